"""Tells models of transformers and diffusers that they are quantised, without importing either."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn


def attach(model: nn.Module) -> None:
    """Tells models of these libraries inside ``model`` that they are quantised, for ``save_pretrained`` to write it."""
    for library, of in (("transformers", "PreTrainedModel"), ("diffusers", "ModelMixin")):
        base = _loaded(f"{library}.{'modeling_utils' if library == 'transformers' else 'models.modeling_utils'}", of)
        if base is not None:
            ours = importlib.import_module(f"qao.integrations.{library}")
            for outermost in _outermost(model, base):
                ours.attach(outermost)


def _outermost(module: nn.Module, base: type) -> list[nn.Module]:
    if isinstance(module, base):
        return [module]
    return [found for child in module.children() for found in _outermost(child, base)]


def _loaded(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)


def fill(tables: Any, config: type, quantizer: type) -> None:
    """Makes "qao" known to ``quantizers.auto`` of transformers or diffusers."""
    tables.AUTO_QUANTIZATION_CONFIG_MAPPING["qao"] = config
    tables.AUTO_QUANTIZER_MAPPING["qao"] = quantizer

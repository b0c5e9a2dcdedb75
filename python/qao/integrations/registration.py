"""Makes "qao" known to transformers and diffusers, whichever is imported first, they or qao, without importing them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

# The module with a library's table of quantisers, and ours with what goes into it.
_TABLES = {
    "transformers.quantizers.auto": "qao.integrations.transformers",
    "diffusers.quantizers.auto": "qao.integrations.diffusers",
}


def register() -> None:
    """Registers with those libraries that are imported; the others follow when they are. Again does no harm."""
    for table in _TABLES:
        if table in sys.modules:
            _fill(sys.modules[table])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


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


def _fill(table: ModuleType) -> None:
    if getattr(table, "AUTO_QUANTIZER_MAPPING", None) is None:  # still being imported: the finder comes back
        return
    if "qao" not in table.AUTO_QUANTIZER_MAPPING:
        ours: Any = importlib.import_module(_TABLES[table.__name__])
        table.AUTO_QUANTIZATION_CONFIG_MAPPING["qao"] = ours.QaoConfig
        table.AUTO_QUANTIZER_MAPPING["qao"] = ours.QaoQuantizer


class _Finder(MetaPathFinder):
    """Finds nothing itself: has the tables filled when they have been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TABLES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _fill_after(spec.loader)
                return spec
        return None


def _fill_after(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _fill(module)

    loader.exec_module = exec_module

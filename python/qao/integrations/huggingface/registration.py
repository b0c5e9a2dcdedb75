"""Marks transformers and diffusers models as quantized, without importing either library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...nn.packed_module import PackedModule
from ...quantization import targets
from ..wrapping import wrap


def attach(model: nn.Module) -> None:
    """Mark models of these libraries inside ``model`` as quantized, so that ``save_pretrained`` writes it."""
    for ours, outermost in _models(model):
        ours.attach(outermost)


def detach(model: nn.Module) -> None:
    """Undo ``attach``."""
    for ours, outermost in _models(model):
        if isinstance(getattr(outermost, "hf_quantizer", None), ours.QaoQuantizer):
            del outermost.hf_quantizer
            ours.forget_config(outermost)
            if "is_quantized" in vars(outermost):  # set by from_pretrained
                outermost.is_quantized = False  # type: ignore[assignment]


def dequantized(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Implementation of these libraries' ``model.dequantize()``: the float model, cast to ``dtype`` if given."""
    from ...quantization.dequantize import dequantize_  # imported here to avoid a cycle

    dequantize_(model)
    return model if dtype is None else model.to(dtype)


def _models(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """For each loaded library, its module in this package and the outermost models."""
    for library, of in (("transformers", "PreTrainedModel"), ("diffusers", "ModelMixin")):
        base = _loaded(f"{library}.{'modeling_utils' if library == 'transformers' else 'models.modeling_utils'}", of)
        if base is not None:
            ours = importlib.import_module(f"qao.integrations.huggingface.{library}")
            yield from ((ours, outermost) for outermost in _outermost(model, base))


def _outermost(module: nn.Module, base: type) -> list[nn.Module]:
    if isinstance(module, base):
        return [module]
    return [found for child in module.children() for found in _outermost(child, base)]


def _loaded(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)


def fill(tables: Any, config: type, quantizer: type) -> None:
    """Register "qao" with ``quantizers.auto`` of transformers or diffusers."""
    tables.AUTO_QUANTIZATION_CONFIG_MAPPING["qao"] = config
    tables.AUTO_QUANTIZER_MAPPING["qao"] = quantizer


def mark(model: Any, config: Any, quantizer: Any, base: Any) -> bool:
    """Attach a quantizer to ``model``, of its library's class ``base``; False if it has no quantized layers."""
    if not config.layers:
        return False
    quantizer.quantization_config = config
    model.hf_quantizer = quantizer
    wrap(base, "dtype", _dtype)
    wrap(base, "num_parameters", _num_parameters)
    for name in ("half", "float"):
        wrap(base, name, partial(_cast, base, name))
    if hasattr(base, "_resize_token_embeddings"):
        wrap(base, "_resize_token_embeddings", _resize)
    return True


def _dtype(upstream: Any) -> Any:
    """``model.dtype``, the dtype of the first float tensor, without scales.

    Pipelines cast inputs to it, and scales may be float32 in a bfloat16 model.
    """

    def dtype(self: nn.Module) -> torch.dtype:
        found: torch.dtype = upstream(self)
        for module in self.modules():
            if isinstance(module, PackedModule):
                return module.dtype if found == module.scales.dtype else found
            if any(tensor is not None and tensor.is_floating_point() for tensor in module._parameters.values()):
                break
        return found

    return dtype


def _num_parameters(upstream: Any) -> Any:
    """``num_parameters()`` that counts the elements of the unpacked weight, as for other four-bit weights."""

    def num_parameters(self: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        counted: int = upstream(self, only_trainable, exclude_embeddings)
        return counted if only_trainable else counted + targets.uncounted(self.modules(), exclude_embeddings)

    return num_parameters


def _cast(base: Any, name: str, upstream: Any) -> Any:
    """``.half()`` or ``.float()`` as torch defines it. These libraries refuse it for models from ``from_pretrained``,
    but not ``.to(dtype)``."""

    def cast(self: nn.Module, *args: Any) -> Any:
        quantized = any(isinstance(module, PackedModule) for module in self.modules())
        return getattr(super(base, self), name)(*args) if quantized else upstream(self, *args)

    return cast


def _resize(upstream: Any) -> Any:
    """``resize_token_embeddings`` that rejects a quantized embedding or head before it changes the other one."""

    def resize(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        embedding = self.get_input_embeddings()
        ends = {"embedding": embedding, "head": self.get_output_embeddings()}
        size = int(embedding.weight.shape[0] if new_num_tokens is None else new_num_tokens)
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        for name, end in ends.items():
            if isinstance(end, PackedModule) and end._sizes[0] != size:
                raise ValueError(
                    f"resize_token_embeddings({size}): the {name} of {type(self).__name__} is quantized, {end}, and "
                    "cannot be resized. Resize the float model and then quantize it, or quantize it with "
                    "{'lm_head': None, 're:.*': scheme}, which leaves both ends in float. The model is unchanged."
                )
        return upstream(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return resize

"""Eligibility of modules: the reasons for which a layer cannot be replaced by its quantized or float counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import ops
from ..schemes import FLOAT_DTYPES, Scheme
from . import offloading
from .packed_module import PackedModule, Sharded

SHARDED = (
    "it is sharded (fully_shard, FSDP, tensor parallelism): quantize first, then call fully_shard, because "
    "FullyShardedDataParallel does not support integers, or parallelize_module with the styles of qao.distributed"
)

Kind = Literal["linear", "conv1d", "embedding", "experts"]

# Parents that read the weight of these children instead of calling them.
_READ_BY_PARENT: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),
}
# The same by class name, because the library is optional: RWKV rescales these weights in place.
_WRITTEN_BY_MODEL = {"RwkvSelfAttention": ("output",), "RwkvFeedForward": ("value",)}

# Subclasses of nn.Linear with a forward that computes x · Wᵀ + bias. By name, because their packages are optional.
_PLAIN_SUBCLASSES = (("transformers.models.falcon.modeling_falcon", "FalconLinear"), ("timm.layers.linear", "Linear"))
_EXPERTS_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True)
class Unsupported:
    """The reason for which a module cannot be replaced."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def unsupported_reason(module: nn.Module, scheme: Scheme | None = None) -> Unsupported | None:
    """Why replacing a module would change the model's behavior or lose state; None if it would not.

    Args:
        module: a linear layer, an embedding or fused experts, in float; or a quantized layer, to be made float.
        scheme: if given, an embedding must also support it.
    """
    kind = kind_of(module)
    if isinstance(module, PackedModule):
        reason = _attached(module)
    elif kind is None:
        reason = f"it is a {type(module).__name__}, not a linear layer, an embedding or fused experts"
    else:
        reason = _CHECKS[kind](module)
    if reason is None and kind == "embedding" and scheme is not None:
        return unsupported_for_embeddings(scheme)
    return None if reason is None else Unsupported(reason)


def unsupported_place(places: Sequence[tuple[nn.Module, str]], in_fsdp: bool) -> Unsupported | None:
    """Why a layer cannot be replaced where it is; None if it can.

    Args:
        places: its parents, each with the attribute that holds the layer.
        in_fsdp: its weight is part of a flat parameter of FullyShardedDataParallel.
    """
    for parent, attribute in places:
        if attribute in _read_by(parent):
            return Unsupported(f"{type(parent).__name__} reads or writes its weight itself")
    if in_fsdp:
        return Unsupported(SHARDED)
    if any(type(parent).__name__ == "OptimizedModule" for parent, _ in places):
        return Unsupported("torch.compile was called on it and keeps it: quantize first, then compile")
    return None


def _read_by(parent: nn.Module) -> tuple[str, ...]:
    named = _WRITTEN_BY_MODEL.get(type(parent).__name__, ())
    return next((names for kind, names in _READ_BY_PARENT.items() if isinstance(parent, kind)), named)


def unsupported_for_embeddings(scheme: Scheme) -> Unsupported | None:
    """Why an embedding cannot use a weight of this scheme; None if it can."""
    if scheme.rotation:
        return Unsupported(
            f"{scheme} rotates the weight, so its rows are not rows of the embedding: use rotation=0 for it"
        )
    if scheme.weights in ops.EMBEDDINGS:
        return None
    return Unsupported(f"embeddings are quantized to int4 or int8, but {scheme.word} has {scheme.weights} weights")


def unsupported_bias(bias: Tensor, n: int) -> Unsupported | None:
    """Why a layer of n rows cannot have this bias; None if it can."""
    if bias.layout != torch.strided:
        return Unsupported(f"its bias has layout {bias.layout}, not torch.strided")
    if bias.shape != (n,) or bias.dtype not in (*FLOAT_DTYPES, torch.float64):
        described = f"{str(bias.dtype).removeprefix('torch.')}{list(bias.shape)}"
        return Unsupported(f"its bias is {described}, not [{n}] in a float dtype")
    return None


# ---- kinds of modules ------------------------------------------------------------------------------------------------


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module in float that ``quantize_`` knows; None for other modules and quantized ones."""
    if isinstance(module, nn.Linear):
        return "linear"
    # By name, because transformers is optional.
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return "conv1d"
    if isinstance(module, nn.Embedding):  # not nn.EmbeddingBag
        return "embedding"
    return "experts" if is_fused(module) else None


def is_linear(module: nn.Module) -> bool:
    """True for nn.Linear, its subclasses, and transformers' Conv1D (GPT-2), a linear layer with weight [K, N]."""
    return kind_of(module) in ("linear", "conv1d")


def is_embedding(module: nn.Module) -> bool:
    """True for nn.Embedding and its subclasses, which do not include nn.EmbeddingBag."""
    return isinstance(module, nn.Embedding)


def is_scaled(module: nn.Module) -> bool:
    """True for embeddings of transformers that multiply rows by ``embed_scale``: those of Gemma, Bart and others."""
    # By name, because transformers is optional.
    kind = type(module)
    named = kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.models.")
    return named and hasattr(module, "embed_scale") and not hasattr(module, "eoi_embedding")  # T5Gemma2 has two tables


def is_fused(module: nn.Module) -> bool:
    """Whether transformers' ``use_experts_implementation`` decorated its class, which sets these attributes."""
    own = vars(module)
    return all(isinstance(own.get(name), bool) for name in _EXPERTS_ATTRIBUTES) and hasattr(type(module), "_apply_gate")


def projections_of(fused: Any) -> tuple[str, str]:
    """Names of the up and down projections in fused experts of transformers."""
    return "gate_up_proj" if fused.has_gate else "up_proj", "down_proj"


# ---- checks by kind --------------------------------------------------------------------------------------------------


def _linear(linear: nn.Module) -> str | None:
    plain = isinstance(linear, nn.Linear)  # otherwise Conv1D
    kind = type(linear)
    known = not plain or isinstance(linear, Sharded) or kind.forward is nn.Linear.forward
    if not known and (kind.__module__, kind.__name__) not in _PLAIN_SUBCLASSES:
        return f"{kind.__name__} is a subclass of nn.Linear with its own forward"
    if reason := _weight(linear) or _bias(linear, rows=0 if plain else 1):
        return reason
    tensors = {**linear._parameters, **linear._buffers, **linear._modules}
    others = [name for name, value in tensors.items() if value is not None and name not in ("weight", "bias")]
    return f"it also has {', '.join(others)}, which would be lost" if others else None


def _bias(linear: nn.Module, rows: int) -> str | None:
    """The check of the bias; ``rows`` is the dimension of the weight that holds the N rows."""
    if "bias" not in linear._parameters:
        return "its bias is not a Parameter (a buffer, a plain tensor, or computed by a parametrization)"
    bias = linear._parameters["bias"]
    if bias is None:
        return None
    if type(bias) is not nn.Parameter:
        return f"its bias is a {type(bias).__name__}, not a plain Parameter"
    wrong = unsupported_bias(bias, linear.weight.shape[rows])  # type: ignore[index,arg-type]
    return None if wrong is None else wrong.reason


def _embedding(embedding: Any) -> str | None:
    known = type(embedding).forward is nn.Embedding.forward or isinstance(embedding, Sharded)
    if not known and not is_scaled(embedding):
        return f"{type(embedding).__name__} is a subclass of nn.Embedding with its own forward"
    if embedding.max_norm is not None:
        return "it has max_norm, which rewrites rows of the weight in every forward"
    if embedding.sparse or embedding.scale_grad_by_freq:
        option = "sparse" if embedding.sparse else "scale_grad_by_freq"
        return f"it has {option}, which is for training, but quantized rows are frozen"
    return _weight(embedding)


def _fused_experts(module: Any) -> str | None:
    up, down = projections_of(module)
    names = [up, down, *((f"{up}_bias", f"{down}_bias") if module.has_bias else ())]
    if sorted(module._parameters) != sorted(names):
        return f"fused experts: it has {', '.join(module._parameters)}, not just {', '.join(names)}"
    for name in names:
        weight = module._parameters[name]
        if type(weight).__name__ == "DTensor":
            return f"fused experts: {SHARDED}"
        if type(weight) is not nn.Parameter or weight.dtype not in (*FLOAT_DTYPES, torch.float64):
            return f"fused experts: {name} is not a plain Parameter in a float dtype"
        if weight.dim() != (2 if name.endswith("_bias") else 3) or weight.numel() == 0:
            return f"fused experts: {name} has shape {list(weight.shape)}"
    others = [name for name, child in module._modules.items() if name != "post_expert_norm" and _has_tensors(child)]
    if others or module._buffers:
        return f"fused experts: it has {', '.join([*others, *module._buffers])}, which would be lost"
    reason = _attached(module)
    return None if reason is None else f"fused experts: {reason}"


def _has_tensors(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in (*module.parameters(), *module.buffers()))


def _weight(module: nn.Module) -> str | None:
    """The check of the weight and of state on the instance: parametrizations, hooks, a replaced forward."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (parametrization, weight_norm, pruning)"
    if is_lazy(weight):
        return "it is lazy and has no weight yet: run the model once first"
    if type(weight).__name__ == "DTensor":
        return SHARDED
    if hasattr(weight, "ds_id"):
        return "DeepSpeed partitions its weight (ZeRO-3): quantize before deepspeed.initialize"
    if reason := _attached(module):
        return reason
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain Parameter"
    if weight.dtype not in (*FLOAT_DTYPES, torch.float64):
        return f"its weight has dtype {weight.dtype}"
    if weight.layout != torch.strided:
        return f"its weight has layout {weight.layout}, not torch.strided"
    if weight.dim() != 2:
        return f"its weight {list(weight.shape)} does not have two dimensions"
    if weight.numel() == 0:
        return f"its weight {list(weight.shape)} is empty"
    return None


def _attached(module: nn.Module) -> str | None:
    """The check for hooks and an instance-level forward, which a replacement would lose."""
    if "_hf_hook" in vars(module):
        return f"a hook of accelerate runs it (device_map, offloading): {offloading.remedy(module)}"
    # After removing its hook, accelerate leaves the bound forward of the class on the instance.
    own = MethodType(type(module).forward, module)
    if vars(module).get("forward", own) != own:
        return "its forward was replaced on the instance"
    hooks = {name.strip("_"): value for name, value in vars(module).items() if name.endswith("_hooks") and value}
    if "fsdp" in repr(hooks).lower():
        return SHARDED
    return f"it has {', '.join(hooks)}, which would be lost" if hooks else None


_CHECKS = {"linear": _linear, "conv1d": _linear, "embedding": _embedding, "experts": _fused_experts}

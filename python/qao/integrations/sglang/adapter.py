"""Differences between versions of SGLang, each recognized by a feature and not by the number of a version."""

from __future__ import annotations

from functools import reduce
from importlib.util import find_spec
from typing import Any

from sglang.srt import runtime_context


def settings(namespace: str) -> Any:
    """The resolved server arguments of a namespace ("exec.moe"). SGLang 0.5.16 has one object for all arguments.

    Raises:
        AttributeError: this version has another name for it.
        ValueError: there are no arguments yet.
    """
    if not hasattr(runtime_context, "get_exec"):
        return runtime_context.get_server_args()
    top, *inner = namespace.split(".")
    return reduce(getattr, inner, getattr(runtime_context, f"get_{top}")())


def has_paged_experts() -> bool:
    """Whether SGLang can page in experts from CPU memory, as it can since 0.5.23."""
    return find_spec("sglang.srt.layers.moe.paged_experts") is not None


def scheme_of(layer: Any) -> Any:
    """The scheme of a layer; None if SGLang sets it later. Before that, SGLang 0.5.16 has no such attribute."""
    return getattr(layer, "scheme", None)


def is_weight_only(modelopt: Any) -> bool:
    """Whether SGLang's method "modelopt_fp8" leaves x in float, which that of SGLang 0.5.16 never does."""
    return bool(getattr(modelopt, "use_marlin", False))


def method_of(kind: type, own: Any, layer: Any) -> type:
    """``kind`` for a layer with SGLang's method ``own``, such that loaders of weights follow the layout of ``own``.

    Before SGLang 0.5.23, where layers have no ``weight_load_method``, they look for "ModelOpt" in the class's name.
    """
    return kind if hasattr(layer, "weight_load_method") else type(f"Qao{type(own).__name__}", (kind,), {})


def gate_numbers(config: Any) -> tuple[float | None, ...]:
    """Limits and factors of the gate. SGLang 0.5.16 has no ``gemm1_beta``."""
    return config.gemm1_alpha, getattr(config, "gemm1_beta", None), config.gemm1_clamp_limit, config.swiglu_limit


def follows_expert_locations(layer: Any) -> bool:
    """Whether experts are where SGLang's metadata says. Before 0.5.23, those of all layers are."""
    return bool(getattr(layer, "uses_expert_location", True))

"""Puts qao before vLLM's selection of a backend for 4-bit and e4m3 fused experts.

vLLM's lists of backends cannot be extended, so the functions that select a backend, convert its weights and create its
kernel are patched to call qao first. vLLM's expert modules have circular imports, and its oracles may be imported
first, so experts.py and experts_fp8.py are imported when vLLM selects a backend.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from ..serving import common
from ..serving.interface import function_of
from . import WITHOUT
from .process import replace_functions

BACKEND = SimpleNamespace(value="QAO")  # stands for a member of vLLM's enum


def _first(oracle: Any, name: str, names: tuple[str, ...], word: str, ours: Callable[..., str | type]) -> Any:
    """vLLM's selection of a backend, patched to ask qao first.

    Args:
        oracle: vLLM's module.
        name: its function.
        names: the parameters of that function that are passed to ``ours``.
        word: the weight format.
        ours: returns the class that computes these experts, or why none does.
    """
    select = function_of(oracle, name, *names, results=2)
    signature = inspect.signature(select)

    @wraps(select)
    def select_backend(*given: Any, **named: Any) -> Any:
        values = _arguments(signature, given, named)
        part = WITHOUT[f"oracles.register_{word}"]
        experts = common.decided("vllm", part, ours, *(values[one] for one in names))
        if isinstance(experts, str):
            oracle.logger.debug_once("qao leaves experts to vLLM: %s", experts, scope="local")
            return select(*given, **named)
        oracle.logger.info_once(f"Using {experts.__name__} for {word} experts.", scope="local")
        return BACKEND, experts

    return select_backend


def _with_backend(oracle: Any, name: str, backend: str, names: tuple[str, ...], results: int | None, ours: Any) -> Any:
    """A function of vLLM that takes a backend, patched to call ``ours`` with its arguments by name if that is qao."""
    own = function_of(oracle, name, backend, *names, results=results)
    signature = inspect.signature(own)

    @wraps(own)
    def call(*given: Any, **named: Any) -> Any:
        values = _arguments(signature, given, named)
        return ours(values) if values[backend] is BACKEND else own(*given, **named)

    return call


def _arguments(signature: inspect.Signature, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the function's own defaults."""
    bound = signature.bind(*given, **named)
    bound.apply_defaults()
    return bound.arguments


_WEIGHTS = "w13", "w2", "w13_scale", "w2_scale"


def _int4(oracle: Any) -> dict[str, Any]:
    def ours(*given: Any) -> str | type:
        from .experts import QaoExperts, unsupported_reason

        return unsupported_reason(*given) or QaoExperts

    def converted(given: dict[str, Any]) -> Any:
        from . import experts

        return experts.converted(given)

    def kernel(given: dict[str, Any]) -> Any:
        from .grouped_experts import kernel_of

        config, quant_config = given["moe_config"], given["moe_quant_config"]
        experts = given["experts_cls"](moe_config=config, quant_config=quant_config)
        return kernel_of(experts, given["routing_tables"])

    select, convert = "select_wna16_moe_backend", "convert_to_wna16_moe_kernel_format"
    make = "make_wna16_moe_kernel"
    of_kernel = "moe_config", "moe_quant_config", "experts_cls", "routing_tables"
    of_weights = *_WEIGHTS, "layer", "quant_config", "w13_qzeros", "w2_qzeros", "w13_bias", "w2_bias"
    return {
        select: _first(oracle, select, ("config", "weight_key", "quant_config"), "int4", ours),
        convert: _with_backend(oracle, convert, "backend", of_weights, 10, converted),
        make: _with_backend(oracle, make, "backend", of_kernel, None, kernel),
    }


def _fp8(oracle: Any) -> dict[str, Any]:
    def ours(*given: Any) -> str | type:
        from .experts_fp8 import QaoFp8Experts, unsupported_reason

        return unsupported_reason(*given) or QaoFp8Experts

    def converted(given: dict[str, Any]) -> tuple[Any, ...]:
        scales = (given[f"{name}_scale"].data.float().contiguous() for name in ("w13", "w2"))
        return given["w13"].data.contiguous(), given["w2"].data.contiguous(), *scales

    select, convert = "select_fp8_moe_backend", "convert_to_fp8_moe_kernel_format"
    return {
        select: _first(oracle, select, ("config", "weight_key", "activation_key"), "fp8", ours),
        convert: _with_backend(oracle, convert, "fp8_backend", _WEIGHTS, 4, converted),
    }


def register_int4() -> None:
    """Put qao before vLLM's backends for int4 experts. Idempotent."""
    _register("vllm.model_executor.layers.fused_moe.oracle.int_wna16", _int4)


def register_fp8() -> None:
    """Put qao before vLLM's backends for fp8 experts. Idempotent."""
    _register("vllm.model_executor.layers.fused_moe.oracle.fp8", _fp8)


def _register(name: str, functions: Callable[[Any], dict[str, Any]]) -> None:
    oracle: Any = sys.modules[name]
    if not getattr(oracle, "patched_by_qao", False):
        replace_functions(name, functions(oracle))
        oracle.patched_by_qao = True

"""Puts qao before vLLM's selection of a backend for 4-bit and e4m3 fused experts.

Written against vLLM 0.33. Its lists of backends cannot be extended, so the functions that select a backend, convert its
weights and create its kernel are patched to call qao first. vLLM's expert modules have circular imports, and its
oracles may be imported first, so experts.py and experts_fp8.py are imported when vLLM selects a backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from .process import replace_functions

BACKEND = SimpleNamespace(value="QAO")  # stands for a member of vLLM's enum


def _first(
    oracle: Any, select: Any, names: tuple[str, ...], word: str, ours: Callable[..., tuple[str | None, Any]]
) -> Any:
    """vLLM's selection of a backend, patched to ask qao first.

    Args:
        oracle: vLLM's module.
        select: its function.
        names: the first parameters of that function, which are passed to ``ours``.
        word: the weight format.
        ours: returns why qao does not compute these experts (None if it does), and the class that would.
    """

    @wraps(select)
    def select_backend(*given: Any, **named: Any) -> Any:
        values = dict(zip(names, given, strict=False)) | named
        reason, experts = ours(*(values[name] for name in names))
        if reason is None:
            oracle.logger.info_once(f"Using {experts.__name__} for {word} experts.", scope="local")
            return BACKEND, experts
        oracle.logger.debug_once("qao leaves experts to vLLM: %s", reason, scope="local")
        return select(*given, **named)

    return select_backend


def _int4(oracle: Any) -> dict[str, Any]:
    select, convert = oracle.select_wna16_moe_backend, oracle.convert_to_wna16_moe_kernel_format
    make = oracle.make_wna16_moe_kernel

    def ours(*given: Any) -> tuple[str | None, Any]:
        from .experts import QaoExperts, unsupported_reason

        return unsupported_reason(*given), QaoExperts

    @wraps(convert)
    def convert_weights(backend: Any, **given: Any) -> Any:
        if backend is not BACKEND:
            return convert(backend=backend, **given)
        from .experts import converted

        return converted(given)

    @wraps(make)
    def make_kernel(
        moe_quant_config: Any,
        moe_config: Any,
        experts_cls: Any,
        backend: Any = oracle.WNA16MoEBackend.MARLIN,
        routing_tables: Any = None,
    ) -> Any:
        if backend is not BACKEND:
            return make(moe_quant_config, moe_config, experts_cls, backend, routing_tables)
        from .grouped_experts import kernel_of

        return kernel_of(experts_cls(moe_config=moe_config, quant_config=moe_quant_config), routing_tables)

    return {
        "select_wna16_moe_backend": _first(oracle, select, ("config", "weight_key", "quant_config"), "int4", ours),
        "convert_to_wna16_moe_kernel_format": convert_weights,
        "make_wna16_moe_kernel": make_kernel,
    }


def _fp8(oracle: Any) -> dict[str, Any]:
    select, convert = oracle.select_fp8_moe_backend, oracle.convert_to_fp8_moe_kernel_format

    def ours(*given: Any) -> tuple[str | None, Any]:
        from .experts_fp8 import QaoFp8Experts, unsupported_reason

        return unsupported_reason(*given), QaoFp8Experts

    @wraps(convert)
    def convert_weights(fp8_backend: Any, *rest: Any, **given: Any) -> Any:
        if fp8_backend is not BACKEND:
            return convert(fp8_backend, *rest, **given)
        scales = (given[f"{name}_scale"].data.float().contiguous() for name in ("w13", "w2"))
        return given["w13"].data.contiguous(), given["w2"].data.contiguous(), *scales

    return {
        "select_fp8_moe_backend": _first(oracle, select, ("config", "weight_key", "activation_key"), "fp8", ours),
        "convert_to_fp8_moe_kernel_format": convert_weights,
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

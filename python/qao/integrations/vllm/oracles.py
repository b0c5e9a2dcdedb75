"""qao before vLLM's choice of a backend for fused experts, of four bits and of e4m3.

Written against vLLM 0.33. It keeps lists of backends that nobody can add to, so the functions that choose one, arrange
its weights and make its kernel are asked here first. vLLM's modules of experts import one another in circles, and its
oracles may be imported first of all: experts.py and experts_fp8.py are imported when vLLM asks for a backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from .process import replace_functions

BACKEND = SimpleNamespace(value="QAO")  # where vLLM has a member of its enum


def _first(
    oracle: Any, select: Any, names: tuple[str, ...], word: str, ours: Callable[..., tuple[str | None, Any]]
) -> Any:
    """vLLM's choice of a backend, which asks qao first.

    Args:
        oracle: vLLM's module.
        select: its function.
        names: of the first parameters of that function, which ``ours`` gets.
        word: the weight format.
        ours: says why qao does not compute these experts (None if it does), and by which class it would.
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
        from .experts import QaoExperts, obstacle

        return obstacle(*given), QaoExperts

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
        from .experts_fp8 import QaoFp8Experts, obstacle

        return obstacle(*given), QaoFp8Experts

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
    """Puts qao before vLLM's backends of int4 experts; another call changes nothing."""
    _register("vllm.model_executor.layers.fused_moe.oracle.int_wna16", _int4)


def register_fp8() -> None:
    """The same of fp8 experts."""
    _register("vllm.model_executor.layers.fused_moe.oracle.fp8", _fp8)


def _register(name: str, functions: Callable[[Any], dict[str, Any]]) -> None:
    oracle: Any = sys.modules[name]
    if not getattr(oracle, "qao_is_asked_first", False):
        replace_functions(name, functions(oracle))
        oracle.qao_is_asked_first = True

"""Fixed torch modes (autocast, default dtype, matmul precision) for weight quantization."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor

_DEVICE_TYPES = ("cpu", "cuda")  # of autocast


@dataclass(frozen=True)
class _Modes:
    """Global torch state that changes the dtype, device, precision or kind of new tensors."""

    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # device types with autocast enabled
    autocast_cache: bool = True
    inference: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    precisions: tuple[str, ...] = ("ieee", "ieee")  # of float32 matmuls, in the order of _matmuls
    legacy: str | None = "highest"  # as in set_float32_matmul_precision; None: set by fp32_precision only

    @classmethod
    def current(cls) -> _Modes:
        enabled = [kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
        return cls(
            tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled),
            torch.is_autocast_cache_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            tuple(matmul.fp32_precision for matmul in _matmuls()),
            _legacy_precision(),
        )


@contextlib.contextmanager
def neutral(*, defaults: bool = True) -> Iterator[None]:
    """No autocast, inference mode or gradients; defaults are float32 and the CPU; float32 matmuls are not TF32.

    Code that computes quantized weights runs in this context, so that the result does not depend on the caller's modes
    and Parameters are not inference tensors. Also a decorator. ``defaults=False`` keeps the default dtype and device.
    """
    now = _Modes.current()
    wanted = _Modes() if defaults else _Modes(dtype=now.dtype, device=now.device)
    token = None if _callers.get() is not None else _callers.set(now)
    try:
        with _switched(now, wanted), torch.no_grad():
            yield
    finally:
        if token is not None:
            _callers.reset(token)
        if now.autocast:  # cached casts may be stale: weights have changed
            torch.clear_autocast_cache()


@contextlib.contextmanager
def callers() -> Iterator[None]:
    """Inside ``neutral``, restores the caller's modes to run a model, still without gradients."""
    wanted = _callers.get()
    if wanted is None:
        yield
        return
    with _switched(_Modes.current(), wanted), torch.no_grad():
        # Weights change between two calls, so cached casts would be stale.
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(wanted.autocast_cache)


def has_no_numbers(tensor: torch.Tensor) -> bool:
    """True for tensors on meta and FakeTensors."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def writing(*tensors: torch.Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Context for in-place writes to these tensors: inference tensors are writable only in inference mode."""
    inference = any(tensor is not None and tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if inference else contextlib.nullcontext()


_callers: ContextVar[_Modes | None] = ContextVar("modes around the outermost neutral()", default=None)


@contextlib.contextmanager
def _switched(now: _Modes, wanted: _Modes) -> Iterator[None]:
    """Sets only the modes that differ: some are process-wide, and a change would affect other threads."""
    with contextlib.ExitStack() as stack:
        if now.inference != wanted.inference:
            stack.enter_context(torch.inference_mode(wanted.inference))
        if now.device != wanted.device:
            stack.enter_context(wanted.device)
        for kind in {kind for kind, _ in (*now.autocast, *wanted.autocast)}:
            stack.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            to = dict(wanted.autocast).get(kind)
            torch.set_autocast_enabled(kind, to is not None)
            if to is not None:
                torch.set_autocast_dtype(kind, to)
        if now.dtype != wanted.dtype:
            stack.callback(torch.set_default_dtype, now.dtype)
            torch.set_default_dtype(wanted.dtype)
        if not _same_precision(now, wanted):
            stack.callback(_set_precision, now)
            _set_precision(wanted)
        yield


def _matmuls() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _legacy_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by fp32_precision
        return None


def _same_precision(a: _Modes, b: _Modes) -> bool:
    def effective(modes: _Modes) -> list[str]:
        return ["ieee" if precision == "none" else precision for precision in modes.precisions]

    return effective(a) == effective(b)


def _set_precision(modes: _Modes) -> None:
    """Sets both of torch's precision APIs; the getter of one raises if the other disagrees."""
    if modes.legacy is not None:
        torch.set_float32_matmul_precision(modes.legacy)
    for matmul, precision in zip(_matmuls(), modes.precisions, strict=True):
        matmul.fp32_precision = precision

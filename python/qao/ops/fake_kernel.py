"""How a fake kernel is registered, and what is refused before it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_ONNX = "torch.onnx._internal.exporter._flags"  # what says so; no compilation shall import it


def fake_kernel(operator: str) -> Callable[[Kernel], Kernel]:
    """Registers the fake kernel of an operator, which is given tensors of one device.

    An operand on meta beside others that are not comes here and not to the operator's own checks: without this one the
    result would be memory that nobody wrote.
    """

    def register(kernel: Kernel) -> Kernel:
        def checked(*arguments: Any) -> Any:
            if _ONNX in sys.modules and torch.onnx.is_in_onnx_export():
                raise RuntimeError(
                    f"qao::{operator}: ONNX has no such operator. Export what qao.dequantize_(model) makes of the "
                    "model, or of a copy of it."
                )
            devices = {argument.device for argument in arguments if isinstance(argument, Tensor)}
            if len(devices) > 1:
                raise RuntimeError(
                    f"qao::{operator}: operands are on different devices. Got {_describe_all(operator, arguments)}. "
                    "Move them to one device with .to(device); a layer on meta has no data: load a checkpoint into it "
                    "first."
                )
            try:
                return kernel(*arguments)
            except (AttributeError, IndexError, ValueError) as error:  # a None, or too few dimensions
                raise RuntimeError(
                    f"qao::{operator}: an argument is no tensor of a shape it can have. Got "
                    f"{_describe_all(operator, arguments)}. See the documentation of qao.ops.{operator}."
                ) from error

        # A package that is imported again registers again.
        torch.library.register_fake(f"qao::{operator}", allow_override=True)(checked)
        return kernel

    return register


def _describe_all(operator: str, arguments: tuple[Any, ...]) -> str:
    schema = getattr(torch.ops.qao, operator).default._schema
    got = (_describe(a.name, value) for a, value in zip(schema.arguments, arguments, strict=False))
    return ", ".join(filter(None, got))


def _describe(name: str, value: Any) -> str | None:
    if isinstance(value, Tensor):
        return f"{name}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return f"{name}: {value}" if value is None or type(value) is int else None

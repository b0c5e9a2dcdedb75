"""Registration of fake kernels, with checks that run before each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_ONNX = "torch.onnx._internal.exporter._flags"  # has the flag of an ONNX export; compilation must not import it


def fake_kernel(operator: str) -> Callable[[Kernel], Kernel]:
    """Registers the fake kernel of an operator. It runs only if all tensors are on one device.

    If some operands are on meta and others are not, torch calls the fake kernel instead of the operator with its
    checks. Without the check here, the result would be uninitialized memory.
    """

    def register(kernel: Kernel) -> Kernel:
        def checked(*arguments: Any) -> Any:
            if _ONNX in sys.modules and torch.onnx.is_in_onnx_export():
                raise RuntimeError(
                    f"qao::{operator}: ONNX has no such operator. Call qao.dequantize_ on the model, or on a "
                    "copy of it, and export that."
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
                    f"qao::{operator}: an argument is not a tensor of a valid shape. Got "
                    f"{_describe_all(operator, arguments)}. See the documentation of qao.ops.{operator}."
                ) from error
            except RuntimeError as error:  # a size that torch cannot store; subclasses are part of tracing
                if type(error) is not RuntimeError or str(error).startswith("qao::"):
                    raise
                raise RuntimeError(
                    f"qao::{operator}: torch cannot make a result of this size ({error}). Got "
                    f"{_describe_all(operator, arguments)}. Check the sizes."
                ) from error

        # A second import of the package registers again.
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

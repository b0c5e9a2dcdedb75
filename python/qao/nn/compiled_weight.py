"""``layer.weight`` in code that Dynamo traces. Imported only there, because it imports torch._dynamo."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch._dynamo
from torch import Tensor

from .dequantized_weight import READ_ONLY


def _function(name: str) -> Any:
    def method(self: Tensor, *args: Any, **options: Any) -> Any:
        return getattr(torch, name)(self, *args, **options)

    return method


class CompiledWeight(Tensor):
    """The dequantized weight in code that Dynamo traces, or a view of it: its numbers, with errors for writes.

    Dynamo cannot trace DequantizedWeight. It traces this class's ``__torch_function__`` away: graphs have only plain
    tensors. A write into one of them would be lost without an error.
    """

    @classmethod
    def of(cls, weight: Tensor) -> Tensor:
        return weight.as_subclass(cls)

    # torch defines these methods in Python. Dynamo cannot trace them as methods of a subclass, only as functions.
    norm, split, unflatten = _function("norm"), _function("split"), _function("unflatten")
    unique, unique_consecutive = _function("unique"), _function("unique_consecutive")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, name = _kind(func)
        first = [*args, *kwargs.values()][0]  # functions of nn.init pass it by name
        written = first if kind == "write" or kwargs.get("inplace") else kwargs.get("out")
        for value in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(value, cls):
                _refuse_compiled(name)
        with torch._C.DisableTorchFunctionSubclass():
            plain = [_plain(value) for value in args]
            if kind == "transpose":
                return plain[0].transpose(-2, -1).as_subclass(cls)
            if kind == "detach":
                return plain[0].detach().as_subclass(cls)
            result = func(*plain, **{key: _plain(value) for key, value in kwargs.items()})
        if kind != "view" or not isinstance(args[0], cls):
            return result
        return (
            result.as_subclass(cls) if isinstance(result, Tensor) else tuple(part.as_subclass(cls) for part in result)
        )


def _plain(value: Any) -> Any:
    if isinstance(value, CompiledWeight):
        return torch.ops.aten.alias(value)  # Dynamo knows no way back from a subclass
    return type(value)([_plain(one) for one in value]) if type(value) in (list, tuple) else value


_VIEWS = frozenset(
    "__getitem__ as_strided bfloat16 chunk contiguous cpu cuda diagonal double expand expand_as flatten float half "
    "movedim narrow permute reshape select split squeeze swapaxes t tensor_split to transpose unbind unflatten unfold "
    "unsqueeze view view_as".split()
)
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __iand__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ __irshift__ __isub__ "
    "__itruediv__ __ixor__".split()
)
_ATTRIBUTES = {"data": "detach", "T": "transpose", "mT": "transpose"}


@torch._dynamo.assume_constant_result
def _kind(func: Any) -> tuple[str, str]:
    """What a function of torch does with its first argument ("write", "view", "" for all else), and its name."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        return _ATTRIBUTES.get(attribute, "") if name == "__get__" else "write", attribute
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return "write", name
    return "detach" if name == "detach" else "view" if name in _VIEWS else "", name


@torch._dynamo.assume_constant_result
def _refuse_compiled(name: str) -> NoReturn:
    """Raises while Dynamo traces. An exception in traced code would become a graph break."""
    raise torch._dynamo.exc.TorchRuntimeError(f"{name}: layer.weight of a quantized layer {READ_ONLY}")

"""Lazy read-only tensor for ``layer.weight`` of a quantized layer, dequantized on use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_warned = False

READ_ONLY = (
    "is computed from layer.qweight and cannot be written. Quantize another weight into the layer with "
    "layer.load_float_(weight), into a whole model with qao.update_(model, state_dict). To train or to edit the "
    "weight, return to floats with qao.dequantize_(model); layer.dequantize() is a copy."
)


class DequantizedWeight(Tensor):
    """The weight [N, K] of a quantized layer, for models that read it instead of calling the layer; or a view of it.

    Shape, dtype and device are free to read, and most models read only these. Every operation dequantizes it again and
    returns plain tensors; the first one in a process emits a warning.

    It is read-only. A write would not reach the layer, so every operator that writes into it or into a view of it
    raises a RuntimeError before anything changes. It has no memory: access to an address (``data_ptr``, DLPack, Triton
    kernels) would allow unseen writes and raises an error that names ``layer.dequantize()``.
    """

    source: Tensor | None  # the packed weight it is computed from; None for a view
    _dequantize: Callable[[], Tensor]
    _is_hf_initialized = True  # initializers of transformers then skip it; some models call them on child weights

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        device: torch.device,
        dequantize: Callable[[], Tensor],
        source: Tensor | None = None,
    ) -> Any:
        """``like``: a tensor with the shape, strides and dtype, such as one on meta."""
        weight = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
        )
        # C++ code that reads the address then raises instead of reading from address 0.
        torch._C._set_throw_on_mutable_data_ptr(weight)
        weight.source, weight._dequantize = source, dequantize
        return weight

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, source: Tensor, dequantize: Callable[[], Tensor]) -> Tensor:
        """The weight that ``dequantize`` computes from ``source``."""
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return cls(like, source.device, dequantize, source)

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def plain(self) -> Tensor:
        """The dequantized weight as an ordinary tensor."""
        global _warned
        if not _warned:
            _warned = True
            warnings.warn(
                f"The weight {list(self.shape)} of a quantized layer was read. Each read dequantizes it. If a model "
                "reads it in its forward, leave that layer in float: quantize_(model, {name: None, ...}).",
                stacklevel=2,
            )
        return self._dequantize()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        for value in _written(func, args, kwargs):
            if isinstance(value, cls):
                value.refuse_write(str(func))
        if func in _LAZY and isinstance(args[0], cls):
            weight, others = args[0], args[1:]
            like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
            source = weight.source if func in _SAME else None
            return cls(func(like, *others), weight.device, lambda: func(weight.plain(), *others), source)
        dense: list[Tensor] = []

        def plain(weight: DequantizedWeight) -> Tensor:
            dense.append(weight.plain())
            return dense[-1]

        args, kwargs = tree_map_only(cls, plain, (args, kwargs))
        result = func(*args, **kwargs)
        storages = {_storage(tensor) for tensor in dense} - {None}
        return tree_map_only(
            Tensor, lambda tensor: cls._view(tensor) if _storage(tensor) in storages else tensor, result
        )

    @classmethod
    def _view(cls, dense: Tensor) -> DequantizedWeight:
        return cls(dense, dense.device, lambda: dense)

    def refuse_write(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what}: layer.weight of a quantized layer {list(self.shape)} {READ_ONLY}")

    def _refuse_address(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: layer.weight of a quantized layer {list(self.shape)} has no memory: it is dequantized when it is "
            "used. Pass layer.dequantize(), an ordinary tensor [N, K] with the same values, or leave that layer in "
            "float: quantize_(model, {name: None, ...})."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.source is None:
            return repr(self.plain())
        return f"DequantizedWeight({list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.plain() if self.source is None else str(self), spec)

    # ---- attributes that torch sets without an operator ------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.refuse_write("weight.data = ...")

    @property
    def grad(self) -> Tensor | None:
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self.refuse_write("weight.grad = ...")

    @grad.deleter
    def grad(self) -> None:
        pass

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DequantizedWeight:
        if requires_grad:
            self.refuse_write("weight.requires_grad_()")
        return self

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise RuntimeError(
            f"nn.Parameter: layer.weight of a quantized layer {list(self.shape)} has no memory to share. Make the "
            "Parameter of a copy: nn.Parameter(layer.dequantize())."
        )

    def detach_(self) -> DequantizedWeight:
        return self  # it requires no gradient

    def apply_(self, *_: Any) -> NoReturn:
        self.refuse_write("apply_")

    def map_(self, *_: Any) -> NoReturn:
        self.refuse_write("map_")

    def map2_(self, *_: Any) -> NoReturn:
        self.refuse_write("map2_")

    # ---- copies ----------------------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array."""
        array = self.plain().numpy(force=force)
        array.setflags(write=False)
        return array

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    # ---- addresses -------------------------------------------------------------------------------------------------

    def data_ptr(self) -> NoReturn:
        self._refuse_address("data_ptr")

    def const_data_ptr(self) -> NoReturn:
        self._refuse_address("const_data_ptr")

    mutable_data_ptr = data_ptr

    def untyped_storage(self) -> NoReturn:
        self._refuse_address("untyped_storage")

    def storage(self) -> NoReturn:
        self._refuse_address("storage")

    _typed_storage = storage

    def share_memory_(self) -> NoReturn:
        self._refuse_address("share_memory_")

    def is_shared(self) -> bool:
        return self.is_cuda  # as for every tensor on a GPU

    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        if copy:
            return self.plain().clone().__dlpack__(**options)
        self._refuse_address("DLPack")

    @property
    def __cuda_array_interface__(self) -> Any:
        if self.is_cuda:
            self._refuse_address("__cuda_array_interface__")
        raise AttributeError(f"no __cuda_array_interface__ of a tensor on {self.device}")


class TracedWeight(DequantizedWeight):
    """A dense weight, or a view of it, in code that ``torch.export`` traces without Dynamo: numbers, errors for writes.

    Operators of a subclass do not reach its ``__torch_dispatch__`` there, but functions reach this class. Most writes
    increase the version counter.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        weights = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, cls)]
        if func.__name__.startswith("_foreach") and func.__name__.endswith("_"):  # leaves version counters unchanged
            for one in tree_leaves(args[0]):
                if isinstance(one, cls):
                    one.refuse_write(func.__name__)
        dense = [weight._dequantize() for weight in weights]
        before = [tensor._version for tensor in dense]
        args, kwargs = tree_map_only(cls, lambda weight: weight._dequantize(), (args, kwargs or {}))
        result = func(*args, **kwargs)
        for weight, tensor, version in zip(weights, dense, before, strict=True):
            if tensor._version != version:
                weight.refuse_write(func.__name__)
        storages = {tensor.untyped_storage()._cdata for tensor in dense}
        return tree_map_only(
            Tensor, lambda one: cls._view(one) if one.untyped_storage()._cdata in storages else one, result
        )


def read_only(dense: Tensor) -> Tensor:
    """A dense weight as ``layer.weight``: with errors for writes, which would not reach the layer."""
    if torch.compiler.is_dynamo_compiling():
        from .compiled_weight import CompiledWeight  # imports torch._dynamo

        return CompiledWeight.of(dense)
    if not torch.compiler.is_compiling():
        return DequantizedWeight._view(dense)
    if dense.is_inference():
        with torch.inference_mode(False):
            dense = dense.clone()  # inference tensors have no version counters
    return TracedWeight._view(dense)


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_LAZY = (*_SAME, torch.ops.aten.t.default, torch.ops.aten.transpose.int)  # views that stay lazy


@lru_cache(maxsize=4096)
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an operator writes."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return (), ()
    written = [i for i, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write]
    if not written and schema.arguments and schema.name.endswith("_") and not schema.name.endswith("__"):
        written = [0]  # collectives such as all_reduce_, with a schema that does not declare the write
    return tuple(written), tuple(schema.arguments[i].name for i in written)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    positions, names = _writes(func)
    for position in positions:
        if position < len(args):
            yield from tree_leaves(args[position])
    for name in names:
        if name in kwargs:
            yield from tree_leaves(kwargs[name])


def _storage(tensor: Tensor) -> int | None:
    """Identity of the tensor's storage; None for subclasses and other layouts."""
    strided = type(tensor) is Tensor and tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if strided else None

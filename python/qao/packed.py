"""PackedModule: what every module that owns a quantised weight does alike: hold, move, save, load and dequantise it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import marker
from .formats import Int4Weight, PackedWeight, Scheme
from .update import Updatable
from .weight import DequantizedWeight

Self = TypeVar("Self", bound="PackedModule")


@torch.fx.wrap
def dequantized(qweight: Tensor, scales: Tensor, scheme: Scheme, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """W [n, k] in a float dtype."""
    kernel_dtype = torch.float32 if dtype == torch.float64 else dtype
    return scheme.dequantize(qweight, scales, n, k, kernel_dtype).to(dtype)


class Sharded:
    """Base of the layers of qao.distributed, each of which holds one rank's part of a weight."""

    layout: Any  # a qao.distributed.layout.Layout, which needs torch.distributed


class PackedModule(Updatable, nn.Module):
    """Owner of a quantised weight [N, K] as frozen Parameters, which are moved and never cast.

    A ``state_dict`` holds them and the two entries of marker.py, which tell any loader what they are.
    """

    qweight: nn.Parameter
    scales: nn.Parameter
    weight_sums: nn.Parameter | None
    activation_scale: nn.Parameter | None
    row_scales: nn.Parameter | None
    _tied: Sequence[PackedModule] = ()  # modules that share qweight and scales, this one among them

    def __init__(
        self, n: int, k: int, scheme: Scheme, packed: PackedWeight, dtype: torch.dtype, **others: Tensor | None
    ) -> None:
        """``others``: more Parameters. They and the scales come first, since models take the dtype of
        ``next(child.parameters())`` for that of their activations, which no integers shall be."""
        super().__init__()
        self.scheme = scheme.fitted(k)
        self.dtype = dtype
        self._sizes = n, k
        for name, tensor in {**others, "scales": packed.scales, **packed.tensors()}.items():
            self.register_parameter(name, None if tensor is None else frozen(tensor))
        self._freeze()

    def _freeze(self) -> None:
        """Makes ``model.requires_grad_()`` pass over the packed tensors, where torch would refuse the integers.

        An attribute of the Parameter, since a subclass of it costs compiled calls 10 %. Whatever makes Parameters anew
        calls this again.
        """
        for tensor in self.packed.tensors().values():
            if tensor is not None:
                tensor.requires_grad_ = _stay_frozen  # type: ignore[method-assign, assignment]

    @property
    def packed(self) -> PackedWeight:
        """The frozen tensors."""
        return PackedWeight(self.qweight, self.scales, self.weight_sums, self.activation_scale, self.row_scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it stands for."""
        return self._sizes

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [N, K] in ``dtype``, read-only. Each use computes it anew; see DequantizedWeight."""
        # What is not used is no part of a graph of Dynamo's, and fx.symbolic_trace shows parameters as nodes.
        if torch.compiler.is_compiling() or isinstance(self.qweight, torch.fx.Proxy):
            return self.dequantize(self.dtype)
        return DequantizedWeight(self.shape, self.dtype, self.qweight, lambda: self.dequantize(self.dtype))

    @weight.setter
    def weight(self, value: Tensor) -> None:
        # Version 4 of transformers ties weights by setting one to the other; tied modules share the packed one.
        source = getattr(value, "source", None)
        other = next((other for other in (self, *self._tied) if other.qweight is source), None)
        if other is None:
            self.register_parameter("weight", None)
            return
        self.qweight, self.scales = other.qweight, other.scales

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in ("weight", "weight_orig"):  # the second is what pruning makes
            raise AttributeError(
                f"{type(self).__name__}.weight is computed from qweight and cannot be set, pruned or parametrised. "
                "Make a module of the float weight instead: qao.QuantLinear.from_linear(linear, scheme)."
            )
        super().register_parameter(name, param)

    @property
    def pip_install_qao(self) -> Tensor:
        """The marker of the layer as a ``state_dict`` holds it; a property, since torch looks names of entries up."""
        return self._beside(marker.encode(self._marker()))

    def _marker(self) -> marker.Marker:
        return marker.Marker(self.scheme.to_dict(), *self._sizes, self.dtype)

    def _beside(self, entry: Tensor) -> Tensor:
        """``entry`` where the packed weight is: torch.distributed.checkpoint takes no state dict on two devices.

        Beside a sharded weight it is a replicated DTensor, for accelerate expects nothing else there. It stays off
        meta, where it would be lost, but for a sharded weight that waits for its numbers.
        """
        qweight: Any = self.qweight
        if hasattr(qweight, "device_mesh"):
            return type(qweight).from_local(entry.to(qweight.device), qweight.device_mesh)  # type: ignore[no-any-return]
        return entry if qweight.is_meta else entry.to(qweight.device)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] the layer multiplies with, in a float dtype (None: that of the scales)."""
        return dequantized(self.qweight, self.scales, self.scheme, *self._sizes, dtype or self.scales.dtype)

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script cannot take it: use torch.export or torch.jit.trace."
        )

    def tie(self, other: PackedModule) -> None:
        """Notes that this module was made with the Parameters of ``other``, so that loading keeps it so."""
        self._tied = other._tied = [*(other._tied or [other]), self]

    def _shared(self, key: str, loaded: Tensor) -> Tensor:
        """``loaded``, or the Parameter that a tied module has made of the same memory already."""
        for other in self._tied:
            own = other._parameters[key]
            plain = other is not self and type(own) is nn.Parameter and type(loaded) in (Tensor, nn.Parameter)
            if plain and own is not None and own.dtype == loaded.dtype and own.device == loaded.device:
                if own.is_meta:
                    continue
                # What was misaligned, the other one copied.
                if own.is_set_to(loaded) or (loaded.data_ptr() % 16 and torch.equal(own, loaded)):
                    return own
        return loaded

    def requantize(self, weight: Tensor, name: str = "weight", importance: Tensor | None = None) -> PackedWeight:
        """Another float weight [N, K], quantised as this one is; for ``set_packed``.

        Raises:
            ValueError: it holds NaN or Inf; the message begins with ``name``.
        """
        scheme = self.scheme
        if isinstance(scheme, Int4Weight):
            scheme = replace(scheme, scale_dtype=self.scales.dtype)
        return scheme.quantize(weight, name, importance)

    def set_packed(self, packed: PackedWeight) -> None:
        """Replaces the weight. Modules that shared it keep the present one."""
        for name, tensor in packed.tensors().items():
            self._parameters[name] = None if tensor is None else frozen(tensor)
        self._freeze()
        for other in self._tied:
            other._tied = [module for module in other._tied if module is not self]
        self._tied = ()

    def to_float(self, weight: nn.Parameter | None = None) -> nn.Module:
        """The float module of the dequantised weight, or of ``weight``, with parameters that are frozen."""
        raise NotImplementedError

    def settle(self) -> None:
        """Makes the Parameters fit again after others have set them one by one: frozen, and where kernels can read."""
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.requires_grad = False
                parameter.data = aligned(parameter.data)
        self._freeze()

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = [tensor for tensor in self.packed.tensors().values() if tensor is not None]

        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not any(tensor is parameter for parameter in own):
                return moved
            if moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            return moved.contiguous()  # .to(memory_format=torch.channels_last) reorders anything with 4 dimensions

        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.qweight.device)).dtype
        super()._apply(move_only, recurse)  # type: ignore[no-untyped-call]
        self._freeze()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + marker.TRIPWIRE] = self._beside(marker.tripwire())
        destination[prefix + marker.MARKER] = self.pip_install_qao

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = state_dict.pop(prefix + marker.MARKER, None)
        tripwire = state_dict.pop(prefix + marker.TRIPWIRE, None)
        try:
            if found is not None:
                told = marker.decode(found, prefix + marker.MARKER)
                marker.check_rotation(told, self.scheme.rotation, prefix + marker.MARKER)
            elif isinstance(tripwire, Tensor) and prefix + "qweight" not in state_dict:
                state_dict[prefix + "qweight"] = _unmarked(tripwire, prefix)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        # Module would say "size mismatch", which tells nobody what to do, and cast scales of another dtype silently.
        assign = local_metadata.get("assign_to_params_buffers", False)
        for key, own in self.packed.tensors().items():
            loaded = state_dict.get(prefix + key)
            if own is None or not isinstance(loaded, Tensor):
                continue
            if assign:
                state_dict[prefix + key] = aligned(self._shared(key, loaded))
            may_replace = assign and key == "scales" and loaded.dtype in self.scheme.scale_dtypes
            if loaded.shape != own.shape or (loaded.dtype != own.dtype and not may_replace):
                error_msgs.append(
                    f"{prefix}{key}: the checkpoint holds {_describe(loaded)}, but this {type(self).__name__} "
                    f"({self.extra_repr()}) needs {_describe(own)}. Quantise the model with the scheme the checkpoint "
                    "was made with (group_size, symmetric, scale_dtype); load a checkpoint of float weights before "
                    "quantising."
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._freeze()

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = state["_parameters"]
        tensors.setdefault("row_scales", None)  # in 0.1.0 there were none
        if "qweight" not in tensors and "weight" in tensors:  # pickled whole by qao 0.1.0
            _warn_unmarked("a pickled layer")
            state["_parameters"] = {"qweight" if name == "weight" else name: t for name, t in tensors.items()}
            state["_sizes"] = state["out_features"], state["in_features"]
            state["dtype"] = (tensors["scales"] if tensors["bias"] is None else tensors["bias"]).dtype
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._freeze()


def frozen(tensor: Tensor) -> nn.Parameter:
    """A Parameter is taken as it is: modules with tied weights share one."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _stay_frozen(requires_grad: bool = True) -> None:
    """``requires_grad_`` of a packed tensor: no gradient of it exists."""


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` at an address where kernels can read 16 bytes at a time; in a mapped file it lies anywhere."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return tensor.clone() if plain and tensor.data_ptr() % 16 else tensor


def _unmarked(weight: Tensor, prefix: str) -> Tensor:
    """The packed weight of qao 0.1.0, which called it ``weight``. Of others, dtype and shape are judged later."""
    if weight.dtype == torch.int8:
        _warn_unmarked(f"{prefix}weight")
    return weight


def _warn_unmarked(what: str) -> None:
    warnings.warn(
        f"{what}: a checkpoint of qao 0.1.0, which did not mark quantised weights. It is loaded; save it again with "
        "this version, so that loading it without qao is an error instead of wrong numbers.",
        stacklevel=3,
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""PackedModule: base class of modules with a quantized weight: moves, saves, loads and dequantizes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..ops import modes
from ..schemes import Int4Weight, PackedWeight, Scheme
from . import cuda_build, marker
from .dequantized_weight import DequantizedWeight, read_only
from .saved_codes import SavedCodes
from .update import Updatable

Self = TypeVar("Self", bound="PackedModule")


torch.fx.wrap("read_only")


@torch.fx.wrap
def dequantized(qweight: Tensor, scales: Tensor, scheme: Scheme, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """W [n, k] in a float dtype."""
    kernel_dtype = torch.float32 if dtype == torch.float64 else dtype
    return scheme.dequantize(qweight, scales, n, k, kernel_dtype).to(dtype)


class Sharded:
    """Base of the layers of qao.distributed, which hold one rank's part of a weight."""

    layout: Any  # a qao.distributed.layout.Layout, which needs torch.distributed


class PackedModule(Updatable, nn.Module):
    """Module with a quantized weight [N, K] as frozen Parameters, which move with the module and are never cast.

    A ``state_dict`` holds them and the two entries of marker.py, which identify them to any loader.
    """

    qweight: nn.Parameter
    scales: nn.Parameter
    weight_sums: nn.Parameter | None
    activation_scale: nn.Parameter | None
    row_scales: nn.Parameter | None
    needs_all = False  # whether it runs GEMMs, which need weight_sums and row_scales if the scheme has them
    _tied: Sequence[PackedModule] = ()  # modules that share qweight and scales, including this one

    def __init__(
        self, n: int, k: int, scheme: Scheme, packed: PackedWeight, dtype: torch.dtype, **others: Tensor | None
    ) -> None:
        """``others``: more Parameters. They and the scales are registered before integer tensors, because models use
        the dtype of ``next(child.parameters())`` for their activations."""
        super().__init__()
        cuda_build.warn_once()
        self.scheme = scheme.fitted(k)
        self.dtype = dtype
        self._sizes, self._constants = (n, k), self.scheme.constants(n, k)
        self._check_packed(packed)
        for name, tensor in {**others, "scales": packed.scales, **packed.tensors()}.items():
            self.register_parameter(name, None if tensor is None else frozen(tensor))
        self._freeze()

    def _freeze(self) -> None:
        """Makes ``model.requires_grad_()`` skip the packed tensors, for which torch would raise, and notes their sizes.

        It sets attributes of each Parameter, because a Parameter subclass makes compiled calls 10 % slower. Code that
        replaces Parameters calls this again.
        """
        for tensor in self.packed.tensors().values():
            if tensor is not None:
                tensor.requires_grad_ = _stay_frozen  # type: ignore[method-assign, assignment]
                tensor.packed_sizes = self._sizes  # type: ignore[attr-defined]

    @property
    def packed(self) -> PackedWeight:
        """The frozen tensors."""
        tensors = self.qweight, self.scales, self.weight_sums, self.activation_scale, self.row_scales
        return PackedWeight(*tensors, sizes=self._sizes)

    def _check_packed(self, packed: PackedWeight) -> None:
        """Raises ValueError if a packed weight does not have this layer's scheme and sizes."""
        what = f"{type(self).__name__}: {self.scheme} of {list(self._sizes)}"
        if packed.sizes not in (None, self._sizes):
            raise ValueError(f"{what}: the packed weight is of {list(packed.sizes or ())}")
        scales = packed.scales.dtype
        if scales not in self.scheme.scale_dtypes:
            raise ValueError(
                f"{what}: scales must be {_names(self.scheme.scale_dtypes)}, not {_describe(packed.scales)}"
            )
        expected = self._expected(scales).tensors()
        for key, tensor in packed.tensors().items():
            wanted = expected[key]
            if tensor is None and (wanted is None or not self.needs_all):
                continue
            if tensor is None or wanted is None or (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
                needed, given = ("None" if one is None else _describe(one) for one in (wanted, tensor))
                raise ValueError(f"{what}: {key} must be {needed}, not {given}: a weight of another scheme or size")

    def _label(self) -> str:
        """Description of the layer for messages."""
        return f"{type(self).__name__} ({self.extra_repr()})"

    def _expected(self, scale_dtype: torch.dtype) -> PackedWeight:
        """Meta tensors with the shapes and dtypes of this layer's tensors, and scales of ``scale_dtype``."""
        expected = self.scheme.empty(*self._sizes, dtype=scale_dtype, device="meta")
        return expected._replace(scales=expected.scales.to(scale_dtype))

    def _check_padding(self, qweight: Tensor, scales: Tensor, name: str) -> None:
        """Raises ValueError if the padding of packed tensors shows that they belong to a weight of another size.

        It is for state dicts without a marker. Padding beyond N and K is the same in every packed weight, and no
        quantized row has the scales of padding. A last column with the codes of padding may be all zeros or may not
        exist: that is ambiguous and raises too.
        """
        n, k = self._sizes
        if self.scheme.weights not in ("int4", "fp4") or qweight.is_meta or hasattr(qweight, "device_mesh"):
            return
        qweight, scales = aligned(qweight.detach()), aligned(scales.detach())  # those of a mapped file may not be
        packed = qweight.reshape(-1, *qweight.shape[-3:]), scales.reshape(-1, *scales.shape[-4:])
        for q, of_groups in zip(*packed, strict=True):
            rows = of_groups[:, :, 0].mT.flatten(0, 1)  # [N, G], NVFP4: [N, G + 3]
            beyond = torch.zeros_like(rows[0])
            if self.scheme.weights == "fp4" and rows.shape[1] > -(-k // self.scheme.units(n, k)[1]):
                beyond[-3] = 1  # the divisor
            smaller = torch.equal(rows[n - 1], beyond)
            if smaller or not self._is_of(n, k, q, of_groups):
                raise ValueError(
                    f"{name}qweight: this is the packed weight of a {'smaller' if smaller else 'larger'} layer than "
                    f"this {self._label()}, padded to the same shape. Use the model that it was made from."
                )
            if self._is_of(n, k - 1, q, of_groups):
                raise ValueError(
                    f"{name}qweight: the size of the packed weight is ambiguous: it may be that of this "
                    f"{self._label()}, with zeros in its last column, or one with fewer columns. Keep the entry "
                    f"{name}{marker.MARKER} of model.state_dict(), which has the sizes."
                )

    def _is_of(self, n: int, k: int, qweight: Tensor, scales: Tensor) -> bool:
        """Whether packed tensors in this layer's shapes are those of a weight [n, k], with only padding beyond it."""
        if k < 1:
            return False
        empty = self.scheme.empty(n, k, dtype=self.dtype, device="meta")
        if (empty.qweight.shape, empty.scales.shape) != (qweight.shape, scales.shape):
            return False
        again = self.scheme.pack(*self.scheme.unpack(qweight, scales, n, k))
        return torch.equal(again.qweight, qweight) and torch.equal(again.scales, scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight it replaces."""
        return self._sizes

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [N, K] in ``dtype``, read-only. Each use computes it again; see DequantizedWeight."""
        # Dynamo drops unused results, and fx.symbolic_trace needs parameters as nodes, so both dequantize directly.
        if torch.compiler.is_compiling() or isinstance(self.qweight, torch.fx.Proxy):
            return read_only(self.dequantize(self.dtype))
        return DequantizedWeight.of(self.shape, self.dtype, self.qweight, lambda: self.dequantize(self.dtype))

    @weight.setter
    def weight(self, value: Tensor) -> None:
        # transformers 4 ties weights by assigning one to the other; tied modules then share the packed weight.
        source = getattr(value, "source", None)
        other = next((other for other in (self, *self._tied) if other.qweight is source), None)
        if other is None:
            self.register_parameter("weight", None)
            return
        self.qweight, self.scales = other.qweight, other.scales

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__}.weight is computed from qweight and cannot be set. Quantize another weight "
                "into the layer with layer.load_float_(weight), or return to floats with qao.dequantize_(model)."
            )
        if name.endswith("_orig"):  # pruning registers it before it deletes the tensor
            self.refuse_reparametrization(name.removesuffix("_orig"), "prune")
        own = self._parameters.get(name)
        if param is not None and own is not None and name in PackedWeight._fields:
            if own.is_meta:  # loading, with its checks
                self._check_assigned(name, param)
            else:
                self.check_given({name: param}, "")
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if self._parameters.get(name) is not None:  # parametrizations delete the tensor that they compute
            self.refuse_reparametrization(name, f"del {name}")
        super().__delattr__(name)

    def refuse_reparametrization(self, name: str, what: str) -> None:
        """Raises TypeError if ``name`` is the weight or one of its packed tensors."""
        if name == "weight" or name in PackedWeight._fields:
            raise TypeError(
                f"{what}: {name} of this {self._label()} belongs to a quantized weight, which cannot be pruned or "
                "parametrized (weight_norm, spectral_norm). Return to floats with qao.dequantize_(model), change the "
                "weight there, and quantize the result."
            )

    def check_given(self, given: Mapping[str, Tensor], prefix: str) -> None:
        """Raises ValueError if tensors, by their names in this layer's state dict, are of another scheme or size."""
        for name, tensor in given.items():
            if name in PackedWeight._fields:
                self._check_assigned(name, tensor)
        tensors = given.get("qweight", self.qweight), given.get("scales", self.scales)
        if any(modes.has_no_numbers(t) or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
            return
        if marker.MARKER in given:
            self.check_marker(given[marker.MARKER], prefix + marker.MARKER)
            return
        if tensors[0].device != tensors[1].device or any(hasattr(tensor, "device_mesh") for tensor in tensors):
            return
        owns = self.qweight, self.scales
        if any(
            not hasattr(tensor, "packed_sizes") and tensor.data_ptr() != own.data_ptr()
            for tensor, own in zip(tensors, owns, strict=True)
        ):
            self._check_padding(*tensors, prefix)

    def _check_assigned(self, name: str, param: Tensor) -> None:
        """Raises ValueError if ``layer.<name> = param`` would assign a tensor that does not fit this layer's weight."""
        own = self._parameters.get(name)
        if own is None:
            return
        sizes = getattr(param, "packed_sizes", self._sizes)
        dtypes = self.scheme.scale_dtypes if name == "scales" else (own.dtype,)
        if param.shape != own.shape or param.dtype not in dtypes or sizes != self._sizes:
            of_weight = f" of a weight {list(sizes)}" if sizes != self._sizes else ""
            raise ValueError(
                f"{self._label()}: {name} must be {_describe(own)}, not {_describe(param)}{of_weight}. Make a layer "
                "of the other weight instead."
            )

    @property
    def pip_install_qao(self) -> Tensor:
        """The layer's marker as in a ``state_dict``; a property, because torch looks up entries by attribute name."""
        return self._on_weight_device(marker.encode(self._marker()))

    def _marker(self) -> marker.Marker:
        return marker.Marker(self.scheme.to_dict(), *self._sizes, self.dtype)

    def check_marker(self, found: Tensor, name: str) -> None:
        """Raises ValueError if a checkpoint's marker is invalid or describes another scheme or size."""
        marker.check(marker.decode(found, name), self._marker(), name, self._label())

    def _on_weight_device(self, entry: Tensor) -> Tensor:
        """``entry`` on the device of the packed weight, because torch.distributed.checkpoint needs a single device.

        With a sharded weight it is a replicated DTensor, as accelerate expects. If the weight is on meta, the entry
        stays off meta to keep its data, except with a sharded weight that is not loaded yet.
        """
        qweight: Any = self.qweight
        if hasattr(qweight, "device_mesh"):
            return type(qweight).from_local(entry.to(qweight.device), qweight.device_mesh)  # type: ignore[no-any-return]
        return entry if qweight.is_meta else entry.to(qweight.device)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantized weight [N, K] in a float dtype (None: that of the scales)."""
        return dequantized(self.qweight, self.scales, self.scheme, *self._sizes, dtype or self.scales.dtype)

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script does not support it: use torch.export or torch.jit.trace."
        )

    def tie(self, other: PackedModule) -> None:
        """Records that this module shares the Parameters of ``other``, so that loading keeps them shared."""
        self._tied = other._tied = [*(other._tied or [other]), self]

    def _shared(self, key: str, loaded: Tensor) -> Tensor:
        """``loaded``, or the Parameter that a tied module has already created from the same memory."""
        for other in self._tied:
            own = other._parameters[key]
            plain = other is not self and type(own) is nn.Parameter and type(loaded) in (Tensor, nn.Parameter)
            if plain and own is not None and own.dtype == loaded.dtype and own.device == loaded.device:
                if own.is_meta:
                    continue
                # The tied module has copied a misaligned tensor.
                if own.is_set_to(loaded) or (loaded.data_ptr() % 16 and torch.equal(own, loaded)):
                    return own
        return loaded

    def requantize(self, weight: Tensor, name: str = "weight", importance: Tensor | None = None) -> PackedWeight:
        """Quantizes another float weight [N, K] with this layer's scheme; for ``set_packed``.

        Raises:
            ValueError: it holds NaN or Inf; the message begins with ``name``.
        """
        scheme = self.scheme
        if isinstance(scheme, Int4Weight):
            scheme = replace(scheme, scale_dtype=self.scales.dtype)
        return scheme.quantize(weight, name, importance)

    def set_packed(self, packed: PackedWeight) -> None:
        """Replaces the weight. Modules that shared it keep the old one.

        Raises:
            ValueError: it has another scheme or other sizes. The layer is unchanged.
        """
        self._check_packed(packed)
        for name, tensor in packed.tensors().items():
            self._parameters[name] = None if tensor is None else frozen(tensor)
        self._freeze()
        for other in self._tied:
            other._tied = [module for module in other._tied if module is not self]
        self._tied = ()

    def to_float(self, weight: nn.Parameter | None = None) -> nn.Module:
        """The float module with the dequantized weight, or with ``weight``; its parameters are frozen."""
        raise NotImplementedError

    def settle(self) -> None:
        """Freezes and aligns the Parameters after external code has assigned them one by one."""
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.requires_grad = False
                parameter.data = aligned(parameter.data)
        self._freeze()

    def _replicate_for_data_parallel(self: Self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._parameters = _OfReplica(replica)
        return replica

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is Tensor and isinstance(self.__dict__.get("_parameters"), _OfReplica):
            value = aligned(value)  # a coalesced broadcast may misalign it
        super().__setattr__(name, value)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = [tensor for tensor in self.packed.tensors().values() if tensor is not None]

        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not any(tensor is parameter for parameter in own):
                return moved
            if moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            return moved.contiguous()  # .to(memory_format=torch.channels_last) changes strides of 4-D tensors

        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.qweight.device)).dtype
        super()._apply(move_only, recurse)  # type: ignore[no-untyped-call]
        self._freeze()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in PackedWeight._fields:
            value = destination.get(prefix + name)
            if type(value) is Tensor and not value.is_floating_point():
                destination[prefix + name] = SavedCodes.of(value, self._sizes)
        destination[prefix + marker.TRIPWIRE] = self._on_weight_device(marker.tripwire())
        destination[prefix + marker.MARKER] = entry = self.pip_install_qao
        marker.of_layers[entry] = True

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
        try:
            self._check_entries(state_dict, prefix)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        # nn.Module would report only "size mismatch", without a remedy, and silently cast scales of another dtype.
        assign = local_metadata.get("assign_to_params_buffers", False)
        for key, own in self.packed.tensors().items():
            loaded = state_dict.get(prefix + key)
            if own is None or not isinstance(loaded, Tensor):
                continue
            if isinstance(loaded, SavedCodes):
                state_dict[prefix + key] = loaded = loaded.plain()
            may_replace = assign and key == "scales" and loaded.dtype in self.scheme.scale_dtypes
            if loaded.shape != own.shape or (loaded.dtype != own.dtype and not may_replace):
                error_msgs.append(
                    f"{prefix}{key}: the checkpoint holds {_describe(loaded)}, but this {self._label()} needs "
                    f"{_describe(own)}. Quantize the model with the scheme the checkpoint was made with (group_size, "
                    "symmetric, scale_dtype); load a checkpoint of float weights before quantizing."
                )
                return
            if assign:
                state_dict[prefix + key] = loaded = frozen(aligned(self._shared(key, loaded)))
                loaded.packed_sizes = self._sizes  # type: ignore[attr-defined]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._freeze()

    def _check_entries(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Removes entries of a state dict that are not Parameters of this layer. Raises ValueError if they, or the
        tensors' values, show a weight of another scheme or size."""
        found = state_dict.pop(prefix + marker.MARKER, None)
        sized = found is not None or prefix + "weight_scale" in state_dict
        if prefix + "weight_scale" in state_dict:
            from ..checkpoints.compressed_tensors.state_dict import translate

            translate(self, state_dict, prefix)
        floats = state_dict.pop(prefix + marker.TRIPWIRE, None)
        if isinstance(floats, Tensor) and floats.dtype != torch.uint8:
            raise ValueError(
                f"{prefix}{marker.TRIPWIRE}: the checkpoint holds {_describe(floats)}, but this {self._label()} is "
                "quantized. Load it before quantizing, or quantize these weights into the model: "
                "qao.update_(model, state_dict)."
            )
        if (
            self.weight_sums is not None
            and not self.weight_sums.is_meta  # a layer without data holds no sums of another weight
            and prefix + "qweight" in state_dict
            and prefix + "weight_sums" not in state_dict
        ):
            raise ValueError(
                f"{prefix}weight_sums: the checkpoint has none, but this {self._label()} needs those of its weight. "
                "Load into a model that is quantized with the scheme of the checkpoint."
            )
        if found is not None:
            self.check_marker(found, prefix + marker.MARKER)
            return
        bias = state_dict.get(prefix + "bias")
        if isinstance(bias, Tensor) and bias.shape[-1:] != self._sizes[:1]:
            raise ValueError(
                f"{prefix}bias: the checkpoint holds {_describe(bias)}, but this {self._label()} has {self._sizes[0]} "
                "outputs. Use the model that the checkpoint was made from."
            )
        qweight, scales = (state_dict.get(prefix + name) for name in ("qweight", "scales"))
        if not sized and isinstance(qweight, Tensor) and isinstance(scales, Tensor):
            alike = qweight.shape == self.qweight.shape and scales.shape == self.scales.shape
            if alike and qweight.dtype == torch.int8 and scales.dtype in self.scheme.scale_dtypes:
                self._check_padding(qweight, scales, prefix)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._constants = self.scheme.constants(*self._sizes)  # their order may be that of an earlier version
        self._freeze()


class _OfReplica(dict[str, Any]):
    """``_parameters`` of an nn.DataParallel replica, which has its tensors as plain attributes: it is empty, and a
    lookup by name returns the attribute."""

    def __init__(self, replica: nn.Module) -> None:
        super().__init__()
        self._attributes = vars(replica)

    def __missing__(self, name: str) -> Any:
        return self._attributes[name]


def frozen(tensor: Tensor) -> nn.Parameter:
    """A frozen Parameter. An existing Parameter is returned unchanged: modules with tied weights share it."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _stay_frozen(requires_grad: bool = True) -> None:
    """``requires_grad_`` of a packed tensor: does nothing, because it has no gradient."""


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` at a 16-byte aligned address, as kernels need; tensors of a mapped file may be misaligned."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return tensor.clone() if plain and tensor.data_ptr() % 16 else tensor


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

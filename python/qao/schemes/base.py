"""What all schemes are: the base class, and a weight as they pack it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops import packed_shape
from ..ops.batch_invariant import MODE
from ..quant_primitives.integer import QuantizedWeight, as_stored

try:
    from .. import _host as _host
except ImportError:  # built without pybind11: layers work, kernels just have no names to show
    _host = None  # type: ignore[assignment]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OnePass = tuple[torch.dtype, int, int, bool, bool]  # dtype, rows, columns, symmetric, whole_zeros: quantize_weight_


class PackedWeight(NamedTuple):
    """A quantized weight [N, K] in the layout of the scheme's kernels, with what else a layer stores."""

    qweight: Tensor  # int8, whatever its bytes are
    scales: Tensor
    weight_sums: Tensor | None = None  # float32 [N], sums over k of the dequantized W; for asymmetric activations
    activation_scale: Tensor | None = None  # float32 [1]; for static activations
    row_scales: Tensor | None = None  # float32 [N], of which scales are factors, with scales of two levels
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖, Frobenius; None if unknown
    sizes: tuple[int, int] | None = None  # N and K, which the padded tensors of four bits do not tell; None if unknown

    def tensors(self) -> dict[str, Tensor | None]:
        return dict(zip(self._fields[:5], self[:5], strict=True))


def stacked(weights: Iterable[PackedWeight], count: int) -> PackedWeight:
    """Those of ``count`` experts, as grouped products take them: behind one more dimension. A static scale is that of
    all. Weights that are made when they are asked for lie beside the whole one at a time."""
    whole: dict[str, Tensor | None] = {}
    sizes = None
    for index, one in enumerate(weights):
        tensors, sizes = one.tensors(), one.sizes
        if not index:
            whole = {name: None if t is None else t.new_empty(count, *t.shape) for name, t in tensors.items()}
            whole["activation_scale"] = one.activation_scale
        for name, tensor in tensors.items():
            if tensor is not None and name != "activation_scale":
                whole[name][index] = tensor  # type: ignore[index]
    return PackedWeight(**whole, sizes=sizes)  # type: ignore[arg-type]


class Scheme(ABC):
    """How a linear layer of N = out_features by K = in_features is stored and computed."""

    word: ClassVar[str]  # the scheme's name in operators, files and reports
    activations: ClassVar[str] = "float"  # what the product takes: "float" (as they come), "int8" or "fp8"
    weights: ClassVar[str]  # "int4", "int8" or "fp8"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]]  # that the kernels take
    default_constants: ClassVar[tuple[int, ...]] = ()  # that operators take for granted
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")  # types of devices that have kernels

    # Of schemes that quantize activations. A scheme that offers the choice has a field of that name.
    symmetric_activations: bool = True
    activation_scale: float | None = None
    rotation: int = 0

    # ---- the weight format: what a subclass says about it

    @abstractmethod
    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        """``quantize`` as far as plain tensors; ``importance`` [K] of columns, where a range is searched."""

    @abstractmethod
    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int, int] | tuple[int], bool]:
        """Of the plain tensors of a weight [n, k]: dtypes that q may have, shape of scales, whether there are zeros."""

    @abstractmethod
    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        """weight and scales in the layout of the kernels."""

    @abstractmethod
    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """float32 [N]: sums over k of W."""

    def one_pass(self, n: int, k: int) -> OnePass | None:
        """What ``quantize_weight_`` is told to quantize a weight [n, k].

        None: ranges are searched, or there is no such kernel.
        """
        return None

    def _row_scales(self, scales: Tensor) -> Tensor | None:
        """float32 [N], where the operator takes it: ``scales``, as they are stored, are factors times those."""
        return None

    @abstractmethod
    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """W [n, k] in a float dtype, from what ``pack`` made."""

    @abstractmethod
    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inverse of ``pack``: q [n, k], scales and zeros as ``pack`` takes them, bit for bit."""

    def units(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of a weight [n, k] that share a scale, so that no cut may part them; 1 where any may."""
        return 1, 1

    def rotation_of(self, k: int) -> int:
        """Columns of a block of the rotation (rotation.py) that a layer of k columns has; 0: none."""
        return 0

    def fitted(self, k: int) -> Scheme:
        """The same as a layer of k columns has it."""
        return self

    def with_scales_of(self, dtype: torch.dtype) -> Scheme:
        """The same, which stores scales as it does beside a weight of ``dtype``, whatever the weight is."""
        return self

    # ---- what follows from it

    @staticmethod  # of a scheme that all layers share, torch.compile would guard in every layer that they do
    @abstractmethod
    def mm(x: Tensor, layer: Mapping[str, Any], constants: tuple[int, ...]) -> Tensor:
        """y [..., N] = x [..., K] · Wᵀ + bias: the forward of a layer with these tensors by name."""

    def constants(self, n: int, k: int) -> tuple[Any, ...]:
        """What the operator of a layer W [n, k] is told beside tensors."""
        return ()

    def needed_constants(self, n: int, k: int) -> tuple[Any, ...]:
        """The same for a product, without what it takes for granted or sees in its tensors: 0.1 µs less each."""
        constants = self.constants(n, k)
        seen = self.weights in ("int4", "fp4") and packed_shape.tell(self.weights, *constants)
        return () if seen or constants == self.default_constants else constants

    def quantize(self, weight: Tensor, name: str = "weight", importance: Tensor | None = None) -> PackedWeight:
        """Quantizes and packs a float weight [N, K]; ``importance``, read by int4 alone, as in ``quantize_int4``."""
        quantized = self._quantize(weight, name, importance)
        packed = self.pack(quantized.q, quantized.scales, quantized.zeros)
        return packed._replace(relative_error=quantized.relative_error)

    def pack(self, q: Tensor, scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
        """Packs a weight that is quantized already, W = (q - zero) * scale.

        Args:
            q: [N, K]. int4: uint8 of 0..15; int8: int8; fp8: float8_e4m3fn, or its bytes as int8.
            scales: of any float dtype, float64 included; a float dtype the kernels do not take becomes float32. int4:
                [N, ceil(K / group_size)]; int8: [N]; fp8: [N, 1], [1, 1] or [ceil(N / 128), ceil(K / 128)], by
                granularity. Dimensions of size 1 may be left out or added.
            zeros: int4 unless symmetric: zero points in the shape of scales, of any dtype, with fractions or without,
                rounded to the dtype scales are stored in; else None.

        Raises:
            ValueError: a shape or dtype does not fit the scheme, or a scale overflows the dtype it is stored in.
        """
        dtypes, shape, has_zeros = self._plain(*q.shape) if q.dim() == 2 else ((), (), False)
        if q.dtype not in dtypes:
            expected = ", ".join(str(dtype) for dtype in self._plain(1, 1)[0])
            raise ValueError(f"{self}: q must be {expected} of shape [N, K], not {q.dtype}{list(q.shape)}")
        if (zeros is not None) != has_zeros:
            raise ValueError(f"{self}: zeros must be {'given' if has_zeros else 'None'} for a weight of this scheme")
        dtype = self.scale_dtype_of(scales.dtype)
        scales = as_stored("scales", scales, shape, dtype, str(self))
        zeros = None if zeros is None else as_stored("zeros", zeros, shape, dtype, str(self))
        weight, stored = self._store(q.contiguous(), scales, zeros)
        sums = None if self.symmetric_activations else self._weight_sums(q, scales, zeros)
        scale = self.activation_scale
        activation_scale = None if scale is None else torch.full((1,), scale, dtype=torch.float32, device=q.device)
        n, k = q.shape
        return PackedWeight(weight, stored, sums, activation_scale, self._row_scales(scales), sizes=(n, k))

    def empty(
        self, n: int, k: int, *, dtype: torch.dtype, device: torch.device | str, experts: int | None = None
    ) -> PackedWeight:
        """Uninitialized tensors for a layer whose float weight [n, k] would have ``dtype``, or for so many experts."""
        dtypes, shape, has_zeros = self._plain(n, k)
        q = torch.empty(n, k, dtype=dtypes[0], device="meta")
        scales = torch.empty(shape, dtype=self.scale_dtype_of(dtype), device="meta")
        packed = self.pack(q, scales, scales if has_zeros else None)
        if experts is not None:
            packed = stacked([packed] * experts, experts)
        empty: Any = (t if t is None else torch.empty_like(t, device=device) for t in packed.tensors().values())
        return PackedWeight(*empty)._replace(sizes=(n, k))

    def kernel(self, m: int, n: int, k: int, **options: Any) -> str | None:
        """Name of the kernel that multiplies x [m, k], options as for ``plan``; None where that is not known."""
        plan = self.plan(m, n, k, **options)
        return None if plan is None else str(plan["kernel"])

    def plan(
        self,
        m: int,
        n: int,
        k: int,
        *,
        x_dtype: torch.dtype,
        scale_dtype: torch.dtype,
        device: torch.device,
        experts: int = 0,
    ) -> dict[str, Any] | None:
        """How x [m, k] is multiplied on ``device``: "kernel", its name; "text", the choice in words; more on a GPU.

        ``experts``: as many share the rows on a GPU."""
        if _host is None or device.type not in ("cpu", "cuda"):
            return None
        x, scales = (str(dtype).removeprefix("torch.") for dtype in (x_dtype, scale_dtype))
        problem = self._problem(m=m, n=n, k=k, x_dtype=x, scale_dtype=scales, batch_invariant=MODE.on)
        if device.type == "cpu":
            kernel = _host.cpu_kernel(problem)
            return {"kernel": kernel, "text": f"for M = {m} with {x} activations on {_host.cpu_features()['selected']}"}
        properties = torch.cuda.get_device_properties(device)
        gpu = _host.Gpu(
            compute_capability=10 * properties.major + properties.minor,
            num_sms=properties.multi_processor_count,
            shared_bytes_per_cta=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
        return _host.plan(problem, gpu, experts)

    def _problem(self, **facts: Any) -> _host.Problem:
        """All that the choice of a kernel depends on; a subclass adds its own facts."""
        return _host.Problem(x=self.activations, weight=self.weights, x_zeros=not self.symmetric_activations, **facts)

    def scale_dtype_of(self, given: torch.dtype) -> torch.dtype:
        """The dtype scales are stored in, where the weight or its scales have ``given``."""
        return given if given in self.scale_dtypes else torch.float32

    def to_dict(self) -> dict[str, Any]:
        """The scheme in types that JSON knows; ``qao.scheme_from_dict`` is the inverse."""
        return {"scheme": self.word, **{f.name: _plain_value(getattr(self, f.name)) for f in fields(self)}}  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.word + ("" if self.symmetric_activations else ", asymmetric activations")

    def _reject(self, name: str, expected: str, error: type[Exception] = ValueError) -> None:
        raise error(f"{type(self).__name__}: {name} must be {expected}, not {getattr(self, name)!r}")

    def _check_bool(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._reject(name, "True or False", TypeError)


def _plain_value(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

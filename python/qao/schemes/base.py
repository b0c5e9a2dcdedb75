"""Base class of all schemes, and the packed weight that a scheme produces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops import packed_shape
from ..ops.batch_invariant import MODE
from ..ops.library import cpu_features
from ..quant_primitives.integer import QuantizedWeight, as_stored

try:
    from .. import _host as _host
except ImportError:  # built without pybind11: layers work, but kernel names are not available
    _host = None  # type: ignore[assignment]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OnePass = tuple[torch.dtype, int, int, bool, bool]  # dtype, rows, columns, symmetric, whole_zeros: quantize_weight_


class PackedWeight(NamedTuple):
    """A quantized weight [N, K] in the layout of the scheme's kernels, with the layer's other quantization tensors."""

    qweight: Tensor  # int8, also for packed or e4m3 bytes
    scales: Tensor
    weight_sums: Tensor | None = None  # float32 [N], sums over k of the dequantized W; for asymmetric activations
    activation_scale: Tensor | None = None  # float32 [1]; for static activations
    row_scales: Tensor | None = None  # float32 [N]; scales are small factors of it; for two-level scales
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖, Frobenius; None if unknown
    sizes: tuple[int, int] | None = None  # N and K, not known from padded four-bit tensors; None if unknown

    def tensors(self) -> dict[str, Tensor | None]:
        return dict(zip(self._fields[:5], self[:5], strict=True))


def stacked(weights: Iterable[PackedWeight], count: int) -> PackedWeight:
    """Stacks the weights of ``count`` experts along a new leading dimension for grouped GEMMs. Experts share a static
    activation scale. With a lazy iterable only one expert's weight is in memory next to the stacked ones."""
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
    """Storage and computation of a linear layer with N = out_features and K = in_features."""

    word: ClassVar[str]  # the scheme's name in operators, files and reports
    activations: ClassVar[str] = "float"  # activations in the GEMM: "float" (unquantized), "int8" or "fp8"
    weights: ClassVar[str]  # "int4", "int8" or "fp8"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]]  # supported by the kernels
    operands: ClassVar[tuple[str, ...]] = ()  # tensors of the layer that its operator takes after weight, scales, bias
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")  # device types with kernels

    # For schemes that quantize activations. A scheme with the option overrides it with a dataclass field.
    symmetric_activations: bool = True
    activation_scale: float | None = None
    rotation: int = 0

    # ---- the weight format, defined by a subclass

    @abstractmethod
    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        """``quantize`` without packing; ``importance`` [K] weights columns in a clipping search."""

    @abstractmethod
    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int, int] | tuple[int], bool]:
        """For the unpacked tensors of a weight [n, k]: allowed dtypes of q, shape of scales, whether zeros exist."""

    @abstractmethod
    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        """weight and scales in the layout of the kernels."""

    @abstractmethod
    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """float32 [N]: sums over k of W."""

    def one_pass(self, n: int, k: int) -> OnePass | None:
        """Arguments of ``quantize_weight_`` for a weight [n, k].

        None: the scheme needs a search, or no such kernel exists.
        """
        return None

    def _row_scales(self, scales: Tensor) -> Tensor | None:
        """float32 [N], the row scales of two-level ``scales``; None for other schemes."""
        return None

    @abstractmethod
    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """W [n, k] in a float dtype, from packed tensors."""

    @abstractmethod
    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inverse of ``pack``: q [n, k], scales and zeros in the form of ``pack``, bit for bit."""

    def units(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of a weight [n, k] that sharding must keep together because they share a scale; 1: any."""
        return 1, 1

    def rotation_of(self, k: int) -> int:
        """Block size of the rotation (ops/rotation.py) for a layer of k columns; 0: no rotation."""
        return 0

    def fitted(self, k: int) -> Scheme:
        """The scheme with its options adapted to a layer of k columns."""
        return self

    def with_scales_of(self, dtype: torch.dtype) -> Scheme:
        """The scheme with the scale dtype it uses for a weight of ``dtype``, whatever the dtype of the given weight."""
        return self

    # ---- derived from the format

    @staticmethod  # static: torch.compile would guard on a scheme object in every layer that shares it
    @abstractmethod
    def mm(x: Tensor, layer: Mapping[str, Any], constants: tuple[int, ...]) -> Tensor:
        """y [..., N] = x [..., K] · Wᵀ + bias: the forward of a layer with these tensors by name."""

    def sizes(self, n: int, k: int) -> tuple[int, ...]:
        """N, K and group size for the operators of a packed weight [n, k]; empty for other weights."""
        return ()

    def options(self, k: int) -> tuple[Any, ...]:
        """Numbers of the operator after the sizes for a layer of k columns; empty if all are defaults."""
        return ()

    def constants(self, n: int, k: int) -> tuple[Any, ...]:
        """Numbers of the operator for a layer W [n, k], which follow its tensors.

        Sizes are left out if they follow from the tensors: saves 0.1 µs each.
        """
        sizes, options = self.sizes(n, k), self.options(k)
        inferred = not sizes or packed_shape.determines_sizes(self.weights, *sizes)
        return options if inferred and not options else (*sizes, *options)

    def quantize(self, weight: Tensor, name: str = "weight", importance: Tensor | None = None) -> PackedWeight:
        """Quantizes and packs a float weight [N, K]; ``importance`` as in ``quantize_int4``, used by int4 only."""
        quantized = self._quantize(weight, name, importance)
        packed = self.pack(quantized.q, quantized.scales, quantized.zeros)
        return packed._replace(relative_error=quantized.relative_error)

    def pack(self, q: Tensor, scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
        """Packs a weight that is already quantized, W = (q - zero) * scale.

        Args:
            q: [N, K]. int4: uint8 of 0..15; int8: int8; fp8: float8_e4m3fn, or its bytes as int8.
            scales: any float dtype, including float64; dtypes that the kernels do not support become float32. int4:
                [N, ceil(K / group_size)]; int8: [N]; fp8: [N, 1], [1, 1] or [ceil(N / 128), ceil(K / 128)], by
                granularity. Dimensions of size 1 may be omitted or added.
            zeros: int4 unless symmetric: zero points in the shape of scales, any dtype, integer or not, rounded to the
                stored dtype of scales; otherwise None.

        Raises:
            ValueError: a shape or dtype does not fit the scheme, or a scale overflows its stored dtype.
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
        activation_scale = (
            None if scale is None else torch.full((1,), float(scale), dtype=torch.float32, device=q.device)
        )
        n, k = q.shape
        return PackedWeight(weight, stored, sums, activation_scale, self._row_scales(scales), sizes=(n, k))

    def empty(
        self, n: int, k: int, *, dtype: torch.dtype, device: torch.device | str, experts: int | None = None
    ) -> PackedWeight:
        """Uninitialized tensors for a layer with a float weight [n, k] of ``dtype``, or for ``experts`` of them."""
        empty: list[Any] = []
        for name, fact in zip(PackedWeight._fields, _shapes(self, n, k, dtype), strict=False):
            if fact is None:
                empty.append(None)
                continue
            shape = fact[0] if experts is None or name == "activation_scale" else (experts, *fact[0])
            empty.append(torch.empty(shape, dtype=fact[1], device=device))
        return PackedWeight(*empty)._replace(sizes=(n, k))

    def kernel(self, m: int, n: int, k: int, **options: Any) -> str | None:
        """Name of the kernel for x [m, k], options as for ``plan``; None if unknown."""
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
        """Kernel selection for x [m, k] on ``device``: "kernel", its name; "text", a description; more on a GPU.

        ``experts``: the number of experts that share the rows of a grouped GEMM on a GPU."""
        if _host is None or device.type not in ("cpu", "cuda"):
            return None
        x, scales = (str(dtype).removeprefix("torch.") for dtype in (x_dtype, scale_dtype))
        problem = self._problem(m=m, n=n, k=k, x_dtype=x, scale_dtype=scales, batch_invariant=MODE.on)
        if device.type == "cpu":
            kernel = _host.cpu_kernel(problem)
            return {"kernel": kernel, "text": f"for M = {m} with {x} activations on {cpu_features()['selected']}"}
        properties = torch.cuda.get_device_properties(device)
        gpu = _host.Gpu(
            compute_capability=10 * properties.major + properties.minor,
            num_sms=properties.multi_processor_count,
            shared_bytes_per_cta=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
        return _host.plan(problem, gpu, experts)

    def _problem(self, **facts: Any) -> _host.Problem:
        """The problem description for kernel selection; subclasses add their fields."""
        return _host.Problem(x=self.activations, weight=self.weights, x_zeros=not self.symmetric_activations, **facts)

    def scale_dtype_of(self, given: torch.dtype) -> torch.dtype:
        """The stored dtype of scales if the weight or its scales have ``given``."""
        return given if given in self.scale_dtypes else torch.float32

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON types; ``qao.schemes.scheme_from_dict`` is the inverse."""
        return {"scheme": self.word, **{f.name: _plain_value(getattr(self, f.name)) for f in fields(self)}}  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.word + ("" if self.symmetric_activations else ", asymmetric activations")

    def _reject(self, name: str, expected: str, error: type[Exception] = ValueError) -> None:
        raise error(f"{type(self).__name__}: {name} must be {expected}, not {getattr(self, name)!r}")

    def _check_bool(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._reject(name, "True or False", TypeError)


@lru_cache(maxsize=4096)  # layers of a model have few sizes, and meta tensors cost a millisecond
def _shapes(scheme: Scheme, n: int, k: int, dtype: torch.dtype) -> tuple[tuple[torch.Size, torch.dtype] | None, ...]:
    """Shape and dtype of each tensor of ``PackedWeight`` for a float weight [n, k] of ``dtype``."""
    dtypes, shape, has_zeros = scheme._plain(n, k)
    q = torch.empty(n, k, dtype=dtypes[0], device="meta")
    scales = torch.empty(shape, dtype=scheme.scale_dtype_of(dtype), device="meta")
    packed = scheme.pack(q, scales, scales if has_zeros else None)
    return tuple(None if t is None else (t.shape, t.dtype) for t in packed.tensors().values())


def _plain_value(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

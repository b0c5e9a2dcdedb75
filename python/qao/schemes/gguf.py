"""Weights in the blocks of a GGUF file, as llama.cpp quantized them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..ops.gguf import BLOCKS
from ..quant_primitives.integer import QuantizedWeight
from .base import PackedWeight, Scheme

# ggml's numbers of the types with kernels.
GGUF_NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13}
GGUF_NUMBERS |= {"Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23}


@dataclass(frozen=True)
class GgufWeightOnly(Scheme):
    """Weights as a GGUF file holds them, bit for bit, unquantized activations. CPU only.

    Such layers come from files: ``qao.from_pretrained("model-Q4_K_M.gguf")``. Nothing is quantized to this scheme.

    Args:
        qtype: llama.cpp's name of the type: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
            "Q6_K", "IQ4_NL" or "IQ4_XS".

    Raises:
        ValueError: another name.
    """

    qtype: str

    word: ClassVar[str] = "gguf"
    weights: ClassVar[str] = "gguf"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __post_init__(self) -> None:
        if self.qtype not in GGUF_NUMBERS:
            self._reject("qtype", f"one of {', '.join(GGUF_NUMBERS)}")

    def __str__(self) -> str:
        return f"gguf {self.qtype}"

    @property
    def number(self) -> int:
        """ggml's number of the type."""
        return GGUF_NUMBERS[self.qtype]

    @property
    def block(self) -> tuple[int, int]:
        """Columns and bytes of a block."""
        return BLOCKS[self.number]

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of ``k`` columns. Raises ValueError if rows hold no whole blocks."""
        columns, size = self.block
        if k % columns:
            raise ValueError(f"{self}: rows of {k} columns are not a multiple of the block's {columns}")
        return k // columns * size

    def pack(self, q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None) -> PackedWeight:
        """The bytes of the file's rows, uint8 [N, bytes of a row], which include scales; those of the layer are 1.

        Experts are stacked: [E, N, bytes of a row].
        """
        columns, size = self.block
        if q.dtype != torch.uint8 or q.dim() not in (2, 3) or q.shape[-1] % size:
            raise ValueError(
                f"{self}: q must be uint8 [N, bytes of a row], in blocks of {size} bytes, not {q.dtype}{list(q.shape)}"
            )
        sizes = q.shape[-2], q.shape[-1] // size * columns
        ones = torch.ones((*q.shape[:-2], 1), dtype=torch.float32, device=q.device)
        return PackedWeight(q.contiguous(), ones, sizes=sizes)

    def empty(
        self, n: int, k: int, *, dtype: torch.dtype, device: torch.device | str, experts: int | None = None
    ) -> PackedWeight:
        shape = (n, self.row_bytes(k)) if experts is None else (experts, n, self.row_bytes(k))
        return self.pack(torch.empty(shape, dtype=torch.uint8, device=device))

    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return weight, scales, None

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_gguf(weight, self.number, dtype)

    def sizes(self, n: int, k: int) -> tuple[int, ...]:
        """The operators' ``qtype``, which gives the sizes with the rows of bytes."""
        return (self.number,)

    def constants(self, n: int, k: int) -> tuple[int, ...]:
        return (self.number,)

    def units(self, n: int, k: int) -> tuple[int, int]:
        return 1, k  # rows of blocks are split by rows only

    @staticmethod
    def mm(x: Tensor, layer: Mapping[str, Any], constants: tuple[Any, ...]) -> Tensor:
        return ops.gguf_mm(x, layer["qweight"], layer["bias"], *constants)

    def plan(self, m: int, n: int, k: int, *, device: torch.device, **facts: Any) -> dict[str, Any] | None:
        kernel = f"gguf {self.qtype}"
        return {"kernel": kernel, "text": f"for M = {m}"} if device.type == "cpu" else None

    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        raise ValueError(
            f"{name}: {self} holds what llama.cpp quantized, and qao does not quantize to it. Use llama-quantize and "
            "load the file, or another scheme, for example qao.Int4WeightOnly(32)"
        )

    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int], bool]:
        return (torch.uint8,), (1,), False

    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        return q, scales

    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        raise NotImplementedError("GGUF weights take float activations")

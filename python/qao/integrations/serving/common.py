"""Weights loaded by serving engines, as plain integers, scales and zero points.

Engines name tensor dimensions by their content: ``output_dim`` (rows of W), ``input_dim`` (columns of W) and
``packed_dim``, along which 32-bit words pack values, the first in the lowest bits.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ..._version import __version__
from ...checkpoints.plain import group_size_of, regroup, unpack
from ...ops.batch_invariant import MODE
from ...ops.library import build_info
from ...ops.signature import SIGNATURES, invariant
from ...schemes import Int4WeightOnly, Int8WeightOnly, PackedWeight, Scheme

MIN_CAPABILITY = 80
TESTED = {"vllm": "0.30 to 0.33", "sglang": "0.5.16 and 0.5.20 to 0.5.23"}  # tests/engines.json
OPERATORS: dict[str, Any] = {
    "int4": ops.INT4,
    "int8": ops.INT8,
    "fp8": ops.FP8,
    "fp4": ops.FP4,
    "int8_int8": ops.INT8_INT8,
    "int8_int4": ops.INT8_INT4,
    "fp8_fp8": ops.FP8_FP8,
    "fp8_int4": ops.FP8_INT4,
}


_warned: set[tuple[str, str]] = set()


def failure(engine: str, what: str, error: Exception) -> str:
    """A message that a part of qao does not work with this version of an engine.

    Args:
        what: the part, and what happens without it: "linear layers use vllm's own kernels".
    """
    version = getattr(sys.modules.get(engine), "__version__", "of unknown version")
    return (
        f"qao {__version__} does not fit {engine} {version}: {what}. {type(error).__name__}: {error}. Install a "
        f"version that qao is tested with, {engine} {TESTED[engine]}, or another qao; {switch(engine)}=1 turns qao off"
    )


def warn_failed(engine: str, what: str, error: Exception) -> None:
    """Log ``failure`` in the engine's log, once per part."""
    if (engine, what) not in _warned:
        _warned.add((engine, what))
        logger = logging.getLogger(f"{engine}.qao")
        logger.error(failure(engine, what, error))
        logger.debug("The cause:", exc_info=error)


def decided(engine: str, what: str, decide: Callable[..., Any], *args: Any) -> Any:
    """``decide(*args)``, which returns what serves a layer, or why none does.

    An exception means that this version of the engine lacks something that ``decide`` reads. It is logged as
    ``warn_failed`` does, and the layer is left to the engine.
    """
    try:
        return decide(*args)
    except Exception as error:
        warn_failed(engine, what, error)
        return f"{type(error).__name__}: {error}"


@contextmanager
def required(engine: str, what: str) -> Iterator[None]:
    """Turn an exception into ``failure``, where no kernel of the engine can take over."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(failure(engine, what, error)) from error


def switch(engine: str) -> str:
    """The environment variable that disables qao in an engine."""
    return f"QAO_DISABLE_{engine.upper()}"


def is_off(engine: str) -> bool:
    """Whether the user disabled qao in this engine."""
    return os.environ.get(switch(engine), "") not in ("", "0")


def unsupported_gpu(compute_capability: int | None) -> str | None:
    """Why no qao kernel runs on a GPU of this compute capability (90; None: unknown); None if kernels exist."""
    if build_info()["cuda"] is None:
        return "this build of qao has no CUDA kernels: install one that was built with nvcc"
    if compute_capability is not None and compute_capability < MIN_CAPABILITY:
        return f"qao needs compute capability {MIN_CAPABILITY}, this is {compute_capability}"
    return None


def multiply(operator: Any, x: Tensor, weight: Any, scales: Any, *rest: Any) -> Tensor:
    """A GEMM of the engine's layers, batch-invariant if the engine is (``follow_batch_invariance``).

    Args:
        rest: the bias and the operator's other tensors, all of them if numbers follow, then the numbers.
    """
    if MODE.on:
        first = 1 + SIGNATURES[operator].others
        others, numbers = invariant(operator, rest[1:first], rest[first:])
        rest = (*rest[:1], *others, *numbers)
    return operator(x, weight, scales, *rest)  # type: ignore[no-any-return]


def follow_batch_invariance(wanted: bool) -> None:
    """Make qao's operators batch-invariant in this process, as the engine is."""
    if wanted:
        MODE.on = True


STATIC_INT8 = "static scales of int8 activations; qao computes one scale per token"
GROUPS = "groups of 32, 64, 128, 256, their multiples, or a row"


def rows(words: Tensor, bits: int, *, packed_dim: int, output_dim: int) -> Tensor:
    """Unpack int32 words of 32 / ``bits`` values each to uint8 [N, K] (or zero points [N, G])."""
    values = unpack(words if packed_dim == 1 else words.t(), bits)
    return values if packed_dim != output_dim else values.t()


def unsupported_groups(group_size: int, k: int, full_k: int) -> str | None:
    """Why qao cannot compute k of ``full_k`` columns in groups of ``group_size`` (-1: the row); None if it can."""
    if group_size_of(group_size, k) is None or group_size == 0:
        return f"groups of {group_size} columns; qao supports {GROUPS}"
    if 0 < group_size < full_k and k % group_size and k != full_k:
        return f"a shard of {k} columns, which groups of {group_size} do not divide"
    return None


def unsupported_integers(bits: int, group_size: int, k: int, full_k: int, zero_points: bool) -> str | None:
    """``unsupported_groups`` for k of ``full_k`` columns of weight-only integers of ``bits``."""
    if bits == 8:
        if group_size not in (-1, full_k):
            return f"eight bits in groups of {group_size} columns; qao supports one scale per row there"
        return "eight bits with zero points; qao supports none in this layout" if zero_points else None
    if bits != 4:
        return f"weights of {bits} bits; qao supports four, and eight without zero points"
    return unsupported_groups(group_size, k, full_k)


def integer_scheme(bits: int, given: int, k: int, *, symmetric: bool) -> Scheme:
    """The scheme for weights that ``unsupported_integers`` accepts, in groups of ``given`` of k columns."""
    if bits == 8:
        return Int8WeightOnly()
    size = group_size_of(given, k)
    assert size is not None
    return Int4WeightOnly(size, symmetric)


def integers(scheme: Scheme, q: Tensor, scales: Tensor, zeros: Tensor | None, given: int, *, bits: int) -> PackedWeight:
    """Pack uint8 q [N, K]: 4 bits as ``grouped`` does; 8 bits, with zero point 128, with per-row scales."""
    if bits == 8:
        return scheme.pack((q ^ 0x80).view(torch.int8), scales.reshape(-1))
    return grouped(scheme, q, scales, zeros, given)


def grouped(scheme: Scheme, q: Tensor, scales: Tensor, zeros: Tensor | None, given: int) -> PackedWeight:
    """Pack uint8 q [N, K], scales [N, G] and zeros [N, G] of groups of ``given`` columns (-1: the row)."""
    n, k = q.shape
    expected = (n, 1 if given == -1 else -(-k // given))
    for name, tensor in (("scales", scales), ("zero points", zeros)):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(
                f"qao: {name} {list(tensor.shape)} of a weight [{n}, {k}] in groups of {given} columns must be "
                f"{list(expected)}. Choose a tensor parallel size that divides K into whole groups."
            )
    scales = regroup(scales, given, k).contiguous()
    return scheme.pack(q, scales, None if zeros is None else regroup(zeros, given, k).contiguous())


def row_scales(scales: Tensor, widths: list[int]) -> Tensor:
    """float32 [N] from one scale per joined matrix with ``widths`` rows; [N, 1] is only flattened."""
    scales = scales.detach().float().reshape(-1)
    if scales.numel() == sum(widths):
        return scales.contiguous()
    if scales.numel() == 1:
        return scales.expand(sum(widths)).contiguous()
    if scales.numel() != len(widths):
        raise ValueError(f"qao: {scales.numel()} scales for matrices of {widths} rows, not one per matrix or row")
    return scales.repeat_interleave(torch.tensor(widths, device=scales.device))

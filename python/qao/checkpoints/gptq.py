"""GPTQ checkpoints (AutoGPTQ, GPTQModel; versions 1 and 2): 4 bits, or 8 bits with per-row scales.

    qweight  int32 [K·b/32, N]   value i of a word is k = 32/b·j + i
    scales   float16 [G, N]
    qzeros   int32 [G, N·b/32]   natural order; version 1 stores zero - 1
    g_idx    int32 [K]           group of a column; k // group_size unless columns were reordered

W = (q - zero) · scale.
"""

from __future__ import annotations

from functools import partial

import torch

from ..schemes import Int4WeightOnly, Int8WeightOnly, Scheme
from .base import CheckpointError, Plain, QuantizedLayer
from .files import FLOATS, TensorFiles
from .plain import check_layer_name, grouping, regroup, unpack
from .settings import Settings, matches

__all__ = ["layer", "read"]


def read(files: TensorFiles, settings: Settings) -> list[QuantizedLayer]:
    """The layers of a GPTQ checkpoint.

    Raises:
        CheckpointError: also for columns reordered into groups (``desc_act`` with groups), for bits other than 4 and 8,
            and for eight bits with groups or zero points.
    """
    names = [check_layer_name(files, key, ".qweight") for key in files.names if key.endswith(".qweight")]
    return [layer(files, name, _of_layer(settings, name)) for name in names]


def _of_layer(settings: Settings, name: str) -> Settings:
    """The settings of one module. ``dynamic`` maps name patterns to overrides ("-:" excludes, "+:" is the default)."""
    for pattern, changes in settings.children("dynamic").items():
        if pattern.startswith("-:"):
            if matches(pattern[2:], name, settings.where):
                raise CheckpointError(f"{settings.where}: {name} is excluded by {pattern!r:.80}, but is quantized")
        elif matches(pattern.removeprefix("+:"), name, settings.where):
            return Settings({**settings.values, **changes.values}, settings.where)
    return settings


def layer(files: TensorFiles, name: str, settings: Settings) -> QuantizedLayer:
    qweight, scales, qzeros, g_idx = (f"{name}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx"))
    bits = settings.integer("bits", 4, low=1, high=32)
    if bits not in (4, 8):
        raise CheckpointError(f"{settings.where}: {name}: {bits} bits; qao has kernels for 4 and 8")
    words, n = files.matrix(qweight, torch.int32)
    k = words * 32 // bits
    if n * bits % 32:
        raise files.error(qweight, f"has {n} columns, which are not a whole number of 32-bit words of zero points")
    given = settings.integer("group_size", 128)
    if given == -1 or given > k:
        given = k
    group_size, note = grouping(files, qweight, given, k)
    groups = -(-k // given)
    files.check(scales, FLOATS, (groups, n))
    files.check(qzeros, (torch.int32,), (groups, n * bits // 32))
    keys: tuple[str, ...] = (qweight, scales, qzeros)
    if g_idx in files:
        files.check(g_idx, (torch.int32, torch.int64), (k,))
        keys += (g_idx,)
        if settings.flag("desc_act", False):
            _check_order(files, g_idx, given)
    symmetric = settings.values.get("sym") is True
    version = _version(settings)
    scheme: Scheme
    if bits == 4:
        scheme = Int4WeightOnly(group_size=group_size, symmetric=symmetric, scale_dtype=files.dtype(scales))
    elif groups == 1:
        scheme = Int8WeightOnly()
    else:
        raise files.error(qweight, f"int8 with groups of {given} columns; qao supports one scale per row")
    load = partial(_read, files, name, bits, given, version, symmetric)
    return QuantizedLayer(name, scheme, n, k, keys, load, note)


def _version(settings: Settings) -> int:
    """1 or 2, from ``checkpoint_format``, which GPTQModel also calls ``format``."""
    found = 1
    for key in ("format", "checkpoint_format"):
        if settings.values.get(key) is not None:
            version = {"gptq": 1, "gptq_v2": 2}.get(settings.text(key, ""))
            if version is None:
                raise settings.fail(key, "gptq or gptq_v2 (others, such as marlin, are repacked for a specific kernel)")
            found = version
    if settings.values.get("is_marlin_format") is True:
        raise settings.fail("is_marlin_format", "false: marlin is repacked for a specific kernel")
    return found


def _read(files: TensorFiles, name: str, bits: int, given: int, version: int, symmetric: bool) -> Plain:
    qweight, qzeros, g_idx = (f"{name}.{part}" for part in ("qweight", "qzeros", "g_idx"))
    if g_idx in files:
        _check_order(files, g_idx, given)
    q = unpack(files.read(qweight).t(), bits)
    stored = unpack(files.read(qzeros), bits).t()  # [N, G]
    middle = 1 << bits - 1
    zeros = stored if version == 2 else (stored + 1) & (2 * middle - 1)
    # Files may state the wrong version. A symmetric weight shows it: its zero points are all 8 (4 bits) or all 7.
    if symmetric and not (zeros == middle).all():
        if not (stored == (middle if version == 1 else middle - 1)).all():
            raise files.error(
                qzeros, f'zero points differ from {middle}, but the config says "sym": true. Set "sym": false there.'
            )
        zeros = torch.full_like(zeros, middle)
    scales = files.finite(f"{name}.scales").t()
    if bits == 8:
        if not (zeros == middle).all():
            raise files.error(qzeros, f"int8 with zero points other than {middle}; qao supports none")
        return Plain((q ^ 0x80).view(torch.int8), scales.contiguous())
    scales, k = regroup(scales, given, q.shape[1]), q.shape[1]
    return Plain(q, scales, None if symmetric else regroup(zeros, given, k))


def _check_order(files: TensorFiles, g_idx: str, given: int) -> None:
    order = files.read(g_idx)
    natural = torch.arange(len(order), dtype=order.dtype) // given
    if torch.equal(order, natural):
        return
    lowest, highest = (int(one) for one in torch.aminmax(order))
    if lowest < 0 or highest > int(natural[-1]):
        raise files.error(
            g_idx, f"holds the group {lowest if lowest < 0 else highest}; there are 0..{int(natural[-1])}"
        )
    raise files.error(
        g_idx,
        "columns are reordered into groups (desc_act with groups), for which qao has no kernel. Use a checkpoint with "
        "desc_act false, or quantize the float model.",
    )

"""Operands next to inaccessible pages, where out-of-bounds reads of CPU kernels crash."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_schemes import DTYPES, PRODUCTS, Scheme
from ops_support import bits, randn
from torch import Tensor

pytestmark = [pytest.mark.every_isa, pytest.mark.skipif(os.name != "posix", reason="needs mprotect")]
PAGE = mmap.PAGESIZE


def beside_guards(t: Any, at_end: bool) -> Any:
    """A copy of a tensor that ends before or starts after an inaccessible page. Other values are returned unchanged."""
    if not isinstance(t, Tensor):
        return t
    count = t.numel() * t.element_size()
    pages = -(-count // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + PAGE + pages):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) == 0
    offset = PAGE + (pages - count if at_end else 0)
    copy = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=offset).view(t.shape)
    return copy.copy_(t)


@pytest.mark.parametrize("at_end", (False, True), ids=("begin", "end"))
@pytest.mark.parametrize("m", (1, 2, 5, 16, 40))
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_nothing_is_read_past_an_operand(scheme: Scheme, m: int, at_end: bool) -> None:
    for i, fmt in enumerate(scheme.few_formats):
        for n, k in ((16, 64), (33, 100), (100, 384), (17, 1000)):
            weight = scheme.make_weight(n, k, fmt)
            x = randn(m, k, dtype=DTYPES[(m + n + i) % 3], device="cpu")
            bias = randn(n, dtype=DTYPES[(m + i) % 3], device="cpu")
            guarded = replace(
                weight,
                operands=tuple(beside_guards(t, at_end) for t in weight.operands),
                arguments=tuple(beside_guards(t, at_end) for t in weight.arguments),
            )
            y = scheme.mm(beside_guards(x, at_end), guarded, beside_guards(bias, at_end))
            assert torch.equal(bits(y), bits(scheme.mm(x, weight, bias)))

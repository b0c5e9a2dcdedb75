"""Waits of Triton kernels that start before the kernel in front of them ends."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from qao.inductor.nodes import has_hopper
from test_compile_schemes import fresh_dynamo  # noqa: F401  # a fixture of every test
from torch import Tensor


@pytest.mark.parametrize("enabled", [False, True])
def test_kernels_wait_first(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of every load and store, once."""
    from qao.inductor.dependent_launch import wait_first
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.utils import IndentedBuffer

    upstream = inspect.unwrap(TritonKernel._filter_pdl)
    monkeypatch.setattr(TritonKernel, "_filter_pdl", upstream)
    wait_first()
    wait_first()
    monkeypatch.setattr(TritonKernel, "_enable_pdl_codegen", staticmethod(lambda: enabled))
    kernel = TritonKernel.__new__(TritonKernel)
    wait, launch = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH

    def filtered(lines: list[str], by: Any = TritonKernel._filter_pdl) -> list[str]:
        body = IndentedBuffer()
        body.writelines(lines)
        by(kernel, body)
        return list(body.getvalue().splitlines())

    fill = ["tl.store(out, 1)"]
    load = ["x = tl.load(a)", wait, launch, "y = tl.load(b)", wait, launch, "tl.store(c, x)"]
    if enabled:
        assert filtered(fill) == [wait, *fill]
        assert filtered(load) == [wait, "x = tl.load(a)", "y = tl.load(b)", launch, "tl.store(c, x)"]
    else:
        assert [filtered(fill), filtered(load)] == [filtered(fill, upstream), filtered(load, upstream)]


@pytest.mark.skipif(not has_hopper(), reason="programmatic dependent launch needs Hopper")
def test_reads_of_a_buffer_written_in_place_wait() -> None:
    """Inductor's own wait is behind the load of ``cache``, which the kernel in front writes."""
    from torch._inductor.utils import run_and_get_code

    def step(cache: Tensor, place: Tensor, key: Tensor) -> Tensor:
        cache.index_copy_(1, place, key)
        return torch.ops.aten.mm(key[0], cache[0].T).sum() + cache.repeat_interleave(2, 0).sin()

    cache, key = torch.zeros(2, 64, 32, device="cuda"), torch.randn(2, 1, 32, device="cuda")
    place = torch.tensor([3], device="cuda")
    expected = step(cache.clone(), place, key)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, (code,) = run_and_get_code(torch.compile(step, backend="qao"), cache, place, key)
    torch.testing.assert_close(found, expected)
    kernels = re.findall(r"^def triton_.*?^'''", code, re.MULTILINE | re.DOTALL)
    assert kernels
    for kernel in kernels:
        first = re.search(r"gdc_wait|tl\.load|tl\.store", kernel)
        assert first is not None and first[0] == "gdc_wait", kernel

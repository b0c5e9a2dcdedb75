"""Tensors on a GPU other than the current one, on two GPUs at once, and on dependent streams."""

from __future__ import annotations

import copy

import pytest
import qao
import torch
from abuse_support import CALLS, ON_CPU, call_of
from ops_schemes import SCHEMES as PRODUCTS
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OPS = [op for op in CALLS if op not in ON_CPU]
SCHEMES = [scheme() for scheme in qao.schemes.SCHEMES.values()]


def results(op: str, arguments: dict[str, object]) -> tuple[Tensor, ...]:
    got = getattr(torch.ops.qao, op)(**arguments)
    if got is None:  # the operator writes into its arguments
        return tuple(value for value in arguments.values() if isinstance(value, Tensor))
    return got if isinstance(got, tuple) else (got,)


def moved(arguments: dict[str, object], device: str) -> dict[str, object]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("op", OPS)
def test_the_current_device_does_not_matter(op: str) -> None:
    """With tensors on 1, the current one is 0 before and after, and the bits are those of GPU 0."""
    arguments = call_of(op, "cuda:0")
    with torch.cuda.device(0):
        there = moved(arguments, "cuda:1")
        expected, got = results(op, arguments), results(op, there)
        assert torch.cuda.current_device() == 0
    for one, own in zip(got, expected, strict=True):
        assert one.device.index == (1 if own.is_cuda else None)
        assert torch.equal(one.cpu().view(torch.uint8), own.cpu().view(torch.uint8))


@pytest.mark.parametrize("op", OPS)
def test_tensors_on_two_gpus_are_an_error(op: str) -> None:
    arguments = call_of(op, "cuda:0")
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    for name in names if len(names) > 1 else ():
        mixed = {**arguments, name: arguments[name].to("cuda:1")}
        with pytest.raises(RuntimeError, match=rf"(?s)^qao::{op}: .*device.*cuda:1") as raised:
            results(op, mixed)
        assert "cuda:0" in str(raised.value) and ".to(" in str(raised.value)
    torch.cuda.synchronize()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_moves_and_runs_on_streams_of_another_gpu(scheme: qao.Scheme) -> None:
    """x is made on GPU 0, copied to a side stream of GPU 1, and used there while GPU 0 is the current one."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 384).to("cuda:0", torch.bfloat16)
    first = qao.QuantLinear.from_linear(layer, scheme)
    with torch.cuda.device(0):
        second = copy.deepcopy(first).to("cuda:1")
        quantized_there = qao.QuantLinear.from_linear(layer.to("cuda:1"), scheme)
        stream = torch.cuda.Stream("cuda:1")
        for _ in range(20):
            x = torch.randn(16, 512, device="cuda:0", dtype=torch.bfloat16)
            expected = first(x)
            made = torch.cuda.current_stream(0).record_event()
            with torch.cuda.stream(stream):
                stream.wait_event(made)
                there = x.to("cuda:1", non_blocking=True)
                y = second(there)
            assert torch.cuda.current_device() == 0
            torch.cuda.current_stream(0).wait_stream(stream)
            assert torch.equal(y.to("cuda:0"), expected)
        assert torch.equal(quantized_there.qweight.cpu(), first.qweight.cpu())


def test_every_product_is_here() -> None:
    assert {f"{scheme.word}_mm" for scheme in PRODUCTS} <= set(OPS)

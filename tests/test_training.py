"""Training through frozen quantized layers: gradcheck, torch.compile, checkpointing, adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import qao
import torch
from ops_schemes import SCHEMES as OPERATORS
from ops_schemes import Scheme as Operator
from ops_support import randn
from qao.ops import autograd as gradients
from qao.ops import reference
from test_compile_schemes import ONE_OF_EACH, SCHEMES, Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.word)
def test_gradcheck_in_float64(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that every product shares, around the float64 reference of its weight."""
    weight = operator.make_weight(5, 33)

    def multiply(x: Tensor, _weight: Tensor, _scales: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        return reference.mm(x, weight.dense, bias)

    multiply._op = multiply  # type: ignore[attr-defined]  # as operators have it

    def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype, *rest: object) -> Tensor:
        return gradients.DENSE[operator.op](packed, scales, torch.float32, *rest).to(dtype)

    monkeypatch.setitem(gradients.DENSE, multiply, dequantize)
    monkeypatch.setitem(gradients.SIGNATURES, multiply, gradients.SIGNATURES[operator.op])

    def product(x: Tensor, bias: Tensor) -> Tensor:
        return qao.ops.product(multiply, weight.arguments, x, *weight.operands, bias)

    x = randn(3, 33, dtype=torch.float64, device="cpu").requires_grad_()
    bias = randn(5, dtype=torch.float64, device="cpu").requires_grad_()
    # dequantize rounds W to float32, 2^-24 of values below 1; gradcheck's own differences are coarser.
    assert torch.autograd.gradcheck(product, (x, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (x, bias), check_fwd_over_rev=True)


def gradients_of(forward: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """d/dx and d/dbias of a loss."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    forward(x).square().sum().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert x.grad is not None and trained and all(grad is not None for grad in trained)
    return x.grad, *trained  # type: ignore[return-value]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_way_to_the_gradient_is_the_same(name: str, device: str) -> None:
    """Eager, checkpointed, compiled, both, and by compiled autograd."""
    model = Mlp(SCHEMES[name]).to(device)
    model.up.requires_grad_()  # the bias; the rest stays frozen
    x = randn(5, 64, dtype=torch.float32, device=device)
    expected = gradients_of(model, model, x)

    def compiler(graph: torch.fx.GraphModule) -> Callable[..., object]:
        return torch.compile(graph, backend="aot_eager", fullgraph=True)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    def check(forward: Callable[[Tensor], Tensor]) -> None:
        for actual, wanted in zip(gradients_of(forward, model, x), expected, strict=True):
            assert (actual - wanted).abs().max() <= 2.0**-18 * wanted.abs().max()

    check(checkpointed)
    check(torch.compile(model, fullgraph=True, backend="aot_eager"))
    check(torch.compile(checkpointed, fullgraph=True, backend="aot_eager"))
    with torch._dynamo.compiled_autograd._enable(compiler):
        check(model)


class Adapted(nn.Module):
    """A frozen layer plus a trained low-rank correction."""

    def __init__(self, layer: qao.QuantLinear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_adapter_learns_and_the_weights_stay(name: str, compiled: bool, device: str) -> None:
    """Behind another quantized layer, so that gradients pass through one; the target is of the adapter's rank."""
    torch.manual_seed(0)
    first, second = (
        qao.QuantLinear.from_linear(nn.Linear(n, k), SCHEMES[name]).to(device) for n, k in ((64, 96), (96, 64))
    )
    model = nn.Sequential(Adapted(first, 4), nn.ReLU(), Adapted(second, 4)).to(device)
    frozen = {key: value.clone() for key, value in model.state_dict().items() if ".layer." in key}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 4
    x = randn(64, 64, dtype=torch.float32, device=device)
    with torch.no_grad():
        correction = randn(64, 4, dtype=torch.float32, device=device) @ randn(4, 64, dtype=torch.float32, device=device)
        target = model(x) + x @ correction / 64
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (forward(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert all(torch.equal(model.state_dict()[key], value) for key, value in frozen.items())

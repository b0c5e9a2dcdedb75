"""calibrate on small models: results, messages, and the state after an abort."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import qao
import torch
from qao.calibration import stream
from qao.calibration.calibrating import UNREACHED
from qao.calibration.statistics import Inputs
from qao.quantization import quantize
from torch import Tensor, nn

WIDTH, VOCAB = 64, 50
INT4 = qao.Int4WeightOnly(group_size=32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, states: Tensor, shift: Tensor, scale: float = 1.0) -> tuple[Tensor]:
        return (states + self.dropout(self.down(self.up(self.norm(states)).relu() * scale)) + shift,)


class Model(nn.Module):
    """Blocks in a row between an embedding and a head; ``loops``: goes through them twice."""

    def __init__(self, loops: int = 1) -> None:
        super().__init__()
        self.embedding, self.head, self.loops = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), loops
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype != torch.int64:
            raise TypeError(f"ids must be int64, not {ids.dtype}")
        states = self.embedding(ids)
        for _ in range(self.loops):
            for index, block in enumerate(self.blocks):
                (states,) = block(states, ids[..., None] * 0.001, scale=1.0 + index)
        return self.head(states)


@pytest.fixture
def model(device: str) -> Model:
    torch.manual_seed(0)
    return Model().eval().to(device)


@pytest.fixture
def data() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (1, 40), generator=g) for _ in range(12)]


def off(model: nn.Module, reference: nn.Module, data: Iterable[Tensor], device: str) -> float:
    with torch.no_grad():
        pairs = [(model(ids.to(device)), reference(ids.to(device))) for ids in data]
    return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5


@pytest.mark.parametrize(
    "scheme", [INT4, qao.Int8DynamicActivationInt4Weight(group_size=32), qao.Float8WeightOnly()], ids=str
)
def test_better_than_without_data(scheme: qao.Scheme, model: Model, data: list[Tensor], device: str) -> None:
    reference, nearest = copy.deepcopy(model), copy.deepcopy(model)
    qao.quantize_(nearest, scheme)
    report = qao.calibrate(model, data, scheme)
    assert off(model, reference, data, device) < off(nearest, reference, data, device)
    rows = [row for row in report.rows if row.status == "quantized"]
    assert len(rows) == 7 and all(row.note is None and row.output_error is not None for row in rows)
    assert all(0 < row.output_error < 0.2 and row.kernel for row in rows)  # type: ignore[operator]
    assert all(row.output_error <= row.output_error_nearest for row in rows)  # type: ignore[operator]
    assert report.to_dict()["rows"][0]["output_error"] == report.rows[0].output_error
    shown = {line.split()[0]: line for line in str(report).splitlines()}
    assert "output error, nearest  calibrated" in shown["layer"] and " error " not in shown["layer"].replace(
        "output", ""
    )
    for row in rows:
        assert f"{row.output_error_nearest:.4f} " in shown[row.name] and f"{row.output_error:.4f} " in shown[row.name]
        assert row.relative_error is not None and f" {row.relative_error:.4f}" not in shown[row.name]


@pytest.mark.parametrize("form", ["list of ids", "ids [T]", "tuple", "mapping", "one tensor"])
def test_forms_of_data(form: str, model: Model, data: list[Tensor]) -> None:
    expected = copy.deepcopy(model)
    qao.calibrate(expected, data, INT4)
    forms: dict[str, Any] = {
        "list of ids": [ids[0].tolist() for ids in data],
        "ids [T]": (ids[0] for ids in data),
        "tuple": [(ids,) for ids in data],
        "mapping": [{"ids": ids} for ids in data],
        "one tensor": torch.cat(data),
    }
    qao.calibrate(model, forms[form], INT4)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_blocks_see_what_they_see_in_the_model(model: Model, data: list[Tensor]) -> None:
    """Block by block the hidden states are those of the whole model."""
    calls = stream.samples_of(data, model)
    with stream.evaluating(model):
        blocks, why = stream.find_blocks(model, calls)
        assert blocks is not None and why == "" and blocks.name == "blocks"
        for index in range(3):
            blocks.run(index, lambda: None, keep=True)
        for call, states in zip(calls, blocks.hidden, strict=True):
            assert torch.equal(model.head(states), model(*call[0]))
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_a_model_that_is_no_row_of_blocks(data: list[Tensor], device: str) -> None:
    """One pass over the whole model, and the report says so."""
    torch.manual_seed(0)
    model = Model(loops=2).eval().to(device)
    reference, nearest = copy.deepcopy(model), copy.deepcopy(model)
    qao.quantize_(nearest, INT4)
    report = qao.calibrate(model, data, INT4)
    assert "one pass over the whole model: the blocks blocks are not called once each" in str(report)
    assert off(model, reference, data, device) < off(nearest, reference, data, device)


class Stop(Exception):
    pass


def state(model: nn.Module) -> tuple[dict[str, Tensor], list[int], list[bool]]:
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    return tensors, [id(m) for m in model.modules()], [m.training for m in model.modules()]


def same(model: nn.Module, before: tuple[dict[str, Tensor], list[int], list[bool]]) -> bool:
    tensors, modules, training = state(model)
    return (
        (modules, training) == before[1:]
        and tensors.keys() == before[0].keys()
        and all(torch.equal(t, before[0][name]) for name, t in tensors.items())
    )


@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_stopped_in_the_middle(method: str, model: Model, data: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is unchanged: the same modules, values and mode."""
    model.blocks[1].train()
    before, put, count = state(model), quantize.put, 0

    def stopping(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise Stop
        put(*arguments)

    monkeypatch.setattr(quantize, "put", stopping)
    with pytest.raises(Stop):
        qao.calibrate(model, data, qao.Int8DynamicActivationInt8Weight(), method=method)
    assert count == 4 and same(model, before)


def test_gradients_and_modes_stay(model: Model, data: list[Tensor]) -> None:
    model.train()
    model.blocks[0].eval()
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    qao.calibrate(model, data, {"blocks": INT4})
    assert model.embedding.weight.requires_grad and model.embedding.weight.grad.eq(1).all()
    assert model.head.weight.grad is None and model.head.weight.requires_grad
    assert model.training and not model.blocks[0].training and model.blocks[1].up.training


def test_unreached_layers_are_named(model: Model, data: list[Tensor], device: str) -> None:
    model.other = nn.Linear(WIDTH, WIDTH).to(device)
    expected = qao.QuantLinear.from_linear(model.other, INT4)
    with pytest.warns(UserWarning, match="did not reach other"):
        report = qao.calibrate(model, data, INT4)
    row = next(row for row in report.rows if row.name == "other")
    assert row.note == UNREACHED and row.output_error is None
    assert torch.equal(model.other.qweight, expected.qweight)


def test_tied_weights_stay_tied(model: Model, data: list[Tensor]) -> None:
    model.head.weight = model.embedding.weight
    qao.calibrate(model, data, qao.Int8WeightOnly(), embeddings=True)
    assert model.head.qweight is model.embedding.qweight


def test_quantized_layers_stay(model: Model, data: list[Tensor]) -> None:
    qao.quantize_(model, {"blocks.0": INT4})
    first = model.blocks[0].up
    report = qao.calibrate(model, data, INT4)
    assert model.blocks[0].up is first
    assert {row.status for row in report.rows if row.name.startswith("blocks.0")} == {"already quantized"}


@pytest.mark.parametrize(
    "data, error, message",
    [
        ([], ValueError, "data is empty"),
        ("text", TypeError, "iterable of samples, not str"),
        (5, TypeError, "iterable of samples, not int"),
        ([object()], TypeError, "sample 0 must be a tensor"),
        ([torch.zeros(1, 0, dtype=torch.int64)], ValueError, "sample 0 is empty"),
        ([torch.tensor([1.0, float("nan")])], ValueError, "sample 0 .* NaN"),
        ([torch.zeros(1, 8)], ValueError, "cannot run sample 0: TypeError: ids must be int64"),
    ],
)
def test_bad_data(data: Any, error: type[Exception], message: str, model: Model) -> None:
    before = state(model)
    with pytest.raises(error, match=message):
        qao.calibrate(model, data, INT4)
    assert same(model, before)


def test_nan_in_activations(model: Model, data: list[Tensor]) -> None:
    with torch.no_grad():
        model.blocks[1].norm.bias[3] = float("nan")
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"blocks\.1\.up: its inputs hold NaN"):
        qao.calibrate(model, data, INT4)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_bad_arguments(model: Model, data: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="method must be one of gptq"):
        qao.calibrate(model, data, INT4, method="magic")
    with pytest.raises(ValueError, match="damping must be"):
        qao.calibrate(model, data, INT4, damping=0)
    with pytest.raises(ValueError, match="on meta"):
        qao.calibrate(model.to("meta"), data, INT4)


def test_memory_holds_statistics_of_one_block(
    model: Model, data: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a block begins, at most those of the previous block still exist, whatever the number of blocks."""
    made: list[weakref.ref[Inputs]] = []

    class Counted(Inputs):
        def __init__(self, squares: bool) -> None:
            super().__init__(squares)
            made.append(weakref.ref(self))
            gc.collect()
            assert sum(one() is not None for one in made) <= 2

    monkeypatch.setattr("qao.calibration.calibrating.Inputs", Counted)
    model.blocks.extend(copy.deepcopy(model.blocks))
    qao.calibrate(model, data, INT4)
    assert len(made) == 7  # of six blocks, and of the head
    gc.collect()
    assert all(one() is None for one in made)


class Embedding(Model):
    """A model that names its embedding of tokens."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def test_random_tokens(device: str) -> None:
    """Columns are weighted by their inputs: less error on other tokens than from weights alone, and no text."""
    torch.manual_seed(0)
    model = Embedding().eval().to(device)
    with torch.no_grad():
        for block in model.blocks:  # large and small inputs in every group
            block.norm.weight.copy_(torch.linspace(-3, 3, WIDTH)[torch.randperm(WIDTH)].exp())
    reference, nearest, again = (copy.deepcopy(model) for _ in range(3))
    qao.quantize_(nearest, INT4)
    report = qao.calibrate(model, None, INT4)
    ids = [torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(7))]
    assert off(model, reference, ids, device) < 0.9 * off(nearest, reference, ids, device)
    rows = [row for row in report.rows if row.status == "quantized"]
    assert len(rows) == 7 and all(row.note is None and row.output_error is None for row in rows)
    qao.calibrate(again, None, INT4)
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), again.buffers(), strict=True))


def test_importance_of_a_text(model: Model, data: list[Tensor], device: str) -> None:
    """The scales are those of the search with the mean squares of the inputs."""
    seen: list[Tensor] = []
    handle = model.blocks[0].up.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for ids in data:
            model(ids.to(device))
    handle.remove()
    squares = torch.cat([x.flatten(0, 1) for x in seen]).square().mean(0)
    weight = model.blocks[0].up.weight.detach().clone()
    qao.calibrate(model, data, INT4, method="importance")
    expected = INT4.quantize(weight, "up", squares)
    layer = model.blocks[0].up
    same = (layer.scales.float() - expected.scales.float()).abs() <= 1e-3 * expected.scales.float().abs()
    assert same.double().mean() > 0.99  # squares are summed in another order
    assert (layer.dequantize(torch.float32) - weight).abs().max() < 0.1


def test_few_tokens_do_not_count(device: str) -> None:
    torch.manual_seed(0)
    model = Embedding().eval().to(device)
    expected = copy.deepcopy(model)
    qao.quantize_(expected, INT4)
    report = qao.calibrate(model, [torch.arange(31)[None]], INT4, method="importance")
    assert {row.note for row in report.rows if row.status == "quantized"} == {
        "fewer than 32 tokens reached it; columns weighted as by quantize_"
    }
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), expected.buffers(), strict=True))


@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_other_methods_need_data(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method} needs data; random tokens"):
        qao.calibrate(Embedding(), None, INT4, method=method)


def test_random_tokens_need_an_embedding(model: Model) -> None:
    with pytest.raises(ValueError, match=r"data is None.*get_input_embeddings\(\) of Model.*qao.quantize_"):
        qao.calibrate(model, None, INT4)
    assert not any(isinstance(module, qao.QuantLinear) for module in model.modules())

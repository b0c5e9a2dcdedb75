"""Quantizing one layer at a time: divergences against float64, and a model that is restored."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import qao
import torch
from qao.diagnostics import sensitivity
from qao.diagnostics.perplexity import compare, perplexity
from torch import Tensor, nn

VOCAB = 60


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}) for _ in "ab")

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = states + layer["down"](layer["up"](states).relu())
        return self.head(states)


@pytest.fixture
def model(device: str) -> Model:
    return Model().to(device).eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (71,), generator=torch.Generator().manual_seed(1))


SCHEME = qao.Int4WeightOnly(32)


def test_each_layer_alone(model: Model, tokens: Tensor) -> None:
    """Divergences are those of models with one quantized layer, computed in float64; the loss is perplexity's."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    costs = sensitivity.by_layer(model, tokens, {"head": None, "re:.*": SCHEME}, window=20, progress=False)
    assert [cost.name for cost in costs] == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    exact = copy.deepcopy(model).double()
    reference = perplexity(model, tokens, window=20)
    pieces = [tokens[begin : begin + 21] for begin in range(0, 70, 20)]
    for cost in costs:
        alone = copy.deepcopy(model)
        report = qao.quantize_(alone, {cost.name: SCHEME}, progress=False)
        assert cost.relative_error == next(row.relative_error for row in report.rows if row.name == cost.name)
        rounded = copy.deepcopy(exact)
        weight = alone.get_submodule(cost.name).dequantize(torch.float32)
        rounded.get_submodule(cost.name).weight.data = weight.double()
        sums = []
        with torch.no_grad():
            for piece in pieces:
                p, q = (one(piece[None, :-1].to(weight.device))[0].log_softmax(-1) for one in (exact, rounded))
                sums.append((p.exp() * (p - q)).sum().item())
        assert cost.divergence == pytest.approx(sum(sums) / 70, rel=1e-3) and cost.divergence > 0
        assert 0 < cost.divergence_error < cost.divergence
        difference = compare(perplexity(alone, tokens, window=20), reference)
        assert cost.nats_per_token == pytest.approx(difference.nats_per_token, abs=1e-6)
        assert cost.standard_error == pytest.approx(difference.standard_error, abs=1e-6)


def test_a_single_window_has_no_error(model: Model, tokens: Tensor) -> None:
    (cost,) = sensitivity.by_layer(model, tokens, {"head": SCHEME}, progress=False)
    assert math.isnan(cost.divergence_error) and math.isnan(cost.standard_error) and cost.divergence > 0


def test_predictions_that_are_impossible(tokens: Tensor) -> None:
    """Logits of -inf, as masks of vocabularies make them, are no NaN."""

    class Masked(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).index_fill(-1, torch.tensor([VOCAB - 1]), -torch.inf)

    possible = tokens.clamp(max=VOCAB - 2)
    costs = sensitivity.by_layer(Masked().eval(), possible, SCHEME, progress=False)
    assert all(math.isfinite(cost.divergence) and cost.divergence > 0 for cost in costs)


def test_tied_layers_go_together(model: Model, tokens: Tensor) -> None:
    model.layers[1]["up"].weight = model.layers[0]["up"].weight
    scheme = {"head": None, "re:.*": qao.Int4WeightOnly()}
    costs = sensitivity.by_layer(model, tokens, scheme, progress=False)
    assert [cost.name for cost in costs] == ["layers.0.up", "layers.0.down", "layers.1.down"]
    assert model.layers[1]["up"].weight is model.layers[0]["up"].weight
    chosen = copy.deepcopy(model)
    report = qao.quantize_(chosen, scheme, progress=False)
    assert {cost.name: cost.scheme for cost in costs}.items() <= {row.name: row.scheme for row in report.rows}.items()


def test_the_model_is_as_it_was_when_it_fails(model: Model, tokens: Tensor) -> None:
    modules = dict(model.named_modules())
    calls = []

    def stop(module: nn.Module, args: object) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        sensitivity.by_layer(model, tokens, SCHEME, progress=False)
    assert dict(model.named_modules()) == modules


def test_errors(model: Model, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="quantizes no layer"):
        sensitivity.by_layer(model, tokens, {"embedding": SCHEME}, progress=False)
    with pytest.raises(ValueError, match="training mode"):
        sensitivity.by_layer(model.train(), tokens, SCHEME)
    with pytest.raises(ValueError, match="window must be at least 1"):
        sensitivity.by_layer(model.eval(), tokens, SCHEME, window=0)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    from qao.cli import main
    from test_cli import TEXT, load, save_llama

    llama = save_llama(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(TEXT)
    options = [
        "--text",
        str(tmp_path / "text.txt"),
        "--windows",
        "2",
        "--window",
        "40",
        "--layers",
        "--quiet",
        "--device",
        "cpu",
    ]
    base = ["eval", str(llama), "--scheme", "int4", "--group-size", "32", *options]
    assert main([*base, "--json", "--plot", str(tmp_path / "layers.png")]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False)["input_ids"][:80]]
    costs = sensitivity.by_layer(load(llama), ids, SCHEME, window=40, progress=False)
    assert [row["name"] for row in report["layers"]] == [cost.name for cost in costs] and len(costs) == 15
    assert [row["divergence"] for row in report["layers"]] == [cost.divergence for cost in costs]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    worst = max(costs, key=lambda cost: cost.divergence)
    lines = captured.err.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("---"))
    assert lines[first + 1].startswith(worst.name)
    assert main([*base, "--worst", "3"]) == 0
    assert "and 12 more with" in capsys.readouterr().out
    for wrong, status in (
        (["eval", str(llama), "--layers"], 2),
        ([*base, "--against", str(llama)], 2),
        ([*base, "--plot", str(tmp_path / "layers.txt")], 2),
        ([*base, "--plot", str(tmp_path / "none" / "layers.png")], 1),
        (["eval", str(llama), "--plot", "layers.png"], 2),
    ):
        assert main(wrong) == status
        capsys.readouterr()


def test_lines_of_the_plot() -> None:
    def cost(name: str) -> sensitivity.LayerCost:
        return sensitivity.LayerCost(name, "int4", (1, 1), 0.1, 0.0, 0.0, 0.0, None)

    names = ["model.layers.0.q", "model.layers.0.k", "model.layers.1.q", "head"]
    lines = {kind: [number for number, _ in one] for kind, one in sensitivity.blocks([cost(name) for name in names])}
    assert lines == {"q": [0, 1], "k": [0], "head": [3]}

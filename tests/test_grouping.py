"""Group sizes chosen within a budget: the choice, its error estimates, and per-layer sizes."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.quantization import auto_group_size as grouping
from qao.quantization.auto_group_size import Option, choose
from qao.quantization.report import Report
from torch import Tensor, nn

HALF = torch.float16
KINDS = (qao.Int4WeightOnly, qao.Int8DynamicActivationInt4Weight, qao.Float8DynamicActivationInt4Weight)


def auto(bits: float, kind: type[Any] = qao.Int4WeightOnly, **options: Any) -> Any:
    return kind(group_size="auto", budget_bits=bits, scale_dtype=HALF, **options)


class Model(nn.Module):
    """Layers of different sizes; the weights of ``spread`` have outliers, which large groups suffer from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.spread, self.last = nn.Linear(512, 256), nn.Linear(256, 512), nn.Linear(512, 320)
        with torch.no_grad():
            self.spread.weight *= torch.randn(512, 256).exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spread(self.first(x).relu()).tanh())


@pytest.fixture
def model(device: str) -> Model:
    return Model().to(device).eval()


def sizes(model: nn.Module) -> dict[str, int]:
    return {name: layer.scheme.size for name, layer in model.named_modules() if isinstance(layer, qao.QuantLinear)}


def bits(report: Report) -> float:
    return 8 * report.bytes_after / report.parameters_quantized


# ---- the choice ------------------------------------------------------------------------------------------------------


def random_options(seed: int) -> list[list[Option]]:
    g = torch.Generator().manual_seed(seed)
    options = []
    for elements in (1000, 3000, 500):
        errors = torch.rand(4, generator=g).sort().values.tolist()
        options.append(
            [Option(size, elements * (4 + 32 // size), e) for size, e in zip((4, 8, 16, 32), errors, strict=True)]
        )
    return options


@pytest.mark.parametrize("seed", range(8))
def test_within_the_budget_and_near_the_best_choice(seed: int) -> None:
    """The best there is costs at least what fractions of the last step would save: the bound of the relaxation."""
    options, elements = random_options(seed), [1000, 3000, 500]
    by_size = [{one.size: one for one in layer} for layer in options]
    for budget in (5.0, 5.5, 6.3, 8.0, 12.0):
        taken = choose(options, elements, qao.Int4WeightOnly(group_size="auto", budget_bits=budget))
        chosen = [layer[size] for layer, size in zip(by_size, taken, strict=True)]
        assert sum(one.bits for one in chosen) <= budget * sum(elements)
        fitting = [c for c in itertools.product(*options) if sum(o.bits for o in c) <= budget * sum(elements)]
        best = min(sum(o.error for o in c) for c in fitting)
        largest_step = max(a.error - b.error for layer in options for a, b in zip(layer[1:], layer, strict=False))
        assert best <= sum(one.error for one in chosen) <= best + largest_step
    whole = choose(options, elements, qao.Int4WeightOnly(group_size="auto", budget_bits=12))
    assert whole == [4, 4, 4]  # 4 + 32 / 4 bits a weight: all fit


def test_more_bits_that_save_nothing_are_not_spent() -> None:
    scheme = qao.Int4WeightOnly(group_size="auto", budget_bits=6.0)
    options = [[Option(32, 500, 0.1), Option(64, 450, 0.1)], [Option(32, 500, 0.1), Option(64, 450, 0.3)]]
    assert choose(options, [100, 100], scheme) == [64, 32]


def test_budgets_that_cannot_be_met(model: Model) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"budget_bits=4.01 is not enough: these 3 layers take 4\.\d+ bits.*float16"):
        qao.quantize_(model, auto(4.01))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
def test_errors_are_those_of_the_layer(symmetric: bool, device: str) -> None:
    torch.manual_seed(1)
    weight, importance = torch.randn(48, 256, device=device), torch.rand(256, device=device)
    errors = grouping.weight_errors(weight, auto(5, symmetric=symmetric), "w", importance)
    assert list(errors) == [32, 64, 128, -1]  # 256 is the whole row
    for size, error in errors.items():
        scheme = qao.Int4WeightOnly(size, symmetric, HALF)
        packed = scheme.quantize(weight, "w", importance)
        back = scheme.dequantize(packed.qweight, packed.scales, 48, 256, torch.float32).double()
        expected = ((weight - back).square() @ importance.double()).sum() / (
            weight.double().square() @ importance.double()
        ).sum()
        assert error == pytest.approx(expected.item(), rel=1e-5)
    assert errors[32] < errors[64] < errors[128] < errors[-1]


def test_sizes_divide_the_row_where_large_ones_do() -> None:
    assert grouping.sizes_for(576) == [32, 64, 128, 256, -1]
    assert grouping.sizes_for(1408) == [32, 64, 128, -1]
    assert grouping.sizes_for(4096) == [32, 64, 128, 256, -1]
    assert grouping.sizes_for(100) == [32, 64, -1] and grouping.sizes_for(32) == [-1]


def test_a_weight_of_zeros_needs_no_bits(device: str) -> None:
    model = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 512)).to(device)
    nn.init.zeros_(model[0].weight)
    qao.quantize_(model, auto(4.6))
    assert sizes(model) == {"0": -1, "1": 32}


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_model_stays_within_its_budget(kind: type[Any], symmetric: bool, model: Model) -> None:
    reference, again = copy.deepcopy(model), copy.deepcopy(model)
    budget = 4.3 if symmetric else 4.5
    scheme = auto(budget, kind, symmetric=symmetric)
    report = qao.quantize_(model, scheme)
    assert budget - 0.15 < bits(report) <= budget
    assert len(set(sizes(model).values())) > 1  # otherwise there was nothing to choose
    rows = {row.name: row.scheme for row in report.rows}
    assert rows == {name: str(grouping.fixed(scheme, size)) for name, size in sizes(model).items()}
    qao.quantize_(again, scheme)
    assert sizes(again) == sizes(model)
    for name, size in sizes(model).items():
        alone = qao.QuantLinear.from_linear(reference.get_submodule(name), grouping.fixed(scheme, size))
        assert torch.equal(alone.qweight, model.get_submodule(name).qweight)


def test_bits_go_where_errors_are(model: Model) -> None:
    """Groups of one size with the same number of bits are worse."""
    even = copy.deepcopy(model)
    report = qao.quantize_(model, auto(4.5))
    uniform = qao.quantize_(even, qao.Int4WeightOnly(64, scale_dtype=HALF))
    assert bits(report) <= bits(uniform) == pytest.approx(4.5)
    assert sizes(model)["spread"] == 32
    squares = [sum(row.relative_error**2 for row in one.rows if row.relative_error) for one in (report, uniform)]
    assert squares[0] < squares[1]


def test_a_grid_is_found_by_its_own_groups(model: Model) -> None:
    """A weight that four bits in groups of 64 hold exactly gets these, and no smaller ones."""
    g = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (256, 8, 64), generator=g).double()
    codes[..., 0], codes[..., 1] = 0, 15
    scales = (torch.rand(256, 8, 1, generator=g) * 0.1 + 0.01).half().double()
    zeros = (torch.rand(256, 8, 1, generator=g) * 15).half().double()  # float zero points
    with torch.no_grad():
        model.first.weight.copy_(((codes - zeros) * scales).view(256, 512))
    report = qao.quantize_(model, auto(4.8))
    assert sizes(model)["first"] == 64 and sizes(model)["spread"] == 32
    row = next(row for row in report.rows if row.name == "first")
    assert row.relative_error is not None and row.relative_error < 1e-6


def test_each_scheme_has_its_own_budget_and_tied_layers_one_size(device: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(256, 256) for name in ("a", "b", "c", "d", "e")}).to(device)
    model["b"].weight = model["a"].weight
    schemes = {"re:[ab]": auto(4.3), "c": auto(5.0), "d": qao.Int4WeightOnly(128), "e": qao.Int8WeightOnly()}
    qao.quantize_(model, schemes)
    found = {name: getattr(model[name].scheme, "group_size", None) for name in model}
    assert found == {"a": 128, "b": 128, "c": 32, "d": 128, "e": None}
    assert model["a"].qweight is model["b"].qweight


def test_what_has_to_be_chosen_needs_a_model() -> None:
    linear = nn.Linear(128, 64)
    with pytest.raises(ValueError, match="group sizes are chosen among the layers of a model"):
        qao.QuantLinear.from_linear(linear, auto(4.5))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="0 is on meta.*group_size='auto'.*Load the model first"):
        qao.quantize_(model, auto(4.5))
    assert not sizes(model)


@pytest.mark.parametrize("kind", KINDS)
def test_as_data(kind: type[Any]) -> None:
    scheme = auto(4.5, kind)
    assert qao.schemes.scheme_from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert "budget_bits" not in kind().to_dict()
    assert str(scheme).startswith(f"{kind.word} auto 4.5 bits asymmetric")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(model: Model, tmp_path: Path, device: str) -> None:
    x = torch.randn(3, 512, device=device)
    qao.quantize_(model, auto(4.5))
    qao.save(model, tmp_path / "model.safetensors")
    loaded = qao.load(tmp_path / "model.safetensors", Model().to(device).eval())
    assert sizes(loaded) == sizes(model) and len(set(sizes(model).values())) > 1
    assert torch.equal(loaded(x), model(x))


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import saving_support as support

    floats, out = tmp_path / "floats", tmp_path / "out"
    support.llama(128).save_pretrained(floats)
    scheme = qao.Int4WeightOnly(group_size="auto", budget_bits=4.6)
    config = qao.QaoConfig({"lm_head": None, "re:.*": scheme})
    assert qao.QaoConfig.from_dict(json.loads(config.to_json_string())) == config
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(floats, quantization_config=config, dtype=torch.bfloat16)
    expected = load(floats, dtype=torch.bfloat16)
    qao.quantize_(expected, {"lm_head": None, "re:.*": scheme})
    assert sizes(model) == sizes(expected) and len(set(sizes(model).values())) > 1
    model.save_pretrained(out)
    again = qao.from_pretrained(out)
    assert sizes(again) == sizes(model)
    with torch.no_grad():
        assert torch.equal(again(support.IDS).logits, expected(support.IDS).logits)
    own = qao.QaoConfig.of(model)
    assert qao.QaoConfig.from_dict(json.loads(own.to_json_string())) == own
    assert {name: one.size for name, one in own.layers.items()} == sizes(model)


@pytest.mark.parametrize("tie", [False, True])
def test_the_command_line_chooses_as_the_library(tie: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from qao.cli import main
    from test_cli import assert_same, load, save_llama

    llama = save_llama(tmp_path / "llama", tie_word_embeddings=tie)
    options = ["--scheme", "int4", "--group-size", "auto", "--budget-bits", "4.9", "--json", "--quiet"]
    options += ["--embeddings"] if tie else ["--exclude", "lm_head"]
    assert main(["quantize", str(llama), str(tmp_path / "out"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    model = load(llama)
    scheme = qao.Int4WeightOnly(group_size="auto", budget_bits=4.9)
    expected = qao.quantize_(model, scheme if tie else {"lm_head": None, "re:.*": scheme}, embeddings=tie)
    assert [row["scheme"] for row in report["rows"]] == [row.scheme for row in expected.rows]
    assert len(set(sizes(model).values())) > 1 and bits(expected) <= 4.9
    assert_same(tmp_path / "out", model)


def test_wrong_usage_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qao.cli import main

    base = ["quantize", str(tmp_path), str(tmp_path / "out"), "--scheme", "int4"]
    for options, message in (
        (["--group-size", "auto"], "budget_bits must be a number above 4"),
        (["--group-size", "some"], "'some' is neither a number nor auto"),
        (["--budget-bits", "4.5"], "budget_bits must be None"),
    ):
        assert main([*base, *options]) == 2
        assert message in capsys.readouterr().err


# ---- with data -------------------------------------------------------------------------------------------------------


def test_with_data_errors_count_by_what_layers_read(model: Model, device: str) -> None:
    """An input of which a few columns are nearly everything: the groups that hold them, and their layer, matter."""
    g = torch.Generator().manual_seed(3)
    data = [torch.randn(32, 512, generator=g).to(device) for _ in range(6)]
    reference = copy.deepcopy(model)
    report = qao.calibrate(model, data, auto(4.5), progress=False)
    assert 4.3 < bits(report) <= 4.5 and len(set(sizes(model).values())) > 1
    inputs: dict[str, Tensor] = {}
    for name in sizes(model):
        reference.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: inputs.setdefault(name, args[0])
        )
    with torch.no_grad():
        reference(torch.cat(data))
    options, elements = [], []
    for name, x in inputs.items():
        weight = reference.get_submodule(name).weight.detach()
        hessian = (x.double().T @ x.double() / len(x)).float()
        diagonal = hessian.diagonal() + 0.01 * hessian.diagonal().mean()
        errors = {}
        for size in grouping.sizes_for(weight.shape[1]):
            scheme = qao.Int4WeightOnly(size, scale_dtype=HALF)
            packed = scheme.quantize(weight, name, diagonal)
            back = scheme.dequantize(packed.qweight, packed.scales, *weight.shape, torch.float32)
            y, off = x.double() @ weight.double().T, x.double() @ (weight - back).double().T
            errors[size] = (off.square().sum() / y.square().sum()).item()
        options.append(grouping.options_of(weight.shape, weight.dtype, auto(4.5), errors))
        elements.append(weight.numel())
    assert list(sizes(model).values()) == choose(options, elements, auto(4.5))


def test_with_data_blocks_see_the_float_model(device: str) -> None:
    """Sizes come from one pass before anything is quantized, whichever way the model is run."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Chain().to(device).eval()
    whole = nn.Sequential(copy.deepcopy(model))  # the same, where no list of blocks is the largest module
    whole[0].blocks = nn.ModuleDict({str(i): block for i, block in enumerate(whole[0].blocks)})
    whole[0].forward = lambda x: [x := block(x) for block in whole[0].blocks.values()][-1]
    data = [torch.randn(1, 16, 128, device=device) for _ in range(4)]
    report = qao.calibrate(model, data, auto(4.5), progress=False)
    other = qao.calibrate(whole, data, auto(4.5), progress=False)
    assert list(sizes(model).values()) == list(sizes(whole).values())
    assert bits(report) == bits(other) <= 4.5
    assert all(row.note is None for row in report.rows) and all(row.note for row in other.rows)

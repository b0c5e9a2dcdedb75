"""Choice of layers that quantize_ replaces: subclasses of nn.Linear, routers, sharded layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import qao
import torch
from qao import Int4WeightOnly, quantize_
from test_quantize import COARSE, SCHEME, Model, notes, quantized
from torch import Tensor, nn
from torch.nn.utils import prune

# Models here are so small that every weight in them is a big one.
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")


# ---- subclasses of nn.Linear -----------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A stand-in for timm.layers.linear.Linear, which keeps the dtype of W where TorchScript would not."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_known_subclasses_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """FalconLinear of transformers is in test_models.py."""
    model = nn.Sequential(Linear(64, 48), nn.Linear(48, 32))
    assert notes(quantize_(copy.deepcopy(model), SCHEME)).keys() == {"0"}
    monkeypatch.setattr(Linear, "__module__", "timm.layers.linear")
    report = quantize_(model, SCHEME)
    assert list(quantized(model)) == ["0", "1"] and not report.problems


@pytest.mark.parametrize("kind", [Scaled, Linear])
def test_a_subclass_with_its_own_forward_is_left(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(64, 64), nn.Linear(64, 32))
    plain = copy.deepcopy(model)
    report = quantize_(model, {"0": SCHEME})
    assert not quantized(model)
    assert notes(report)["0"] == f"{kind.__name__} is a subclass of nn.Linear with its own forward"
    x = torch.randn(2, 64)
    assert torch.equal(model(x), plain(x))


def test_a_linear_that_owns_more_than_weight_and_bias_is_left() -> None:
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    model[0].register_buffer("input_scale", torch.ones(1))
    model[1].adapter = nn.Linear(64, 64)
    model[2].extra = nn.Parameter(torch.ones(3))
    model[3].register_parameter("extra", None)
    report = quantize_(model, SCHEME)
    assert set(quantized(model)) == {"1.adapter", "3"}
    lost = "which would be lost"
    assert notes(report) == {
        "0": f"it also has input_scale, {lost}",
        "1": f"it also has adapter, {lost}",
        "2": f"it also has extra, {lost}",
    }


def test_a_bias_that_is_computed_is_no_bias_of_a_quantized_layer() -> None:
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    nn.utils.parametrize.register_parametrization(model[0], "bias", nn.ReLU())
    prune.l1_unstructured(model[1], "bias", 0.5)
    prune.l1_unstructured(model[2], "weight", 0.5)
    x = torch.randn(2, 64)
    expected = [layer(x) for layer in model]
    report = quantize_(model, SCHEME)
    assert not quantized(model) and {"0", "1", "2"} <= notes(report).keys()
    assert all(torch.equal(layer(x), y) for layer, y in zip(model, expected, strict=True))


# ---- what one scheme for all leaves out ------------------------------------------------------------------------------


class Moe(nn.Module):
    """Names as in Qwen2-MoE, Switch Transformers and models written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.shared_expert_gate = nn.Linear(64, 1, bias=False)
        self.router = nn.ModuleDict({"classifier": nn.Linear(64, 4)})
        self.experts = nn.ModuleList(
            nn.ModuleDict({"gate_proj": nn.Linear(64, 32), "gate": nn.Linear(64, 32)}) for _ in range(2)
        )
        self.output = nn.ModuleDict({"gate": nn.Linear(64, 64)})  # of a gated layer, not of experts
        self.score = nn.Linear(64, 1)


EXCLUDED = {"gate", "shared_expert_gate", "router.classifier", "score"}
DENSE = {"experts.0.gate_proj", "experts.0.gate", "experts.1.gate_proj", "experts.1.gate", "output.gate"}


def test_the_router_of_jetmoe_stays() -> None:
    """`router.layer`, with a class of transformers around it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.JetMoeConfig(
        **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 32},
        **{"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    )
    model = transformers.JetMoeForCausalLM(config)
    routers = {name for name, module in model.named_modules() if name.endswith("router.layer")}
    report = quantize_(model, SCHEME)
    excluded = {row.name: row.note or "" for row in report.rows if row.status == "excluded"}
    assert routers
    assert all("router" in excluded[name] for name in routers)


@pytest.mark.parametrize(
    "scheme, named",
    [
        (SCHEME, set()),
        ({"re:.*": SCHEME}, set()),
        ({"score": None, "re:.*": SCHEME}, set()),
        ({"re:.*gate.*": COARSE, "re:.*": SCHEME}, set()),  # gate_proj, too, so it is not meant for routers
        ({"gate": COARSE, "re:.*": SCHEME}, {"gate"}),
        ({"router": COARSE, "re:.*": SCHEME}, {"router.classifier"}),
        ({"re:(gate|score)": COARSE, "re:.*": SCHEME}, {"gate", "score"}),
        (lambda module, name: SCHEME, EXCLUDED),
    ],
)
def test_routers_and_single_outputs_are_quantized_where_they_are_meant(scheme: Any, named: set[str]) -> None:
    model = Moe()
    report = quantize_(model, scheme, strict=True)
    assert quantized(model).keys() == DENSE | named
    excluded = {row.name: row.note or "" for row in report.rows if row.status == "excluded"}
    assert excluded.keys() == EXCLUDED - named
    for name in excluded.keys() - {"score"}:
        assert "a router: " in excluded[name] and "name it" in excluded[name]
    if isinstance(scheme, Int4WeightOnly):
        assert "it has a single output" in excluded["score"]


def test_the_class_around_a_layer_may_say_that_it_routes() -> None:
    class TopKRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.weight = nn.Parameter(torch.randn(8, 64))

    model = nn.ModuleDict({"mixer": TopKRouter(), "linear": nn.Linear(64, 64)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is its own weight a big one that anybody forgot
        report = quantize_(model, SCHEME, strict=True)
    assert list(quantized(model)) == ["linear"]
    assert {row.name for row in report.rows if row.status == "excluded"} == {"mixer.layer", "mixer.weight"}


def test_a_checkpoint_with_a_quantized_router_still_loads(tmp_path: Any) -> None:
    model = Moe()
    quantize_(model, lambda module, name: SCHEME)
    qao.save(model, tmp_path / "model.safetensors")
    loaded = qao.load(tmp_path / "model.safetensors", Moe())
    assert quantized(loaded) == quantized(model)
    assert torch.equal(loaded.gate.dequantize(), model.gate.dequantize())


def test_weights_of_three_dimensions_that_are_no_experts() -> None:
    model = nn.ModuleDict(
        {
            "position": nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 8, groups=4), dim=2),
            "linear": nn.Linear(64, 64),
        }
    )
    model.register_parameter("scale", nn.Parameter(torch.ones(4, 1, 1)))
    model.register_parameter("recurrent", nn.Parameter(torch.randn(4, 16, 16)))
    report = notes(quantize_(model, SCHEME))
    assert report == {
        "position.parametrizations.weight.original1": "weight of ParametrizedConv1d, not a linear layer",
        "recurrent": "weight of ModuleDict, not a linear layer",
    }


# ---- sharded ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[Any]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_sharded_layers_are_called_so(one_process: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def flat(use_orig_params: bool) -> nn.Module:
        return FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)

    model = Model()
    fully_shard(model.blocks[0], mesh=one_process)
    fully_shard(model.head, mesh=one_process)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone
        models = [model, flat(True), flat(False)]
    for sharded in models:
        report = quantize_(sharded, SCHEME)
        left = {row.name: row.note or "" for row in report.rows if row.status == "left"}
        assert left and all("it is sharded" in note and "then call fully_shard" in note for note in left.values())
    assert set(quantized(model)) == {"blocks.1.up", "blocks.1.down"}


def test_quantized_layers_can_be_sharded(one_process: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model, tokens = Model(), torch.arange(5)
    quantize_(model, SCHEME)
    expected = model(tokens)
    assert torch.equal(fully_shard(model, mesh=one_process)(tokens), expected)

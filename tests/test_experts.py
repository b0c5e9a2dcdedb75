"""QuantExperts: transformers 5 MoE models compute, generate, train, save and load."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from experts_support import SCHEMES
from qao.nn import QuantExperts
from qao.nn.eligibility import is_fused
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("version 4 has its experts in modules of linear layers", allow_module_level=True)

COMMON = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def qwen3_moe() -> Any:
    sizes = {"moe_intermediate_size": 96, "num_experts": 8, "head_dim": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**COMMON, **sizes))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**COMMON, intermediate_size=160, num_local_experts=4)
    )


def olmoe() -> Any:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**COMMON, intermediate_size=96, num_experts=8))


def gpt_oss() -> Any:
    model = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**COMMON, intermediate_size=160, head_dim=32, num_local_experts=4)
    )
    for name, parameter in model.named_parameters():
        if "bias" in name:  # zero at first
            nn.init.normal_(parameter, std=0.1)
    return model


def deepseek_v3() -> Any:
    ranks = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    groups = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {"moe_intermediate_size": 96, "intermediate_size": 160, "n_routed_experts": 8}
    config = transformers.DeepseekV3Config(**COMMON | {"num_key_value_heads": 4}, **ranks, **groups, **sizes)
    return transformers.DeepseekV3ForCausalLM(config)


def nemotron() -> Any:
    """Experts without a router."""
    return _block(transformers.models.nemotron_h.modeling_nemotron_h.NemotronHExperts, n_routed_experts=4)


def aria() -> Any:
    """The same, transposed without bias."""
    kind = transformers.models.aria.modeling_aria.AriaExperts
    if not hasattr(kind, "_apply_gate"):
        pytest.skip(f"transformers {transformers.__version__} has Aria's experts in modules of their own")
    return _block(kind, moe_num_experts=4, intermediate_size=64)


def _block(kind: Any, **sizes: int) -> Any:
    activations = {"mlp_hidden_act": "relu2", "hidden_act": "silu"}
    config = transformers.PretrainedConfig(
        hidden_size=128, moe_intermediate_size=64, moe_latent_size=None, **activations, **sizes
    )
    config._experts_implementation = "eager"
    experts = kind(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


MODELS: list[Callable[[], Any]] = [qwen3_moe, mixtral, olmoe, gpt_oss, deepseek_v3]
STATIC = qao.Float8StaticActivationFloat8Weight(activation_scale=0.05, granularity="tensor")
IDS = torch.arange(22).view(2, 11) * 7 % 64


def made(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make().to(dtype).eval()


def quantized(make: Callable[[], Any], scheme: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    model = made(make, dtype)
    qao.quantize_(model, scheme or qao.Int8WeightOnly(), progress=False)
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).logits
    return result


def exact(model: Any) -> Any:
    """The model that it stands for, in float64."""
    floats = qao.dequantize_(copy.deepcopy(model)).double()
    floats.set_experts_implementation("eager")
    return floats


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_models_compute_what_their_dequantized_weights_do(make: Callable[[], Any]) -> None:
    """Only weights are quantized, so the results differ only by float32 or 16-bit rounding."""
    for scheme in (qao.Int4WeightOnly(group_size=32), qao.Int8WeightOnly()):
        model = made(make)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = qao.quantize_(model, scheme, progress=False)
        assert report.coverage > 0.95 and not report.problems
        rows = {row.name: row for row in report.rows}
        experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
        assert experts and not any(is_fused(module) for module in model.modules())
        for name in ("gate_up_proj", "down_proj"):
            row = rows[f"model.layers.1.mlp.experts.{name}"]
            assert row.status == "quantized" and row.kernel and 0 < (row.relative_error or 0) < 0.12
            assert 0 < row.bytes_after < row.bytes_before
        floats = exact(model)
        truth = logits(floats)
        assert distance(logits(model), truth) < 2.0**-20
        low = copy.deepcopy(floats).bfloat16()
        # twice what plain bfloat16 makes of the same weights, which it has to round
        assert distance(logits(model.bfloat16()), truth) < 2 * distance(logits(low), truth)


ROUTED = {"moe_intermediate_size": 96, "intermediate_size": 160}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 32, "n_routed_experts": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Moe": ROUTED | {"shared_expert_intermediate_size": 96, "num_experts": 8},
    "Glm4Moe": ROUTED | GROUPS,
    "Dots1": ROUTED | GROUPS | {"n_shared_experts": 1},
    "Ernie4_5_Moe": ROUTED
    | {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    "HunYuanMoEV1": {"intermediate_size": 96, "num_experts": 8, "moe_topk": 2, "head_dim": 32},
    "MiniMax": {"intermediate_size": 96, "num_local_experts": 4, "head_dim": 32},
    "FlexOlmo": {"intermediate_size": 96, "num_experts": 8},
    "GraniteMoe": {"intermediate_size": 96, "num_local_experts": 4},
    "Phimoe": {"intermediate_size": 96, "num_local_experts": 4},
    "DeepseekV2": ROUTED
    | {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "Lfm2Moe": ROUTED
    | {"num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    | {"tie_embedding": False},  # the word that its config takes
    "MiniMaxM2": {"intermediate_size": 96, "num_local_experts": 8, "head_dim": 32},
    "SolarOpen": ROUTED | {"n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 32},
    "Afmoe": ROUTED | {"num_experts": 8, "num_dense_layers": 1, "head_dim": 32},
    "Jamba": {"intermediate_size": 96, "num_experts": 4, "expert_layer_period": 1, "expert_layer_offset": 0}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 16},
    "GraniteMoeHybrid": {"intermediate_size": 96, "num_local_experts": 4, "shared_intermediate_size": 96}
    | {"layer_types": ["attention", "attention"]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family: str) -> None:
    """Logits as above, and the same tokens after the modules that hold experts, with their router, are compiled."""
    kind, config = (getattr(transformers, f"{family}{part}", None) for part in ("ForCausalLM", "Config"))
    if kind is None or config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = made(lambda: kind(config(**COMMON | FAMILIES[family])))
    report = qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    assert report.coverage > 0.95 and not report.problems
    assert any(isinstance(module, QuantExperts) for module in model.modules())
    assert distance(logits(model), logits(exact(model))) < 2.0**-20
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    torch._dynamo.reset()
    compiled = [module for module in model.modules() if any(isinstance(m, QuantExperts) for m in module.children())]
    for module in compiled:
        module.compile(backend="aot_eager", dynamic=True)
    assert compiled and torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss], ids=lambda make: make.__name__)
@pytest.mark.parametrize("scheme", [*SCHEMES, STATIC], ids=str)
def test_every_scheme(make: Callable[[], Any], scheme: Any) -> None:
    model = quantized(make, scheme)
    assert distance(logits(model), logits(exact(model))) < (1e-6 if scheme.activations == "float" else 0.1)
    # One layer's experts: exactly rounding x is all that quantized activations may do.
    experts = next(module for module in model.modules() if isinstance(module, QuantExperts))
    x, index, weights = torch.randn(9, 128), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    index[:, 1] = (index[:, 0] + 1) % 4
    floats = experts.to_float()
    floats.config._experts_implementation = "eager"
    with torch.no_grad():
        assert distance(experts(x, index, weights), floats(x, index, weights)) < (
            1e-6 if scheme.activations == "float" else 0.05
        )


@pytest.mark.parametrize("make", [nemotron, aria])
def test_experts_without_a_gate_and_transposed_ones(make: Callable[[], Any]) -> None:
    model = nn.ModuleDict({"experts": made(make)})
    report = qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    assert [row.status for row in report.rows] == ["quantized"] * 2 and report.coverage == 1
    experts: Any = model["experts"]
    floats = experts.to_float()
    x, index, weights = torch.randn(9, 128), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    index[:, 1] = (index[:, 0] + 1) % 4
    with torch.no_grad():
        assert distance(experts(x, index, weights), floats(x, index, weights)) < 1e-6
        elsewhere = torch.full_like(index, 4)  # experts of another rank
        assert not experts(x, elsewhere, weights).any()
        index[3] = 4
        assert not experts(x, index, weights)[3].any() and experts(x, index, weights)[4].any()


@pytest.mark.filterwarnings("ignore:The weight .* of a quantized layer was read")
@pytest.mark.parametrize("make", [nemotron, aria, gpt_oss, qwen3_moe], ids=lambda make: make.__name__)
def test_weights_are_read_under_the_names_they_had(make: Callable[[], Any]) -> None:
    """Qwen3-Omni's initialization does so during loading, and writes uninitialized tensors."""
    model = nn.ModuleDict({"all": made(make)})
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    experts: Any = next(module for module in model.modules() if isinstance(module, QuantExperts))
    floats = dict(experts.to_float().named_parameters())
    names = [name for name in floats if not name.endswith("_bias")]
    assert len(names) == 2
    for name in names:
        read = getattr(experts, name)
        assert read.shape == floats[name].shape and read.dtype == floats[name].dtype
        assert read._is_hf_initialized
        assert torch.equal(read + 0, floats[name])
    assert sum(hasattr(experts, name) for name in ("gate_up_proj", "up_proj", "down_proj")) == 2


@pytest.mark.parametrize(
    "make",
    [*MODELS[:2], *(pytest.param(make, marks=pytest.mark.extended) for make in MODELS[2:])],
    ids=lambda make: make.__name__,
)
def test_generate_eager_and_compiled(make: Callable[[], Any]) -> None:
    model = quantized(make, qao.Int4WeightOnly(group_size=32))
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(logits(compiled), logits(model))
    model.forward = torch.compile(model.forward, backend="aot_eager", dynamic=True)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), expected)


def test_gradients_reach_inputs_and_routers() -> None:
    model = quantized(qwen3_moe)
    floats = exact(model)
    grads = []
    for one, dtype in ((model, torch.float32), (floats, torch.float64)):
        embedded = one.get_input_embeddings()(IDS).detach().to(dtype).requires_grad_()
        gate = one.model.layers[0].mlp.gate.weight.requires_grad_()
        one(inputs_embeds=embedded).logits.square().sum().backward()
        grads.append((embedded.grad, gate.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert distance(ours, theirs) < 1e-5


# ---- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_saved_models_are_the_same_bits(make: Callable[[], Any], tmp_path: Path) -> None:
    model = quantized(make, qao.Int4WeightOnly(group_size=32))
    state = model.state_dict()

    def same(other: Any) -> None:
        loaded = other.state_dict()
        assert state.keys() == loaded.keys()
        names = [name for name in state if not name.endswith("pip_install_qao")]  # which tell dtypes of scales now
        assert [name for name in names if not torch.equal(state[name], loaded[name])] == []
        assert torch.equal(logits(other), logits(model))

    model.save_pretrained(tmp_path / "pretrained")
    same(qao.from_pretrained(tmp_path / "pretrained"))
    same(type(model).from_pretrained(tmp_path / "pretrained"))
    qao.save(model, tmp_path / "own")
    same(qao.load(tmp_path / "own", made(make)))
    same(qao.load(tmp_path / "own", copy.deepcopy(model)))


@pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_quantized_while_loading(make: Callable[[], Any], tmp_path: Path) -> None:
    """The float checkpoint has one tensor an expert; they are merged, and quantized as they arrive."""
    model = made(make)
    model.save_pretrained(tmp_path)
    scheme = qao.Int4WeightOnly(group_size=32)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=qao.QaoConfig(scheme))
    qao.quantize_(model, scheme, progress=False)
    assert torch.equal(logits(loaded), logits(model))
    assert any(isinstance(module, QuantExperts) for module in loaded.modules())


@pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")
def test_each_projection_has_the_rotation_of_its_columns(tmp_path: Path) -> None:
    model = made(qwen3_moe)  # 128 and 96 columns
    model.save_pretrained(tmp_path)
    scheme = qao.Int8DynamicActivationInt4Weight(group_size=32, rotation=128)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=qao.QaoConfig(scheme))
    report = qao.quantize_(model, scheme, progress=False)
    reported = {row.name: row.scheme for row in report.rows}
    for one in (model, loaded):
        name, experts = next((name, module) for name, module in one.named_modules() if isinstance(module, QuantExperts))
        schemes = {key: str(projection.scheme) for key, projection in experts.projections().items()}
        assert schemes == {key: reported[f"{name}.{key}"] for key in schemes}
        assert [projection.scheme.rotation for projection in (experts.up, experts.down)] == [128, 32]
    assert torch.equal(logits(loaded), logits(model))


def test_a_checkpoint_of_other_experts_is_refused(tmp_path: Path) -> None:
    qao.save(quantized(qwen3_moe), tmp_path / "own")
    other = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, moe_intermediate_size=64, num_experts=8, head_dim=32)
    )
    with pytest.raises(ValueError, match=r"experts\.(up|down): the checkpoint has weights .* another model\?"):
        qao.load(tmp_path / "own", other)
    fewer = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, moe_intermediate_size=96, num_experts=4, head_dim=32)
    )
    with pytest.raises(ValueError, match="not a checkpoint of this"):
        qao.load(tmp_path / "own", fewer)


def test_deepcopy_pickle_and_casts(tmp_path: Path) -> None:
    model = quantized(gpt_oss)
    torch.save(model.model.layers[0].mlp.experts, tmp_path / "experts.pt")
    loaded = torch.load(tmp_path / "experts.pt", weights_only=False)
    x, index, weights = torch.randn(5, 128), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    own = model.model.layers[0].mlp.experts
    with torch.no_grad():
        assert torch.equal(loaded(x, index, weights), own(x, index, weights))
    cast = copy.deepcopy(own).half()
    assert cast.up.scales.dtype == torch.float32 and cast.up.bias.dtype == torch.float16
    cast.requires_grad_()
    assert cast.up.bias.requires_grad and not cast.up.qweight.requires_grad
    with torch.no_grad():
        assert torch.equal(cast.up.weight.float() + 0, cast.up.dequantize(torch.float16).float())


# ---- selection -------------------------------------------------------------------------------------------------------


def test_schemes_by_name_and_by_function() -> None:
    model = made(qwen3_moe)
    first = "model.layers.0.mlp.experts"
    report = qao.quantize_(model, {first: qao.Int4WeightOnly(group_size=32), "re:.*experts": None}, progress=False)
    rows = {row.name: row for row in report.rows}
    assert rows[f"{first}.down_proj"].scheme == "int4 g32 asymmetric"
    assert rows["model.layers.1.mlp.experts.down_proj"].status == "excluded"
    again = qao.quantize_(
        model, lambda module, name: qao.Int8WeightOnly() if name.endswith("experts") else None, progress=False
    )
    status = {row.name: row.status for row in again.rows}
    assert status[f"{first}.gate_up_proj"] == "already quantized"
    assert status["model.layers.1.mlp.experts.gate_up_proj"] == "quantized"
    assert again.coverage > report.coverage > 0.3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: e.register_parameter("extra", nn.Parameter(torch.ones(3))), "it has .*extra"),
        (lambda e: e.register_buffer("extra", torch.ones(3)), "it has extra, which would be lost"),
        (lambda e: e.register_forward_hook(lambda *_: None), "it has forward_hooks, which would be lost"),
        (lambda e: setattr(e, "act_fn", nn.PReLU()), "it has act_fn, which would be lost"),
    ],
)
def test_what_cannot_be_replaced_is_reported(change: Any, why: str) -> None:
    model = made(qwen3_moe)
    change(model.model.layers[0].mlp.experts)
    with pytest.warns(UserWarning, match="(?s)these big weights stay.*fused experts"):
        report = qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    rows = [row for row in report.rows if row.name.startswith("model.layers.0.mlp.experts.")]
    assert len(rows) == 2 and all(row.status == "untouched" for row in rows)
    assert all(re.search(why, row.note or "") for row in rows)
    assert isinstance(model.model.layers[1].mlp.experts, QuantExperts)


def test_bad_weights_change_nothing() -> None:
    model = made(qwen3_moe)
    model.model.layers[1].mlp.experts.down_proj.data[3, 4, 5] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: .* holds NaN"):
        qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    assert not any(isinstance(module, (QuantExperts, qao.QuantLinear)) for module in model.modules())


def test_on_meta_and_calibrated() -> None:
    with torch.device("meta"):
        model = qwen3_moe()
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    state = quantized(qwen3_moe, qao.Int4WeightOnly(group_size=32)).state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    model = made(qwen3_moe)
    report = qao.calibrate(model, [IDS[:1], IDS[1:]], qao.Int8WeightOnly(), progress=False)
    assert report.coverage > 0.95 and sum("experts" in row.name for row in report.rows) == 4
    assert distance(logits(model), logits(exact(model))) < 1e-6


def test_lora_beside_frozen_experts() -> None:
    peft = pytest.importorskip("peft")
    model = quantized(qwen3_moe, qao.Int4WeightOnly(group_size=32))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and any(isinstance(module, QuantExperts) for module in model.modules())
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]

"""Training loops around quantized models: averages, optimizers, Trainer, accelerate, processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SCHEMES = [
    qao.Int4WeightOnly(group_size=32),
    qao.Int8WeightOnly(),
    qao.Fp4WeightOnly(),
    qao.Float8WeightOnly(),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    qao.Float8DynamicActivationFloat8Weight(),
]


def make(scheme: qao.Scheme, device: str = "cpu") -> nn.Sequential:
    """Two frozen quantized layers around a norm that is trained, and a float head."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 8)).to(device)
    qao.quantize_(model, {"3": None, "re:.*": scheme}, progress=False)
    return model


def packed(model: nn.Module) -> dict[str, Tensor]:
    names = ("qweight", "scales", "weight_sums", "activation_scale")
    return {name: value.clone() for name, value in model.state_dict().items() if name.rpartition(".")[2] in names}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "function": {"avg_fn": lambda averaged, model, count: 0.7 * averaged + 0.3 * model},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_averaged_models_keep_their_codes(scheme: qao.Scheme, kind: str, device: str) -> None:
    model = make(scheme, device)
    codes, first = packed(model), model[3].weight.detach().clone()
    averaged = AveragedModel(model, **AVERAGES[kind])
    averaged.update_parameters(model)
    with torch.no_grad():
        model[3].weight.add_(1.0)
    averaged.update_parameters(model)
    assert_same(packed(averaged.module), codes)
    assert_same(packed(model), codes)
    share = {"swa": 0.5, "ema": 0.1, "function": 0.3, "buffers": 0.1}[kind]
    assert torch.allclose(averaged.module[3].weight, first + share, atol=1e-6)
    assert all("parameters" not in vars(module) for module in (model, averaged, averaged.module))


def test_averages_of_other_codes_are_refused() -> None:
    model, other = make(SCHEMES[0]), make(SCHEMES[0])
    averaged = AveragedModel(other, **AVERAGES["ema"])
    new = {name: 0.5 * value for name, value in qao.dequantize_(copy.deepcopy(model)).state_dict().items()}
    qao.update_(model, new)
    averaged.update_parameters(model)  # the first only copies
    assert_same(packed(averaged.module), packed(model))
    with pytest.raises(ValueError, match=r"AveragedModel: 0\.qweight has changed.* packed weights cannot be averaged"):
        averaged.update_parameters(make(SCHEMES[0]))
    assert_same(packed(averaged.module), packed(model))
    floats = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 8))
    averaged = AveragedModel(floats)
    with pytest.raises(ValueError, match=r"AveragedModel: 0\.qweight is quantized in only one of the two"):
        averaged.update_parameters(model)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_optimizers_of_all_parameters_train_what_is_trainable(scheme: qao.Scheme, optimizer: str, device: str) -> None:
    """With a scaler and clipped gradients: the same as an optimizer of the trainable parameters alone."""
    x = torch.linspace(-2, 2, 16 * 64, device=device).view(16, 64)
    kind, options = OPTIMIZERS[optimizer]

    def trained(every: bool) -> dict[str, Tensor]:
        model = make(scheme, device)
        codes = packed(model)
        scaler = torch.amp.GradScaler(device)
        own = [parameter for parameter in model.parameters() if every or parameter.requires_grad]
        steps = kind(own, lr=0.01, **options)
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(steps)
        assert_same(packed(model), codes)
        assert model(x).square().mean() < loss
        return model.state_dict()

    assert_same(trained(True), trained(False))


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_accelerate_saves_and_loads_a_state(scheme: qao.Scheme, safe: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    built = make(scheme)
    model, optimizer = accelerator.prepare(built, torch.optim.AdamW(built.parameters(), lr=0.01))
    x = torch.linspace(-2, 2, 16 * 64).view(16, 64)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    codes, first = packed(built), step()
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    expected = [step(), step()]
    accelerator.load_state(str(tmp_path))
    assert [step(), step()] == expected and expected[1] < first
    assert_same(packed(built), codes)
    accelerate.state.AcceleratorState._reset_state(True)


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(3, 13) + index
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("adapters", [False, True], ids=["norms", "lora"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_trainer_resumes_and_takes_the_best_model(scheme: qao.Scheme, adapters: bool, tmp_path: Path) -> None:
    """Resumed after two of four steps: the same weights, bit for bit, as of four steps in one go."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
        qao.quantize_(model, {"lm_head": None, "re:.*": scheme}, progress=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "norm" in name
        if not adapters:
            return model
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    def trainer(name: str, greater_is_better: bool) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / name), max_steps=4, save_steps=2, eval_steps=2, eval_strategy="steps", learning_rate=1e-2,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=greater_is_better,
            report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        return transformers.Trainer(built(), arguments, train_dataset=Texts(), eval_dataset=Texts())

    whole, resumed, early = trainer("whole", False), trainer("resumed", False), trainer("early", True)
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    found = whole.model.state_dict()
    assert any(not torch.equal(found[name], value) for name, value in before.items())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(resumed.model.state_dict(), found)
    early.train()  # the loss falls, so that the largest was that of step 2
    assert early.state.best_model_checkpoint.endswith("checkpoint-2")
    assert early.evaluate()["eval_loss"] > whole.evaluate()["eval_loss"]
    codes = packed(early.model)
    assert_same(codes, {name: before[name] for name in codes})

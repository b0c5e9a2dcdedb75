"""Experts of GGUF files: in the file's blocks, with a scheme, and in MXFP4."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.checkpoints import open_checkpoint
from qao.checkpoints.gguf.read import GgufCheckpoint
from qao.cli import main
from qao.nn import QuantExperts
from qao.schemes import GgufWeightOnly

pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")

from gguf_configs import MODELS  # noqa: E402
from gguf_files import float_model, write  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 has a module for each expert"),
]
KEPT = "qao.integrations.huggingface.from_pretrained.kept_gguf_types"


def test_experts_are_quantized_with_a_scheme(tmp_path: Path) -> None:
    """They are stacked in the file, in Q8_0 here."""
    architecture, changes = MODELS["qwen3_moe"]
    path = write(tmp_path / "model.gguf", float_model("qwen3_moe", changes), architecture, "Q8_0")
    floats = qao.from_pretrained(path, dequantize=True)
    made = qao.from_pretrained(path, scheme=qao.Int8WeightOnly())
    assert sum(isinstance(one, QuantExperts) for one in made.modules()) == 4
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        expected, logits = floats(ids).logits, made(ids).logits
    assert 0 < (logits - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", ("mixtral", "qwen3_moe", "olmoe"))
def test_experts_keep_their_blocks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scheme, on CPUs with kernels: the values of the file, saved and restored; elsewhere int8."""
    architecture, changes = MODELS[name]
    path = write(tmp_path / "model.gguf", float_model(name, changes), architecture, "Q8_0")
    floats = qao.from_pretrained(path, dequantize=True)
    monkeypatch.setattr(KEPT, lambda device_map: ("Q8_0",))
    model = qao.from_pretrained(path, dtype=torch.float32)
    experts = [one for one in model.modules() if isinstance(one, QuantExperts)]
    assert len(experts) == 4 and all(one.up.scheme == one.down.scheme == GgufWeightOnly("Q8_0") for one in experts)
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        expected, logits = floats(ids).logits, model(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    model.save_pretrained(tmp_path / "saved")
    with torch.inference_mode():
        assert torch.equal(qao.from_pretrained(tmp_path / "saved")(ids).logits, logits)
    halves = qao.from_pretrained(path, dtype=torch.bfloat16)  # the loader's default dtype is bfloat16
    loaded = [one for one in halves.modules() if isinstance(one, QuantExperts)]
    assert all(one._gate == (1.0, math.inf, 0.0, False) for one in loaded)  # SiLU, applied by the operator
    for own, plain in zip(qao.dequantize_(model).model.layers, floats.model.layers, strict=True):
        assert torch.equal(own.mlp.experts.gate_up_proj, plain.mlp.experts.gate_up_proj)
        assert torch.equal(own.mlp.experts.down_proj, plain.mlp.experts.down_proj)
    monkeypatch.setattr(KEPT, lambda device_map: ())
    with pytest.warns(UserWarning, match="25 linear layers in Q8_0 are rounded"):  # 8 of them are stacks of experts
        elsewhere = qao.from_pretrained(path, dtype=torch.float32)
    experts = [one for one in elsewhere.modules() if isinstance(one, QuantExperts)]
    assert len(experts) == 4 and all(one.up.scheme == one.down.scheme == qao.Int8WeightOnly() for one in experts)


@pytest.mark.parametrize("kind", ("Q4_0", "Q4_1", "Q8_0", "MXFP4"))
@pytest.mark.parametrize("name", ("qwen3_moe", "gpt_oss", "granitemoeshared", "deepseek_v3"))
def test_convert_keeps_experts_quantized(name: str, kind: str, tmp_path: Path) -> None:
    """As it keeps dense layers: in the layout that GPUs run, with the values of the file except for Q8_0."""
    architecture, changes = MODELS[name]
    changes = changes | ({"shared_intermediate_size": 64} if name == "granitemoeshared" else {})
    path = write(tmp_path / "model.gguf", float_model(name, changes), architecture, kind)
    assert main(["convert", str(path), str(tmp_path / "made"), "--quiet"]) == 0
    floats = qao.from_pretrained(path, dequantize=True, dtype=torch.float32)
    made = qao.from_pretrained(tmp_path / "made", dtype=torch.float32)
    words = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8", "MXFP4": "fp4"}
    experts = [one for one in made.modules() if isinstance(one, QuantExperts)]
    assert len(experts) == (3 if name == "deepseek_v3" else 4)
    assert all(one.up.scheme.word == one.down.scheme.word == words[kind] for one in experts)
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        expected, logits = floats(ids).logits, made(ids).logits
    if kind == "Q8_0":  # rounding may choose other experts
        restored = qao.dequantize_(made).state_dict()
        pairs = [(restored[key], value) for key, value in floats.state_dict().items() if ".experts." in key]
        assert pairs and all((one - other).norm() <= 0.01 * other.norm() for one, other in pairs)
    else:
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_experts_in_other_types_become_float(tmp_path: Path) -> None:
    """As dense layers do: no scheme of qao holds the values, and nothing is rounded without a note."""
    architecture, changes = MODELS["qwen3_moe"]
    path = write(tmp_path / "model.gguf", float_model("qwen3_moe", changes), architecture, "Q5_1")
    read = GgufCheckpoint(path, native=(), stacked=True)
    assert not read.layers and "Q5_1" in read.notes[0]


def test_open_checkpoint_stacks_experts(tmp_path: Path) -> None:
    architecture, changes = MODELS["qwen3_moe"]
    path = write(tmp_path / "model.gguf", float_model("qwen3_moe", changes), architecture, "Q8_0")
    checkpoint: Any = open_checkpoint(path)
    for name, n, k in (("up", 64, 64), ("down", 64, 32)):
        layer = checkpoint.layers[f"model.layers.3.mlp.experts.{name}"]
        assert (layer.experts, layer.out_features, layer.in_features) == (4, n, k)
        assert (
            checkpoint.stored(layer.name) == ("Q8_0", layer.pack()["qweight"].nbytes) == ("Q8_0", 4 * n * k * 34 // 32)
        )
    assert not any(".experts." in name for name in checkpoint.others)


def test_experts_of_two_types_are_floats(tmp_path: Path) -> None:
    """gate and up are one weight in transformers."""
    architecture, changes = MODELS["qwen3_moe"]
    path = write(tmp_path / "model.gguf", float_model("qwen3_moe", changes), architecture, "Q8_0", up="Q5_0")
    model = qao.from_pretrained(path)
    assert not any(isinstance(one, QuantExperts) for one in model.modules())


def test_experts_in_mxfp4_stay_in_four_bits(tmp_path: Path) -> None:
    """As fp4, which has the same values, without a scheme."""
    architecture, changes = MODELS["gpt_oss"]
    path = write(tmp_path / "model.gguf", float_model("gpt_oss", changes), architecture, "MXFP4")
    floats = qao.from_pretrained(path, dequantize=True, dtype=torch.float32)
    model = qao.from_pretrained(path)
    assert model.model.layers[0].mlp.experts.up.scheme == qao.Fp4WeightOnly() and model.dtype == torch.bfloat16
    again = qao.dequantize_(qao.from_pretrained(path, dtype=torch.float32))
    experts, expected = (one.model.layers[3].mlp.experts for one in (again, floats))
    assert torch.equal(experts.gate_up_proj, expected.gate_up_proj)
    assert torch.equal(experts.down_proj, expected.down_proj)

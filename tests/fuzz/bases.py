"""Small valid checkpoints of every format, from which ``readers`` draws mutations."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import qao
import torch
from checkpoint_support import SCHEMES, with_whole_zeros
from ops_schemes import generator
from qao.checkpoints import native
from qao.checkpoints.compressed_tensors.write import can_write, layer_tensors, quantization_config
from test_checkpoints_gptq_awq import Weight
from torch import Tensor, nn

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Base:
    """A checkpoint: tensors and header of one safetensors file, JSON files, or the bytes of a GGUF file."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)  # content of JSON files by name
    gguf: bytes | None = None
    numbers: tuple[tuple[int, int], ...] = ()  # offset and width of those in the head of a GGUF file
    store: str = WHOLE  # name of the safetensors file
    model: Callable[[], nn.Module] | None = None  # for qao.load


def _method(name: str, **settings: Any) -> dict[str, Any]:
    return {"config.json": {"model_type": "llama", "quantization_config": {"quant_method": name, **settings}}}


def _float8(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(1)).clamp(-4, 4).to(torch.float8_e4m3fn)


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=generator(2)) * 0.1 + 0.01).to(dtype)


def _others() -> dict[str, Tensor]:
    return {"norm.weight": torch.ones(16), "embed.weight": torch.randn(8, 16, generator=generator(3)).half()}


@cache
def _first_floats() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 16, bias=False))


def _floats() -> nn.Module:
    return _copied(_first_floats())


def _copied(module: nn.Module) -> nn.Module:
    """What copy.deepcopy makes, which takes 0.4 ms, and torch.manual_seed 0.8 ms."""
    new = type(module).__new__(type(module))
    for name, value in module.__dict__.items():
        new.__dict__[name] = value.copy() if isinstance(value, dict) else value
    for name, parameter in module._parameters.items():
        new._parameters[name] = None if parameter is None else nn.Parameter(parameter.detach().clone())
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else _copied(child)
    return new


def _native(scheme: qao.Scheme) -> Base:
    model = _floats()
    qao.quantize_(model, scheme, progress=False)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    return Base(tensors, native.header({}), {"config.json": {"hidden": 40}}, model=_floats)


def _compressed(scheme: qao.Scheme, layer_name: str = "a") -> Base:
    layer = qao.QuantLinear.from_linear(nn.Linear(256, 32), scheme)
    tensors = {f"{layer_name}.{name}": t.contiguous() for name, t in layer_tensors(layer).items()} | _others()
    settings = quantization_config({layer_name: layer.scheme}, ["lm_head"])
    return Base(tensors, {"format": "pt"}, {"config.json": {"quantization_config": settings}})


def _torchao(kind: str, parts: dict[str, Tensor], **about: Any) -> Base:
    header = {"tensor_names": '["a.weight"]', "a.weight": json.dumps({"_type": kind, "_data": about})}
    return Base({f"a._weight_{name}": part for name, part in parts.items()} | _others(), header, _method("torchao"))


def _packed_codes(n: int, k: int) -> Tensor:
    return torch.randint(0, 256, (n, k // 2), generator=generator(5), dtype=torch.uint8)


class _Head:
    """The bytes before the data of a GGUF file, and the place and width of each number among them."""

    def __init__(self) -> None:
        self.content, self.numbers = b"", list[tuple[int, int]]()

    def add(self, kinds: str, *values: float) -> None:
        for kind, value in zip(kinds, values, strict=True):
            self.numbers.append((len(self.content), struct.calcsize(kind)))
            self.content += struct.pack(f"<{kind}", value)

    def add_text(self, text: str) -> None:
        self.add("Q", len(text))
        self.content += text.encode()


def _gguf(kind: int, size: int, elements: int = 32) -> Base:
    """A Llama of one block; its matrices have that ggml type, with blocks of ``size`` bytes."""
    hidden, ffn, vocab = elements, max(elements, 64), 8
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,), "output": (vocab, hidden)}
    q, kv = (hidden, hidden), (hidden // 2, hidden)
    shapes |= {f"blk.0.{name}": shape for name, shape in {"attn_q": q, "attn_k": kv, "attn_v": kv}.items()}
    shapes |= {"blk.0.attn_output": q, "blk.0.ffn_gate": (ffn, hidden), "blk.0.ffn_up": (ffn, hidden)}
    shapes |= {"blk.0.ffn_down": (hidden, ffn), "blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,)}
    numbers = {"block_count": 1, "context_length": 64, "embedding_length": hidden, "feed_forward_length": ffn}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    head = _Head()
    head.content = b"GGUF"
    head.add("IQQ", 3, len(shapes), len(numbers) + 3)
    head.add_text("general.architecture")
    head.add("I", 8)
    head.add_text("llama")
    for key, value in numbers.items():
        head.add_text(f"llama.{key}")
        head.add("II", 4, value)
    head.add_text("llama.attention.layer_norm_rms_epsilon")
    head.add("If", 6, 1e-5)
    head.add_text("tokenizer.ggml.tokens")
    head.add("IIQ", 9, 8, vocab)
    for i in range(vocab):
        head.add_text(f"t{i}")
    data = b""
    for name, shape in shapes.items():
        is_matrix = len(shape) == 2
        count = math.prod(shape)
        content = _blocks(count // elements, size) if is_matrix else struct.pack("<f", 1.0) * count
        head.add_text(f"{name}.weight")
        head.add("I" + "Q" * len(shape), len(shape), *reversed(shape))
        head.add("IQ", kind if is_matrix else 0, len(data))
        data += content + bytes(-len(content) % 32)
    return Base(gguf=head.content + bytes(-len(head.content) % 32) + data, numbers=tuple(head.numbers))


def _blocks(count: int, size: int) -> bytes:
    """Blocks that begin with one or two float16 scales; of floats if their size is 64 or 128."""
    if size == 128:
        return struct.pack("<f", 0.5) * 32 * count
    codes = torch.randint(0, 256, (count, size), generator=generator(6), dtype=torch.uint8)
    codes[:, :4] = torch.tensor([0x66, 0x2E, 0x66, 0xA6], dtype=torch.uint8)  # 0.1 and -0.025 in float16
    return bytes(codes.flatten().tolist())


def _of_other_libraries() -> Iterator[tuple[str, Base]]:
    torch.manual_seed(0)
    asymmetric = Weight(16, 64, 32)
    yield "gptq", Base(asymmetric.gptq() | _others(), {}, _method("gptq", bits=4, group_size=32, sym=False))
    rows = Weight(16, 64, -1)
    yield "gptq rows", Base(rows.gptq(), {}, {"quantize_config.json": {"bits": 4, "group_size": -1, "desc_act": True}})
    eight = Weight(16, 64, 64, bits=8, zero=128)
    yield "gptq eight bits", Base(eight.gptq(), {}, _method("gptq", bits=8, group_size=64, sym=True))
    yield "auto_round", Base(asymmetric.gptq(), {}, _method("auto-round", bits=4, group_size=32, sym=False))
    awq = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    shard = "model-00001-of-00001.safetensors"
    places = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(asymmetric.gptq() | _others(), shard)}
    config = _method("gptq", bits=4, group_size=32, sym=False) | {INDEX: places}
    yield "gptq with an index", Base(asymmetric.gptq() | _others(), {}, config, store=shard)
    yield "awq", Base(Weight(16, 64, 32).awq() | _others(), {}, _method("awq", **awq))
    fp8 = {"a.weight": _float8(130, 140), "a.weight_scale_inv": _scales(2, 2)} | _others()
    yield "fp8", Base(fp8, {}, _method("fp8", activation_scheme="dynamic", weight_block_size=[128, 128]))
    one = {"a.weight": _float8(16, 32), "a.weight_scale": torch.tensor(0.1), "a.input_scale": torch.tensor(0.2)}
    yield "fp8 tensor", Base(one, {}, _method("fp8", activation_scheme="static"))
    fbgemm = {"a.weight": _float8(16, 32), "a.weight_scale": _scales(16, 1)}
    yield "fbgemm_fp8", Base(fbgemm, {}, _method("fbgemm_fp8", activation_scale_ub=1200.0))
    blocks = torch.randint(0, 256, (2, 16, 3, 16), generator=generator(7), dtype=torch.uint8)
    exponents = torch.randint(118, 125, (2, 16, 3), generator=generator(8), dtype=torch.uint8)
    mxfp4 = {"a.up_blocks": blocks, "a.up_scales": exponents, "a.up_bias": torch.ones(2, 16)}
    yield "mxfp4", Base(mxfp4, {}, _method("mxfp4", modules_to_not_convert=["lm_head"]))
    nvfp4 = {"a.weight": _packed_codes(32, 64), "a.weight_scale": _scales(32, 4).mul(40).to(torch.float8_e4m3fn)}
    nvfp4 |= {"a.weight_scale_2": torch.tensor(0.0123), "a.input_scale": torch.tensor(0.5)}
    yield "modelopt nvfp4", Base(nvfp4 | _others(), {}, _method("modelopt", quant_algo="NVFP4", group_size=16))
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    hf = {"producer": {"name": "modelopt"}, "quantization": inner}
    yield "modelopt fp8", Base(one | {"a.k_scale": torch.tensor(1.0)}, {}, {"hf_quant_config.json": hf})
    mixed = {"a": {"quant_algo": "W8A16"}, "b": {"quant_algo": "FP8_PB_WO"}}
    two = {"a.weight": torch.ones(16, 32, dtype=torch.int8), "a.weight_scale": _scales(16)}
    two |= {"b.weight": _float8(256, 128), "b.weight_scale": _scales(2, 1, 1, 1)}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": mixed}
    yield "modelopt mixed", Base(two, {}, _method("modelopt", **settings))
    int8 = {"qdata": torch.ones(16, 64, dtype=torch.int8), "scale": _scales(16, 1)}
    yield "torchao int8", _torchao("Int8Tensor", int8, block_size=[1, 64])
    kwargs = {"_type": "x", "_data": {"granularity": {"_type": "PerRow", "_data": {}}}}
    float8 = {"qdata": _float8(16, 64), "scale": _scales(16, 1)}
    yield "torchao fp8", _torchao("Float8Tensor", float8, block_size=[1, 64], act_quant_kwargs=kwargs)
    codes = torch.randint(-8, 8, (16, 64), generator=generator(9), dtype=torch.int8)
    intx = {"qdata": codes, "scale": _scales(16, 2), "zero_point": torch.zeros(16, 2, dtype=torch.int8)}
    dtype = {"_type": "torch.dtype", "_data": "int4"}
    yield "torchao intx", _torchao("IntxUnpackedToInt8Tensor", intx, block_size=[1, 32], target_dtype=dtype)
    yield "float", Base(_others() | {"lm_head.weight": torch.randn(8, 16, generator=generator(4))}, {}, _method("")
                        | {"config.json": {"model_type": "x"}})  # fmt: skip


@cache
def by_format() -> dict[str, list[str]]:
    """Names of the bases by what reads them."""
    found: dict[str, list[str]] = {}
    for name in sorted(bases()):
        found.setdefault(name.replace(",", " ").split()[0], []).append(name)
    return found


@cache
def bases() -> dict[str, Base]:
    found = dict(_of_other_libraries())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found |= {f"qao {scheme}": _native(scheme) for scheme in SCHEMES}
        whole = [with_whole_zeros(scheme) for scheme in SCHEMES]
        found["compressed-tensors, a name to backtrack in"] = _compressed(qao.Int8WeightOnly(), "a" * 40)
        found |= {f"compressed-tensors {scheme}": _compressed(scheme) for scheme in whole if can_write(scheme) is None}
    types: dict[str, tuple[int, ...]] = {"F32": (0, 128), "F16": (1, 64), "Q4_0": (2, 18), "Q4_1": (3, 20)}
    types["Q8_0"] = 8, 34
    if importlib.util.find_spec("gguf"):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        more = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
        kinds = [kind for kind in GGMLQuantizationType if kind.name in more]
        types |= {kind.name: (kind.value, *GGML_QUANT_SIZES[kind][::-1]) for kind in kinds}
    return found | {f"gguf {name}": _gguf(*of) for name, of in types.items()}

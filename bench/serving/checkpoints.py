"""Checkpoints with seeded random weights in the layouts that serving engines read, written without a model hub.

A layer's integers, scales and zero points depend on its name and on the layout alone. ``write(…, dense=True)`` writes
the values that the checkpoint represents as a bfloat16 model, the reference of all kernels.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from unittest import mock

import qao
import torch
from qao.checkpoints.plain import packed_nibbles
from qao.integrations.huggingface import saving
from torch import Tensor

from ..llama_model import COMMON, PRESETS
from ..schemes import LAYER_SCHEMES, without_search

STD = 0.02  # of the represented weights
_E4M3 = torch.float8_e4m3fn
_INT4_STEPS, _INT8_STEPS, _E4M3_STEPS = 2.5, 32.0, 64.0  # standard deviations of the stored values
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_KEPT = re.compile(r"lm_head$|embed_tokens$|\.gate$|norm")  # modules that stay in bfloat16
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")

Tensors = dict[str, Tensor]


class Weight(NamedTuple):
    """Stored tensors of a weight [N, K] by the last part of their names, and the float32 values that they represent."""

    stored: Tensors
    dense: Tensor


class Layout(NamedTuple):
    """A layout of quantized checkpoints: ``quantization_config``, and the function that draws a weight."""

    config: dict[str, Any]
    draw: Callable[[int, int, torch.Generator], Weight]


def _normal(n: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, k, generator=generator, device=generator.device)


def _scales(n: int, groups: int, steps: float, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(n, groups, generator=generator, device=generator.device)
    return ((drawn * 0.5 + 0.75) * (STD / steps)).to(torch.bfloat16)


def _int4(n: int, k: int, size: int, symmetric: bool, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0 to 15 [N, K], scales [N, G], zero points [N, G]."""
    groups = k // size
    q = (_normal(n, k, generator) * _INT4_STEPS + 8).round_().clamp_(0, 15).to(torch.uint8)
    scales = _scales(n, groups, _INT4_STEPS, generator)
    if symmetric:
        return q, scales, torch.full((n, groups), 8, dtype=torch.uint8, device=q.device)
    return q, scales, (_normal(n, groups, generator) + 8).round_().clamp_(5, 11).to(torch.uint8)


def _dense4(q: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    n, k = q.shape
    by_group = q.view(n, scales.shape[1], -1).float() - zeros.unsqueeze(-1).float()
    return (by_group * scales.float().unsqueeze(-1)).view(n, k)


def _packed(size: int, symmetric: bool = True) -> Callable[[int, int, torch.Generator], Weight]:
    """compressed-tensors "pack-quantized" in four bits; ``size`` -1: one group per row."""

    def draw(n: int, k: int, generator: torch.Generator) -> Weight:
        q, scales, zeros = _int4(n, k, k if size == -1 else size, symmetric, generator)
        stored = {"weight_packed": packed_nibbles(q), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        if not symmetric:
            stored["weight_zero_point"] = packed_nibbles(zeros.t()).t().contiguous()
        return Weight(stored, _dense4(q, scales, zeros))

    return draw


def _packed8(n: int, k: int, generator: torch.Generator) -> Weight:
    q = (_normal(n, k, generator) * _INT8_STEPS).round_().clamp_(-127, 127)
    scales = _scales(n, 1, _INT8_STEPS, generator)
    stored = {"weight_packed": (q + 128).to(torch.uint8).view(torch.int32), "weight_scale": scales}
    return Weight(stored | {"weight_shape": torch.tensor([n, k])}, q * scales.float())


def _gptq(n: int, k: int, generator: torch.Generator) -> Weight:
    q, scales, zeros = _int4(n, k, 128, True, generator)
    stored = {
        "qweight": packed_nibbles(q).t().contiguous(),
        "qzeros": packed_nibbles((zeros - 1).t()),  # version 1 of the format stores zero points minus 1
        "scales": scales.t().to(torch.float16).contiguous(),
        "g_idx": torch.arange(k, dtype=torch.int32) // 128,
    }
    return Weight(stored, _dense4(q, scales, zeros))


def _awq_columns(values: Tensor) -> Tensor:
    """[R, C] with the eight columns of each word in AWQ's order."""
    return values.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)


def _awq(n: int, k: int, generator: torch.Generator) -> Weight:
    q, scales, zeros = _int4(n, k, 128, False, generator)
    stored = {
        "qweight": packed_nibbles(_awq_columns(q.t())),
        "qzeros": packed_nibbles(_awq_columns(zeros.t())),
        "scales": scales.t().to(torch.float16).contiguous(),
    }
    return Weight(stored, _dense4(q, scales, zeros))


def _int8(n: int, k: int, generator: torch.Generator) -> Weight:
    q = (_normal(n, k, generator) * _INT8_STEPS).round_().clamp_(-127, 127).to(torch.int8)
    scales = _scales(n, 1, _INT8_STEPS, generator)
    return Weight({"weight": q, "weight_scale": scales}, q.float() * scales.float())


def _int4_bytes(n: int, k: int, generator: torch.Generator) -> Weight:
    """Four bits, one value per byte, as compressed-tensors stores integer W4A8."""
    q, scales, zeros = _int4(n, k, 128, True, generator)
    stored = {"weight": (q.to(torch.int8) - 8), "weight_scale": scales}
    return Weight(stored, _dense4(q, scales, zeros))


def _e4m3(scales: str, name: str = "weight_scale", static: bool = False) -> Callable[..., Weight]:
    """e4m3 with scales by "row", "tensor" or "block" of 128 x 128."""

    def draw(n: int, k: int, generator: torch.Generator) -> Weight:
        q = (_normal(n, k, generator) * _E4M3_STEPS).clamp_(-448, 448).to(_E4M3)
        shape = {"row": (n, 1), "tensor": (1, 1), "block": (-(-n // 128), -(-k // 128))}[scales]
        s = _scales(*shape, _E4M3_STEPS, generator).float()
        if scales == "tensor":
            s.fill_(STD / _E4M3_STEPS)  # vLLM requantizes joined matrices to the largest scale
        by_value = s
        if scales == "block":
            by_value = s.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        stored = {"weight": q, name: s.reshape(1) if scales == "tensor" else s}
        if static:
            stored["input_scale"] = torch.full((1,), 0.02)
        return Weight(stored, q.float() * by_value)

    return draw


# ---- configs ---------------------------------------------------------------------------------------------------------


def _values(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Arguments of quantized tensors in the config of compressed-tensors."""
    plain = {"symmetric": True, "group_size": None, "dynamic": False, "block_structure": None, "actorder": None}
    return {"num_bits": bits, "type": kind, "strategy": strategy} | plain | more


def _compressed(form: str, weights: dict[str, Any], x: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": x, "output_activations": None}
    ignore = ["lm_head", "re:.*mlp[.]gate$"]
    same = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
    return same | {"format": form, "ignore": ignore, "config_groups": {"group_0": group}}


_TOKEN8, _TOKENF8 = (_values(8, kind, "token", dynamic=True) for kind in ("int", "float"))
_INT4 = _values(4, "int", "group", group_size=128)
LAYOUTS = {
    "w4a16": Layout(_compressed("pack-quantized", _INT4), _packed(128)),
    "w4a16_asym": Layout(_compressed("pack-quantized", _INT4 | {"symmetric": False}), _packed(128, False)),
    "w4a16_g32": Layout(_compressed("pack-quantized", _INT4 | {"group_size": 32}), _packed(32)),
    "w4a16_rows": Layout(_compressed("pack-quantized", _values(4, "int", "channel")), _packed(-1)),
    "w8a16": Layout(_compressed("pack-quantized", _values(8, "int", "channel")), _packed8),
    "gptq": Layout({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, _gptq),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, _awq),
    "w8a8": Layout(_compressed("int-quantized", _values(8, "int", "channel"), _TOKEN8), _int8),
    "fp8": Layout(_compressed("float-quantized", _values(8, "float", "channel"), _TOKENF8), _e4m3("row")),
    "fp8_static": Layout(
        _compressed("float-quantized", _values(8, "float", "tensor"), _values(8, "float", "tensor")),
        _e4m3("tensor", static=True),
    ),
    "fp8_block": Layout(
        _compressed(
            "float-quantized",
            _values(8, "float", "block", block_structure=[128, 128]),
            _values(8, "float", "group", group_size=128, dynamic=True),
        ),
        _e4m3("block"),
    ),
    "fp8_deepseek": Layout(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _e4m3("block", "weight_scale_inv"),
    ),
    "fp8_weights": Layout(_compressed("float-quantized", _values(8, "float", "channel")), _e4m3("row")),
    "w4a8": Layout(_compressed("int-quantized", _INT4, _TOKEN8), _int4_bytes),
    "w4afp8": Layout(_compressed("pack-quantized", _INT4, _TOKENF8), _packed(128)),
}
_WRITING = Lock()  # transformers sets the default dtype and the seed of the process
OWN = {f"qao_{word}": word for word in LAYER_SCHEMES}  # checkpoints in qao's own format, whole models with their heads
BF16 = "bf16"
_SMALL = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8} | {
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 4096, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
# Narrow models that show whether an engine runs a layout, with sizes that two GPUs can share.
SMALL: dict[str, dict[str, Any]] = {
    "small-llama": _SMALL | {"model_type": "llama"},
    "small-moe": _SMALL | {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1},
}  # fmt: skip


# ---- files -----------------------------------------------------------------------------------------------------------


def config_of(model: str, layers: int | None = None, **changes: Any) -> Any:
    """transformers' config of a preset, with fewer layers and other numbers if given."""
    from transformers import AutoConfig

    numbers = COMMON | (PRESETS | SMALL)[model] | changes
    numbers["num_hidden_layers"] = layers or numbers["num_hidden_layers"]
    return AutoConfig.for_model(**numbers | {"dtype": "bfloat16"})


def write(folder: Path, config: Any, layout: str, device: str, dense: bool = False) -> Path:
    """Write a checkpoint, unless an earlier call did.

    Args:
        folder: parent of the checkpoint's folder.
        config: of ``config_of``.
        layout: of LAYOUTS, OWN, or BF16.
        device: where the weights are drawn. CPUs and GPUs draw different values.
        dense: the represented values as a model in bfloat16.

    Returns:
        The folder of the checkpoint.
    """
    key = zlib.crc32(config.to_json_string().encode())
    path = folder / f"{config.model_type}-{config.num_hidden_layers}-{key:08x}-{layout}{'-dense' if dense else ''}"
    with _WRITING:
        if not (path / "config.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            if layout in OWN:
                _write_own(path, config, layout, device, dense)
            else:
                _write_layout(path, config, LAYOUTS.get(layout), layout, device, dense)
    return path


@torch.no_grad()
def _write_layout(path: Path, config: Any, layout: Layout | None, word: str, device: str, dense: bool) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    index: dict[str, str] = {}
    for file, parts in _by_file(model):
        tensors: Tensors = {}
        for name, shape in parts:
            generator = torch.Generator(device)
            generator.manual_seed(zlib.crc32(f"{word} {name}".encode()))
            tensors |= _tensors(name, shape, layout, generator, dense)
        save_file({name: one.to("cpu").contiguous() for name, one in tensors.items()}, path / file)
        index |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    written = config.to_dict() | {"architectures": [type(model).__name__]}
    if layout is not None and not dense:
        written["quantization_config"] = layout.config | _kept_in_float(layout, config)
    (path / "config.json").write_text(json.dumps(written))  # the last file: its presence means that all are there


def _kept_in_float(layout: Layout, config: Any) -> dict[str, list[str]]:
    """The entry of methods that name their exceptions in full: heads, and the routers of experts."""
    if layout.config["quant_method"] not in ("fp8", "awq"):
        return {}
    routers = [f"model.layers.{i}.mlp.gate" for i in range(config.num_hidden_layers)]
    return {"modules_to_not_convert": ["lm_head", *(routers if hasattr(config, "num_experts") else [])]}


def _tensors(name: str, shape: torch.Size, layout: Layout | None, generator: torch.Generator, dense: bool) -> Tensors:
    """The file's entries for one parameter of the float model."""
    module, _, leaf = name.rpartition(".")
    if len(shape) == 1:
        return {name: torch.ones(shape, dtype=torch.bfloat16) if leaf == "weight" else torch.zeros(shape).bfloat16()}
    if layout is None or leaf != "weight" or _KEPT.search(module):
        return {name: (_normal(*shape, generator) * STD).bfloat16()}
    weight = layout.draw(*shape, generator)
    if dense:
        return {name: weight.dense.bfloat16()}
    return {f"{module}.{part}": one for part, one in weight.stored.items()}


def _by_file(model: Any) -> Iterator[tuple[str, list[tuple[str, torch.Size]]]]:
    """Names and shapes of a float model's parameters as checkpoints name them, one file per decoder layer."""
    files: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, shape in _parameters(model):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        files.setdefault(f"layer-{int(layer[1]):03}" if layer else "rest", []).append((name, shape))
    for file, parts in files.items():
        yield f"{file}.safetensors", parts


def _parameters(model: Any) -> Iterator[tuple[str, torch.Size]]:
    for name, parameter in model.named_parameters():  # tied parameters once
        fused = _EXPERTS.match(name)
        if fused is None:
            yield name, parameter.shape
            continue
        count, rows, columns = parameter.shape
        for expert in range(count):
            if fused[2] == "down_proj":
                yield f"{fused[1]}.{expert}.down_proj.weight", torch.Size((rows, columns))
            else:
                yield f"{fused[1]}.{expert}.gate_proj.weight", torch.Size((rows // 2, columns))
                yield f"{fused[1]}.{expert}.up_proj.weight", torch.Size((rows // 2, columns))


@torch.no_grad()
def _write_own(path: Path, config: Any, layout: str, device: str, dense: bool) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    qao.quantize_(model, without_search(LAYER_SCHEMES[OWN[layout]]), progress=False)
    if dense:
        qao.dequantize_(model)
        model.save_pretrained(path)
        return
    # By default, save_pretrained writes most schemes as compressed-tensors.
    with mock.patch.object(saving, "_compressed_tensors", lambda *_: None):
        model.save_pretrained(path)

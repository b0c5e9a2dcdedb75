"""compressed-tensors: files that its own package wrote are read bit for bit, and it reads ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from checkpoint_support import SCHEMES, assert_same_layer, layer_of, with_whole_zeros, write
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.checkpoints.compressed_tensors.write import can_write, layer_tensors, quantization_config
from safetensors.torch import load_file
from torch import Tensor

ct = pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.format import infer_module_format  # noqa: E402
from compressed_tensors.config import CompressionFormat  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)

INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_TOKEN = {**INT8_TOKEN, "type": "float"}


def weights(bits: int, kind: str, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": False, **more}


CASES = {
    "W4A16": (preset_name_to_scheme("W4A16", ["Linear"]), qao.Int4WeightOnly(128, True)),
    "W4A16 asym": (preset_name_to_scheme("W4A16_ASYM", ["Linear"]), qao.Int4WeightOnly(128)),
    "W4A16 g32": (weights(4, "int", "group", False, group_size=32), qao.Int4WeightOnly(32)),
    "W4A16 actorder": (weights(4, "int", "group", group_size=64, actorder="static"), qao.Int4WeightOnly(64, True)),
    "W4A16 channel": (weights(4, "int", "channel"), qao.Int4WeightOnly(-1, True)),
    "W4A16 channel asym": (weights(4, "int", "channel", False), qao.Int4WeightOnly(-1)),
    "W4A16 tensor": (weights(4, "int", "tensor"), qao.Int4WeightOnly(-1, True)),
    "W4A16 tensor asym": (weights(4, "int", "tensor", False), qao.Int4WeightOnly(-1)),
    "W4A16 g192": (weights(4, "int", "group", False, group_size=192), qao.Int4WeightOnly(64)),
    "W8A16 channel": (weights(8, "int", "channel"), qao.Int8WeightOnly()),
    "W8A16 tensor": (weights(8, "int", "tensor"), qao.Int8WeightOnly()),
    "W8A8": (preset_name_to_scheme("W8A8", ["Linear"]), qao.Int8DynamicActivationInt8Weight()),
    "W8A8 asym": (
        (weights(8, "int", "channel"), {**INT8_TOKEN, "symmetric": False}),
        qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    ),
    "W4A8": (preset_name_to_scheme("W4A8", ["Linear"]), qao.Int8DynamicActivationInt4Weight(128, True)),
    "W4A8 asym": (
        (weights(4, "int", "group", False, group_size=32), {**INT8_TOKEN, "symmetric": False}),
        qao.Int8DynamicActivationInt4Weight(32, symmetric_activations=False),
    ),
    "W4A8 channel asym": (
        (weights(4, "int", "channel", False), INT8_TOKEN),
        qao.Int8DynamicActivationInt4Weight(-1),
    ),
    "W8A8 tensor": ((weights(8, "int", "tensor"), INT8_TOKEN), qao.Int8DynamicActivationInt8Weight()),
    "FP8 tensor": (
        (weights(8, "float", "tensor"), {**FP8_TOKEN, "strategy": "tensor"}),
        qao.Float8DynamicActivationFloat8Weight("tensor"),
    ),
    "W4AFP8": (preset_name_to_scheme("W4AFP8", ["Linear"]), qao.Float8DynamicActivationInt4Weight(128, True)),
    "W4AFP8 packed": (preset_name_to_scheme("W4AFP8", ["Linear"]), qao.Float8DynamicActivationInt4Weight(128, True)),
    "FP8_DYNAMIC": (preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]), qao.Float8DynamicActivationFloat8Weight("row")),
    "FP8_BLOCK": (preset_name_to_scheme("FP8_BLOCK", ["Linear"]), qao.Float8DynamicActivationFloat8Weight("block")),
    "FP8": (
        preset_name_to_scheme("FP8", ["Linear"]),
        qao.Float8StaticActivationFloat8Weight("tensor", activation_scale=0.25),
    ),
    "FP8 channel, static": (
        (weights(8, "float", "channel"), weights(8, "float", "tensor")),
        qao.Float8StaticActivationFloat8Weight("row", activation_scale=0.25),
    ),
    "FP8 tensor by token": (
        (weights(8, "float", "tensor"), FP8_TOKEN),
        qao.Float8DynamicActivationFloat8Weight("row"),
    ),
    "FP8 weights": (weights(8, "float", "channel"), qao.Float8WeightOnly("row")),
}


def scheme_of(case: Any) -> QuantizationScheme:
    if not isinstance(case, QuantizationScheme):
        args, inputs = case if isinstance(case, tuple) else (case, None)
        inputs = None if inputs is None else QuantizationArgs(**inputs)
        case = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), input_activations=inputs)
    case = case.model_copy(deep=True)
    case.format = infer_module_format(torch.nn.Linear, case)
    return case


def compressor(scheme: QuantizationScheme) -> Any:
    return BaseCompressor.get_value_from_registry(CompressionFormat(scheme.format).value)


def compressed(scheme: QuantizationScheme, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A weight quantized by the rules of the scheme, as the package's compressor stores it."""
    args = scheme.weights
    groups = k // args.group_size if args.strategy == "group" else 1
    shape = {"tensor": (1,), "block": (-(-n // 128), -(-k // 128))}.get(args.strategy, (n, groups))
    state = {
        "weight": torch.randn(n, k, dtype=dtype) / 8,
        "weight_scale": (torch.rand(shape) * 0.02 + 0.01).to(dtype),
        "weight_zero_point": torch.zeros(shape, dtype=torch.int8),
    }
    if args.type == "float":
        state["weight_scale"] /= 16
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
    if scheme.input_activations is not None and not scheme.input_activations.dynamic:
        state["input_scale"] = torch.tensor([0.25])
    if args.type == "float":
        del state["weight_zero_point"]
    return compressor(scheme).compress(state, scheme)


def decompressed(state: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    return compressor(scheme).decompress(dict(state), scheme)["weight"]


def config_of(groups: dict[str, QuantizationScheme], **more: Any) -> dict[str, Any]:
    config = QuantizationConfig(config_groups=groups, format="mixed-precision", quantization_status="compressed")
    return json.loads(config.model_dump_json()) | more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_reads_what_the_package_wrote(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    scheme = scheme_of(CASES[case][0])
    if "packed" in case:
        scheme.format = CompressionFormat.pack_quantized
    n, k = (200, 384) if case == "FP8_BLOCK" else (44, 384)
    state = compressed(scheme, n, k, dtype)
    bias = torch.randn(n, dtype=dtype)
    tensors = {f"model.q_proj.{key}": value for key, value in state.items()} | {"model.q_proj.bias": bias}
    write(tmp_path, tensors, {"model_type": "llama", "quantization_config": config_of({"group_0": scheme})})

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.format == "compressed-tensors" and checkpoint.config == {"model_type": "llama"}
    assert checkpoint.others == ("model.q_proj.bias",)
    (layer,) = checkpoint.layers.values()
    expected = CASES[case][1]
    assert (layer.name, layer.out_features, layer.in_features) == ("model.q_proj", n, k)
    assert {**layer.scheme.to_dict(), "scale_dtype": None} == {**expected.to_dict(), "scale_dtype": None}
    if expected.weights == "int4":
        assert layer.scheme.scale_dtype == dtype
    linear = layer_of(checkpoint, "model.q_proj")
    assert torch.equal(linear.dequantize(dtype), decompressed(state, scheme))
    assert set(layer.keys) == set(tensors) - {"model.q_proj.bias"}


@pytest.mark.parametrize("k", [1, 7, 61, 100])
@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("case", ["W4A16 channel asym", "W8A16 channel"])
def test_tails_of_words(case: str, n: int, k: int, tmp_path: Path) -> None:
    scheme = scheme_of(CASES[case][0])
    state = compressed(scheme, n, k, torch.float16)
    write(
        tmp_path, {f"a.{key}": value for key, value in state.items()}, {"quantization_config": config_of({"g": scheme})}
    )
    linear = layer_of(open_checkpoint(tmp_path), "a")
    assert torch.equal(linear.dequantize(torch.float16), decompressed(state, scheme))


def test_groups_of_512_become_groups_of_256(tmp_path: Path) -> None:
    scheme = scheme_of(weights(4, "int", "group", False, group_size=512))
    state = compressed(scheme, 16, 1024, torch.bfloat16)
    write(
        tmp_path, {f"a.{key}": value for key, value in state.items()}, {"quantization_config": config_of({"g": scheme})}
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers["a"].scheme.group_size == 256
    assert "groups of 512 columns as groups of 256" in checkpoint.layers["a"].note
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.bfloat16), decompressed(state, scheme))


def test_eight_bits_in_groups_are_refused(tmp_path: Path) -> None:
    scheme = scheme_of(preset_name_to_scheme("W8A16", ["Linear"]))
    state = compressed(scheme, 16, 256, torch.bfloat16)
    write(tmp_path, {f"a.{key}": t for key, t in state.items()}, {"quantization_config": config_of({"g": scheme})})
    with pytest.raises(CheckpointError, match="a.weight_scale: eight bits with 2 groups per row"):
        open_checkpoint(tmp_path)


def test_static_int8_activations_are_noted(tmp_path: Path) -> None:
    scheme = scheme_of((weights(8, "int", "channel"), weights(8, "int", "tensor")))
    state = compressed(scheme, 16, 64, torch.bfloat16)
    write(
        tmp_path, {f"a.{key}": value for key, value in state.items()}, {"quantization_config": config_of({"g": scheme})}
    )
    layer = open_checkpoint(tmp_path).layers["a"]
    assert "static input scales are ignored" in layer.note and "a.input_scale" in layer.keys


def test_groups_targets_ignore_and_kv_cache(tmp_path: Path) -> None:
    int4, fp8, int8 = (scheme_of(CASES[case][0]) for case in ("W4A16", "FP8_DYNAMIC", "W8A8"))
    fp8.targets, int8.targets = ["re:.*down_proj"], ["layers.1.down_proj"]
    tensors = {}
    for name, scheme in (("layers.0.down_proj", fp8), ("layers.1.down_proj", int8), ("layers.0.q_proj", int4)):
        tensors |= {f"{name}.{key}": value for key, value in compressed(scheme, 16, 128, torch.bfloat16).items()}
    tensors |= {"lm_head.weight": torch.randn(8, 128), "layers.0.k_scale": torch.ones(1)}
    config = config_of({"a": int4, "b": fp8, "c": int8}, ignore=["lm_head"], kv_cache_scheme={"num_bits": 8})
    write(tmp_path, tensors, {"quantization_config": config})
    checkpoint = open_checkpoint(tmp_path)
    words = {name: layer.scheme.word for name, layer in checkpoint.layers.items()}
    assert words == {"layers.0.down_proj": "fp8_fp8", "layers.1.down_proj": "int8_int8", "layers.0.q_proj": "int4"}
    assert checkpoint.others == ("lm_head.weight",)
    assert "KV cache" in checkpoint.notes[0]
    config["ignore"] = ["re:.*q_proj"]
    write(tmp_path, tensors, {"quantization_config": config})
    with pytest.raises(CheckpointError, match="layers.0.q_proj is in the ignore list"):
        open_checkpoint(tmp_path)


def test_zero_points_of_symmetric_weights(tmp_path: Path) -> None:
    scheme = scheme_of(CASES["W8A8"][0])
    state = compressed(scheme, 16, 64, torch.bfloat16)
    config = {"quantization_config": config_of({"g": scheme})}
    state["weight_zero_point"] = torch.zeros(16, 1, dtype=torch.int8)
    write(tmp_path, {f"a.{key}": value for key, value in state.items()}, config)
    assert torch.equal(layer_of(open_checkpoint(tmp_path), "a").dequantize(torch.bfloat16), decompressed(state, scheme))
    state["weight_zero_point"][5] = 1
    write(tmp_path, {f"a.{key}": value for key, value in state.items()}, config)
    with pytest.raises(CheckpointError, match="a.weight_zero_point: has zero points other than 0"):
        open_checkpoint(tmp_path)


REFUSED = {
    "e2m1": (lambda c: c["config_groups"]["g"]["weights"].update(num_bits=4, type="float"), "groups of 16"),
    "three bits": (lambda c: c["config_groups"]["g"]["weights"].update(num_bits=3), "int of 3 bits"),
    "group 16": (lambda c: c["config_groups"]["g"]["weights"].update(group_size=16), "groups of 16 columns"),
    "group 0": (lambda c: c["config_groups"]["g"]["weights"].update(group_size=0), "group_size must be positive"),
    "group text": (lambda c: c["config_groups"]["g"]["weights"].update(group_size="64"), "integer"),
    "group huge": (lambda c: c["config_groups"]["g"]["weights"].update(group_size=1 << 70), "integer"),
    "bits negative": (lambda c: c["config_groups"]["g"]["weights"].update(num_bits=-4), "integer"),
    "symmetric text": (lambda c: c["config_groups"]["g"]["weights"].update(symmetric="yes"), "true or false"),
    "8 bits in groups": (lambda c: c["config_groups"]["g"]["weights"].update(num_bits=8), "weight_shape"),
    "W4A4": (lambda c: c["config_groups"]["g"].update(input_activations={"num_bits": 4}), "num_bits must be 8"),
    "transforms": (lambda c: c.update(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "sparse": (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    "experts": (lambda c: c.update(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config"),
    "format": (lambda c: c.update(format="marlin-24"), "marlin-24"),
    "no group": (lambda c: c["config_groups"]["g"].update(targets=["Conv2d"]), "no group"),
    "pattern": (lambda c: c["config_groups"]["g"].update(targets=["re:("]), "not a regular expression"),
    "weights a number": (lambda c: c["config_groups"]["g"].update(weights=7), "must be an object"),
    "groups a list": (lambda c: c.update(config_groups=[1]), "must be an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    scheme = scheme_of(weights(4, "int", "group", group_size=64))
    state = compressed(scheme, 16, 128, torch.bfloat16)
    config = config_of({"g": scheme}, format="pack-quantized")
    config["config_groups"]["g"]["format"] = None
    REFUSED[case][0](config)
    write(tmp_path, {f"a.{key}": value for key, value in state.items()}, {"quantization_config": config})
    with pytest.raises(CheckpointError, match=REFUSED[case][1]):
        open_checkpoint(tmp_path)


DAMAGED = {
    "weight_shape lies": ({"weight_shape": torch.tensor([16, 1 << 40])}, "says \\[16, 1099511627776\\]"),
    "weight_shape negative": ({"weight_shape": torch.tensor([-16, 128])}, "says \\[-16, 128\\]"),
    "weight_shape long": (
        {"weight_shape": torch.zeros(1000, dtype=torch.int64)},
        "must be int64 or int32 of shape \\[2\\]",
    ),
    "weight_packed dtype": ({"weight_packed": torch.zeros(16, 16)}, "must be int32"),
    "weight_packed 3-D": ({"weight_packed": torch.zeros(2, 16, 16, dtype=torch.int32)}, "fused experts"),
    "weight_packed empty": ({"weight_packed": torch.zeros(0, 16, dtype=torch.int32)}, "a matrix is needed"),
    "scales short": ({"weight_scale": torch.ones(16, 1)}, "of shape \\[16, 2\\]"),
    "scales missing": ({"weight_scale": None}, "weight_scale: this tensor is missing"),
    "zeros short": ({"weight_zero_point": torch.zeros(1, 2, dtype=torch.int32)}, "must be int32 of shape \\[2, 2\\]"),
    "NaN": ({"weight_scale": torch.full((16, 2), float("nan"))}, "NaN or Inf"),
    "Inf": ({"weight_scale": torch.full((16, 2), float("inf"))}, "NaN or Inf"),
    "g_idx": ({"weight_g_idx": torch.arange(128, dtype=torch.int32) % 2}, "reordered"),
    "g_idx negative": ({"weight_g_idx": torch.full((128,), -1, dtype=torch.int32)}, "reordered"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors(case: str, tmp_path: Path) -> None:
    scheme = scheme_of(weights(4, "int", "group", False, group_size=64))
    state = compressed(scheme, 16, 128, torch.bfloat16) | DAMAGED[case][0]
    tensors = {f"a.{key}": value for key, value in state.items() if value is not None}
    write(tmp_path, tensors, {"quantization_config": config_of({"g": scheme})})
    with pytest.raises(CheckpointError, match=DAMAGED[case][1]):
        open_checkpoint(tmp_path).layers["a"].read()


def test_int8_file_with_values_beyond_four_bits(tmp_path: Path) -> None:
    scheme = scheme_of(preset_name_to_scheme("W4A8", ["Linear"]))
    state = compressed(scheme, 16, 128, torch.bfloat16)
    state["weight"][3, 4] = 8
    write(
        tmp_path, {f"a.{key}": value for key, value in state.items()}, {"quantization_config": config_of({"g": scheme})}
    )
    with pytest.raises(CheckpointError, match="holds 8; four-bit values are -8..7"):
        open_checkpoint(tmp_path).layers["a"].read()


@pytest.mark.parametrize("scheme", [with_whole_zeros(scheme) for scheme in SCHEMES], ids=str)
def test_written_layers_come_back_and_the_package_reads_them(scheme: qao.schemes.Scheme, tmp_path: Path) -> None:
    shapes = [(40, 256), (16, 512)]
    if not isinstance(scheme, (qao.schemes.Fp4Weight, qao.schemes.Int4Weight)) or scheme.group_size == -1:
        shapes.append((37, 101))
    layers = {
        f"l{i}": qao.QuantLinear.from_linear(torch.nn.Linear(k, n, bias=False), scheme)
        for i, (n, k) in enumerate(shapes)
    }
    config = quantization_config({name: layer.scheme for name, layer in layers.items()}, ["lm_head"])
    tensors = {f"{name}.{key}": t for name, layer in layers.items() for key, t in layer_tensors(layer).items()}
    write(tmp_path, tensors, {"quantization_config": config})

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers.keys() == layers.keys() and not checkpoint.others
    for name, layer in layers.items():
        assert_same_layer(layer_of(checkpoint, name), layer)
        assert checkpoint.layers[name].note is None

    theirs = QuantizationConfig.model_validate(config)
    (group,) = theirs.config_groups.values()
    saved = load_file(tmp_path / "model.safetensors")
    for name, layer in layers.items():
        state = {key.removeprefix(f"{name}."): t for key, t in saved.items() if key.startswith(f"{name}.")}
        expected = compressor(group).compression_param_names(group)
        assert set(state) - {"input_scale"} == set(expected)
        dtype = torch.bfloat16 if scheme.word == "fp4" else state["weight_scale"].dtype
        assert torch.equal(decompressed(state, group), layer.dequantize(dtype))


@pytest.mark.parametrize(("n", "k"), [(2, 64), (2, 256), (1, 64), (9, 64)])
def test_zero_points_of_a_layer_with_few_outputs(n: int, k: int, tmp_path: Path) -> None:
    """One word of zero points per column of groups, a classifier of two classes for example."""
    scheme = qao.Int4WeightOnly(group_size=64, whole_zeros=True)
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(k, n, bias=False), scheme)
    tensors = {f"a.{key}": tensor for key, tensor in layer_tensors(layer).items()}
    write(tmp_path, tensors, {"quantization_config": quantization_config({"a": scheme}, [])})
    assert_same_layer(layer_of(open_checkpoint(tmp_path), "a"), layer)


def test_presets_are_said_as_the_package_says_them() -> None:
    presets = {
        "W4A16": qao.Int4WeightOnly(128, True),
        "W4A16_ASYM": qao.Int4WeightOnly(128),
        "W8A8": qao.Int8DynamicActivationInt8Weight(),
        "W4A8": qao.Int8DynamicActivationInt4Weight(128, True),
        "W4AFP8": qao.Float8DynamicActivationInt4Weight(128, True),
        "FP8": qao.Float8StaticActivationFloat8Weight("tensor", activation_scale=1.0),
        "FP8_DYNAMIC": qao.Float8DynamicActivationFloat8Weight("row"),
        "FP8_BLOCK": qao.Float8DynamicActivationFloat8Weight("block"),
        "NVFP4A16": qao.Fp4WeightOnly("nvfp4"),
        "MXFP4A16": qao.Fp4WeightOnly(),
    }
    for name, scheme in presets.items():
        theirs = scheme_of(preset_name_to_scheme(name, ["Linear"]))
        (ours,) = QuantizationConfig.model_validate(quantization_config({"a": scheme}, [])).config_groups.values()
        for part in ("weights", "input_activations"):
            a, b = getattr(theirs, part), getattr(ours, part)
            fields = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
            assert (a is None) == (b is None)
            assert a is None or all(getattr(a, field) == getattr(b, field) for field in fields), (name, part)
        # The package keeps W4AFP8 in int8; vLLM reads it packed, as older versions of the package wrote it.
        assert ours.format == ("pack-quantized" if name == "W4AFP8" else theirs.format), name


def test_several_schemes_make_groups_with_exact_targets(tmp_path: Path) -> None:
    schemes = {
        "a.q": qao.Int4WeightOnly(32, whole_zeros=True),
        "a.k": qao.Int4WeightOnly(32, whole_zeros=True),
        "a.o": qao.Float8DynamicActivationFloat8Weight("row", fast_accum=True),
        "head": qao.Float8StaticActivationFloat8Weight("row", activation_scale=0.5),
        "tail": qao.Float8StaticActivationFloat8Weight("row", activation_scale=2.0),
    }
    layers = {name: qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), scheme) for name, scheme in schemes.items()}
    config = quantization_config(schemes, [])
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [
        ["a.q", "a.k"],
        ["a.o"],
        ["head", "tail"],
    ]
    assert config["qao"] == {"group_0": {"whole_zeros": True}, "group_1": {"fast_accum": True}}
    QuantizationConfig.model_validate(config)
    tensors = {f"{name}.{key}": t for name, layer in layers.items() for key, t in layer_tensors(layer).items()}
    write(tmp_path, tensors, {"quantization_config": config})
    checkpoint = open_checkpoint(tmp_path)
    for name, layer in layers.items():
        assert_same_layer(layer_of(checkpoint, name), layer)
    assert checkpoint.layers["a.o"].scheme.fast_accum and not checkpoint.layers["head"].scheme.fast_accum
    assert checkpoint.layers["tail"].scheme.activation_scale == 2.0


def test_what_cannot_be_written() -> None:
    assert can_write(qao.Int4WeightOnly(64), 128) is None
    assert "not a multiple of the group size 64" in can_write(qao.Int4WeightOnly(64), 100)
    with pytest.raises(ValueError, match="not a multiple"):
        layer_tensors(qao.QuantLinear.from_linear(torch.nn.Linear(100, 16), qao.Int4WeightOnly(64)))
    q = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    fractions = qao.QuantLinear.from_quantized(
        q, torch.ones(16, 2), torch.full((16, 2), 7.5), scheme=qao.Int4WeightOnly(32)
    )
    with pytest.raises(ValueError, match="not integers"):
        layer_tensors(fractions)
    with pytest.raises(ValueError, match="no layer"):
        quantization_config({}, [])

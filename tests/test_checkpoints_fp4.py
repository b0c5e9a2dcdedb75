"""MXFP4 and NVFP4 files written by compressed-tensors: read bit for bit as by that package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from accuracy import check_close
from checkpoint_support import layer_of, write
from qao.checkpoints import CheckpointError, open_checkpoint
from torch import Tensor

ct = pytest.importorskip("compressed_tensors")
from compressed_tensors.quantization import preset_name_to_scheme  # noqa: E402
from test_checkpoints_compressed_tensors import compressor, config_of, decompressed, scheme_of  # noqa: E402

N, K = 44, 384
PRESETS = {"NVFP4A16": "nvfp4", "MXFP4A16": "mxfp4", "NVFP4": "nvfp4", "MXFP4": "mxfp4"}


def package_scheme(preset: str) -> Any:
    return scheme_of(preset_name_to_scheme(preset, ["Linear"]))


def compressed(preset: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A weight as the package's compressor stores it, with scales as its observers choose them."""
    scheme = package_scheme(preset)
    size = scheme.weights.group_size
    weight = torch.randn(N, K, dtype=dtype) * torch.logspace(-2, 0, N)[:, None].to(dtype)
    largest = weight.float().view(N, K // size, size).abs().amax(-1)
    if PRESETS[preset] == "nvfp4":
        divisor = (6 * 448 / largest.max()).reshape(1)
        scale = (largest / 6 * divisor).to(torch.float8_e4m3fn).to(dtype)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    else:
        state = {"weight": weight, "weight_scale": 2.0 ** (largest.log2().floor() - 2)}
    return compressor(scheme).compress(state, scheme)


def checkpoint(directory: Path, preset: str, state: dict[str, Tensor], **more: Any) -> Any:
    tensors = {f"a.b.{name}": tensor for name, tensor in state.items()}
    write(directory, tensors, {"quantization_config": config_of({"group_0": package_scheme(preset)}, **more)})
    return open_checkpoint(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", PRESETS)
def test_reads_what_the_package_wrote(preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = compressed(preset, dtype)
    opened = checkpoint(tmp_path, preset, state)
    layer = layer_of(opened, "a.b")
    assert layer.scheme == qao.Fp4WeightOnly(PRESETS[preset])
    expected = decompressed(state, package_scheme(preset))
    assert torch.equal(layer.dequantize(expected.dtype), expected)
    note = opened.layers["a.b"].note
    assert (note is None) == preset.endswith("A16") and (note is None or "activations are not quantized" in note)
    assert not opened.others


def test_a_global_scale_of_activations_is_taken_and_left_out(tmp_path: Path) -> None:
    state = compressed("NVFP4", torch.bfloat16) | {"input_global_scale": torch.tensor([300.0])}
    opened = checkpoint(tmp_path, "NVFP4", state)
    assert not opened.others and "a.b.input_global_scale" in opened.layers["a.b"].keys


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16"])
def test_a_layer_multiplies_by_what_is_stored(preset: str, tmp_path: Path) -> None:
    """The package rounds a weight to bfloat16, its layers do not."""
    state = compressed(preset, torch.bfloat16)
    layer = layer_of(checkpoint(tmp_path, preset, state), "a.b")
    x = torch.randn(3, K)
    check_close(layer(x), x, layer.dequantize(torch.float64))
    rounded = decompressed(state, package_scheme(preset)).double()
    torch.testing.assert_close(layer.dequantize(torch.float64), rounded, rtol=2.0**-8, atol=0)


Change = dict[str, Tensor | None]


@pytest.mark.parametrize(
    "preset, change, message",
    [
        ("NVFP4A16", {"weight_packed": torch.zeros(N, K // 2, dtype=torch.int8)}, "weight_packed.*uint8"),
        ("NVFP4A16", {"weight_packed": torch.zeros(N, 2, K // 4, dtype=torch.uint8)}, "weight_packed.*experts"),
        ("NVFP4A16", {"weight_packed": torch.zeros(N, 0, dtype=torch.uint8)}, "weight_packed"),
        ("NVFP4A16", {"weight_scale": torch.ones(N, 3).to(torch.float8_e4m3fn)}, "weight_scale"),
        ("NVFP4A16", {"weight_scale": torch.ones(N, K // 16)}, "weight_scale"),
        ("NVFP4A16", {"weight_global_scale": None}, "weight_global_scale"),
        ("NVFP4A16", {"weight_global_scale": torch.ones(2)}, "weight_global_scale"),
        ("MXFP4A16", {"weight_scale": torch.ones(N, K // 32).to(torch.float8_e4m3fn)}, "weight_scale"),
        ("MXFP4A16", {"weight_scale": torch.ones(N, K // 16, dtype=torch.uint8)}, "weight_scale"),
    ],
)
def test_damaged_files_are_refused_when_opened(preset: str, change: Change, message: str, tmp_path: Path) -> None:
    state = {
        name: tensor for name, tensor in (compressed(preset, torch.bfloat16) | change).items() if tensor is not None
    }
    with pytest.raises(CheckpointError, match=message):
        checkpoint(tmp_path, preset, state)


@pytest.mark.parametrize(
    "preset, change, message",
    [
        ("NVFP4A16", {"weight_scale": torch.full((N, K // 16), float("nan")).to(torch.float8_e4m3fn)}, "holds NaN"),
        ("NVFP4A16", {"weight_scale": torch.full((N, K // 16), -1.0).to(torch.float8_e4m3fn)}, "a.b: .*0 or more"),
        ("NVFP4A16", {"weight_global_scale": torch.tensor([float("inf")])}, "holds NaN or Inf"),
        ("NVFP4A16", {"weight_global_scale": torch.zeros(1)}, "a.b: .*divisor"),
        ("MXFP4A16", {"weight_scale": torch.full((N, K // 32), 255, dtype=torch.uint8)}, "holds NaN"),
    ],
)
def test_damaged_numbers_are_refused_when_read(preset: str, change: Change, message: str, tmp_path: Path) -> None:
    state = compressed(preset, torch.bfloat16) | change
    with pytest.raises(CheckpointError, match=message):
        checkpoint(tmp_path, preset, state).layers["a.b"].pack()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"group_size": 64}, "strategy.*tensor_group with groups of 16 or group with groups of 32"),
        ({"strategy": "tensor"}, "strategy.*tensor_group with groups of 16"),
        ({"symmetric": False}, "symmetric.*true for float weights"),
        ({"scale_dtype": "torch.float32"}, "scale_dtype.*e4m3fn in groups of 16"),
        ({"num_bits": 6}, "float of 6 bits"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config_of({"group_0": package_scheme("NVFP4A16")})
    config["config_groups"]["group_0"]["weights"] |= change
    state = {f"a.b.{name}": tensor for name, tensor in compressed("NVFP4A16", torch.bfloat16).items()}
    write(tmp_path, state, {"quantization_config": config})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)

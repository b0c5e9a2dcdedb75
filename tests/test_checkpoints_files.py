"""Opening of checkpoints: choice of file and format, shards, laziness, and malicious files."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import qao
import torch
from checkpoint_support import SCHEMES, assert_same_layer, layer_of, write
from qao.checkpoints import CheckpointError, native, open_checkpoint
from qao.checkpoints import settings as settings_module
from safetensors.torch import save_file


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_qao_reads_its_own(scheme: qao.schemes.Scheme, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 17, bias=False))
    qao.quantize_(model, scheme)
    write(tmp_path, model.state_dict(), {"hidden": 40})
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.config) == ("qao", {"hidden": 40})
    assert checkpoint.others == ("0.bias", "1.bias", "1.weight")
    for name in ("0", "2"):
        assert_same_layer(layer_of(checkpoint, name), model[int(name)])
        packed = checkpoint.layers[name].pack()
        assert all(
            torch.equal(packed[part], t) for part, t in model[int(name)].packed.tensors().items() if t is not None
        )

    with torch.device("meta"):
        fresh = torch.nn.Sequential(
            torch.nn.Linear(300, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 17, bias=False)
        )
    qao.quantize_(fresh, {name: layer.scheme for name, layer in checkpoint.layers.items()})
    fresh.load_state_dict({name: lazy.load() for name, lazy in checkpoint.state_dict().items()}, assign=True)
    x = torch.randn(3, 300)
    assert torch.equal(fresh(x), model(x))


def test_a_layer_by_itself(tmp_path: Path) -> None:
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), qao.Int8WeightOnly())
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    checkpoint = open_checkpoint(tmp_path / "layer.safetensors")
    assert set(checkpoint.state_dict()) == {"qweight", "scales", "bias"}
    assert torch.equal(checkpoint.state_dict()["qweight"].load(), layer.qweight)


def test_tensors_with_several_names(tmp_path: Path) -> None:
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), qao.Int4WeightOnly(32))
    tensors = {f"a.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors["b.pip_install_qao"] = layer.pip_install_qao
    aliases = {"b.qweight": "a.qweight", "b.scales": "a.scales", "norm": "a.bias"}
    write(tmp_path, tensors, {}, aliases=json.dumps(aliases))
    checkpoint = open_checkpoint(tmp_path)
    assert_same_layer(layer_of(checkpoint, "b"), layer)
    assert set(checkpoint.others) == {"a.bias", "norm"} and torch.equal(checkpoint.tensor("norm"), layer.bias)
    assert torch.equal(checkpoint.state_dict()["norm"][3:5], layer.bias[3:5])
    for bad in (
        "[1]",
        "{",
        '{"b.qweight": "z"}',
        '{"b.qweight": [1]}',
        '{"a.bias": "a.scales"}',
        '{"x": "y", "y": "x"}',
    ):
        write(tmp_path, tensors, {}, aliases=bad)
        with pytest.raises(CheckpointError, match="aliases|is impossible"):
            open_checkpoint(tmp_path)


def test_native_header_of_a_newer_version(tmp_path: Path) -> None:
    model = torch.nn.Sequential(qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), qao.Int8WeightOnly()))
    write(tmp_path, model.state_dict(), {}, qao="2")
    for load in (open_checkpoint, lambda path: qao.load(path, model)):
        with pytest.raises(CheckpointError, match="header: written by a newer qao .*pip install -U qao"):
            load(tmp_path)


def test_native_marker_that_lies(tmp_path: Path) -> None:
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), qao.Int4WeightOnly(32))
    tensors = {f"a.{name}": tensor for name, tensor in layer.state_dict().items()}
    for change, message in (
        ({"out_features": 1 << 62}, "is not the shape of a weight"),
        ({"out_features": 32}, "of shape \\[2, 1, 512\\]"),
        ({"in_features": -1}, "not a marker"),
        ({"version": 99}, "newer qao"),
        ({"scheme": {"scheme": "int3"}}, "is not a scheme"),
        ({"scheme": {"scheme": "int4", "group_size": 7}}, "group_size"),
        ({"dtype": "load"}, "not a marker"),
    ):
        content = json.loads(bytes(layer.pip_install_qao.tolist())) | change
        text = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        write(tmp_path, tensors | {"a.pip_install_qao": text}, {})
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


def test_float(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(6, 5).bfloat16(), "b": torch.arange(4), "c": torch.tensor(2.0)}
    write(tmp_path, tensors, {"model_type": "x"})
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "float" and not checkpoint.layers and checkpoint.config == {"model_type": "x"}
        assert set(checkpoint.others) == set(tensors)
        state = checkpoint.state_dict()
        for name, tensor in tensors.items():
            assert checkpoint.shape_dtype(name) == (tuple(tensor.shape), tensor.dtype)
            assert (state[name].shape, state[name].dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(checkpoint.tensor(name), tensor) and torch.equal(state[name][...], tensor)
        assert torch.equal(state["a.weight"][1:3, 2], tensors["a.weight"][1:3, 2])
    with pytest.raises(KeyError, match="nothing"):
        checkpoint.tensor("nothing")


def shards(directory: Path) -> dict[str, str]:
    save_file({"a.weight": torch.ones(2, 2)}, directory / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(2, 2), "unlisted": torch.zeros(1)}, directory / "model-2.safetensors")
    return {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}


def index(directory: Path, content: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def test_shards(tmp_path: Path) -> None:
    index(tmp_path, {"weight_map": shards(tmp_path)})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.others == ("a.weight", "b.weight")
    assert torch.equal(checkpoint.tensor("b.weight"), torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight": "../model-1.safetensors"}, "is not the name of a .safetensors file"),
        ({"a.weight": "/etc/passwd"}, "is not the name of a .safetensors file"),
        ({"a.weight": "sub/model-1.safetensors"}, "is not the name of a .safetensors file"),
        ({"a.weight": "..\\model-1.safetensors"}, "is not the name of a .safetensors file"),
        ({"a.weight": "model-1.bin"}, "is not the name of a .safetensors file"),
        ({"a.weight": 7}, "is not the name of a .safetensors file"),
        ({"a.weight": "model-9.safetensors"}, "no such file, but the index says"),
        ({"c.weight": "model-1.safetensors"}, "the index says that this tensor is here"),
    ],
)
def test_an_index_that_points_elsewhere(change: dict[str, object], message: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    places = shards(inside)
    shards(tmp_path)
    index(inside, {"weight_map": places | change})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(inside)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_places(content: object, tmp_path: Path) -> None:
    shards(tmp_path)
    index(tmp_path, content)
    with pytest.raises(CheckpointError, match="weight_map|not an object"):
        open_checkpoint(tmp_path)


def safetensors_of(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
BROKEN = {
    "empty": b"",
    "short": b"\x10",
    "no header": b"\xff" * 64,
    "header beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": (8).to_bytes(8, "little") + b"nonsense",
    "cut off": safetensors_of(GOOD, b"\0" * 15),
    "too long": safetensors_of(GOOD, b"\0" * 17),
    "sizes that overflow": safetensors_of({"a": {**GOOD["a"], "shape": [1 << 40, 1 << 40]}}, b"\0" * 16),
    "a huge size": safetensors_of(
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, b"\0" * 16
    ),
    "offsets backwards": safetensors_of({"a": {**GOOD["a"], "data_offsets": [16, 0]}}, b"\0" * 16),
    "negative shape": safetensors_of({"a": {**GOOD["a"], "shape": [-4]}}, b"\0" * 16),
    "a pickle": b"\x80\x02}q\x00.",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(BROKEN[case])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="model.safetensors: not a readable safetensors file"):
        open_checkpoint(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="file permissions of POSIX")
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json", "."])
def test_a_file_without_permission(name: str) -> None:
    """safetensors says "No such file or directory", and glob finds nothing in such a directory."""
    with tempfile.TemporaryDirectory() as directory:  # pytest's tmp_path is closed to other users
        path, whole = Path(directory), Path(directory) / "model.safetensors"
        save_file({"a": torch.zeros(4)}, whole)
        (path / "config.json").write_text("{}")
        if name.endswith("index.json"):
            whole.rename(path / "part.safetensors")
            (path / name).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
        for one in (path, *path.iterdir()):
            one.chmod(0o755)
        (path / name).chmod(0o111 if name == "." else 0)
        user = os.geteuid()
        if user == 0:  # root reads every file
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=re.escape(str(path / name))):
                open_checkpoint(path)
            if name == whole.name:
                with pytest.raises(PermissionError, match=re.escape(str(whole))):
                    native.markers_in_files([whole])
        finally:
            os.seteuid(user)
            (path / name).chmod(0o755)


def test_a_dtype_that_qao_does_not_read(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    (tmp_path / "model.safetensors").write_bytes(safetensors_of(header, b"\0\0"))
    with pytest.raises(CheckpointError, match="a: qao does not support the dtype F4"):
        open_checkpoint(tmp_path)


def test_which_file_is_meant(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="pickle"):
            open_checkpoint(path)
    shards(tmp_path)
    with pytest.raises(CheckpointError, match="several files could be loaded"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "model-1.safetensors").others == ("a.weight",)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).others == ("c",)


@pytest.mark.parametrize("text", ["[]", "{", "", "[" * 100_000, '{"quantization_config": "awq"}', "\xff\xfe"])
def test_broken_configs(text: str, tmp_path: Path) -> None:
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match="config.json"):
        open_checkpoint(tmp_path)


def test_a_layer_is_read_once_for_all_its_tensors(tmp_path: Path) -> None:
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), qao.Int8DynamicActivationInt8Weight())
    write(tmp_path, {f"a.{name}": tensor for name, tensor in layer.state_dict().items()}, {})
    checkpoint = open_checkpoint(tmp_path)
    reads = []
    stored = checkpoint.layers["a"].stored
    checkpoint.layers["a"] = replace(checkpoint.layers["a"], stored=lambda: reads.append(1) or stored())
    state = checkpoint.state_dict()
    assert not reads
    first, second = state["a.qweight"].load(), state["a.scales"].load()
    assert len(reads) == 1 and torch.equal(first, layer.qweight) and torch.equal(second, layer.scales)
    assert torch.equal(state["a.qweight"].load(), layer.qweight) and len(reads) == 2


def test_every_refusal_names_the_file(tmp_path: Path) -> None:
    """Of a tensor without a module, of a torchao header, of values that a scheme cannot hold; at bounded length."""
    int8 = {"a._weight_qdata": torch.ones(16, 64, dtype=torch.int8), "a._weight_scale": torch.ones(16, 1)}
    about = json.dumps({"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}})
    header = {"tensor_names": '["a.weight"]', "a.weight": about}
    nvfp4 = {"a.weight": torch.zeros(32, 32, dtype=torch.uint8), "a.weight_scale_2": torch.tensor(1e-38)}
    nvfp4["a.weight_scale"] = torch.ones(32, 4).to(torch.float8_e4m3fn)
    fp8 = {".weight": torch.ones(16, 32).to(torch.float8_e4m3fn), ".weight_scale": torch.ones(())}
    sums = {"a.weight": torch.full((16, 64), 127, dtype=torch.int8), "a.weight_scale": torch.full((16, 1), 3e38)}
    tokens = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}
    channels = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": channels, "input_activations": tokens}
    overflow = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    static = {"a.weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(())}
    static["a.input_scale"] = torch.tensor(1e-45)
    for tensors, settings, metadata in (
        (sums, overflow, {}),
        (static, {"quant_method": "modelopt", "quant_algo": "FP8"}, {}),
        (int8, {"quant_method": "torchao"}, header),
        (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}),
        (fp8, {"quant_method": "fp8"}, {}),
    ):
        write(tmp_path, tensors, {"quantization_config": settings}, **metadata)
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            for layer in open_checkpoint(tmp_path).layers.values():
                layer.pack()
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    text = b'{"a":{"dtype":"F32","shape":"' + b"y" * 5000 + b'","data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[-4:])
    with pytest.raises(CheckpointError, match="not a readable safetensors file") as caught:
        open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 2000


def test_load_refuses_another_dtype_by_value_error(tmp_path: Path) -> None:
    model = torch.nn.Sequential(qao.QuantLinear.from_linear(torch.nn.Linear(64, 16), qao.Int8WeightOnly()))
    state = model.state_dict()
    write(tmp_path, state | {"0.qweight": state["0.qweight"].float()}, {})
    with pytest.raises(ValueError, match=rf"(?s)load: {re.escape(str(tmp_path))}.*float32\[16, 64\]"):
        qao.load(tmp_path, model)


def test_a_pattern_of_a_config_cannot_hang_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_SECONDS", 0.05)
    assert settings_module.matches("a+", "a" * 60, "config.json")
    with pytest.raises(CheckpointError, match=r"config.json: '\(a\|aa\)\+x' takes too long on the name 'aaa"):
        settings_module.matches("(a|aa)+x", "a" * 60, "config.json")
    with pytest.raises(CheckpointError, match=r"config.json: '\(a' is not a regular expression: missing \)"):
        settings_module.matches("(a", "a", "config.json")

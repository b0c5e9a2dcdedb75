"""Saving and loading quantized models: the same model again, or an error."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch
from torch import nn

pytest.importorskip("safetensors")
WORDS = list(qao.schemes.SCHEMES)
CONTAINERS = [name for name in support.CONTAINERS if support.importable(name)]
Results = Callable[[str], dict[str, Any]]


def save(container: str, scheme: qao.Scheme, path: Path) -> torch.Tensor:
    path.mkdir()
    if container.startswith("transformers") or container == "diffusers":
        model = support.transformer() if container == "diffusers" else support.llama(128)
        if container == "transformers":  # 96 columns in groups of 128 are what compressed-tensors cannot say
            model = support.llama(96)
            qao.quantize_(model, {"model.layers.0.mlp.up_proj": qao.Int4WeightOnly()})
        if container == "transformers_ct" and isinstance(scheme, qao.schemes.Int4Weight):
            # It has no others, and vLLM reads none next to quantized activations.
            plain = scheme.activations == "float"
            scheme = replace(scheme, whole_zeros=True) if plain else replace(scheme, symmetric=True)
        qao.quantize_(model, scheme)
        model.save_pretrained(path)
    else:
        model = support.plain_model()
        qao.quantize_(model, scheme)
        state = model.state_dict()
        if container == "qao":
            qao.save(model, path)
        elif container == "torch":
            torch.save(state, path / "x.pt")
        elif container == "safetensors":
            from safetensors.torch import save_file

            save_file(state, path / "x.safetensors")
        else:
            import torch.distributed.checkpoint as dcp

            dcp.save(state, checkpoint_id=path, no_dist=True)
    expected = support.run(model, container)
    torch.save(expected, path / "expected.pt")
    return expected


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for container in CONTAINERS:
        for word, kind in qao.schemes.SCHEMES.items():
            save(container, kind(), root / f"{container}-{word}")
    return root


def process(what: str, directory: Path) -> dict[str, Any]:
    arguments = [sys.executable, support.__file__, what, str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    results: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return results


@pytest.fixture(scope="module")
def loaded(directory: Path) -> dict[str, Any]:
    return process("load", directory)


@pytest.fixture(scope="module")
def refused(directory: Path) -> dict[str, Any]:
    return process("refuse", directory)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_with_qao_it_is_what_it_was(container: str, word: str, loaded: dict[str, Any]) -> None:
    assert loaded[f"{container}-{word}"] == {"equal": True, "error": 0.0}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "transformers_ct"])
def test_without_qao_it_is_an_error(container: str, word: str, refused: dict[str, Any]) -> None:
    result = refused[f"{container}-{word}"]
    assert "raised" in result, result
    said = result["raised"] + result["log"]
    if container == "dcp":  # it only reads requested names, and the marker is not one of them
        assert "size mismatch" in said.lower(), said
    elif container == "diffusers" or (container == "transformers" and "LOAD REPORT" not in said):
        assert "Unknown quantization type, got qao" in said, said  # version 4 of transformers lists no names
    else:
        assert "pip_install_qao" in said, said


@pytest.mark.parametrize("word", WORDS)
def test_without_qao_compressed_tensors_is_right_or_an_error(word: str, refused: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("transformers")
    result = refused[f"transformers_ct-{word}"]
    # transformers makes no room for packed zero points, and says so.
    assert ("raised" in result and word == "int4") or result["error"] < 0.15, result


@pytest.mark.parametrize("word", WORDS)
def test_formats_are_what_the_tests_mean(word: str, directory: Path) -> None:
    pytest.importorskip("transformers")
    for container, method in (("transformers", "qao"), ("transformers_ct", "compressed-tensors")):
        config = json.loads((directory / f"{container}-{word}" / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == method


@pytest.mark.parametrize("kind", [qao.Int8DynamicActivationInt4Weight, qao.Float8DynamicActivationInt4Weight])
def test_zero_points_beside_quantized_activations_are_saved_for_engines(kind: Any, tmp_path: Path) -> None:
    """vLLM and SGLang load them in qao's own format alone, even if they are whole."""
    pytest.importorskip("transformers")
    for symmetric, method in ((False, "qao"), (True, "compressed-tensors")):
        model = support.llama(128)
        qao.quantize_(model, kind(symmetric=symmetric, whole_zeros=True))
        model.save_pretrained(tmp_path / method)
        config = json.loads((tmp_path / method / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == method


# ---- qao.save and qao.load -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.again = self.up
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.again(self.embed(ids)) + self.up(self.embed(ids))) + self.offset)


IDS = torch.arange(7)


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("largest", [5_000_000_000, 2000])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shared_tensors_and_shards(tmp_path: Path, embeddings: bool, largest: int, device: str) -> None:
    model = Tied()
    qao.quantize_(model, qao.Int8WeightOnly(), embeddings=embeddings)
    files = qao.save(model, tmp_path / "a", max_shard_size=largest)
    assert sorted(path.name for path in (tmp_path / "a").glob("*.safetensors")) == [path.name for path in files]
    assert (len(files) > 1) == (largest == 2000) == (tmp_path / "a" / "model.safetensors.index.json").exists()
    with torch.device(device):
        other = Tied()
    assert qao.load(tmp_path / "a", other) is other
    assert torch.equal(other(IDS), model(IDS))
    assert other.up is other.again and isinstance(other.up, qao.QuantLinear)
    if embeddings:
        assert other.head.qweight is other.embed.qweight
    else:
        assert other.head.weight is other.embed.weight
    assert {n: p.requires_grad for n, p in other.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }


def test_a_second_save_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    model = Tied()
    qao.save(model, tmp_path, max_shard_size=2000)
    (tmp_path / "notes.txt").write_text("mine")
    qao.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    assert torch.equal(qao.load(tmp_path, Tied())(IDS), model(IDS))


@pytest.mark.parametrize("name", ["model.safetensors", "directory"])
def test_a_full_disk_changes_nothing_and_the_error_names_the_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    qao.save(Tied(), path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{re.escape(str(path))}'"):
            qao.save(Tied(), path, max_shard_size=1500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_an_error_of_the_directory_names_the_path_that_was_given() -> None:
    with pytest.raises(OSError, match="'/proc/x.safetensors'"):  # not the temporary file; root cannot write there
        qao.save(nn.Sequential(nn.Linear(4, 4)), "/proc/x.safetensors")


def test_a_stopped_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qao.save(Tied(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def stop(tensor: torch.Tensor) -> torch.Tensor:
        assert len(list(tmp_path.iterdir())) > 1  # some of it is on the disk
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "contiguous", stop)
    with pytest.raises(KeyboardInterrupt):
        qao.save(Tied(), tmp_path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_a_save_is_what_safetensors_writes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    dtypes = [torch.uint8, torch.int64, torch.bfloat16, torch.complex64, torch.bool, torch.float32, torch.float8_e4m3fn]
    model = nn.Module()
    for index, dtype in enumerate([*dtypes, *dtypes]):
        model.register_buffer(f"b{index * 5 % 14}", torch.ones(3 + index % 2).to(dtype))
    model.register_buffer("é", torch.zeros(0, 3))
    model.register_buffer("transposed", torch.randn(4, 6).t())
    qao.save(model, tmp_path / "a.safetensors")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "b.safetensors", {"format": "pt", "qao": "1"})
    ours, theirs = ((tmp_path / f"{name}.safetensors").read_bytes().partition(b"}") for name in "ab")
    assert ours[0].endswith(b'{"__metadata__":{"format":"pt","qao":"1"')  # in any order in the library's files
    assert ours[2] == theirs[2]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    qao.load(tmp_path / "a.safetensors", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="wide: qao writes no torch.complex128"):
        model.register_buffer("wide", torch.zeros(2).to(torch.complex128))
        qao.save(model, tmp_path / "a.safetensors")


def test_a_long_header_is_of_one_file(tmp_path: Path) -> None:
    model = nn.Module()
    for name in ("a", "b" * 300_000, "c"):
        model.register_buffer(name, model.a if name.startswith("b") else torch.ones(2))
    assert qao.save(model, tmp_path) == [tmp_path / "model.safetensors"]
    assert qao.load(tmp_path, model) is model


def quantized(path: Path) -> nn.Module:
    model = support.plain_model()
    qao.quantize_(model, qao.Int4WeightOnly())
    qao.save(model, path)
    return model


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(48, 24)), r"2: .*\[24, 40\].*\[24, 48\]"),
        (lambda: nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24)), "missing: 2.bias"),
        (
            lambda: nn.Sequential(nn.Linear(96, 40, bias=False), nn.ReLU(), nn.Linear(40, 24, bias=False)),
            "unexpected: 0",
        ),
        (
            lambda: nn.Sequential(nn.Linear(96, 40), nn.ReLU()),
            "2: the checkpoint has a quantized layer, but .* has no module",
        ),
        (lambda: nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.ReLU()), "2: .*but the model has a ReLU"),
    ],
)
def test_another_model_is_refused_and_unchanged(tmp_path: Path, make: Callable[[], nn.Module], message: str) -> None:
    quantized(tmp_path / "x.safetensors")
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        qao.load(tmp_path / "x.safetensors", model)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight is on meta"):
        qao.save(nn.Linear(2, 2, device="meta"), tmp_path / "x.safetensors")
    quantized(tmp_path)
    with pytest.raises(TypeError, match="no config.json"):
        qao.load(tmp_path)
    with pytest.raises(TypeError, match="dtype are for models"):
        qao.load(tmp_path, support.plain_model(), dtype=torch.float32)

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    qao.save(Rotary(), tmp_path / "r")
    with torch.device("meta"):
        empty = Rotary()
    with pytest.raises(ValueError, match="frequencies are on meta and not in the checkpoint"):
        qao.load(tmp_path / "r", empty)


def test_another_scheme_in_the_module_gives_way(tmp_path: Path) -> None:
    model = quantized(tmp_path)
    other = support.plain_model()
    qao.quantize_(other, qao.Float8WeightOnly())
    qao.load(tmp_path, other)
    x = support.plain_input()
    assert torch.equal(other(x), model(x)) and other[0].scheme == model[0].scheme


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([support.plain_model(), support.plain_model()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) + self.blocks[1](x)  # type: ignore[no-any-return]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def with_a_compiled_block(model: nn.Module) -> nn.Module:
    blocks = model.get_submodule("blocks")
    blocks.register_module("1", compiled(blocks.get_submodule("1")))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "compiled": compiled,
    "a compiled block": with_a_compiled_block,
    "DataParallel": nn.DataParallel,
    "DataParallel, compiled": lambda model: compiled(nn.DataParallel(model)),
}


@pytest.mark.parametrize("reader", WRAPPERS)
@pytest.mark.parametrize("writer", WRAPPERS)
def test_names_do_not_depend_on_wrappers(writer: str, reader: str, tmp_path: Path) -> None:
    model, other = Blocks(), Blocks()
    qao.quantize_(model, qao.Int4WeightOnly())
    with torch.no_grad():
        qao.save(WRAPPERS[writer](model), tmp_path)
        around = WRAPPERS[reader](other)
        x = support.plain_input().to(next(other.parameters()).device)  # DataParallel moves a model to the first GPU
        if "compiled" in reader:
            around(x)  # compiled of floats
        assert qao.load(tmp_path, around) is around
        for loaded in (around, other):
            assert torch.equal(loaded(x), model.to(x.device)(x))
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert all(name.startswith("blocks.") and "_orig_mod" not in name for name in file.keys())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_files_of_others_with_such_names(prefix: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, other = support.plain_model(), support.plain_model()
    qao.quantize_(model, qao.Int4WeightOnly())
    save_file({prefix + name: tensor for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    qao.load(tmp_path, other)
    assert torch.equal(other(support.plain_input()), model(support.plain_input()))


def test_a_layer_that_was_compiled_alone_is_refused(tmp_path: Path) -> None:
    """torch binds its forward: it would go on with the float weight."""
    model, other = support.plain_model(), support.plain_model()
    qao.quantize_(model, qao.Int4WeightOnly())
    qao.save(model, tmp_path)
    other.register_module("0", compiled(other.get_submodule("0")))
    with pytest.raises(ValueError, match="0._orig_mod: .*torch.compile was called.*Load first, then compile"):
        qao.load(tmp_path, other)

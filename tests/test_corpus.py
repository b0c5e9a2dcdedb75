"""Files that earlier versions of qao wrote, loaded by this one: pickled models, state dicts, qao.save.

``python tests/test_corpus.py`` writes those of the present version into tests/corpus, once a release.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import qao
import torch
from qao.quantization.report import Report
from qao.schemes import SCHEMES
from torch import Tensor, nn

CORPUS = Path(__file__).with_name("corpus")
VERSIONS = sorted(path.name for path in CORPUS.iterdir()) if CORPUS.exists() else []


def floats() -> nn.ModuleDict:
    """A layer [32, 64] for each scheme, and an embedding with the weight of one; the values are fixed."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, 32) for name in schemes()})
    model["embedding"] = nn.Embedding(32, 64)
    model["embedding"].weight = model["int8"].weight
    return model


def schemes() -> dict[str, qao.Scheme]:
    found = {name: kind() for name, kind in SCHEMES.items()}
    # groups that a row of 64 columns has
    return {
        name: type(scheme)(group_size=32) if "group_size" in scheme.to_dict() else scheme
        for name, scheme in found.items()
    }


def quantized() -> tuple[nn.ModuleDict, Report]:
    model = floats()
    return model, qao.quantize_(model, schemes(), embeddings=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: module.dequantize()
        for name, module in model.named_modules()
        if isinstance(module, (qao.QuantLinear, qao.nn.QuantEmbedding))
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    model, report = quantized()
    torch.save(model, folder / "model.pt")
    torch.save(model.state_dict(), folder / "state.pt")
    qao.save(model, folder / "model.safetensors")
    (folder / "report.pickle").write_bytes(pickle.dumps(report))
    torch.save(weights(model), folder / "weights.pt")


def check(model: nn.Module, folder: Path) -> None:
    expected = torch.load(folder / "weights.pt", weights_only=True)
    found = weights(model)
    assert found.keys() == expected.keys() and len(found) == len(SCHEMES) + 1
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.fixture(params=VERSIONS)
def folder(request: pytest.FixtureRequest) -> Path:
    return CORPUS / str(request.param)


def test_there_are_files() -> None:
    assert VERSIONS


def test_a_pickled_model(folder: Path) -> None:
    """Pickles name classes by their modules, which may have moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.load(folder / "model.pt", weights_only=False)
    check(model, folder)
    assert all(type(module).__module__.startswith("qao.") for module in model.children())
    assert model[next(iter(SCHEMES))](torch.randn(3, 64)).shape == (3, 32)


def test_a_state_dict(folder: Path) -> None:
    model = quantized()[0]
    for module in model.children():
        for tensor in module.parameters():
            tensor.data.zero_()
    model.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    check(model, folder)


def test_a_file_of_save(folder: Path) -> None:
    check(qao.load(folder / "model.safetensors", floats()), folder)


def test_a_report(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        report = pickle.loads((folder / "report.pickle").read_bytes())
    assert isinstance(report, Report)
    assert [(row.name, row.scheme, row.shape) for row in report.rows] == [
        (row.name, row.scheme, row.shape) for row in quantized()[1].rows
    ]


if __name__ == "__main__":
    write(CORPUS / qao.__version__)

"""``python -m bench accuracy`` on a tiny model, and the check of results that users contribute."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import qao
import torch
from qao.cli.eval import tokens_of
from qao.diagnostics.perplexity import perplexity

from bench import accuracy, divergence, reports, result_files
from bench.__main__ import main

pytest.importorskip("transformers")
from test_cli import TEXT, load, save_llama

METHODS = ("qao int4 g32", "qao int8")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy")
    (folder / "text.txt").write_text(TEXT)
    return save_llama(folder / "llama")


def run(monkeypatch: pytest.MonkeyPatch, llama: Path, *options: str) -> dict[str, Any]:
    text = str(llama.parent / "text.txt")
    command = ["bench", "accuracy", str(llama), "--text", text, "--window", "16", "--windows", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(llama.parent / "out"), *options])
    assert main() == 0
    return result_files.read(llama.parent / "out" / "accuracy.csv")


def test_methods_and_checkpoints(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    """A method of qao gives what a checkpoint in that scheme gives; later runs add rows; no path is written."""
    from transformers import AutoTokenizer

    results = run(monkeypatch, llama, "--methods", *METHODS)
    model = load(llama)
    tokens, _ = tokens_of(AutoTokenizer.from_pretrained(llama), TEXT, 64)
    expected = perplexity(model, tokens, window=16).perplexity
    qao.quantize_(model, {"lm_head": None, "re:.*": qao.Int4WeightOnly(32)}, progress=False)
    model.save_pretrained(llama.parent / "int4")
    monkeypatch.setattr(divergence, "_KEPT_BYTES", 2 * 16 * 256 * 4)  # half of the windows
    results = run(monkeypatch, llama, "--methods", "--checkpoint", f"mine={llama.parent / 'int4'}")
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == ["bf16", "qao int8", "qao int4 g32", "mine"]
    assert rows["bf16"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert rows["bf16"]["divergence"] == 0 and rows["bf16"]["same_top"] == 1
    assert rows["mine"] | {"method": "", "bytes": 0} == rows["qao int4 g32"] | {"method": "", "bytes": 0}
    assert 0 < rows["qao int8"]["divergence"] < rows["qao int4 g32"]["divergence"]
    assert rows["qao int4 g32"]["bytes"] < rows["qao int8"]["bytes"] < rows["bf16"]["bytes"]
    assert str(llama.parent) not in (llama.parent / "out" / "accuracy.csv").read_text()
    assert accuracy.render(results).count("\n") == 7
    with pytest.raises(SystemExit, match="another model, text"):
        run(monkeypatch, llama, "--window", "8")
    with pytest.raises(SystemExit, match="must be NAME=PATH"):
        run(monkeypatch, llama, "--checkpoint", "mine=/no/such/path")


def test_a_method_of_another_package(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    """Runs if its package is installed; its bytes are those of its format."""
    monkeypatch.setitem(accuracy.PEERS, "llama.cpp Q4_0", ("torch", lambda weight: (weight, 4.5 * weight.numel())))
    monkeypatch.setitem(accuracy.PEERS, "HQQ int4 g64", ("no_such_package", lambda weight: (weight, 0.0)))
    results = run(monkeypatch, llama, "--methods", "llama.cpp Q4_0", "HQQ int4 g64")
    rows = {row["method"]: row for row in results["rows"]}
    assert "HQQ int4 g64" not in rows and rows["llama.cpp Q4_0"]["divergence"] == 0
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert rows["bf16"]["bytes"] - rows["llama.cpp Q4_0"]["bytes"] == weights * (2 - 4.5 / 8)


def test_tasks(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    asked = []

    def evaluate(**options: Any) -> dict[str, Any]:
        asked.append(options)
        accuracies = {"piqa": {"acc,none": 0.5, "acc_norm,none": 0.75}, "winogrande": {"acc,none": 0.25}}
        return {"results": {name: accuracies[name] for name in options["tasks"]}}

    package, models, own = ModuleType("lm_eval"), ModuleType("lm_eval.models"), ModuleType("lm_eval.models.huggingface")
    package.simple_evaluate, own.HFLM = evaluate, SimpleNamespace  # type: ignore[attr-defined]
    for module in (package, models, own):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    results = run(monkeypatch, llama, "--methods", "--tasks", "piqa", "winogrande", "--limit", "3")
    assert results["rows"][0]["tasks"] == {"piqa": 0.75, "winogrande": 0.25}
    assert asked[0]["limit"] == 3 and isinstance(asked[0]["model"].pretrained, torch.nn.Module)
    assert "| piqa | winogrande |" in accuracy.render(results) and "| 75.0% | 25.0% |" in accuracy.render(results)


HOSTILE = {
    "HTML": ("\nbf16,", "\n<script>,", "method must be text"),
    "a path": ('# model = "llama"', '# model = "x|y"', "model must be text"),
    "an unknown key": ("# window = 16", '# window = 16\n# host = "x"', "must be an object with the keys"),
    "an unknown column": ("perplexity,", "host,", "must be an object with the keys"),
    "a column in another": ("perplexity,", "method.a,", "."),
    "not a number": (",0.0,", ",NaN,", "must be a number"),
    "a list": (",0.0,", ',"[0]",', "must be a number"),
    "no rows of that length": ("\nbf16,", "\nbf16,1,", "."),
    "no table": ("method", "# method", "."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_contributed_results_are_checked(
    name: str, monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path
) -> None:
    file = llama.parent / "out" / "accuracy.csv"
    if not file.exists():
        run(monkeypatch, llama, "--methods")
    before, after, message = HOSTILE[name]
    other = tmp_path / "accuracy.csv"
    other.write_text(file.read_text().replace("# window = 16", '# command = "/home/x"\n# window = 16'))
    accepted = reports.accept(other, tmp_path / "contributed")
    assert accepted.name.startswith("accuracy-") and "/home" not in accepted.read_text()
    assert result_files.read(accepted)["rows"] == result_files.read(file)["rows"]
    other.write_text(file.read_text().replace(before, after))
    with pytest.raises(reports.Rejected, match=message):
        reports.accept(other, tmp_path / "contributed")
    assert list((tmp_path / "contributed").iterdir()) == [accepted]

"""The command ``qao quantize --calibrate``."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import qao
import torch
from qao.cli import main
from qao.cli.calibrated import samples
from test_cli import load, save_llama, save_tokenizer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_llama(tmp_path_factory.mktemp("calibrated") / "llama")
    save_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"a line of the text, and number {i * i}" for i in range(200)), encoding="utf-8")
    return file


def test_it_writes_what_the_library_makes(
    llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    options = [
        "--calibrate",
        str(text),
        "--samples",
        "5",
        "--window",
        "20",
        "--exclude",
        "lm_head",
        "--json",
        "--quiet",
        "--device",
        "cpu",
    ]
    assert main(["quantize", str(llama), str(out), "--scheme", "int4", "--group-size", "32", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["tokens"], report["method"]) == (5, 100, "gptq")
    model = load(llama)
    data = samples(AutoTokenizer.from_pretrained(llama), text, 5, 20)
    assert [tuple(ids.shape) for ids in data] == [(1, 20)] * 5
    expected = qao.calibrate(model, data, {"lm_head": None, "re:.*": qao.Int4WeightOnly(group_size=32)}, progress=False)
    assert [row["output_error"] for row in report["rows"]] == [row.output_error for row in expected.rows]
    written = qao.from_pretrained(out)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, qao.QuantLinear)}
    assert layers
    for name, layer in layers.items():
        again = written.get_submodule(name)
        assert torch.equal(again.qweight, layer.qweight) and torch.equal(again.scales, layer.scales), name
    assert (out / "tokenizer.json").exists()


def test_errors(llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a line")
    out = tmp_path / "out"
    base = ["quantize", str(llama), str(out), "--scheme", "int4", "--group-size", "32", "--quiet", "--calibrate"]
    assert main([*base, str(short)]) == 1
    assert "fewer than one text of 512" in capsys.readouterr().err
    assert main([*base, str(tmp_path / "none.txt")]) == 1
    assert "none.txt: no such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"abc\xff")
    assert main([*base, str(tmp_path / "binary")]) == 1
    assert f"{tmp_path / 'binary'}: not UTF-8 text: invalid start byte at byte 3" in capsys.readouterr().err
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as a full disk: safetensors writes the result
    try:
        assert main([*base, str(text), "--samples", "2", "--window", "20"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"{out}: File too large; partial output was removed" in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob("out.tmp*"))
    assert main([*base, str(text), "--samples", "0"]) == 2
    assert main([*base, str(text), "--to", "qao"]) == 2
    assert not out.exists()


def test_random_tokens(llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, rest = tmp_path / "out", ["--scheme", "int4", "--group-size", "32", "--quiet", "--device", "cpu"]
    rest += ["--random-tokens"]
    assert main(["quantize", str(llama), str(out), *rest, "--json", "--exclude", "lm_head"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["tokens"], report["method"]) == (0, 0, "importance")
    model = load(llama)
    qao.calibrate(model, None, {"lm_head": None, "re:.*": qao.Int4WeightOnly(group_size=32)}, progress=False)
    written = qao.from_pretrained(out)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, qao.QuantLinear)}
    assert layers and all(torch.equal(written.get_submodule(name).qweight, one.qweight) for name, one in layers.items())
    for more in (["--calibrate", str(text)], ["--method", "gptq"]):
        assert main(["quantize", str(llama), str(tmp_path / "other"), *rest, *more]) == 2
        assert "takes the place of a text" in capsys.readouterr().err

"""Hardware reports: ``qao doctor --share`` writes nothing that identifies a machine, and no other file is accepted."""

from __future__ import annotations

import copy
import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import qao
import torch
from qao.cli import main, share
from qao.diagnostics import doctor, hardware

from bench import reports
from bench.__main__ import main as bench

REPORT: dict[str, Any] = {
    "schema": "qao hardware report",
    "version": 1,
    "qao": "0.2.0",
    "commit": None,
    "python": "3.11.7",
    "torch": "2.11.0+cu130",
    "os": "Linux",
    "machine": "x86_64",
    "cpu": {"model": "Intel(R) Xeon(R) @ 2.20GHz", "features": ["avx2"], "kernels": "amx", "threads": 2},
    "cuda": {"torch": "13.0", "qao": "13.0.88", "driver": "575.57.08", "driver_cuda": "13.0"},
    "gpus": [{"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "gib": 140}],
    "checks": {"passed": 3, "failed": ["cuda:0 int4_mm"]},
    "speeds": [{"device": "cuda:0", "m": 1, "n": 64, "k": 64, "bf16_us": 2.5, "ratios": {"int4": 3.1, "int8": 2}}],
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = doctor.Check("cpu int4_mm", None)
    monkeypatch.setattr(doctor, "checks", lambda: [passed])
    monkeypatch.setattr("qao.cli.timing.ROUND_SECONDS", 1e-4)
    monkeypatch.setattr("qao.cli.doctor._SIZE", 64)
    monkeypatch.setattr("qao.cli.doctor._BYTES", 1)


def test_a_report_is_accepted_once(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["doctor", "--share", str(file)]) == 0
    said = capsys.readouterr().out
    assert f'Attach {file} to an issue "Hardware report"' in said and "no host or user name" in said
    assert {speed["device"] for speed in reports.read(file)["speeds"]} >= {"cpu"}
    monkeypatch.setattr(reports, "FOLDER", tmp_path / "contributed")
    monkeypatch.setattr(sys, "argv", ["bench", "accept", str(file)])
    assert bench() == 0 and "accepted" in capsys.readouterr().out
    assert bench() == 1 and "holds the same report" in capsys.readouterr().out
    (accepted,) = (tmp_path / "contributed").iterdir()
    assert json.loads(accepted.read_text()) == json.loads(file.read_text())
    assert "| 1 |" in reports.render(accepted.parent)


def test_stdout_holds_the_report_alone(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--share"]) == 0
    output = capsys.readouterr()
    reports.HARDWARE(json.loads(output.out), "report")
    assert 'Attach it to an issue "Hardware report"' in output.err


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text("mine")
    assert main(["doctor", "--share", str(file)]) == 1 and file.read_text() == "mine"
    assert main(["doctor", "--share", str(tmp_path / "absent" / "report.json")]) == 1
    assert "exists; name a new file" in capsys.readouterr().err
    assert main(["doctor", "--share", "--facts"]) == 2


def test_nothing_identifies_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a failed check, a version, a device or the commit says more than it should."""
    secret = "/home/alice/qao on host-17"
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+alice.host17")
    monkeypatch.setattr(share, "commit", lambda: secret)
    monkeypatch.setattr(hardware, "cpu_model", lambda: "CPU\n|<b>`x`")
    report = share.report([doctor.Check("bad", f"{secret}: no such file"), doctor.Check("good", None)], [])
    text = share.text(report)
    reports.HARDWARE(report, "report")
    assert report["torch"] == "2.11.0a0" and report["commit"] is None and report["cpu"]["model"] == "CPU b x"
    assert report["checks"] == {"passed": 1, "failed": ["bad"]}
    here = [socket.gethostname(), getpass.getuser(), str(Path.home()), os.getcwd(), sys.executable]
    here += [str(Path(qao.__file__).parent), "alice", "host17"]
    words = set(re.findall(r"[\w/.-]+", text))
    assert not words & set(here)
    paths = [Path(name) for name in ("/etc/machine-id", "/sys/class/dmi/id/product_uuid")]
    ids = [path.read_text().strip() for path in paths if os.access(path, os.R_OK)]
    assert not [each for each in ids if each and each in text]


def test_gpus_and_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of_card = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "uuid": "GPU-12"}
    card = SimpleNamespace(**of_card, total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(hardware, "driver", lambda: hardware.Driver("575.57.08", "13.0"))
    report = share.report([], [])
    reports.HARDWARE(report, "report")
    assert report["gpus"] == [{"name": "NVIDIA H200", "capability": "9.0", "sms": 132, "gib": 140}]
    assert report["cuda"]["driver"] == "575.57.08"


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    report = copy.deepcopy(REPORT)
    change(report)
    return json.dumps(report)


HOSTILE = {
    "an unknown key": (changed(lambda r: r.update(host="x")), "must be an object with the keys"),
    "a missing key": (changed(lambda r: r.pop("cpu")), "must be an object with the keys"),
    "another schema": (changed(lambda r: r.update(version=2)), "report.version must be a number from 1 to 1"),
    "a bool for a number": (changed(lambda r: r["cpu"].update(threads=True)), "report.cpu.threads"),
    "a number for a text": (changed(lambda r: r.update(torch=2.11)), "report.torch must be text"),
    "a list for an object": (changed(lambda r: r.update(cpu=[])), "report.cpu must be an object"),
    "HTML": (changed(lambda r: r["gpus"][0].update(name="<script>")), "report.gpus\\[0\\].name"),
    "Markdown": (changed(lambda r: r["cpu"].update(model="[x](y) | z")), "report.cpu.model"),
    "a line break": (changed(lambda r: r["cpu"].update(model="x\ny")), "report.cpu.model"),
    "a look-alike letter": (changed(lambda r: r.update(os="Lіnux")), "report.os"),
    "a path": (changed(lambda r: r.update(commit="../../etc/passwd")), "report.commit"),
    "a long text": (changed(lambda r: r["cpu"].update(model="x" * 81)), "report.cpu.model"),
    "many entries": (changed(lambda r: r.update(gpus=r["gpus"] * 17)), "at most 16 entries"),
    "a name of a scheme": (changed(lambda r: r["speeds"][0]["ratios"].update({"a|b": 1.0})), "a key of report.speeds"),
    "a huge number": (changed(lambda r: r["speeds"][0].update(bf16_us=1e300)), "bf16_us must be a number"),
    "NaN": (changed(lambda r: r["speeds"][0].update(bf16_us=float("nan"))), "NaN is not a number"),
    "infinity by digits": (json.dumps(REPORT).replace("2.5", "1e999"), "bf16_us must be a number"),
    "a number of many digits": (json.dumps(REPORT).replace("132", "9" * 9000), "digits"),
    "a key twice": (json.dumps(REPORT).replace('"os": "Linux"', '"os": "x", "os": "Linux"'), "appears twice"),
    "deep nesting": ("[" * 20_000, "."),
    "many bytes": (json.dumps(REPORT) + " " * reports.SIZE, "more than 32768 bytes"),
    "not JSON": ("report", "Expecting value"),
    "null": ("null", "must be an object"),
    "nothing": ("", "Expecting value"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_rejected(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    file = tmp_path / "report.json"
    file.write_text(content)
    with pytest.raises(reports.Rejected, match=message):
        reports.accept(file, tmp_path / "contributed")
    assert not (tmp_path / "contributed").exists()


def test_only_a_file_of_text_is_read(tmp_path: Path) -> None:
    good, link = tmp_path / "good.json", tmp_path / "link.json"
    good.write_text(json.dumps(REPORT))
    assert reports.accept(good, tmp_path / "contributed").name.startswith("hardware-")
    link.symlink_to(good)
    with pytest.raises(reports.Rejected, match="not a file"):
        reports.read(link)
    with pytest.raises(reports.Rejected, match="not a file"):
        reports.read(tmp_path)
    good.write_bytes(b"\xff\xfe")
    with pytest.raises(reports.Rejected, match="utf-8"):
        reports.read(good)


def test_every_contributed_file_is_a_report() -> None:
    for path in reports.FOLDER.glob("*"):
        reports.read(path)

"""The fuzzers: a slice of each, the cases that they have found, and injected defects that they must find."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from fuzz import ledger, mutations, readers, workers
from fuzz.bases import bases
from fuzz.operators import OPERATORS
from qao.checkpoints import open_checkpoint, opening

CORPUS = [json.loads(line) for line in Path(ledger.HERE, "corpus.jsonl").read_text().splitlines()]
SLICE = {"operators": 200, "calls": 10, "readers": 600, "layers": 40}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    workers.watch(0)


def wrong(fuzzer: str, case: dict[str, Any]) -> str | None:
    return workers.attempt(fuzzer, case, "cpu")[1]


def test_every_operator_is_fuzzed() -> None:
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    assert {name.partition(".")[0] for space, _, name in names if space == "qao"} == set(OPERATORS), (
        "a fuzzer of each operator belongs into fuzz/operators.py"
    )


def test_every_format_is_fuzzed(tmp_path: Path) -> None:
    formats = set()
    for name in bases():
        for file, content in mutations.contents({"base": name, "steps": []}).items():
            (tmp_path / file).write_bytes(content)
        checkpoint = open_checkpoint(tmp_path / "model.gguf" if bases()[name].gguf else tmp_path)
        assert checkpoint.layers or checkpoint.format in ("float", "mxfp4", "gguf"), name
        formats.add(checkpoint.format)
        for file in tmp_path.iterdir():
            file.unlink()
    assert formats == {"qao", "float", "gguf", *opening._METHODS}, "a small checkpoint belongs into fuzz/bases.py"


@pytest.mark.parametrize("fuzzer", SLICE)
def test_slice(fuzzer: str) -> None:
    problems = 0
    if fuzzer == "calls":  # in a process with a limit, since some systems promise more memory than they have
        outcome = workers.run(fuzzer, "default", seed=0, first=0, count=SLICE[fuzzer], seconds=120)
        assert not outcome.findings and outcome.cases == SLICE[fuzzer]
        return
    for index in range(SLICE[fuzzer]):
        case = workers.case_of(fuzzer, 0, index)
        done, error = workers.attempt(fuzzer, case, "cpu")
        assert error is None, f"{error}\n{workers.command_of(fuzzer, case, 'default')}"
        problems += done
    assert problems >= SLICE[fuzzer]


@pytest.mark.parametrize("found", CORPUS, ids=lambda found: found["fuzzer"])
def test_corpus(found: dict[str, Any]) -> None:
    assert wrong(found["fuzzer"], found["case"]) is None


def test_workers_find_crashes() -> None:
    outcome = workers.run("selftest", "default", seed=353, first=0, count=8, seconds=60)
    drawn = [workers.case_of("selftest", 353, index)["kind"] for index in range(8)]
    found = [(case["kind"], text) for case, text in outcome.findings]
    assert outcome.cases == 8 and outcome.problems == drawn.count("right")
    assert [kind for kind, _ in found] == [kind for kind in drawn if kind != "right"]
    said = {"wrong": "1 is 2", "raises": "KeyError", "crashes": "SIGSEGV", "hangs": "takes more than"}
    said |= {"waits": "waits for more than", "too": "MemoryError"}
    assert all(said[kind.split()[0]] in text for kind, text in found) and len({kind for kind, _ in found}) == 6


def test_fuzzers_find_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong product, a reader that raises, and an update that does nothing."""
    from ops_schemes import INT4

    assert wrong("operators", {"op": "int4_mm", "seed": 2}) is None
    op = INT4.op
    monkeypatch.setattr(type(INT4), "op", property(lambda self: lambda *args, **options: op(*args, **options) * 1.02))
    assert "elements are wrong" in str(wrong("operators", {"op": "int4_mm", "seed": 2}))
    case = {"base": "awq", "steps": [["tensor", "a.scales", "drop"]]}
    assert wrong("readers", case) is None
    monkeypatch.setattr(readers, "open_checkpoint", lambda path: {}["a.scales"])
    assert "KeyError" in str(wrong("readers", case))
    case = {"seed": 1, "dtype": "float32", "tied": True, "steps": [["quantize", 0, 0], ["update", 0, 5]]}
    assert wrong("layers", case) is None
    monkeypatch.setattr(qao, "update_", lambda model, state: [])
    assert "is not what quantize_ makes" in str(wrong("layers", case))


def test_a_case_is_shortened() -> None:
    steps = [["tensor", "a.bias", "drop"], ["bytes", "nothing", "cut", 1], ["tensor", "a.g_idx", "drop"]]
    case = {"base": "gptq", "steps": steps}
    short, text = workers.shortened("readers", case, str(wrong("readers", case)), "cpu")
    assert signal.getitimer(signal.ITIMER_PROF) == signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert short["steps"] == steps[1:2] and "KeyError" in text


def test_ledger(tmp_path: Path) -> None:
    rows = ledger.rows()
    assert all(tuple(row) == ledger.COLUMNS for row in rows)
    row = dict.fromkeys(ledger.COLUMNS, "1") | {"fuzzer": "layers", "level": "default"}
    for _ in range(2):
        ledger.append(tmp_path / "ledger.csv", row)
    assert len((tmp_path / "ledger.csv").read_text().splitlines()) == 3
    lines = list(ledger.summary())
    assert len(lines) == len({(row["fuzzer"], row["level"]) for row in rows}) and all(
        "findings" in line for line in lines
    )

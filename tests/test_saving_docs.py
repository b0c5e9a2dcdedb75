"""The code in docs/saving.md and docs/transformers.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import saving_support as support
import torch
from torch import nn

DOCS = Path(__file__).parents[1] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S)


def test_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": support.plain_model(), "Model": support.plain_model}
    for code in blocks("saving.md"):
        exec(code, names)
    x = support.plain_input()
    assert torch.equal(names["other"](x), names["model"](x)) and not isinstance(names["other"][0], nn.Linear)


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_transformers(library: str, tmp_path: Path) -> None:
    if not support.importable(library):
        pytest.skip(f"no {library} that works")
    pytest.importorskip("accelerate")
    code = [block for block in blocks("transformers.md") if ("diffusers" in block) == (library == "diffusers")]
    names: dict[str, Any] = {"path": str(tmp_path / "f"), "directory": str(tmp_path / "q"), "flux": str(tmp_path / "f")}
    if library == "diffusers":
        import qao
        from test_diffusers import flux

        names["qao"] = qao
        flux().save_pretrained(tmp_path / "f")
        exec(code[0], names)
    else:
        support.llama(128).save_pretrained(tmp_path / "f")
        load, others, save = code
        exec(load, names)
        exec(save, names)
        expected = support.run(names["model"], "transformers")
        names["path"] = names["directory"]
        exec(others, names)
        assert torch.equal(support.run(names["model"], "transformers"), expected)

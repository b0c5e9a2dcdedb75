"""Pages and pictures of bench results: the site build makes all, the repository holds a few."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import plots, reports, site, table
from bench.meta import RESULTS, ROOT

FILES = sorted(path for path in RESULTS.glob("*/*.csv") if path.parent != reports.FOLDER)
PERFORMANCE = ROOT / "docs" / "performance.md"
pytestmark = pytest.mark.skipif(not FILES, reason="a source distribution has no results")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return dict(site.pages())


def test_the_site_has_a_section_for_every_file(pages: dict[str, str]) -> None:
    assert pages.keys() == {"index.md", "contributed.md", *(f"{path.parent.name}.md" for path in FILES)}
    for path in FILES:
        page = pages[f"{path.parent.name}.md"]
        section = page.partition(f"\n\n## {path.stem}\n\n")[2].partition("\n\n## ")[0]
        assert section.endswith(table.body(path.stem, path.parent.name) or "nothing"), path
        assert f"[{path.parent.name}]({path.parent.name}.md)" in pages["index.md"]


def test_a_page_shows_a_picture_of_every_scheme_and_decoder(pages: dict[str, str]) -> None:
    shown = {name for page in pages.values() for name in re.findall(r"!\[\w+\]\(([^)]+)\)", page)}
    assert shown == {plots.name_of(path.parent.name, path.stem) for path in FILES if path.stem in plots.WORDS}
    assert len(shown) > 30


def test_a_picture_is_drawn_again_only_for_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "int4.csv").write_text("")
    (tmp_path / "gpu" / "host.csv").write_text("")
    drawn = []
    monkeypatch.setattr(site, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "draw_file", lambda path, target: (drawn.append(path.name), target.write_text("svg")))
    for _ in range(2):
        assert [path.name for path in site.pictures(tmp_path / "cache")] == ["gpu-int4.svg"]
    assert drawn == ["int4.csv"]


def test_the_repository_holds_few_pictures() -> None:
    listed = subprocess.run(["git", "ls-files", "docs/plots"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    assert {Path(name).name for name in listed.stdout.split()} == {plots.name_of(*one) for one in plots.TRACKED}
    assert len(plots.TRACKED) <= 4


def test_the_performance_page_is_short_and_leads_to_every_device() -> None:
    text = PERFORMANCE.read_text()
    assert len(text.splitlines()) <= 200
    assert {path.parent.name for path in FILES} == set(re.findall(r"\]\(\.\./bench/results/([\w-]+)\)", text))


@pytest.mark.parametrize(
    "page,link,expected",
    [
        ("performance.md", "[all](../bench/results/h200)", "[all](results/h200.md)"),
        ("kernels/sm90_ws.md", "[all](../../bench/results/h200)", "[all](../results/h200.md)"),
        ("performance.md", "[all](../bench/results)", "[all](results/index.md)"),
        ("performance.md", "[code](../bench/plots.py)", "code"),
        ("performance.md", "[page](benchmarks.md)", "[page](benchmarks.md)"),
        ("performance.md", "![p](plots/h200-generate.svg)", "![p](plots/h200-generate.svg)"),
    ],
)
def test_links_to_results_lead_to_their_pages_on_the_site(page: str, link: str, expected: str) -> None:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "tools" / "mkdocs_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"))
    shown = hooks.on_page_markdown(f"a {link}.", SimpleNamespace(file=SimpleNamespace(src_uri=page)), config)
    assert shown == f"a {expected}."

"""Pages and plots of every results file, for the site build (tools/mkdocs_hooks.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import accuracy, plots, reports, table
from .meta import RESULTS, source_hash
from .result_files import read

FOLDER = "results"  # path in the site


def pages() -> Iterator[tuple[str, str]]:
    """Names and Markdown: an index, and one page per device."""
    lines = []
    present = source_hash()
    for folder in sorted({path.parent for path in RESULTS.glob("*/*.csv")} - {reports.FOLDER}):
        files = sorted(folder.glob("*.csv"))
        device = read(files[0])["meta"]["device"]
        lines.append(f"- [{folder.name}]({folder.name}.md): {device}; {', '.join(path.stem for path in files)}")
        yield f"{folder.name}.md", "\n\n".join([f"# {folder.name}", *(_section(path, present) for path in files)])
    title = (
        "# Every cell\n\nAll results files of `bench/results`, a page for each device. [Benchmarks](../benchmarks.md)"
    )
    others = "Reports of users are [apart](contributed.md)."
    yield "index.md", "\n".join([f"{title} describes the method. {others}", "", *lines])
    yield "contributed.md", "\n\n".join(_contributed())


def _contributed() -> Iterator[str]:
    yield "# Contributed"
    yield "Reports of users, checked for form only."
    yield reports.render(reports.FOLDER)
    for path in sorted(reports.FOLDER.glob("*.csv")):
        yield f"## {path.stem}"
        yield accuracy.render(reports.read(path))


def pictures(cache: Path) -> Iterator[Path]:
    """Every plot on the pages, redrawn into ``cache`` if older than its results."""
    cache.mkdir(parents=True, exist_ok=True)
    for path in sorted(RESULTS.glob("*/*.csv")):
        if path.stem in plots.WORDS:
            target = cache / plots.name_of(path.parent.name, path.stem)
            newest = max(path.stat().st_mtime, Path(plots.__file__).stat().st_mtime)
            if not target.exists() or target.stat().st_mtime < newest:
                plots.draw_file(path, target)
            yield target


def _section(path: Path, present: str) -> str:
    results = read(path)
    parts = [f"## {path.stem}", table.body(path.stem, path.parent.name) or ""]
    if results["meta"]["source_hash"] != present:
        parts.insert(1, "*Measured on other sources than those of this site.*")
    if path.stem in plots.WORDS:
        parts.insert(1, f"![{path.stem}]({plots.name_of(path.parent.name, path.stem)})")
    return "\n\n".join(parts)

"""Hooks of `make docs`: links of pages that are written for GitHub as well, and pages of results."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds a page for every device of bench/results, and all plots: they are made from results and not tracked."""
    from mkdocs.structure.files import File, InclusionLevel

    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from bench import site

    level = InclusionLevel.NOT_IN_NAV
    for name, text in site.pages():
        inclusion = InclusionLevel.INCLUDED if name == "index.md" else level
        files.append(File.generated(config, f"{site.FOLDER}/{name}", content=text, inclusion=inclusion))
    for picture in site.pictures(ROOT / "build" / "plots"):
        uri = f"{site.FOLDER}/{picture.name}"
        files.append(File.generated(config, uri, abs_src_path=str(picture), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Makes links work on the site that lead to a checkout: to a page of results, else their text alone stays."""
    docs = Path(config.docs_dir).resolve()
    results = ROOT / "bench" / "results"

    def shown(link: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if target.is_dir() and target.is_relative_to(results):
            name = "index" if target == results else target.name
            return f"[{link[1]}]({posixpath.relpath(f'results/{name}.md', posixpath.dirname(page.file.src_uri))})"
        in_the_site = target.is_file() and target.is_relative_to(docs)
        return link[1] if target.exists() and not in_the_site else link[0]

    return re.sub(r"\[([^\]]+)\]\(([^()#\s]+)\)", shown, markdown)

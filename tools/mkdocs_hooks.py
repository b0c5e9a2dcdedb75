"""What `make docs` does to pages that are written for GitHub as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links to folders and to files outside docs/ lead somewhere in a checkout alone: the site has their text."""
    docs = Path(config.docs_dir).resolve()

    def shown(link: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        in_the_site = target.is_file() and target.is_relative_to(docs)
        return link[1] if target.exists() and not in_the_site else link[0]

    return re.sub(r"\[([^\]]+)\]\(([^()#\s]+)\)", shown, markdown)

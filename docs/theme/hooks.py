"""Hooks of the documentation site: pages and files that lie outside `docs/`.

A page of the repository links to files beside `docs/` (`../results/...`, `../examples/...`). In the site these files
are copied to `files/`, and the links lead there. The changelog, CONTRIBUTING.md and results/README.md become pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "results/README.md": "measured.md"}
OUTSIDE = re.compile(r"\[([^]]*)\]\((?:\.\./)+([^)#\s]+)\)")  # text and target


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages above and every file that a page links to outside of `docs/`."""
    docs = Path(config.docs_dir)
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    linked = {target for page in docs.glob("*.md") for _, target in OUTSIDE.findall(page.read_text("utf-8"))}
    for target in sorted(linked - PAGES.keys()):
        if (ROOT / target).is_file():
            files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links that leave `docs/`, and those of the root's pages that lead into it. A folder outside is named
    without a link."""
    if page.file.src_uri in PAGES.values():
        return re.sub(r"\]\(docs/", "](", markdown)
    if "/" in page.file.src_uri:  # what a page in a folder links to above it is in `docs/`
        return markdown

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        return text if (ROOT / target).is_dir() else f"[{text}]({PAGES.get(target, f'files/{target}')})"

    return OUTSIDE.sub(link, markdown)

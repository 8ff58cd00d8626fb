"""Notebooks in the documentation site: each of docs/notebooks becomes a page, with the outputs that it has in the file.

The page of notebooks/NAME.ipynb is notebooks/NAME.md; pages link to the notebook, and in the site to its page.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

FOLDER = "notebooks"
LINK = re.compile(rf"\]\(({FOLDER}/[\w/]+)\.ipynb\)")


def text_of(lines: str | list[str]) -> str:
    """A text as notebooks have it: whole or in lines."""
    return lines if isinstance(lines, str) else "".join(lines)


def fenced(text: str, kind: str) -> str:
    return f"~~~~ {kind}\n{text.rstrip()}\n~~~~"


def as_markdown(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, and its figures by the names of their files."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = text_of(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced(source, "python"))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}_{len(pictures) + 1}.png"
                pictures[file] = b64decode(text_of(data["image/png"]))
                parts.append(f"![{cell['metadata']['alt']}]({file})")
            else:
                text = text_of(output.get("text") or data["text/plain"])
                parts.append(fenced(text, "{ .text .output .no-copy }"))
    # Below the title: where to get it.
    parts.insert(1, f"This page is a notebook: [{name}.ipynb]({name}.ipynb).")
    return "\n\n".join(parts) + "\n", pictures


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for every notebook, and its figures."""
    from mkdocs.structure.files import File

    for path in sorted((Path(config.docs_dir) / FOLDER).glob("*.ipynb")):
        markdown, pictures = as_markdown(json.loads(path.read_text("utf-8")), path.stem)
        files.append(File.generated(config, f"{FOLDER}/{path.stem}.md", content=markdown))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return LINK.sub(r"](\1.md)", markdown)

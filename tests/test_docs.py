"""Documents that are made from the code equal what the code makes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def maker(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_findings_page_is_up_to_date():
    page = maker("make_findings").render()
    assert page == (DOCS / "findings.md").read_text(encoding="utf-8"), "run: python docs/make_findings.py"
    for picture in re.findall(r"\]\((images/[^)]+)\)", page):
        assert (DOCS / picture).is_file(), picture


def test_tables_of_exported_files_are_up_to_date():
    make_export = maker("make_export")
    pages = [DOCS / name for name in make_export.PAGES if (DOCS / name).exists()]
    assert pages
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert text == make_export.render(text), "run: python docs/make_export.py"


def test_models_page_is_up_to_date():
    page = maker("make_models").render()
    assert page == (DOCS / "models.md").read_text(encoding="utf-8"), "run: python docs/make_models.py"
    assert max(map(len, page.splitlines())) <= 130

"""Documents that are made from the code equal what the code makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_exported_files_are_up_to_date():
    make_export = load("make_export")
    pages = [DOCS / name for name in make_export.PAGES if (DOCS / name).exists()]
    assert pages
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert text == make_export.render(text), "run: python docs/make_export.py"


def test_models_page_is_up_to_date():
    page = load("make_models").render()
    assert page == (DOCS / "models.md").read_text(encoding="utf-8"), "run: python docs/make_models.py"
    assert max(map(len, page.splitlines())) <= 130

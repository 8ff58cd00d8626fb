"""Documents that are made from the code equal what the code makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_models_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_models", DOCS / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    make_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_models)
    page = make_models.render()
    assert page == (DOCS / "models.md").read_text(encoding="utf-8"), "run: python docs/make_models.py"
    assert max(map(len, page.splitlines())) <= 130

"""The notebooks run and show what their cells print; their pages in the site have the outputs."""

from __future__ import annotations

import copy
import traceback

import pytest

from docs import run_notebooks
from docs.run_notebooks import NOTEBOOKS, code_cells, differences, drawn, printed, read, run, same_text, text_of
from docs.theme.notebooks import as_markdown, on_page_markdown
from tests.test_zoo import stored

for package in ("matplotlib", "PIL", "sklearn"):
    pytest.importorskip(package)

PATHS = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def notebook(*cells: str) -> dict:
    made = [{"cell_type": "code", "source": source, "metadata": {"alt": "a line"}, "outputs": []} for source in cells]
    return {"cells": made}


@stored
@pytest.mark.parametrize("name", PATHS)
def test_it_runs_and_prints_what_it_shows(name):
    shown = read(PATHS[name])
    assert not differences(shown, run(shown, name))


@stored
def test_that_of_a_trained_model_takes_any_of_the_zoo_that_takes_images():
    shown = read(PATHS["trained_model"])
    cells = code_cells(shown)
    cells[0]["source"] = text_of(cells[0]["source"]).replace("digits_lrf_dyn", "digits_ssa")
    made = code_cells(run(shown, "another"))
    assert printed(made[2]).startswith("Spikformer with ssa")
    (first, second, *_) = printed(made[4]).splitlines()
    assert float(first.split()[-2]) == pytest.approx(float(second.split()[-2]), abs=0.6)  # two images


@pytest.mark.parametrize("name", PATHS)
def test_it_is_small_and_says_what_its_figures_show(name):
    assert PATHS[name].stat().st_size < 300_000
    for number, cell in enumerate(code_cells(read(PATHS[name])), 1):
        assert cell["execution_count"] == number  # run as a whole, from the top
        assert not drawn(cell) or cell["metadata"]["alt"]


def test_a_cell_that_fails_is_named():
    with pytest.raises(ZeroDivisionError) as caught:
        run(notebook("x = 1", "x / 0"), "mine")
    assert 'File "mine, cell 2", line 1' in "".join(traceback.format_exception(caught.value))


def test_outputs_are_those_of_jupyter():
    first, second = code_cells(run(notebook("x = 2\nprint('x is')\nx", "x;"), "mine"))
    assert printed(first) == "x is\n\n2"
    assert [output["output_type"] for output in first["outputs"]] == ["stream", "execute_result"]
    assert second["outputs"] == []  # a semicolon hides the value


def test_what_changed_is_found(tmp_path, monkeypatch, capsys):
    shown = run(notebook("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", "print('accuracy', 97.5)"), "mine")
    saved = copy.deepcopy(shown)
    saved["cells"][0]["outputs"][0]["data"]["text/plain"] = ["<Figure size 640x480 with 1 Axes>"]  # by Jupyter
    assert not differences(shown, shown) + differences(saved, shown)
    other = copy.deepcopy(shown)
    other["cells"][1]["source"] = "print('accuracy', 97.2)"
    other["cells"][0]["source"] = "pass"
    draws, prints = differences(other, run(other, "mine"))
    assert draws == "cell 1 draws 0 figures, the notebook shows 1"
    assert prints.startswith("cell 2 prints\naccuracy 97.2")
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    (tmp_path / "mine.ipynb").write_text(run_notebooks.json.dumps(other))
    assert run_notebooks.main(["--check"]) == 1
    assert "mine.ipynb: cell 2 prints" in capsys.readouterr().out
    assert run_notebooks.main([]) == 0  # which writes what is there now
    assert run_notebooks.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("new", "tolerance", "same"),
    [
        ("top-1 97.5 % of 360", 0.0, True),
        ("top-1  97.5 %\nof 360", 0.0, True),  # the width of columns
        ("top-1 97.2 % of 360", 0.0, False),
        ("top-1 97.2 % of 360", 0.01, True),
        ("top-1 90.0 % of 360", 0.01, False),
        ("top-5 97.5 % of 360", 0.01, False),
        ("top-1 97.5 % of images", 0.01, False),
        ("top-1 97.5 % of 360 images", 0.01, False),
    ],
)
def test_words_stay_and_numbers_may_have_a_tolerance(new, tolerance, same):
    assert same_text("top-1 97.5 % of 360", new, tolerance) is same


def test_a_page_has_the_outputs_of_its_notebook():
    made = run(notebook("import matplotlib.pyplot as plt\nprint('drawn')\nplt.plot([1, 2]);"), "mine")
    made["cells"].insert(0, {"cell_type": "markdown", "source": ["# Mine\n", "\n", "A line."], "metadata": {}})
    page, pictures = as_markdown(made, "mine")
    assert page.startswith("# Mine\n\nA line.\n\nThis page is a notebook: [mine.ipynb](mine.ipynb).\n\n~~~~ python\n")
    assert page.endswith("~~~~ { .text .output .no-copy }\ndrawn\n~~~~\n\n![a line](mine_1.png)\n")
    assert pictures["mine_1.png"].startswith(b"\x89PNG")
    linked = on_page_markdown("[a](notebooks/mine.ipynb) and [b](mine.ipynb)", page=None)
    assert linked == "[a](notebooks/mine.md) and [b](mine.ipynb)"

"""Runs the notebooks in docs/notebooks, as Jupyter would, and writes into them what their cells print and draw.

    python docs/run_notebooks.py            # in place
    python docs/run_notebooks.py --check    # fails where a cell prints something else than the notebook shows

Text must be the same, word for word. The metadata of a cell may have a `tolerance` for its numbers, which is relative
and absolute: training rounds differently on other processors. Figures have to be there; pixels are not compared.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.theme.notebooks import text_of

NOTEBOOKS = Path(__file__).parent / "notebooks"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
DPI = 90

Notebook = dict[str, Any]  # as the file has it


def read(path: Path) -> Notebook:
    return json.loads(path.read_text("utf-8"))


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Notebook, name: str) -> Notebook:
    """The notebook with the outputs of its cells, run one after the other in one namespace. What fails in a cell
    raises, and the traceback says in which."""
    import matplotlib
    from matplotlib import pyplot

    made, names = json.loads(json.dumps(notebook)), {"__name__": "__main__"}
    with matplotlib.rc_context({"backend": "agg"}):
        pyplot.close("all")  # what somebody else left open
        for number, cell in enumerate(code_cells(made), 1):
            cell["execution_count"] = number
            cell["outputs"] = run_cell(text_of(cell["source"]), names, f"{name}, cell {number}")
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = number
    return made


def run_cell(source: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The outputs of a cell: what it prints, the value of an expression at its end, unless a
    semicolon follows it, and the figures that are open."""
    tree, last = ast.parse(source, where), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = None if last is None else eval(compile(last, where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": in_lines(printed.getvalue())})
    if value is not None and not source.rstrip().endswith(";"):
        shown = {"text/plain": in_lines(repr(value))}
        outputs.append({"data": shown, "metadata": {}, "output_type": "execute_result"})
    return outputs + [
        {"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"} for picture in figures()
    ]


def in_lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def figures() -> Iterator[str]:
    """The figures that are open, as PNG in base 64; they are closed."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        file = BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(number)
        yield b64encode(file.getvalue()).decode()


def differences(shown: Notebook, made: Notebook) -> list[str]:
    """A line for every cell that no longer prints what the notebook shows, or draws another number of figures."""
    found = []
    for number, (old, new) in enumerate(zip(code_cells(shown), code_cells(made), strict=True), 1):
        tolerance = old["metadata"].get("tolerance", 0.0)
        before, after = printed(old), printed(new)
        if not same_text(before, after, tolerance):
            found.append(f"cell {number} prints\n{after}\nand the notebook shows\n{before}")
        if drawn(old) != drawn(new):
            found.append(f"cell {number} draws {drawn(new)} figures, the notebook shows {drawn(old)}")
    return found


def printed(cell: dict[str, Any]) -> str:
    """The texts of a cell, without those that Jupyter has for a figure."""
    outputs = [output for output in cell["outputs"] if "image/png" not in output.get("data", {})]
    return "\n".join(text_of(output.get("text") or output["data"]["text/plain"]) for output in outputs)


def drawn(cell: dict[str, Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def same_text(old: str, new: str, tolerance: float) -> bool:
    """Whether two texts have the same words and, but for `tolerance`, the same numbers."""
    words = [[NUMBER.sub("#", word) for word in text.split()] for text in (old, new)]
    numbers = [[float(value) for value in NUMBER.findall(text)] for text in (old, new)]
    near = (math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in zip(*numbers, strict=False))
    return words[0] == words[1] and all(near)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    changed = 0
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        shown = read(path)
        made = run(shown, path.name)
        if check:
            lines = differences(shown, made)
            changed += len(lines)
            print(*(f"{path.name}: {line}" for line in lines), sep="\n", end="\n" if lines else "")
        else:
            path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

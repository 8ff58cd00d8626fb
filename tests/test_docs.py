"""The pages: filled parts are current, code and commands in them work, links lead somewhere."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("yaml")
import yaml

import lrfdyn
from docs import fill
from docs.parts import edge, evidence, findings, read, segmentation
from lrfdyn.cli import build_parser
from lrfdyn.data.base import check_options
from lrfdyn.errors import LrfdynError
from lrfdyn.training.recipes import load_recipe
from lrfdyn.training.tasks import data_options

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *NOTEBOOKS]


def text_in(page: Path) -> str:
    """What is written in a page or in the texts of a notebook."""
    text = page.read_text("utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")


def test_filled_parts_are_current(capsys):
    assert fill.main(["--check"]) == 0, capsys.readouterr().out


def test_parts_are_filled_between_markers_only(monkeypatch):
    monkeypatch.setitem(fill.PARTS, "part", lambda: "| new |")
    text = "before\n<!-- fill: part -->\n\nold\n\n<!-- end -->\nafter old\n"
    assert fill.fill(text) == "before\n<!-- fill: part -->\n\n| new |\n\n<!-- end -->\nafter old\n"
    with pytest.raises(KeyError):
        fill.fill("<!-- fill: nothing --><!-- end -->")


def test_every_part_is_used_and_every_marker_is_closed():
    text = "\n".join(map(text_in, PAGES))
    assert set(re.findall(r"<!-- fill: (\w+) -->", text)) == set(fill.PARTS)
    assert text.count("<!-- fill:") == text.count("<!-- end -->") == len(fill.MARKED.findall(text))


def field(side: int, grid: int, dilations: list[int] | None) -> dict:
    shares = [{"side": min(n, side), "share": n / side} for n in range(1, side + 2, 2)]
    options = {} if dilations is None else {"dilations": dilations}
    pixels = {"pixels_per_cell": 1, "map": [[0.0] * side] * side, "share_inside": shares}
    return {"receptive_field": pixels, "locality": {"grid": [grid, grid]}, "options": options}


def test_receptive_fields_are_judged_in_a_square_with_the_taps_in_it():
    ssa = field(32, 8, None)
    assert findings.field_square({"ssa": ssa}) == (17, 32)  # half of the image without stencils
    # Three tokens of four pixels to each side, and those of the tokens themselves; five tokens leave the grid.
    assert findings.field_square({"ssa": ssa, "lrf_dyn": field(32, 8, [3, 5])}) == (29, 32)
    assert findings.field_square({"ssa": ssa, "lrf_dyn": field(32, 8, [1])}) == (17, 32)
    assert findings.field_square({"lrf_ssa": field(8, 8, [3])}) == (7, 8)
    assert findings.field_square({"lrf_ssa": field(32, 16, [5, 8])}) == (32, 32)  # no square is larger than the image


def seen(rows: list[list[str]], claim: str) -> str:
    return next(row[3] for row in rows if row[0] == claim)


def test_order_alone_does_not_make_lrf_dyn_local():
    """Nearby on average but not in the last row is what looking back only gives."""
    ssa = {"locality": {"short_range_share": 0.3, "last_row_short_range_share": 0.21}}
    claim = "LRF-Dyn is more local than SSA"
    for late, verdict in ((0.2, "**no**"), (0.33, "**yes**"), (None, "not decided")):
        dyn = {"locality": {"short_range_share": 0.4, "last_row_short_range_share": late}}
        assert seen([*findings.attention_claims({"ssa": ssa, "lrf_dyn": dyn})], claim) == verdict
    assert seen([*findings.attention_claims({"ssa": ssa})], claim) == "not decided"


def test_one_seed_decides_no_accuracy():
    def entry(*values: float) -> dict:
        spread = (max(values) - min(values)) / 2
        return {"accuracy_mean": sum(values) / len(values), "accuracy_spread": spread, "accuracy_values": values}

    claim = "LRF-Dyn is more accurate than SSA"
    for ssa, dyn, verdict in (
        ((0.7,), (0.8,), "not decided: one seed"),
        ((0.7, 0.72), (0.74, 0.76), "**yes**"),
        ((0.7, 0.74), (0.73, 0.75), "**no**"),
    ):
        assert seen([*findings.accuracy_claims({"ssa": entry(*ssa), "lrf_dyn": entry(*dyn)})], claim) == verdict


def test_the_vit_has_its_place_before_and_behind_its_analysis(monkeypatch):
    """The rules hold its runs against the paper's number and against SSA of the analysis above."""
    found = {}
    monkeypatch.setattr(findings, "read", lambda name: found if name == findings.VIT else read(name))
    assert findings.vit() == "Not measured yet (`results/analysis/cifar100_vit/results.json`)."
    ssa = findings.entries("cifar100")["ssa"]
    for near, entropy, verdicts in ((0.77, 3.0, "yes yes yes"), (0.5, 3.0, "no yes yes"), (0.2, 4.15, "no no no")):
        locality = {**ssa["locality"], findings.NEAR: near, "entropy_mean": entropy}
        entry = {"label": "VSA, vit-seed0", "kind": "vsa", "locality": locality}
        found |= {"command": "lrfdyn analyze x", "runs": [], "attentions": {"vsa": entry}}
        rows = [line for line in findings.vit().splitlines() if line.startswith("| ViT, vit-seed0: ")]
        assert [row.split("**")[1] for row in rows] == verdicts.split()


def test_pages_say_what_is_not_measured_yet(tmp_path):
    assert segmentation.subset(tmp_path) == "Not measured yet."
    for part in (edge.cpu, edge.factors, edge.firing, edge.layers, edge.boards):
        assert part([]).startswith("Not measured yet")


def test_runs_of_sweeps_enter_their_pages(tmp_path):
    """Means over the seeds, in the usual order; one seed decides no claim, two do, and other settings are refused."""
    assert evidence.runs("pets", {}, tmp_path) == evidence.claims(tmp_path) == "Not measured yet."
    shared = {"model": "sdt_v3_s", "epochs": 60, "precision": "bf16", "data": "pets", "parameters": 6_300_000,
              "images_per_s": 500.0, "wall_s": 60.0, "device": "cpu"}  # fmt: skip

    def write(attention, seed, miou, **changed):
        folder = tmp_path / "pets" / f"{attention}-seed{seed}"
        folder.mkdir(parents=True)
        own = {"attention": attention, "seed": seed, "miou": miou, **shared, **changed}
        (folder / "summary.json").write_text(json.dumps(own), "utf-8")

    write("lrf_dyn", 0, 72.0)
    write("ssa", 0, 70.0)
    write("ssa", 1, 71.0)
    _, _, first, second, *_ = evidence.runs("pets", {}, tmp_path).splitlines()
    assert "| SSA | 70.50 ± 0.71 (n = 2) | [70.00](../results/pets/ssa-seed0/log.jsonl), [71.00]" in first
    assert "| LRF-Dyn | 72.00 |" in second
    assert "| not decided: one seed |" in evidence.claims(tmp_path)
    write("lrf_dyn", 1, 72.2)
    assert "| 72.10 and 70.50 | **yes** |" in evidence.claims(tmp_path)
    write("lrf_ssa", 0, 70.0, epochs=10)
    with pytest.raises(LrfdynError, match="pets: epochs: expected the same"):
        evidence.runs("pets", {}, tmp_path)


def test_the_c_engine_is_compared_on_one_core_with_runtimes_of_the_same_model():
    facts = {"model": "m", "attention": "ssa", "image_size": 8, "ram_kib": None, "file_mib": 1.0, "trained": False}
    facts |= {"images": None, "top1": None, "firing_rate": 0.05, "machine": {"cpu": "a CPU"}}
    times = {("lrfdyn C", 1): 10.0, ("other", 1): 25.0, ("other", 2): 12.0}
    rows = [{**facts, "runtime": name, "threads": n, "ms": ms, "bit_exact": None} for (name, n), ms in times.items()]
    rows.append({**rows[0], "attention": "lrf_dyn", "ms": 5.0, "bit_exact": True})  # which the other does not run
    assert edge.factors(rows).splitlines()[2:] == [
        "| lrfdyn C, ms | 10.0 | 5.0 |",
        "| times faster than other | 2.5 |  |",
    ]
    assert "| m, lrf_dyn, 8 | lrfdyn C | 1 | 5.0 |  | 1.0 |  | yes |" in edge.cpu(rows)
    shown = edge.firing([{**r, "threshold_factor": 2} for r in rows])  # a table for each model
    assert [shown.count(text) for text in ("m, ssa, 8", "m, lrf_dyn, 8", "| 2 | 5.0")] == [1, 1, 4]


@pytest.mark.parametrize("page", ["index.md", "own_networks.md"])
def test_python_of_the_page_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    code = "\n".join(block for block in blocks if ".pth" not in block)
    names: dict = {}
    exec(code, names)
    assert names["out"].shape[:3] == (4, 2, 64)


def test_recipes_of_the_pages_load(tmp_path):
    pages = ((DOCS / name).read_text("utf-8") for name in ("training.md", "data.md"))
    (stages, recipe), shards = (re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) for page in pages)
    (tmp_path / "stages.yaml").write_text(stages)
    assert [stage.epochs for stage, _ in load_recipe(tmp_path / "stages.yaml").in_stages()] == [105, 45]
    (tmp_path / "mine.yaml").write_text(recipe)
    config = load_recipe(tmp_path / "mine.yaml")
    assert config.data.name == "folder"
    assert config.augmentation.crop == "resized"  # of the recipe that it extends
    assert len(shards) == 2
    for text in shards:
        (tmp_path / "shards.yaml").write_text(text)
        config = load_recipe(tmp_path / "shards.yaml")
        check_options(config.data.name, data_options(config))


def test_commands_of_the_pages_are_understood():
    """Their options exist. A single capital letter stands for a number."""
    commands = set()
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", text_in(page))
        commands |= set(re.findall(r"^ {4}(?:lrfdyn|.* -m lrfdyn) (.*)$", text, re.MULTILINE))
    assert len(commands) > 15
    for command in commands:
        words = shlex.split(re.split(r" [|>] ", command)[0], comments=True)
        words = ["1" if re.fullmatch(r"[A-Z]", word) else word for word in words if word != "--help"]
        assert build_parser().parse_known_args(words)[1] == [], command


def test_links_between_pages_lead_somewhere():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *(DOCS / "api").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_in(page))]
    local = [(page, link) for page, link in links if "://" not in link]
    assert len(local) > 20
    for page, link in local:
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_page_is_in_the_site():
    """`make docs` builds the site; here, that nothing was left out of it."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    sources = [*DOCS.rglob("*.md"), *(path.with_suffix(".md") for path in NOTEBOOKS)]
    pages = {page.relative_to(DOCS).as_posix() for page in sources}
    assert pages <= set(re.findall(r"[\w/]+\.md", str(nav)))


def reference() -> dict[str, object]:
    """What the API pages name, by name."""
    found = {}
    for page in (DOCS / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE):
            module, _, last = name.rpartition(".")
            try:
                found[name] = getattr(importlib.import_module(module), last)
            except AttributeError:
                found[name] = importlib.import_module(name)
    return found


def test_every_public_name_is_in_the_reference():
    """Functions and classes that the top level and its packages list in `__all__`."""
    shown = list(reference().values())
    names = [module.name for module in pkgutil.iter_modules(lrfdyn.__path__) if module.ispkg]
    for package in [lrfdyn, *(importlib.import_module(f"lrfdyn.{name}") for name in names)]:
        for name in getattr(package, "__all__", []):
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert any(value is other for other in shown), f"{package.__name__}.{name}"


def test_everything_in_the_reference_says_what_it_is():
    for name, value in reference().items():
        text = value.__doc__ or ""
        made = f"{name.rpartition('.')[2]}("  # how the docstring begins that a dataclass makes from its fields
        assert text.strip(), name
        assert not text.startswith(made), name

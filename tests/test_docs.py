"""Documents that are made from the code equal what the code makes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from docs import findings_attention, make_deployment, make_findings, make_models, make_performance
from lrfdyn.cli import build_parser
from lrfdyn.data.base import check_options
from lrfdyn.training.build import data_options
from lrfdyn.training.recipes import load_recipe

DOCS = Path(__file__).parent.parent / "docs"


def test_findings_page_is_up_to_date():
    page = make_findings.render()
    assert page == (DOCS / "findings.md").read_text(encoding="utf-8"), "run: python docs/make_findings.py"
    for picture in re.findall(r"\]\((images/[^)]+)\)", page):
        assert (DOCS / picture).is_file(), picture


def test_order_alone_does_not_make_lrf_dyn_local():
    """Nearby on average but not in the last row is what looking back only gives."""
    near = {"short_range_share": 0.4, "last_row_short_range_share_uniform": 0.2}
    ssa = {"short_range_share": 0.3, "last_row_short_range_share": 0.21}
    for late, seen in ((0.2, "We do not see it"), (0.33, "We see it")):
        dyn = {**near, "last_row_short_range_share": late}
        (line,) = findings_attention.order({"ssa": ssa, "lrf_dyn": dyn}, dyn, ssa)
        assert seen in line
    (old,) = findings_attention.order({"ssa": ssa, "lrf_dyn": near}, near, ssa)  # results without the last row
    assert "Not decided here: no share of the last row" in old


def test_why_fields_differ_is_only_said_where_the_numbers_say_it():
    def entry(left: float) -> dict:
        cut = {"gradient": left, "share_inside": [{"side": 17, "share": 0.9}]}
        return {"label": "x", "receptive_field": {"without_attention": cut}}

    kinds = {"ssa": entry(0.5), "lrf_dyn": entry(0.4)}
    for inside, said in (({"ssa": 0.6, "lrf_dyn": 0.4}, True), ({"ssa": 0.4, "lrf_dyn": 0.6}, False)):
        (line,) = findings_attention.why_fields_differ(kinds, 32, 17, inside)
        assert ("the more, the wider" in line) == said
    assert not list(findings_attention.why_fields_differ({"ssa": {"receptive_field": {}}}, 32, 17, {}))


def test_deployment_page_is_up_to_date(monkeypatch, tmp_path):
    page = make_deployment.render()
    assert page == (DOCS / "deployment.md").read_text(encoding="utf-8"), "run: python docs/make_deployment.py"
    titles = {re.sub(r"[^\w\s-]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in page.splitlines()}
    for anchor in re.findall(r"\]\(#([^)]+)\)", page):
        assert anchor in titles, anchor
    # What low-memory SSA saves stands beside what LRF-Dyn saves.
    assert re.search(r"CPU, batch 1: SSA \d+\.\d% \([^)]+\) and LRF-Dyn \d+\.\d%", page)
    monkeypatch.setattr(make_deployment, "RESULTS", tmp_path)
    assert "GPU: not measured yet" in make_deployment.render()


def test_own_networks_page_runs():
    page = (DOCS / "own_networks.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    names: dict = {}
    exec(code, names)
    assert names["out"].shape == names["spikes"].shape


def test_recipe_of_the_training_page_loads(tmp_path):
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    recipe, shards = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(recipe)
    config = load_recipe(tmp_path / "mine.yaml")
    assert config.data.name == "folder"
    assert config.augmentation.crop == "resized"  # of the recipe that it extends
    (tmp_path / "shards.yaml").write_text(shards)
    config = load_recipe(tmp_path / "shards.yaml")
    check_options(config.data.name, data_options(config))


def test_every_page_is_found_from_the_readme():
    """In one step or two."""
    seen = {"README.md"}
    for _ in range(2):
        texts = [(DOCS.parent / page).read_text(encoding="utf-8") for page in seen]
        links = {link for text in texts for link in re.findall(r"\]\(([^)#\s]+\.md)", text)}
        seen |= {f"docs/{link.removeprefix('docs/')}" for link in links}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= seen


def test_commands_of_the_pages_are_understood():
    """Their options exist. A single capital letter stands for a number."""
    commands = set()
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        commands |= set(re.findall(r"^ {4}lrfdyn (.*)$", text, re.MULTILINE))
    assert len(commands) > 15
    for command in commands:
        words = shlex.split(re.split(r" [|>] ", command)[0], comments=True)
        words = ["1" if re.fullmatch(r"[A-Z]", word) else word for word in words if word != "--help"]
        assert build_parser().parse_known_args(words)[1] == [], command


def test_links_between_pages_lead_somewhere():
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))]
    local = [(page, link) for page, link in links if "://" not in link]
    assert len(local) > 20
    for page, link in local:
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_models_page_is_up_to_date():
    page = make_models.render()
    assert page == (DOCS / "models.md").read_text(encoding="utf-8"), "run: python docs/make_models.py"
    assert max(map(len, page.splitlines())) <= 130


def test_performance_page_is_up_to_date():
    page = make_performance.render()
    assert page == (DOCS / "performance.md").read_text(encoding="utf-8"), "run: python docs/make_performance.py"

"""Every recipe loads, builds its model and says what it takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.reproduce import Settings
from lrfdyn.training.build import build_model
from lrfdyn.training.config import key_types
from lrfdyn.training.describe import describe
from lrfdyn.training.key_help import HELP
from lrfdyn.training.recipes import FOLDERS, list_recipes, load_recipe
from tests.data.make import write_folder
from tests.training.runs import tiny

RECIPES = sorted(path for path in FOLDERS[2].glob("*.yaml") if not path.name.startswith("_"))
OMEGA = {"omega0": (), "omega1": (1,), "omega3": (1, 3), "omega5": (1, 3, 5)}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path):
    config = load_recipe(path)
    if config.model.name.startswith("timm/"):
        pytest.importorskip("timm")
        config = load_recipe(path, {"model.options": "{pretrained: false}"})
    facts = describe(config, memory=False)
    data, _, rest = path.stem.partition("_")
    rest = rest.removeprefix("subset_")
    assert data == config.data.name
    if data != "digits":
        name = config.model.name.removeprefix("timm/")
        assert rest.startswith(name)
        rest = rest.removeprefix(name).lstrip("_")
    strong = rest.endswith("_strong")
    assert strong == (data.startswith("cifar") and config.augmentation.crop == "pad")
    rest = rest.removesuffix("_strong")
    for name, dilations in OMEGA.items():
        if rest.endswith(name):
            assert config.model.dilations == dilations
            rest = rest.removesuffix(f"_{name}")
    assert rest in ("", f"{facts['attention']}", f"{facts['attention']}_{facts['token']}")
    assert facts["steps"] == facts["steps_per_epoch"] * config.schedule.total_epochs
    for processes in (2, 4, 8):
        config.run.micro_batch(processes)


def test_recipes_of_the_tables_are_there():
    known = set(list_recipes())
    for data in ("cifar10", "cifar100"):
        for host in ("spikformer_4_384", "qkformer_4_384"):
            for kind in ("ssa", "causal_ssa", "lrf_ssa", "lrf_dyn"):
                assert f"{data}_{host}_{kind}" in known
            for kind in ("lrf_ssa", "lrf_dyn", "causal_ssa"):
                assert {f"{data}_{host}_{kind}_{omega}" for omega in OMEGA} <= known
    for host in ("spikformer_8_512", "spikformer_8_768", "qkformer_10_384", "qkformer_10_512", "sdt_v3_s", "sdt_v3_l"):
        assert {f"imagenet_{host}_{kind}" for kind in ("ssa", "lrf_ssa", "lrf_dyn")} <= known
    for host in ("sdt_v1_8_512", "sdt_v2_15m", "sdt_v2_55m", "sew_resnet34", "ms_resnet34"):
        assert f"imagenet_{host}" in known
    for host in ("sdt_v3_s", "sdt_v3_m", "sdt_v3_l"):
        assert {f"ade20k_{host}_{kind}" for kind in ("ssa", "lrf_ssa", "lrf_dyn")} <= known


def test_memory_is_counted():
    facts = describe(tiny(), processes=2)
    memory, parameters = facts["memory"], facts["parameters"]
    assert memory["gradients"] == 4 * parameters
    assert memory["optimizer"] == 8 * parameters
    assert memory["ema"] == memory["parameters"] > 4 * parameters
    assert memory["activations"] < describe(tiny())["memory"]["activations"]
    assert describe(tiny(optimizer={"name": "sgd"}))["memory"]["optimizer"] == 4 * parameters


def test_estimate_is_what_a_step_keeps():
    """Against a real forward pass of the same batch, by the same counter on real memory."""
    import torch
    import torch.nn.functional as F

    from lrfdyn.training.build import build_data, data_model

    config = tiny(model={"drop_path": 0.0})
    source = build_data(config)
    model = data_model(config, source).train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    batch = next(source.train_batches(epoch=0, seed=0, batch_size=128))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        F.cross_entropy(model(batch.images), batch.targets)
    assert describe(config)["memory"]["activations"] == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.parametrize("name", ["imagenet_sdt_v3_s_lrf_dyn", "cifar100_spikformer_4_384_lrf_dyn_omega3"])
def test_dry_run_command(name, capsys):
    assert main(["train", name, "--dry-run", "--processes", "8", "--schedule.epochs", "30"]) == 0
    printed = capsys.readouterr().out
    assert "epochs: 30" in printed
    assert "memory per process, estimated: " in printed
    assert main(["train", name, "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] > 1e6
    assert facts["recipe"]["model"]["attention"] == "lrf_dyn"


def test_without_a_recipe_the_names_are_printed(capsys):
    assert main(["train"]) == 0
    assert capsys.readouterr().out.splitlines() == sorted(list_recipes())


def test_dry_run_of_own_images_counts_them(tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path)
    data = {"name": "folder", "root": str(tmp_path), "image_size": 16}
    facts = describe(tiny(data=data, run={"batch_size": 4}))
    assert describe(tiny(data={**data, "name": "imagenette"}, run={"batch_size": 4})) == facts, "what is there counts"
    with_ten = describe(tiny(data={"name": "imagenette", "image_size": 16}, run={"batch_size": 4}))
    assert facts["steps_per_epoch"] == 6  # of 24 images
    width = tiny().model.options["dim"]
    assert with_ten["parameters"] - facts["parameters"] == (10 - 3) * (width + 1)
    (tmp_path / "other").mkdir()
    elsewhere = describe(tiny(data={"name": "cifar100", "root": str(tmp_path / "other")}), memory=False)
    assert elsewhere["train_images"] == 50_000, "a folder of that name may hold something else"
    assert "holds neither" in elsewhere["images_not_counted"]
    with pytest.raises(LrfdynError, match="root: webdataset needs the folder of its files"):
        describe(tiny(data={"name": "webdataset"}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"name": "imagenet", "options": {"worker": 3}},
            "option of imagenet: unknown name 'worker'; did you mean workers",
        ),
        ({"name": "webdataset", "options": {"shufle_shards": 3}}, "did you mean shuffle_shards"),
        ({"name": "cifar10", "image_size": 64}, "data: cifar10 has no option 'image_size'"),
        ({"name": "imagenet", "options": {"image_size": 64}}, "data.options: image_size has a key of its own"),
    ],
)
def test_dry_run_refuses_options_that_the_data_does_not_have(data, message):
    """Also where the data is not there: the run would begin on another machine, and not begin."""
    with pytest.raises(LrfdynError, match=message):
        describe(tiny(data=data), memory=False)


def test_own_recipe_extends_one_of_the_package(tmp_path, monkeypatch, capsys):
    """By its name or its file, from any folder; a file beside the recipe comes first."""
    monkeypatch.chdir(tmp_path)
    ours = load_recipe(list_recipes()["digits_lrf_dyn"])
    for base in ("digits_lrf_dyn", "digits_lrf_dyn.yaml"):
        (tmp_path / "mine.yaml").write_text(f"extends: {base}\nrun: {{seed: 7}}\n")
        mine = load_recipe(Path("mine.yaml"))
        assert mine.run.seed == 7
        assert mine.model == ours.model
        assert mine.schedule == ours.schedule
    (tmp_path / "digits_lrf_dyn.yaml").write_text("extends: _digits.yaml\nmodel: {attention: vsa}\n")
    assert load_recipe(Path("mine.yaml")).model.attention == "vsa"
    (tmp_path / "mine.yaml").write_text("extends: digits_lrfdyn\n")
    with pytest.raises(LrfdynError, match="recipe: extends: unknown name 'digits_lrfdyn'; did you mean digits_lrf_dyn"):
        load_recipe(Path("mine.yaml"))


def test_a_wrong_name_is_one_line(capsys):
    for command, message in [
        (["train", "./absent.yml"], "recipe: no such file: ./absent.yml"),
        (["evaluate", "absent/run"], "source: no such file or folder, and no recipe of that name: absent/run"),
        (["train", "qqq"], f"and {len(list_recipes()) - 30} more"),
    ]:
        assert main(command) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert len(printed) < 1500


def test_help_explains_every_key(capsys):
    assert set(HELP) == set(key_types())
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert len(usage) < 200
    assert "--augmentation.crop none|pad|resized" in rest
    assert "images per step of the optimiser" in " ".join(rest.split())
    assert "default: ==SUPPRESS==" not in rest


def test_digits_recipe_is_that_of_reproduce():
    recipe, settings = load_recipe(list_recipes()["digits_lrf_dyn"]), Settings()
    assert recipe.model.options["dim"] == settings.dim
    model = build_model(recipe, 10, 8, 1)
    assert model.config == settings.model("lrf_dyn").config
    assert recipe.optimizer.learning_rate == settings.recipe.learning_rate
    assert recipe.schedule.epochs == settings.recipe.epochs


def test_installed_package_has_its_recipes(tmp_path):
    """A wheel, unpacked elsewhere, with nothing of the repository in sight."""
    pytest.importorskip("setuptools", minversion="77")
    source = FOLDERS[2].parent
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, tree)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source / "recipes", tree / "recipes")
    shutil.copytree(source / "lrfdyn", tree / "lrfdyn", symlinks=True, ignore=ignore)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "place"
    zipfile.ZipFile(wheel).extractall(place)
    shutil.rmtree(tree)
    command = [sys.executable, "-m", "lrfdyn", "train"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(command, cwd=place.parent, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [path.stem for path in RECIPES]
    dry = [*command, "digits_ssa", "--dry-run"]
    assert subprocess.run(dry, cwd=place.parent, env=environment, capture_output=True, check=False).returncode == 0


def test_cifar_recipes_choose_from_the_operations_of_their_authors():
    """Spikformer's code has a RandAugment of its own with five operations; QKFormer's takes timm's."""
    spikformer, qkformer = (
        load_recipe(list_recipes()[f"cifar100_{host}_4_384_lrf_dyn"]) for host in ("spikformer", "qkformer")
    )
    five = ("equalize", "rotate", "shear_x", "translate_x", "translate_y")
    assert spikformer.augmentation.rand_augment_operations == five
    assert qkformer.augmentation.rand_augment_operations is None


@pytest.mark.parametrize("host", ["spikformer", "qkformer"])
def test_cifar_recipes_mix_until_the_end(host):
    """As the programs of both do, whatever the switch in their settings says."""
    config = load_recipe(list_recipes()[f"cifar100_{host}_4_384_ssa"])
    assert config.augmentation.mixup == 0.5
    assert config.schedule.mix_epochs is None
    assert config.schedule.within(100).mix_epochs is None

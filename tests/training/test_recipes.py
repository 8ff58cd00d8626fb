"""Every recipe loads, builds its model and says what it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lrfdyn.attention import Attention
from lrfdyn.cli import main
from lrfdyn.data import Augmentation
from lrfdyn.errors import LrfdynError
from lrfdyn.models import SDTV2
from lrfdyn.models.summary import count_parameters, meta_model
from lrfdyn.paper import IMAGENET
from lrfdyn.training.config import key_help, key_types
from lrfdyn.training.estimate import estimate
from lrfdyn.training.recipes import find_recipe, list_recipes, load_recipe, run_name
from lrfdyn.training.tasks import Classification
from tests.data.make import write_folder
from tests.training.runs import tiny

ROOT = Path(__file__).parents[2]
ABLATION = [{}, *({"dilations": omega} for omega in ((), (1,), (1, 3), (1, 3, 5)))]  # the default is 3, 5
QKV = {"attention": "lrf_dyn", "token": "qkv"}
THREE = [{"attention": kind} for kind in ("ssa", "lrf_ssa", "lrf_dyn")]
CIFAR = [
    {"attention": "ssa"}, {"attention": "vsa"}, QKV, {"attention": "lrf_dyn", "directions": 2},
    *({"attention": kind, **omega} for kind in ("causal_ssa", "lrf_ssa", "lrf_dyn") for omega in ABLATION),
]  # fmt: skip


def sizes(*names: str, of: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"model": name, **choice} for name in names for choice in of]


# The experiments of the paper, and those that came with them.
EXPERIMENTS: dict[str, list[dict[str, Any]]] = {
    "digits": [{"attention": kind} for kind in ("ssa", "causal_ssa", "vsa", "lrf_ssa", "lrf_dyn")],
    **{f"{data}_{host}": CIFAR for data in ("cifar10", "cifar100") for host in ("spikformer", "qkformer")},
    **{f"cifar100_spikformer_{kind}": [*CIFAR, {**QKV, "dilations": (1, 3, 5)}] for kind in ("strong", "fast")},
    "cifar100_spikformer_distilled": THREE,
    "cifar100_vit": [{}, {"attention": "vsa"}],
    "cifar100_resnet": [{}],
    "imagenet_spikformer": sizes("spikformer_8_512", "spikformer_8_768", of=[*THREE, QKV]),
    "imagenet_qkformer": sizes("qkformer_10_384", "qkformer_10_512", of=[*THREE, QKV]),
    "imagenet_sdt_v3": sizes("sdt_v3_s", "sdt_v3_l", of=[*THREE, QKV]),
    "imagenet_sdt_v2": sizes("sdt_v2_15m", "sdt_v2_55m", of=[{}]),
    **{name: [{}] for name in ("imagenet_sdt_v1", "imagenet_sew_resnet", "imagenet_ms_resnet")},
    **{f"imagenette_{host}": THREE for host in ("spikformer", "qkformer", "sdt_v3")},
    **{f"tiny_imagenet_{host}": THREE for host in ("spikformer", "qkformer", "sdt_v3")},
    "pets_sdt_v3": THREE,
    **{f"oxford_pets_{host}": THREE for host in ("spikformer", "qkformer", "sdt_v3")},
    "nmnist_spikformer": THREE,
    **{f"{data}_qkformer": [*THREE, QKV] for data in ("cifar10dvs", "gesture")},
    "cifar10dvs_spikformer": [*THREE, QKV],
    **{f"{data}_sdt_v1": [{}, *THREE] for data in ("cifar10dvs", "gesture")},
    "ade20k_sdt_v3": sizes("sdt_v3_s", "sdt_v3_m", "sdt_v3_l", of=THREE),
    "ade20k_subset": THREE,
    "ade20k_reduced": THREE,
    "ade20k_ann": sizes(*(f"timm/{name}" for name in ("resnet18", "pvt_v2_b2", "poolformer_s12")), of=[{}]),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments(name: str):
    """Each loads, builds its model and can be shared by several processes."""
    assert set(list_recipes()) == set(EXPERIMENTS)
    own = load_recipe(name).model.name
    for choice in EXPERIMENTS[name]:
        config = load_recipe(name, choice)
        if config.model.name.startswith("timm/"):
            pytest.importorskip("timm")
            config = load_recipe(name, {**choice, "model.options": {"pretrained": False}})
        facts = estimate(config, memory=False)
        assert facts["model"] == choice.get("model", own)
        for key in ("attention", "dilations", "token"):
            assert key not in choice or tuple(facts[key]) == tuple(choice[key])
        assert facts["directions"] == choice.get("directions", 1 if facts["attention"] == "lrf_dyn" else None)
        assert facts["steps"] == facts["steps_per_epoch"] * config.schedule.total_epochs
        for processes in (2, 4, 8):
            config.micro_batch(processes)


@pytest.mark.parametrize("host", ["spikformer", "qkformer", "sdt_v3"])
def test_tiny_imagenet_has_8_x_8_tokens_and_one_schedule(host: str):
    config, first = (load_recipe(f"tiny_imagenet_{name}") for name in (host, "spikformer"))
    model = {"spikformer": "spikformer_8_384", "qkformer": "qkformer_10_384", "sdt_v3": "sdt_v3_s"}[host]
    assert config.model.name == model
    built = Classification().build_model(config, num_classes=200, image_size=64, in_channels=3)
    assert built.grid == (8, 8)
    for part in ("data", "augmentation", "optimizer", "schedule", "run"):
        assert getattr(config, part) == getattr(first, part)


@pytest.mark.parametrize(
    ("recipe", "models"),
    [
        ("imagenet_qkformer", {"qkformer_10_384": 16.55, "qkformer_10_512": 29.18}),
        ("imagenet_sdt_v3", {"sdt_v3_s": 5.24, "sdt_v3_l": 19.25}),
    ],
)
def test_lrf_ssa_has_as_many_parameters_as_in_the_paper(recipe: str, models: dict[str, float]):
    """Table 1: 29 weights per channel of the values, three stencils and a norm."""
    for name, millions in models.items():
        assert IMAGENET[name]["lrf_ssa"].parameters == millions
        choice = {"model": name, "attention": "lrf_ssa"}
        model = load_recipe(recipe, choice).model
        assert (model.dilations, model.norm) == ((1, 3, 5), True)
        host, ours = (count_parameters(meta_model(name, **options)) for options in ({}, model.arguments()))
        channels = sum(m.value_dim for m in meta_model(name).modules() if isinstance(m, Attention))
        assert ours == host + 29 * channels
        assert f"{ours / 1e6:.2f}" == f"{millions:.2f}"


def test_only_29_weights_fit_all_counts():
    fits = []
    for name in ("qkformer_10_384", "qkformer_10_512", "sdt_v3_s", "sdt_v3_l"):
        model, paper = meta_model(name), IMAGENET[name]["lrf_ssa"].parameters
        channels = sum(m.value_dim for m in model.modules() if isinstance(m, Attention))
        counts = {n: count_parameters(model) + n * channels for n in range(100)}
        fits.append({n for n, count in counts.items() if f"{count / 1e6:.2f}" == f"{paper:.2f}"})
    assert set.intersection(*fits) == {29}


def test_the_choice_of_an_attention_brings_its_keys(tmp_path):
    """Of that kind only, behind what is given; other kinds and the recorded runs are as before."""
    chosen = {"model": "sdt_v3_l", "attention": "lrf_ssa"}
    assert load_recipe("imagenet_sdt_v3", {**chosen, "norm": "false", "dilations": "3,5"}).model.arguments() == {
        "attention": "lrf_ssa", "dilations": (3, 5), "norm": False, "time_steps": 1,
    }  # fmt: skip
    for kind in ("ssa", "lrf_dyn"):
        model = load_recipe("imagenet_qkformer", {"attention": kind}).model
        assert (model.dilations, model.norm) == (None, None)
    assert load_recipe("cifar100_spikformer", {"attention": "lrf_ssa"}).model.norm is None
    facts = estimate(load_recipe("imagenet_sdt_v3", chosen), memory=False)
    assert (facts["attention"], facts["dilations"], facts["norm"]) == ("lrf_ssa", [1, 3, 5], True)
    subset = load_recipe("ade20k_subset", {"attention": "lrf_ssa"}).model
    assert (subset.dilations, subset.norm) == ((3, 5), False)
    for text, problem in (
        ("attentions: [lrf_ssa]", "attentions: expected keys of the model by kind, got"),
        ("attentions: {lrf_ssa: 3}", "attentions: expected keys of the model by kind, got"),
        ("attentions: {lrf_ssa: {nrom: true}}", "key in model: unknown name 'nrom'; did you mean norm"),
    ):
        path = tmp_path / "own.yaml"
        path.write_text(f"extends: cifar100_spikformer\n{text}\n")
        with pytest.raises(LrfdynError, match=problem):
            load_recipe(path, {"attention": "lrf_ssa"})


def test_short_names_are_keys():
    """In Python and as text; a value of any type, and an error names the key."""
    config = load_recipe("cifar100_spikformer", {"attention": "lrf_dyn", "dilations": (1, 3)})
    texts = {"model.attention": "lrf_dyn", "model.dilations": "1,3"}
    assert config == load_recipe(find_recipe("cifar100_spikformer"), texts)
    assert config.model.dilations == (1, 3)
    with pytest.raises(LrfdynError, match=r"--model.dilations: expected a list, got 2.5"):
        load_recipe("digits", {"dilations": 2.5})
    with pytest.raises(LrfdynError, match="unknown name '--atention'; did you mean --attention"):
        load_recipe("digits", {"atention": "ssa"})
    assert run_name("imagenet_sdt_v3", {"model": "sdt_v3_l", "model.attention": "lrf_dyn", "dilations": "[]"}) == (
        "imagenet_sdt_v3-sdt_v3_l-lrf_dyn-dilations_none"
    )
    more = {"attention": "lrf_ssa", "norm": True, "train_qk": "false", "coupling": "same"}
    assert run_name("digits", more) == "digits-lrf_ssa-same-norm_True-train_qk_false"
    assert run_name("digits", {"attention": "lrf_dyn", "model.directions": "2"}) == "digits-lrf_dyn-directions_2"


def test_names_with_capitals(capsys):
    assert find_recipe("CIFAR100_Spikformer") == find_recipe("cifar100_spikformer")
    assert run_name("Digits", {}) == "digits"
    assert main(["Train", "DIGITS", "--dry-run"]) == 0
    assert "parameters:" in capsys.readouterr().out
    assert main(["evaluate", "DIGITS"]) == 2
    assert "weights: a recipe needs --weights" in capsys.readouterr().err


def test_two_classifiers_are_refused():
    """SDT-V2 with `distillation` gives two logits in training, and a run has a loss of one."""
    options = {"distillation": True, "widths": (8, 8, 8, 8), "depths": (1, 1, 1, 1, 1), "heads": 2}
    config = load_recipe("cifar100_spikformer", {"model": "sdt_v2_15m", "model.options": options})
    with pytest.raises(LrfdynError, match="distillation: two classifiers need a loop of your own"):
        estimate(config)
    with pytest.raises(LrfdynError, match="distillation: two classifiers need a loop of your own"):
        Classification().prepare(SDTV2(**options), config, None)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("cifar10dvs_spikformer", "spikformer_dvs_2_256_c10"),
        ("cifar10dvs_qkformer", "qkformer_dvs_256_c10"),
        ("gesture_qkformer", "qkformer_gesture_256_c11"),
        ("cifar10dvs_sdt_v1", "sdt_v1_dvs_2_256_c10"),
        ("gesture_sdt_v1", "sdt_v1_gesture_2_256_c11"),
    ],
)
def test_recipes_of_recordings_have_the_official_settings(name: str, model: str):
    """The notes beside the official parameter counts say them in words."""
    notes = " ".join(json.loads((ROOT / "tests/golden" / f"params_{model}.json").read_text())["notes"])
    config = load_recipe(name)
    optimizer, schedule, run, augmentation = config.optimizer, config.schedule, config.run, config.augmentation
    found = re.search(
        r"Official training[^:]*: (\w+)(?: \(eps 1e-8)?, weight decay ([\d.e-]+)\)?, batch (\d+), T = (\d+), "
        r"cosine schedule over (\d+) epochs plus (\d+) epochs at the minimum, warm-up (\d+) epochs from ([\d.e-]+), "
        r"lr ([\d.e-]+), minimum lr ([\d.e-]+), mixed precision.* seed (\d+)",
        notes,
    )
    assert found
    rule, *numbers = found.groups()
    assert [optimizer.name, run.precision, config.model.drop_path] == [rule.lower(), "fp16", None]
    assert list(map(float, numbers)) == [
        optimizer.weight_decay, run.batch_size, config.model.time_steps, schedule.epochs, schedule.cooldown_epochs,
        schedule.warmup_epochs, schedule.warmup_rate, optimizer.learning_rate, schedule.minimum_rate, run.seed,
    ]  # fmt: skip
    assert "label smoothing 0.1" in notes
    if "no mixup" in notes:
        assert augmentation == Augmentation(label_smoothing=0.1)
    else:
        six = ("identity", "shear_x", "shift_x", "shift_y", "rotate", "cut_out")
        mixed = {"mixup": 0.5, "mix_probability": 0.5, "label_smoothing": 0.1}
        assert augmentation == Augmentation(flip=0.5, event_operations=six, **mixed)
        assert schedule.mix_epochs == int(re.findall(r"switched off from epoch (\d+)", notes)[0]) == 75
    assert config.loss.tet == (0.001 if "Official loss: TET" in notes else None)
    assert config.data.image_size == (64 if "resized to 64 x 64" in notes else None)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*/recipe.yaml")), ids=lambda path: path.parent.name)
def test_recipes_of_recorded_runs_load(path: Path):
    assert load_recipe(path).model.name


def test_list_of_recipes(capsys):
    """Grouped by data set, with what the experiments choose from; the same where `train` gets no recipe."""
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in list_recipes())
    assert "\ncifar100\n  cifar100_qkformer " in printed
    assert "--model spikformer_8_512|spikformer_8_768  --attention ssa|lrf_ssa|lrf_dyn  --token value|qkv" in printed
    assert max(map(len, printed.splitlines())) < 160
    assert main(["train"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["recipes", "cifar10_qkformer", "--attention", "vsa"]) == 0
    assert "\n  name: qkformer_4_384\n  attention: vsa\n" in capsys.readouterr().out


def test_memory_is_counted():
    facts = estimate(tiny(), processes=2)
    memory, parameters = facts["memory"], facts["parameters"]
    assert memory["gradients"] == 4 * parameters
    assert memory["optimizer"] == 8 * parameters
    assert memory["ema"] == memory["parameters"] > 4 * parameters
    assert memory["activations"] < estimate(tiny())["memory"]["activations"]
    assert estimate(tiny(optimizer={"name": "sgd"}))["memory"]["optimizer"] == 4 * parameters
    muon = estimate(tiny(optimizer={"name": "muon"}))["memory"]["optimizer"]
    assert 4 * parameters < muon < 8 * parameters, "one moment of matrices, two of the rest"
    alone = estimate(tiny(run={"batch_size": 64}))["memory"]["activations"]
    stages = {"stages": [{"epochs": 1, "batch_size": 64, "time_steps": 2}]}
    larger = estimate(tiny(schedule=stages, run={"batch_size": 32}))
    assert alone < larger["memory"]["activations"] < 3 * alone, "of the stage that takes most"
    assert (larger["steps_per_epoch"], larger["steps"]) == (44, 22 + 44)
    frozen = estimate(tiny(model={"attention": "ssa", "train_qk": False}))
    learn = frozen["parameters"] - 2 * 2 * (8 * 8 + 3 * 8)  # q and k of two blocks: convolution, its bias, norm
    assert frozen["memory"]["gradients"] == 4 * learn
    assert frozen["memory"]["optimizer"] == 8 * learn
    assert frozen["memory"]["ema"] == frozen["memory"]["parameters"] > 4 * frozen["parameters"]


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
def test_memory_of_many_time_steps_is_not_counted_one_by_one(attention, monkeypatch):
    config = tiny(model={"time_steps": 9, "attention": attention})
    whole = estimate(config)["memory"]
    monkeypatch.setattr("lrfdyn.training.estimate.MOST_STEPS", 4)
    assert estimate(config)["memory"] == whole


def test_estimate_is_what_a_step_keeps():
    """Against a real forward pass of the same batch, by the same counter on real memory."""
    import torch
    import torch.nn.functional as F

    from lrfdyn.training.tasks import build_data, data_model

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
    assert estimate(config)["memory"]["activations"] == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.parametrize("name", ["imagenet_sdt_v3", "cifar100_spikformer"])
def test_dry_run_command(name, capsys):
    choice = ["--attention", "lrf_dyn", "--dilations", "1,3"]
    assert main(["train", name, *choice, "--dry-run", "--processes", "8", "--schedule.epochs", "30"]) == 0
    printed = capsys.readouterr().out
    assert "epochs: 30" in printed
    counted = ("1,000", "50,000") if name.startswith("imagenet") else ("100", "10,000")
    assert f"\nnum_classes: {counted[0]}\n" in printed
    assert f"\ntest_images: {counted[1]}\n" in printed
    assert "memory per process, estimated: " in printed
    assert main(["train", name, *choice, "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] > 1e6
    assert facts["recipe"]["model"]["attention"] == "lrf_dyn"


def test_dry_run_of_own_images_counts_them(tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path)
    data = {"name": "folder", "root": str(tmp_path), "image_size": 16}
    facts = estimate(tiny(data=data, run={"batch_size": 4}))
    assert estimate(tiny(data={**data, "name": "imagenette"}, run={"batch_size": 4})) == facts, "what is there counts"
    with_ten = estimate(tiny(data={"name": "imagenette", "image_size": 16}, run={"batch_size": 4}))
    assert facts["steps_per_epoch"] == 6  # of 24 images
    assert (facts["num_classes"], facts["test_images"], facts["depth"]) == (3, 9, 2)
    width = tiny().model.options["dim"]
    assert with_ten["parameters"] - facts["parameters"] == (10 - 3) * (width + 1)
    (tmp_path / "other").mkdir()
    elsewhere = estimate(tiny(data={"name": "cifar100", "root": str(tmp_path / "other")}), memory=False)
    assert elsewhere["train_images"] == 50_000, "a folder of that name may hold something else"
    assert "holds neither" in elsewhere["images_not_counted"]
    with pytest.raises(LrfdynError, match="root: webdataset needs the folder of its files"):
        estimate(tiny(data={"name": "webdataset"}))


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
        estimate(tiny(data=data), memory=False)


def test_own_recipe_extends_one_of_the_package(tmp_path, monkeypatch, capsys):
    """By its name or its file, from any folder; a file beside the recipe comes first."""
    monkeypatch.chdir(tmp_path)
    ours = load_recipe("digits")
    for base in ("digits", "digits.yaml"):
        (tmp_path / "mine.yaml").write_text(f"extends: {base}\nrun: {{seed: 7}}\n")
        mine = load_recipe(Path("mine.yaml"))
        assert mine.run.seed == 7
        assert mine.model == ours.model
        assert mine.schedule == ours.schedule
    (tmp_path / "digits.yaml").write_text("extends: cifar100_spikformer\nmodel: {attention: vsa}\n")
    assert load_recipe(Path("mine.yaml")).model.attention == "vsa"
    (tmp_path / "mine.yaml").write_text("extends: digts\n")
    with pytest.raises(LrfdynError, match="recipe: extends: unknown name 'digts'; did you mean digits"):
        load_recipe(Path("mine.yaml"))


def test_a_wrong_name_is_one_line(capsys):
    for command, message in [
        (["train", "./absent.yml"], "recipe: no such file: ./absent.yml"),
        (["evaluate", "absent/run"], "source: no such file or folder, and no recipe of that name: absent/run"),
        (["train", "qqq"], "recipe: unknown name 'qqq'"),
    ]:
        assert main(command) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert len(printed) < 1500


def test_help_explains_every_key(capsys):
    assert set(key_help()) == set(key_types())
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert len(usage) < 200
    assert "--augmentation.crop none|pad|resized" in rest
    assert "Images per step of the optimiser" in " ".join(rest.split())
    assert "default: ==SUPPRESS==" not in rest


def test_installed_package_has_its_recipes(tmp_path):
    """A wheel, unpacked elsewhere, with nothing of the repository in sight."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lrfdyn", tree / "lrfdyn", ignore=ignore)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "place"
    zipfile.ZipFile(wheel).extractall(place)
    shutil.rmtree(tree)
    # Both commands in one process, since each would take seconds to start.
    code = "from lrfdyn.cli import main; exit(main(['recipes']) or main(['train', 'digits', '--dry-run']))"
    how = {"cwd": place.parent, "env": {**os.environ, "PYTHONPATH": str(place)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], check=True, **how)
    assert all(f"  {name} " in done.stdout for name in list_recipes())


def test_cifar_recipes_choose_from_the_operations_of_their_authors():
    """Spikformer's code has a RandAugment of its own with five operations; QKFormer's takes timm's."""
    spikformer, qkformer = (load_recipe(f"cifar100_{host}") for host in ("spikformer", "qkformer"))
    five = ("equalize", "rotate", "shear_x", "translate_x", "translate_y")
    assert spikformer.augmentation.rand_augment_operations == five
    assert qkformer.augmentation.rand_augment_operations is None


@pytest.mark.parametrize("host", ["spikformer", "qkformer"])
def test_cifar_recipes_mix_until_the_end(host):
    """As the programs of both do, whatever the switch in their settings says."""
    config = load_recipe(f"cifar100_{host}")
    assert config.augmentation.mixup == 0.5
    assert config.schedule.mix_epochs is None
    assert config.schedule.within(100).mix_epochs is None

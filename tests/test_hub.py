"""Saved models: the same outputs bit for bit, and clear errors for damaged or foreign files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lrfdyn
from lrfdyn.attention import ATTENTIONS
from lrfdyn.errors import LrfdynError
from lrfdyn.io.hub import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, from_pretrained, known_hosts
from lrfdyn.models import SDTV1, SDTV2, SDTV3, MSResNet, QKFormer, SEWResNet, Spikformer, SpikingModel
from tests.models.host_checks import randomize

SMALL = {"dim": 16, "heads": 2, "image_size": 32, "num_classes": 5, "time_steps": 2}
STAGED = {"widths": (8, 8, 16, 16), "depths": (1, 1, 1, 1, 1), "heads": 2, "image_size": 32, "num_classes": 5}
RESNET = {"widths": (4, 8), "depths": (1, 1), "num_classes": 5, "time_steps": 2}
BUILD: dict[str, Callable[..., SpikingModel]] = {
    "spikformer": lambda **o: Spikformer(**{**SMALL, "depth": 1, **o}),
    "qkformer": lambda **o: QKFormer(**{**SMALL, "depth": 3, "form": "cifar", **o}),
    "sdt_v1": lambda **o: SDTV1(**{**SMALL, "depth": 1, **o}),
    "qkformer_dvs": lambda **o: QKFormer(**{**SMALL, "depth": 2, "form": "dvs", **o}),
    "sdt_v1_dvs": lambda **o: SDTV1(**{**SMALL, "depth": 1, "window_maxima": True, **o}),
    "sdt_v2": lambda **o: SDTV2(**{**STAGED, "distillation": True, **o}),
    "sdt_v3": lambda **o: SDTV3(**{**STAGED, "levels": 3, **o}),
    "sew_resnet": lambda **o: SEWResNet(**{**RESNET, **o}),
    "ms_resnet": lambda **o: MSResNet(**{**RESNET, **o}),
}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def awake(model: SpikingModel) -> SpikingModel:
    """In evaluation mode, with the statistics of the images: the neurons fire, so that outputs can differ."""
    norms = [module for module in randomize(model).modules() if isinstance(module, nn.BatchNorm2d)]
    for momentum in (1.0, 0.1):
        for norm in norms:
            norm.momentum = momentum
        model.train()(IMAGES)
    return model.eval()


def small(**options: Any) -> SpikingModel:
    return awake(BUILD["spikformer"](**options))


def assert_same_model(loaded: SpikingModel, model: SpikingModel) -> None:
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert loaded.name == model.name
    assert not loaded.training
    own, other = model.state_dict(), loaded.state_dict()
    assert list(own) == list(other)
    for key, value in own.items():
        assert other[key].dtype == value.dtype
        assert torch.equal(other[key], value), key
    x = IMAGES.to(next(model.parameters()).dtype)
    with torch.no_grad():
        y = model.eval()(x)
        assert y.std() > 0
        assert torch.equal(loaded(x), y)


@pytest.mark.parametrize("host", BUILD)
def test_every_host_comes_back_bit_for_bit(tmp_path, host):
    model = awake(BUILD[host]())
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CARD_FILE, CONFIG_FILE, WEIGHTS_FILE])
    assert_same_model(SpikingModel.from_pretrained(tmp_path), model)
    assert_same_model(type(model).from_pretrained(str(tmp_path)), model)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_attention_comes_back_bit_for_bit(tmp_path, kind):
    model = small(attention=kind)
    model.save_pretrained(tmp_path / "new" / "folder")
    assert_same_model(from_pretrained(tmp_path / "new" / "folder"), model)


def test_options_of_the_attention_come_back(tmp_path):
    options = {"dilations": (1, 3), "dendrites": 4, "token": "qkv", "directions": 2}
    model = small(attention="lrf_dyn", attention_options=options, pooling=[False, False, True, True])
    model.config["pooling"] = tuple(model.config["pooling"])  # JSON does not tell lists from tuples
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.config["attention_options"] == options
    assert_same_model(loaded, model)


@pytest.mark.parametrize("kind", ["causal_ssa", "lrf_ssa", "lrf_dyn"])
def test_attention_without_stencils_comes_back_bit_for_bit(tmp_path, kind):
    model = small(attention=kind, attention_options={"dilations": ()})
    model.save_pretrained(tmp_path)
    assert_same_model(from_pretrained(tmp_path), model)


def test_swapped_attention_comes_back_bit_for_bit(tmp_path):
    model = small(attention="ssa")
    lrfdyn.swap_attention(model, "lrf_dyn", dilations=(1,))
    awake(model)
    model.save_pretrained(tmp_path)
    assert_same_model(from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_of_the_weights_are_kept(tmp_path, dtype):
    model = small().to(dtype)
    model.save_pretrained(tmp_path)
    assert_same_model(from_pretrained(tmp_path), model)


def test_registry_name_and_lack_of_a_classifier_are_kept(tmp_path):
    model = awake(lrfdyn.create_model("spikformer_4_384", dim=16, heads=2, depth=1, num_classes=0))
    assert model(IMAGES).shape == (2, 16)
    model.save_pretrained(tmp_path)
    assert_same_model(from_pretrained(tmp_path), model)


def test_loading_draws_nothing_at_random_and_what_it_loads_trains(tmp_path):
    small().save_pretrained(tmp_path)
    before = torch.get_rng_state()
    model = from_pretrained(tmp_path, drop_path=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config["drop_path"] == 0.1
    model.train()(IMAGES).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)  # over the file it came from
    assert_same_model(from_pretrained(tmp_path), model)


def test_user_defined_hosts(tmp_path):
    class Mine(Spikformer):
        """A host that no registry knows."""

    model = awake(Mine(**SMALL, depth=1))
    model.save_pretrained(tmp_path)
    assert_same_model(from_pretrained(tmp_path), model)
    assert "SpikingModel" not in known_hosts()


def test_wrong_class_is_an_error(tmp_path):
    small().save_pretrained(tmp_path)
    with pytest.raises(LrfdynError, match=r"config\.json holds a Spikformer, expected a QKFormer"):
        QKFormer.from_pretrained(tmp_path)


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes the configuration, and takes it out of the weights' header so that only the change is wrong."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    options = changes.pop("options", {})
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **changes, "options": {**config["options"], **options}}))
    save_file(load_file(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "Spikforma"}, r"config\.json: host: unknown name 'Spikforma'; did you mean Spikformer"),
        ({"host": "os.system"}, r"config\.json: host: unknown name"),
        ({"options": {"hedas": 2}}, r"config\.json: option of Spikformer: unknown name 'hedas'; did you mean heads"),
        (
            {"options": {"attention": "sss"}},
            r"config\.json: Spikformer cannot be built .*attention: unknown name 'sss'",
        ),
        ({"options": {"attention_options": {"x": 1}}}, r"config\.json: Spikformer cannot be built .*'x'"),
        ({"options": {"dim": "wide"}}, r"config\.json: Spikformer cannot be built"),
        ({"options": {"dim": 16000}}, r"model\.safetensors does not fit the model: .*expected \[2000, 3, 3, 3\]"),
        ({"options": {"dim": 24}}, r"model\.safetensors does not fit the model: stem.stages.0.conv.weight expected"),
        ({"options": {"depth": 2}}, r"model\.safetensors does not fit the model: blocks.1.*is missing"),
        ({"options": {"attention": "lrf_dyn"}}, r"model\.safetensors does not fit the model: .*is missing"),
        ({"format": 2, "lrfdyn_version": "9.0"}, r"config\.json has format 2, written by lrfdyn 9\.0"),
        ({"library_name": "timm"}, r"config\.json is not a configuration of lrfdyn"),
    ],
)
def test_wrong_configuration_names_the_file(tmp_path, changes, message):
    small().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(LrfdynError, match=message):
        from_pretrained(tmp_path)


def test_wrong_option_of_the_caller(tmp_path):
    small().save_pretrained(tmp_path)
    with pytest.raises(LrfdynError, match="option of Spikformer: unknown name 'drop_paht'; did you mean drop_path"):
        from_pretrained(tmp_path, drop_paht=0.1)


def test_configuration_and_weights_of_different_saves(tmp_path):
    small().save_pretrained(tmp_path)
    older = (tmp_path / CONFIG_FILE).read_text()
    small(heads=4).save_pretrained(tmp_path)  # the same shapes, other numbers
    (tmp_path / CONFIG_FILE).write_text(older)
    with pytest.raises(LrfdynError, match="were not saved together"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["short", "long", "empty", "pickle", "integer", "missing"])
def test_damaged_weights_name_the_file(tmp_path, damage):
    small().save_pretrained(tmp_path)
    path = tmp_path / WEIGHTS_FILE
    data = path.read_bytes()
    if damage == "pickle":
        torch.save({"stem": torch.zeros(1)}, path)
    elif damage == "integer":
        tensors = load_file(path)
        save_file({**tensors, "head.bias": tensors["head.bias"].long()}, path)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"short": data[:-7], "long": data + b"x", "empty": b""}[damage])
    with pytest.raises(LrfdynError, match=r"weights: .*model\.safetensors"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"library_name": "lrfdyn", "options": 3}'])
def test_damaged_configuration_names_the_file(tmp_path, text):
    small().save_pretrained(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(LrfdynError, match=r"source: .*config\.json"):
        from_pretrained(tmp_path)


def test_folder_without_a_model_and_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(LrfdynError, match=r"cannot read .*config\.json"):
        from_pretrained(tmp_path)
    with pytest.raises(LrfdynError, match="no such folder"):
        from_pretrained(tmp_path / "not here")
    (tmp_path / "file").write_text("")
    with pytest.raises(LrfdynError, match="folder: cannot write"):
        small().save_pretrained(tmp_path / "file")
    model = small()
    model.config["dim"] = object()
    with pytest.raises(LrfdynError, match="cannot be written as JSON"):
        model.save_pretrained(tmp_path / "other")


@pytest.mark.parametrize("change", ["replaced", "removed", "added"])
def test_model_that_its_configuration_does_not_describe_is_not_saved(tmp_path, change):
    model = small()
    if change == "replaced":
        model.head = nn.Linear(16, 6)
    elif change == "removed":
        model.head = nn.Identity()
    else:
        model.extra = nn.Linear(2, 2)
    with pytest.raises(LrfdynError, match=r"model: cannot be saved.*(head|extra)\.weight"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_card(tmp_path):
    model = lrfdyn.create_model("spikformer_4_384", dim=16, heads=2, depth=1, attention="lrf_dyn")
    hostile = 'a: "b"\n---\n# no'
    model.save_pretrained(
        tmp_path, license="apache-2.0", datasets=["cifar100"], notes=hostile, description="Of *2026*."
    )
    text = (tmp_path / CARD_FILE).read_text()
    _, header, body = text.split("---\n", 2)
    assert 'license: "apache-2.0"\n' in header
    assert "# spikformer_4_384\n\nSpikformer (dim 16, depth 1, heads 2) with LRF-Dyn attention" in body
    assert f"| all | {sum(p.numel() for p in model.parameters()):,} |" in body
    assert "Of *2026*." in body
    assert "from_pretrained(" in body
    (config,) = [part.split("\n```")[0] for part in body.split("```json\n")[1:]]
    saved = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert saved.pop("description")["text"] == "Of *2026*."  # which the card has above
    assert json.loads(config) == saved
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with huggingface_hub")
    parsed = yaml.safe_load(header)
    assert parsed["notes"] == hostile
    assert parsed["datasets"] == ["cifar100"]
    assert parsed["library_name"] == "lrfdyn"
    with pytest.raises(LrfdynError, match="card: expected names"):
        model.save_pretrained(tmp_path, **{"a: b": 1})
    with pytest.raises(LrfdynError, match="card: licence: expected text"):
        model.save_pretrained(tmp_path, licence=object())


def test_card_that_a_person_took_over_is_kept(tmp_path):
    model = small()
    model.save_pretrained(tmp_path, description="one")
    model.save_pretrained(tmp_path, description="two")
    assert "two" in (tmp_path / CARD_FILE).read_text()
    (tmp_path / CARD_FILE).write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / CARD_FILE).read_text() == "mine"


def test_card_that_is_no_text_or_no_file(tmp_path):
    model = small()
    (tmp_path / "README.md").write_bytes(b"\xff\xfe by hand")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == b"\xff\xfe by hand"
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").symlink_to("/dev/zero")
    with pytest.raises(LrfdynError, match=r"folder: cannot write in .*no file"):
        model.save_pretrained(tmp_path)


def test_card_of_a_loaded_model_keeps_its_description(tmp_path):
    """As long as its weights and options are those that the text is about."""

    def card(model: SpikingModel, **what: str) -> str:
        model.save_pretrained(tmp_path / "again", **what)
        return (tmp_path / "again" / CARD_FILE).read_text()

    small().save_pretrained(tmp_path / "run", description="top-1 93 %")
    model = from_pretrained(tmp_path / "run")
    assert "top-1 93 %" in card(model)
    assert "top-1 93 %" in card(from_pretrained(tmp_path / "again"))
    assert "top-1 93 %" not in card(from_pretrained(tmp_path / "run", time_steps=1))
    assert "top-1 93 %" not in card(model, description="mine")
    with torch.no_grad():
        model.head.bias.add_(1)
    assert "top-1 93 %" not in card(model)


def test_a_folder_of_the_user_is_where_it_is_loaded_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    small().save_pretrained("~/mine")
    assert (tmp_path / "mine" / CONFIG_FILE).is_file()
    from_pretrained("~/mine")


def test_negative_variances_are_refused(tmp_path):
    """A norm would make nan of everything, at which no neuron fires: a silent network, and no error."""
    model = small()
    model.stem.stages[0].bn.running_var[0] = -1
    model.save_pretrained(tmp_path)
    message = r"model\.safetensors is of no use: stem\.stages\.0\.bn\.running_var holds variances below zero"
    with pytest.raises(LrfdynError, match=message):
        from_pretrained(tmp_path)


def test_local_folders_need_no_huggingface_hub(tmp_path):
    code = f"""
import sys
sys.modules["huggingface_hub"] = None  # as if it were not installed
import lrfdyn
from lrfdyn.models import Spikformer
Spikformer(dim=8, depth=1, heads=1, image_size=32).save_pretrained({str(tmp_path)!r})
lrfdyn.from_pretrained({str(tmp_path)!r})
for use in (lambda: lrfdyn.from_pretrained("someone/model"), lambda: Spikformer(dim=8, depth=1).push_to_hub("a/b")):
    try:
        use()
    except lrfdyn.LrfdynError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'lrfdyn[hub]'") == 2


def test_download(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    model = small()
    model.save_pretrained(tmp_path / "cache")
    asked = {}

    def snapshot_download(repo_id: str, **arguments: Any) -> str:
        asked.update(arguments, repo_id=repo_id)
        return str(tmp_path / "cache")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert_same_model(from_pretrained("someone/model", revision="v1", token="t", local_files_only=True), model)
    assert asked["repo_id"] == "someone/model"
    assert (asked["revision"], asked["token"], asked["local_files_only"]) == ("v1", "t", True)
    assert asked["allow_patterns"] == [CONFIG_FILE, WEIGHTS_FILE]  # no pickles come along

    def refuse(repo_id: str, **arguments: Any) -> str:
        raise OSError("404\nmore lines")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(LrfdynError, match=r"source: no folder 'someone/model' here.*\(404\)$"):
        from_pretrained("someone/model")
    with pytest.raises(LrfdynError, match="no such folder"):
        from_pretrained("some/long/path")


def test_upload(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    calls: list[tuple[str, Any]] = []

    class Api:
        def __init__(self, **arguments: Any) -> None:
            calls.append(("api", arguments))

        def create_repo(self, repo_id: str, **arguments: Any) -> str:
            calls.append(("create", arguments))
            return f"https://example.org/{repo_id}"

        def upload_folder(self, *, repo_id: str, folder_path: str, **arguments: Any) -> None:
            calls.append(("upload", arguments))
            assert repo_id == "someone/model"
            for path in Path(folder_path).iterdir():
                (tmp_path / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(hub, "HfApi", Api)
    model = small()
    address = model.push_to_hub("someone/model", token="t", private=True, license="mit", commit_message="first")
    assert address == "https://example.org/someone/model"
    assert [name for name, _ in calls] == ["api", "create", "upload"]
    assert calls[0][1]["token"] == "t"
    assert calls[1][1] == {"private": True, "exist_ok": True}
    assert calls[2][1]["commit_message"] == "first"
    assert_same_model(from_pretrained(tmp_path), model)
    card = (tmp_path / CARD_FILE).read_text()
    assert 'from_pretrained("someone/model")' in card
    assert 'license: "mit"' in card

    monkeypatch.setattr(Api, "upload_folder", lambda self, **_: (_ for _ in ()).throw(PermissionError("403")))
    with pytest.raises(LrfdynError, match=r"repo_id: cannot upload to 'someone/model'.*403"):
        model.push_to_hub("someone/model")

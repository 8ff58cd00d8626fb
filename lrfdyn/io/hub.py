"""Models as folders, local or on the Hugging Face hub: safetensors, a JSON configuration and a model card.

Nothing is unpickled, and a configuration can only name a host of this package and its constructor's arguments. Local
folders need no further package; the hub needs huggingface_hub (`pip install 'lrfdyn[hub]'`).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from lrfdyn.attention import attention_label
from lrfdyn.checks import checked, fits
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.data.recordings import Framing
from lrfdyn.devices import choose_device
from lrfdyn.errors import LrfdynError, explain, first_line, require, unknown_name
from lrfdyn.files import expanded, plain_file, read_json, writable_folder, write_atomic, write_json
from lrfdyn.io.remote import OURS, huggingface_hub
from lrfdyn.io.weights import TYPES, check_fit, checksum, load_tensors, round_tensors, save_tensors
from lrfdyn.io.zoo import zoo_entry, zoo_folder, zoo_hint
from lrfdyn.registry import load_plugins
from lrfdyn.version import __version__

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
# A card without this line belongs to whoever took it out.
CARD_MARK = "<!-- Made by lrfdyn, and made anew by every save. Remove this line to keep your changes. -->"
FORMAT = 1
SIZES = ("dim", "depth", "widths", "depths", "heads")  # options that say how large a network is
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class HubMixin(nn.Module):
    """What a model needs to be saved, loaded and uploaded: `SpikingModel` inherits it, and every class below that is a
    host that a configuration can name. huggingface_hub's own mixin would make that package a need of every import."""

    pipeline_tag: ClassVar[str] = "image-classification"  # what the hub calls the task
    config: dict[str, Any]  # the constructor's arguments
    time_steps: int
    name: str | None = None  # in the registry
    class_names: tuple[str, ...] | None = None  # what the logits stand for
    preprocessing: Preprocessing | None = None  # of image files
    framing: Framing | None = None  # of recordings of an event camera
    described: Mapping[str, str] = {}  # the text of its card, and which weights and options that is about

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options of the constructor with their defaults."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """The number of classes, 0 for a model without a classifier."""
        return self.config["num_classes"]

    @property
    def size(self) -> dict[str, Any]:
        """How large the network is: those of its options, which need not be those of the model it is named after."""
        return {key: self.config[key] for key in SIZES if key in self.config}

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that the model was laid out for."""
        raise NotImplementedError

    @checked
    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        description: str = "",
        source: str = "path/to/this/folder",
        dtype: torch.dtype | None = None,
        **card: Any,
    ) -> None:
        """Saves the model to a folder: config.json, model.safetensors and a model card, README.md.

        `description` is Markdown for the card, `source` what its example loads, and `card` holds further entries of
        its header (`license="mit"`, `datasets=["cifar100"]`). A card that a person has taken over is kept. Without
        `description` a model that was loaded, and is as it was, keeps its own. With `dtype`, such as torch.bfloat16,
        the file holds weights that are rounded to it; the model that is loaded has the type that this one has.

            model = lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn")
            model.save_pretrained("my_model", license="mit")
            model = lrfdyn.from_pretrained("my_model")
        """
        place, config = writable_folder(expanded(folder, "folder"), "folder"), model_config(self)
        # A model whose layers were changed behind its configuration could not be loaded.
        both = (self, _build(config, {}, type(self), place / CONFIG_FILE))
        own, rebuilt = ({(name, value.shape) for name, value in m.state_dict().items()} for m in both)
        wrong = ", ".join(sorted({name for name, _ in own ^ rebuilt})[:3])
        what = f"a {type(self).__name__} of its configuration has other weights ({wrong})"
        require(not wrong, f"model: cannot be saved, because {what}; were its layers changed?")
        own_state = self.state_dict()
        tensors, own_type = (own_state, None) if dtype is None else round_tensors(own_state, dtype)
        config |= {} if own_type is None else {"dtype": own_type}
        about = checksum({name: value.to(own_state[name].dtype) for name, value in tensors.items()}, config["options"])
        description = description or (self.described.get("text", "") if self.described.get("about") == about else "")
        text = model_card(self, config, source, description, card)
        config |= {"description": {"text": description, "about": about}} if description else {}
        try:
            # The weights carry the configuration too: of a save that was cut short, the two do not agree.
            save_tensors(place / WEIGHTS_FILE, tensors, config)
            write_json(place / CONFIG_FILE, config)
            path = place / CARD_FILE
            if not path.exists() or CARD_MARK in plain_file(path).read_text(encoding="utf-8", errors="replace"):
                write_atomic(path, lambda file: file.write_text(text, encoding="utf-8", errors="replace"))
        except OSError as error:
            raise LrfdynError(f"folder: cannot write in {place} ({explain(error)})") from None

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], **arguments: Any) -> Self:
        """Loads a saved model as `lrfdyn.from_pretrained` does; a model of another class is an error."""
        return from_pretrained(source, host=cls, **arguments)

    @checked
    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload with lrfdyn",
        create_pr: bool = False,
        description: str = "",
        **card: Any,
    ) -> str:
        """Uploads what `save_pretrained` writes to a repository of the Hugging Face hub and returns its address.

        The repository is created if need be. `description` and `card` are those of `save_pretrained`, the other
        arguments are huggingface_hub's.

            address = model.push_to_hub("someone/my_model", private=True, license="mit")
        """
        how = {"commit_message": commit_message, "revision": revision, "create_pr": create_pr}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, description=description, source=repo_id, **card)
            with huggingface_hub(f"repo_id: cannot upload to {repo_id!r}") as hub:
                api = hub.HfApi(token=token, **OURS)
                address = api.create_repo(repo_id, private=private, exist_ok=True)
                api.upload_folder(repo_id=repo_id, folder_path=folder, **how)
        return str(address)


Host = TypeVar("Host", bound=HubMixin)


@checked
def from_pretrained(
    source: str | os.PathLike[str],
    *,
    host: type[Host] = HubMixin,  # type: ignore[assignment]  # the default of a type variable
    device: str | torch.device = "cpu",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    **options: Any,
) -> Host:
    """Loads a model from a folder of `save_pretrained`, of the zoo by its name (`lrfdyn.list_pretrained`), or from a
    repository of the Hugging Face hub.

    The model is in evaluation mode and in the types of its weights, or in the one it had where these were rounded.
    `host` is the class that it must have; `options` replace arguments of its constructor that leave the shapes of the
    weights alone (`drop_path`, `time_steps`, ...). `revision`, `token`, `cache_dir` and `local_files_only` are
    huggingface_hub's; a model of the zoo with a `revision` is the hub's, and its checksum is not looked at.

        model = lrfdyn.from_pretrained("runs/cifar100/model", device="cuda")
        logits = model(images)  # [B, C, H, W] to [B, classes]
    """
    place, folder, name = choose_device(device), expanded(source, "source"), os.fspath(source)
    entry = None if folder.is_dir() or revision is not None else zoo_entry(name)
    if entry is not None:
        folder = zoo_folder(entry, cache_dir, token, local_files_only)
    elif not folder.is_dir():
        require(REPO_ID.fullmatch(name) is not None, f"source: no such folder: {name}")
        how: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir, **OURS}
        how |= {"local_files_only": local_files_only, "allow_patterns": [CONFIG_FILE, WEIGHTS_FILE]}
        where = f"no folder {name!r} here{zoo_hint(name)}"
        with huggingface_hub(f"source: {where}, and the Hugging Face hub does not give it") as hub:
            folder = Path(hub.snapshot_download(name, **how))
    path, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    config, (tensors, header) = read_json(path, "source"), load_tensors(weights)
    together = header.get("library_name") is None or header == config
    hint = "save the model again, or pass changed options to from_pretrained"
    require(together, f"source: {path} and {weights} were not saved together; {hint}")
    return build_trained(config, tensors, path, weights, host=host, **options).to(place)


def build_trained(
    config: Any, tensors: Mapping[str, Tensor], path: Path, weights: Path, host: type[Host], **options: Any
) -> Host:
    """The model of a configuration (JSON from the file `path`) with the tensors of the file `weights`, in evaluation
    mode. What does not fit is an error that names the file."""
    known = isinstance(config, dict) and config.get("library_name") == "lrfdyn"
    require(known and isinstance(config.get("options"), dict), f"source: {path} is not a configuration of lrfdyn")
    found = f"format {config.get('format')!r}, written by lrfdyn {config.get('lrfdyn_version')}"
    readable = config.get("format") == FORMAT
    require(readable, f"source: {path} has {found}; lrfdyn {__version__} reads format {FORMAT}")
    model = _build(config, options, host, path)
    check_fit(weights, model, tensors)
    # The model has no memory yet; it takes over the file's tensors, types included. They are copied because those of
    # the file are mapped from it.
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    own = config.get("dtype")
    require(own in (None, *TYPES), f"source: {path}: dtype: expected one of {', '.join(TYPES)}, got {own!r}")
    return model.eval() if own is None else model.eval().to(TYPES[own])


def model_config(model: HubMixin) -> dict[str, Any]:
    """What `from_pretrained` builds the model from, as JSON gives it back."""
    config = {
        "library_name": "lrfdyn",
        "lrfdyn_version": __version__,
        "format": FORMAT,
        "model": model.name,
        "host": type(model).__name__,
        "options": model.config,
        "class_names": model.class_names,
        "preprocessing": None if model.preprocessing is None else model.preprocessing.as_dict(),
        "framing": None if model.framing is None else model.framing.as_dict(),
    }
    try:
        stated = {key: value for key, value in config.items() if value is not None}
        return json.loads(json.dumps(stated, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise LrfdynError(f"model: its configuration cannot be written as JSON ({error})") from None


def known_hosts() -> dict[str, type[HubMixin]]:
    """All host classes by name: what is below the classes that inherit the mixin, those of users and plugins too."""
    load_plugins()
    classes = [host for base in HubMixin.__subclasses__() for host in base.__subclasses__()]
    for host in classes:  # which grows meanwhile
        classes += host.__subclasses__()
    return {host.__name__: host for host in reversed(classes)}  # of several with one name the first


def _build(config: dict[str, Any], options: dict[str, Any], wanted: type[Host], path: Path) -> Host:
    """The configured model on the meta device: a wrong configuration costs no memory, and nothing is random."""
    hosts, name = known_hosts(), str(config.get("host"))
    if name not in hosts:
        raise unknown_name(f"source: {path}: host", name, hosts)
    host = hosts[name]
    if not issubclass(host, wanted):
        raise LrfdynError(f"source: {path} holds a {name}, expected a {wanted.__name__}")
    known = host.options()
    for where, given in ((f"source: {path}: ", config["options"]), ("", options)):
        for option in set(given) - set(known):
            raise unknown_name(f"{where}option of {name}", option, known)
    try:
        with torch.device("meta"):
            model = host(**{**as_tuples(config["options"]), **options})
    except Exception as error:  # the values come from a file, so anything may be wrong with them
        raise LrfdynError(f"source: {path}: {name} cannot be built ({first_line(error)})") from error
    model.described = config["description"] if fits(config.get("description"), dict[str, str]) else {}
    named = config.get("model") is None or isinstance(config["model"], str)
    require(named, f"source: {path}: model: expected a name, got {str(config.get('model'))[:40]}")
    model.name = config.get("model")
    model.class_names = class_names_of(config, model.num_classes, f"source: {path}")
    if config.get("preprocessing") is not None:
        model.preprocessing = Preprocessing.from_dict(config["preprocessing"], f"source: {path}")
    if config.get("framing") is not None:
        model.framing = Framing.from_dict(config["framing"], f"source: {path}")
    return model


def class_names_of(config: Mapping[str, Any], num_classes: int, where: str) -> tuple[str, ...] | None:
    """The names of the classes; none where there are none, or where an option gave the model other classes."""
    names = config.get("class_names") or []
    valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    require(valid, f"{where}: class_names: expected a list of names, got {names!r}")
    return tuple(names) if names and len(names) == num_classes else None


def as_tuples(value: Any) -> Any:
    """JSON has lists only; the constructors' arguments are tuples."""
    if isinstance(value, dict):
        return {key: as_tuples(item) for key, item in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def model_card(
    model: HubMixin, config: Mapping[str, Any], source: str, description: str, header: Mapping[str, Any]
) -> str:
    """The README.md of a model. `source` is where a reader loads the model from, `header` holds further entries of the
    header that the hub reads: YAML, every value as JSON, which is YAML too and quotes itself."""
    tags = ["lrfdyn", "spiking-neural-network", "vision"]
    entries = {"library_name": "lrfdyn", "pipeline_tag": model.pipeline_tag, "tags": tags, **header}
    for key, value in entries.items():
        valid = re.fullmatch(r"[\w-]+", key) is not None
        require(valid, f"card: expected names of letters, digits, - and _, got {key!r}")
        try:
            entries[key] = json.dumps(value, ensure_ascii=False)
        except TypeError:
            kind = type(value).__name__
            raise LrfdynError(f"card: {key}: expected text, numbers or lists of them, got {kind}") from None
    channels, height, width = model.input_size
    attention, steps = model.config.get("attention"), model.time_steps
    size = ", ".join(f"{key} {value}" for key, value in model.size.items())
    host = type(model).__name__ + (f" ({size})" if size else "")
    host += f" with {attention_label(attention)} attention" if attention else ""
    size = f"images of {height}x{width} pixels and {channels} channels"
    classes = f"{model.num_classes} classes" if model.num_classes else "no classifier"
    facts = f"{host}, a spiking vision network: {size}, {steps} time step{'' if steps == 1 else 's'}, {classes}."
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    counts["all"] = sum(p.numel() for p in model.parameters())
    use = f"logits = model(images)  # [B, {channels}, {height}, {width}]\n"
    if model.framing is not None:
        use = f"logits = model(frames)  # [T, B, {channels}, {height}, {width}], of recordings:\n"
        use += "# lrfdyn predict --model FOLDER RECORDING...\n"
    if model.pipeline_tag == "image-segmentation":  # of any size that its stride divides
        use = f"scores = model(images)  # [B, {channels}, H, W] to [B, {model.num_classes}, H, W], of image files:\n"
        use += "# lrfdyn predict --task segmentation --model FOLDER --out MASKS IMAGE...\n"
    parts = [
        "---\n" + "".join(f"{key}: {text}\n" for key, text in entries.items()) + f"---\n{CARD_MARK}\n",
        f"# {model.name or type(model).__name__}\n\n{facts}\n",
        description.strip() and description.strip() + "\n",
        "| part | parameters |\n|---|---:|\n" + "".join(f"| {key} | {n:,} |\n" for key, n in counts.items() if n),
        "## Use\n\n```python\nfrom lrfdyn import from_pretrained\n\n"
        f"model = from_pretrained({json.dumps(source)})\n{use}```\n",
        f"## Configuration\n\n```json\n{json.dumps(config, indent=1)}\n```\n",
    ]
    return "\n".join(filter(None, parts))

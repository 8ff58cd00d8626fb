"""What the world outside does to a command: paths, streams, disks, signals and damaged files end in one line."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

import lrfdyn
from lrfdyn.analysis.report.plots import plot_memory
from lrfdyn.cli import main
from lrfdyn.commands.shared import bars, make_table, plain_console
from lrfdyn.data.preprocess import open_picture
from lrfdyn.data.shards import ShardImages
from lrfdyn.deploy.export.formats import ExecutorchRunner, OnnxRunner, sidecar
from lrfdyn.errors import LrfdynError
from lrfdyn.files import plain_file, read_json, read_json_lines, read_summary
from lrfdyn.io.weights import load_tensors, save_tensors
from lrfdyn.sources import find_source
from lrfdyn.training.logs import RunLog
from lrfdyn.training.recipes import load_recipe

LONG = "a" * 300  # more than a name may have
FULL = "No space left on device"
EPOCH = {"kind": "epoch", "step": 3, "epoch": 1, "train_loss": 0.5, "top1": 50.0}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def error_of(capsys, *arguments: str) -> str:
    """The one line that a command ends with."""
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 700
    return line


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", LONG),
        ("train", f"{LONG}.yaml"),
        ("train", "extends.yaml"),
        ("theory", "--out", LONG),
        ("evaluate", LONG),
        ("evaluate", "digits", "--weights", LONG),
        ("predict", LONG, "--model", "x"),
        ("export", LONG, "--out", "x.onnx"),
        ("analyze", LONG),
        ("profile", "spikformer_4_384", "--plot", f"{LONG}.png"),
        ("sweep", LONG),
    ],
    ids=lambda arguments: "-".join(a[:12] for a in arguments),
)
def test_names_that_are_too_long(capsys, arguments):
    Path("extends.yaml").write_text(f"extends: {LONG}")
    assert "File name too long" in error_of(capsys, *arguments)


@pytest.mark.parametrize("command", ["evaluate", "analyze", "profile"])
def test_folders_that_may_not_be_read(capsys, monkeypatch, command):
    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert error_of(capsys, command, "secret/run").endswith(": Permission denied: secret/run")


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("analyze", "~nosuchuser/run"), "model"),
        (("export", "~nosuchuser/run", "--out", "x.onnx"), "model"),
        (("train", "cifar10_spikformer", "--data.root", "~nosuchuser/data", "--dry-run"), "data.root"),
    ],
)
def test_user_that_is_not_there(capsys, arguments, argument):
    assert f"{argument}: ~nosuchuser/" in error_of(capsys, *arguments)


def test_paths_cannot_write_on_the_terminal(capsys):
    assert r"a\nb\x1b[31m" in error_of(capsys, "evaluate", "a\nb\x1b[31m")


def full_stream() -> io.TextIOWrapper:
    return open("/dev/full", "w", encoding="utf-8")


def left_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("command", ["models spikformer_4_384", "recipes"])  # one prints with rich, one without
@pytest.mark.parametrize(("stream", "code"), [(full_stream, 2), (left_pipe, 141), (lambda: None, 0)])
def test_output_that_nobody_can_read(monkeypatch, capsys, command, stream, code):
    output = stream()
    monkeypatch.setattr(sys, "stdout", output)
    assert main(command.split()) == code
    if output is not None:
        output.close()  # as the interpreter does when it ends; this would raise again
    assert capsys.readouterr().err == (f"lrfdyn {command.split()[0]}: error: {FULL}\n" if code == 2 else "")


def test_errors_without_an_error_stream(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["evaluate", "nothing"]) == 2
    assert capsys.readouterr().out == ""


def test_interrupted_command(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lrfdyn.cli.build_parser", interrupt)  # it imports for a second
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "\nlrfdyn: interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="other systems have other signals")
def test_interrupted_import():
    Path("torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)")
    path = os.pathsep.join((str(Path.cwd()), str(Path(lrfdyn.__file__).parents[1])))
    command, environment = [sys.executable, "-m", "lrfdyn", "models"], {**os.environ, "PYTHONPATH": path}
    # A shell ignores Ctrl-C for what it starts in the background, and so would what a test starts there.
    signals = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **signals)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("text", ["r[/a]", "runs/[red]x", "runs/:smile:", "[bold]"])
def test_texts_are_printed_as_they_are(capsys, text):
    console = plain_console(100)
    with bars(console) as shown:
        shown.add_task(text, total=1, news=text)
    table = make_table("a", title=text)
    table.add_row(text)
    console.print(table, text)
    output = capsys.readouterr().out
    assert output.count(text) == 5, output


def refuse_to_write(*_, **__):
    raise OSError(errno.ENOSPC, FULL)


def test_full_disk_in_a_figure(monkeypatch):
    """The old figure stays, and there is no half of a new one."""
    path = Path("memory.png")
    path.write_text("old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse_to_write)
    with pytest.raises(OSError, match=r"No space.*memory\.png"):
        plot_memory({"SSA": []}, [], path)
    assert path.read_text() == "old"
    assert list(Path().iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, FULL), SafetensorError(f"I/O error: {FULL}")])
def test_full_disk_in_weights(monkeypatch, error):
    model = lrfdyn.create_model("spikformer_4_384", depth=1, dim=16, heads=2)
    monkeypatch.setattr("lrfdyn.io.weights.save_file", Mock(side_effect=error))
    with pytest.raises(LrfdynError, match=f"folder: cannot write .*{FULL}"):
        model.save_pretrained("saved")


def test_full_disk_in_tensorboard(monkeypatch, capsys):
    log = RunLog(Path(), 0)
    log._board = SimpleNamespace(close=refuse_to_write)
    log.close()
    assert main(["recipes"]) == 0
    thread = threading.Thread(target=refuse_to_write)  # its traceback would be printed
    thread.start()
    thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        "5",
        "[]",
        "{}",
        '{"kind": "epoch"}',
        *(json.dumps(EPOCH | e) for e in ({"top1": "x"}, {"step": None})),
        "[" * 10**5,
    ],
)
def test_edited_log(line):
    Path("log.jsonl").write_text(f"{line}\n{json.dumps(EPOCH)}\n{line}\n")
    assert read_json_lines(Path("log.jsonl")) == [EPOCH]


def test_the_end_of_a_log(tmp_path):
    """A record that the end begins in the middle of is left out."""
    lines = [json.dumps({**EPOCH, "step": step}) + "\n" for step in range(3)]
    log, one = tmp_path / "log.jsonl", len(lines[0])
    log.write_text("".join(lines))
    for last, steps in ((one - 1, []), (one, [2]), (2 * one + 5, [1, 2]), (999, [0, 1, 2])):
        assert [record["step"] for record in read_json_lines(log, last)] == steps
    assert read_json_lines(tmp_path / "none.jsonl", 5) == []


@pytest.mark.parametrize("text", ["5", "", "[" * 10**5, '{"top1": "x"}', '{"seed": []}', "9" * 5000])
def test_edited_summary(text):
    Path("summary.json").write_text(text)
    with pytest.raises(LrfdynError, match=r"out: .*summary\.json") as caught:
        read_summary(Path("summary.json"), "out")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["5", "[]", "x", "[" * 10**5, "9" * 5000])
def test_edited_metadata_of_weights(text):
    save_file({"x": torch.ones(1)}, "a.safetensors", metadata={"lrfdyn": text})
    with pytest.raises(LrfdynError, match=r"a\.safetensors is damaged"):
        load_tensors(Path("a.safetensors"))


@pytest.mark.parametrize("key", ["host", "model", "options", "format", "class_names", "preprocessing"])
@pytest.mark.parametrize("value", [[[]], {"a": {}}, 7])
def test_edited_configuration(key, value):
    config = {"library_name": "lrfdyn", "format": 1, "model": "spikformer_4_384", "host": "Spikformer", "options": {}}
    Path("saved").mkdir()
    Path("saved/config.json").write_text(json.dumps({**config, key: value}))
    save_tensors(Path("saved/model.safetensors"), {"x": torch.ones(1)})
    with pytest.raises(LrfdynError, match=r"config\.json"):
        find_source("saved").load()


def write_shard(label: bytes) -> Path:
    path = Path("train.tar")
    with tarfile.open(path, "w") as tar:
        for name, content in (("a.jpg", b"picture"), ("a.cls", label)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("label", [b"", b"x", b"-1", b"9" * 5000, b"9" * 18, b"9" * 30])
def test_edited_label(label):
    with pytest.raises(LrfdynError, match=r"a\.cls in .*train\.tar is not a class index"):
        ShardImages([write_shard(label)])


def test_damaged_index_is_made_anew():
    path = write_shard(b"3")
    kept = Path(f".{path.name}.index.npy")
    ShardImages([path])
    head, row = np.load(kept)
    for table in ([head], [head, row - 10**6], [head, row + 10**6], [], 5, [[1]]):
        np.save(kept, np.array(table, np.int64))
        assert ShardImages([path]).labels.tolist() == [3]
    for content in (b"", b"PK\x03\x04", b"x"):
        kept.write_bytes(content)
        assert ShardImages([path]).labels.tolist() == [3]


@pytest.fixture(params=["pipe", "device", "folder"])
def no_file(request) -> Path:
    path = Path("a.png")
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("read", [plain_file, lambda path: open_picture(path, "RGB")])
def test_what_is_no_file_is_not_waited_for(no_file, read):
    with pytest.raises(OSError, match="it is no file"):
        read(no_file)


@pytest.mark.parametrize(
    "read", [load_tensors, load_recipe, lambda path: read_json(path, "out"), lambda path: ShardImages([path])]
)
def test_what_is_no_file_is_an_error(no_file, read):
    with pytest.raises(LrfdynError, match="no file"):
        read(no_file)


def test_an_exported_model_that_is_no_file_is_an_error(no_file):
    pytest.importorskip("onnxruntime")
    with pytest.raises(LrfdynError, match=r"not an ONNX file that can be run .*no file"):
        OnnxRunner(no_file)


def test_a_program_that_is_no_file_is_an_error(no_file):
    pytest.importorskip("executorch")
    sidecar(no_file).write_text('{"most_images": 1}')
    with pytest.raises(LrfdynError, match=r"not an ExecuTorch program that can be run .*no file"):
        ExecutorchRunner(no_file)


def test_pictures_from_plain_files():
    Image.fromarray(np.zeros((2, 2), np.uint8)).save("x.png")
    assert open_picture(Path("x.png"), "L").size == (2, 2)

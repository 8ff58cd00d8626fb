"""Block sizes that are measured, with a stand-in for the timer."""

from __future__ import annotations

import json
import runpy
import threading
import warnings
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch

from lrfdyn.cli import main
from lrfdyn.commands import tune
from lrfdyn.ops import lif
from lrfdyn.ops.bits import pack_channels, unpack_channels
from lrfdyn.ops.bits_triton import unpack_steps
from lrfdyn.ops.bn_lif import Norm, bn_lif
from lrfdyn.ops.lif import Dynamics, integer_spike
from tests.ops.kernels import DEVICE, GPU, rand, spikes, with_kernels

pytest.importorskip("triton")

from lrfdyn.ops import dispatch, machine, tuning, tuning_file
from lrfdyn.ops.dendrite.triton import Dendrite
from lrfdyn.ops.lrf.triton import Lrf
from lrfdyn.ops.machine import H200, Machine

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Nothing is known of any machine."""
    monkeypatch.setenv("LRFDYN_TUNING", str(tmp_path / "tuning"))
    tuning_file.read.cache_clear()
    yield tmp_path / "tuning"
    tuning_file.read.cache_clear()


def machine_here() -> Machine:
    return machine.machine_of(torch.zeros(0, device=DEVICE).device)


@pytest.fixture
def fewer_lanes(monkeypatch):
    """The interpreter knows no warps: sizes are tried with other numbers of them on a GPU only."""
    if not GPU:
        every = tuning._choices
        monkeypatch.setattr(tuning, "_choices", lambda machine, lanes, *sizes: every(machine, lanes[:1], *sizes))


def train(x, tokens):
    """Everything that offers several sizes, forward and backward."""
    leaves = [x.detach().requires_grad_(), tokens.detach().requires_grad_()]
    one, neuron = torch.ones(x.shape[2], device=x.device), Dynamics.lif()
    normed = partial(with_kernels(bn_lif), leaves[0], Norm(one, 0 * one, 0 * one, one, True))
    made = [normed(neuron), normed(neuron, pool=True), normed(neuron, pool_first=True), normed(None)]
    made += [with_kernels(lif)(leaves[0], neuron)[0], with_kernels(integer_spike)(leaves[0])]
    weight = rand(2, x.shape[2], 3, 3, seed=1).requires_grad_()
    made.append(Lrf.apply(leaves[0].flatten(0, 1), weight, (1, 3), None, True, None))
    modes = [m.requires_grad_() for m in (0.1 + rand(70, 2, seed=2).abs(), rand(70, 2, seed=3), rand(70, 2, 2, seed=4))]
    made.append(Dendrite.apply(leaves[1], *modes, torch.float32, None, None, False)[0])
    loss = sum((y * rand(*y.shape, seed=i)).sum() for i, y in enumerate(made))
    grads = torch.autograd.grad(loss, (*leaves, weight, *modes))
    packed = with_kernels(pack_channels)(tokens)
    made += [packed, with_kernels(unpack_channels)(packed, tokens.shape[-1], torch.float32)]
    bits = torch.randint(16, (1, 24, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return [*made, *grads, unpack_steps(bits.to(x.device), 4, torch.float32)]


@pytest.fixture
def inputs():
    return 2 * rand(2, 1, 7, 9, 24).permute(0, 1, 4, 2, 3), spikes(3, 3, 70)


def test_all_sizes_give_the_same_bits_and_the_fastest_are_kept(inputs, empty_folder, fewer_lanes):
    expected, clock = train(*inputs), count()  # what is tried last is the fastest
    with tuning.measured(lambda call: (call(), 0.9 ** next(clock))[1]) as found:
        during = train(*inputs)
    kinds = found[machine_here()]
    tuned = {"_lif", "_integer", "_lrf", "apply_kernel", "apply_backward_kernel", "pool_kernel", "unpool_kernel"}
    tuned |= {"maxima_kernel", "_dendrite_forward", "_dendrite_backward", "_pack_channels", "_unpack_channels"}
    tuned |= {"_unpack_steps"}
    assert {key.split()[0].rpartition(".")[2] for key in kinds} == tuned
    assert all(kind.other_bits == 0 and kind.tried > 1 for kind in kinds.values())
    assert len(list(empty_folder.glob("*.json"))) == 1

    taken = []
    with pytest.MonkeyPatch.context() as patch:
        chosen = tuning.taken
        patch.setattr(tuning, "taken", lambda *given: taken.append((chosen(*given), given[2])) or taken[-1][0])
        after = train(*inputs)
    assert all(options == offered[-1] for options, offered in taken)
    assert len(taken) >= len(kinds)
    for outputs in (during, after):
        assert all(map(torch.equal, outputs, expected))
    with tuning.measured(lambda call: pytest.fail("it is known")) as found:
        train(*inputs)
    assert not found
    with tuning.measured(lambda call: 1.0, again=True) as found:  # none is faster, so the first of each stays
        with_kernels(lif)(inputs[0], Dynamics.lif())
    (kind,) = found[machine_here()].values()
    assert kind.options == {"BLOCK": 1024, "num_warps": machine_here().warps(128)}


def test_a_little_faster_is_not_faster(inputs):
    clock = iter([1.0] + [0.99] * 100)
    with tuning.measured(lambda call: next(clock)) as found:
        with_kernels(lif)(inputs[0], Dynamics.lif())
    (kind,) = found[machine_here()].values()
    assert (kind.options["BLOCK"], kind.ms, kind.first_ms) == (1024, 1.0, 1.0)


def test_only_what_is_offered_is_taken_though_shapes_are_alike(fewer_lanes, monkeypatch):
    """These two are alike in powers of two, and the smaller one has no room for the larger blocks of the other."""
    one, taken = torch.ones(32, device=DEVICE), []
    chosen = tuning.taken
    monkeypatch.setattr(tuning, "taken", lambda *given: taken.append((chosen(*given), given[2])) or taken[-1][0])

    def run():
        for width in (10, 8):
            x = rand(2, 1, 32, 8, width).requires_grad_()
            norm = Norm(one, 0 * one, 0 * one, one.clone(), True)
            with_kernels(bn_lif)(x, norm, Dynamics.lif(), pool_first=True).sum().backward()

    with tuning.measured(lambda call: 1.0):
        run()
    assert all(options in offered for options, offered in taken)
    with tuning.measured(lambda call: pytest.fail("it is known")):
        run()


class Kernel:
    """In the place of a kernel: adds `BLOCK` times `step` to its second argument, in place."""

    def __init__(self, step: int, refused: int = 0) -> None:
        self.step, self.refused, self.grids = step, refused, []

    def fn(self) -> None: ...

    fn.__module__ = "package.ops.module"

    def __getitem__(self, grid):
        self.grids.append(grid)

        def launch(x, out, BLOCK, num_warps):  # noqa: N803
            if self.refused == BLOCK:
                raise tuning.REFUSED[0](1, 2, "shared memory")
            out += 1 + self.step * BLOCK

        return launch


def offered():
    return tuning.choices(torch.zeros(0, device=DEVICE).device, BLOCK=(4, 8, 16), lanes=(64,))


def launch(kernel, x, out):
    tuning.launch_tuned(kernel, lambda o: (o["BLOCK"],), offered(), x, out)
    return out


def test_sizes_that_change_a_bit_are_not_taken():
    x = torch.zeros(4, device=DEVICE)
    for step, dropped in ((0, 0), (1, 2)):
        clock = count(9, -1)
        with tuning.measured(lambda call, clock=clock: float(next(clock)), again=True) as found:
            launch(Kernel(step), x, torch.zeros(4, device=DEVICE))
        (kind,) = found[machine_here()].values()
        assert (kind.other_bits, kind.options["BLOCK"]) == (dropped, 4 if dropped else 16)


def test_sizes_that_the_machine_has_no_room_for_are_left_out():
    x = torch.zeros(4, device=DEVICE)
    with tuning.measured(lambda call: 1.0) as found:
        launch(Kernel(0, refused=8), x, x.clone())
    (kind,) = found[machine_here()].values()
    assert (kind.tried, kind.options["BLOCK"]) == (3, 4)
    with pytest.raises(tuning.REFUSED[0]), tuning.measured(lambda call: 1.0, again=True):
        launch(Kernel(0, refused=4), x, x.clone())


def test_triton_without_an_error_of_its_own_for_ptxas(monkeypatch):
    """Triton 3.2, which PyTorch 2.6 brings, raises a RuntimeError there."""
    monkeypatch.delattr(tuning.triton.runtime.errors, "PTXASError", raising=False)
    assert RuntimeError in runpy.run_path(tuning.__file__)["REFUSED"]


def test_arguments_are_left_alone_though_a_kernel_works_in_place_and_shares_their_memory():
    whole = torch.arange(12.0, device=DEVICE)
    wide, kernel = whole.view(3, 4)[:, :2], Kernel(0)  # rows with a gap
    with tuning.measured(lambda call: (call(), 1.0)[1]):
        launch(kernel, wide, wide)
    assert torch.equal(whole.view(3, 4)[:, 2:], torch.arange(12.0, device=DEVICE).view(3, 4)[:, 2:])
    assert torch.equal(wide, torch.arange(12.0, device=DEVICE).view(3, 4)[:, :2] + 1)  # of the launch itself
    copies, memory = tuning._copies((wide, whole, None, 3))
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr() != whole.data_ptr()
    assert (copies[0].stride(), copies[2:], len(memory)) == (wide.stride(), [None, 3], 1)


def test_nothing_is_measured_while_a_graph_is_captured_or_unless_asked_for(monkeypatch, empty_folder):
    x = torch.zeros(4, device=DEVICE)
    monkeypatch.setattr(tuning, "_capturing", lambda: True)
    with tuning.measured(lambda call: pytest.fail("measured")) as found:
        launch(Kernel(0), x, x.clone())
    monkeypatch.setattr(tuning, "fastest", lambda *_: pytest.fail("measured"))
    launch(Kernel(0), x, x.clone())
    assert not found
    assert not empty_folder.exists()
    with tuning.measured(), pytest.raises(RuntimeError, match="another one is open"), tuning.measured():
        pass


def known(sizes, **changes):
    """A file of this machine in which the launch of `Kernel` has these options."""
    x = torch.zeros(4, device=DEVICE)
    key = tuning.kind_of(Kernel(0), lambda o: (o["BLOCK"],), offered(), (x, x), {})
    path = tuning_file.path_of(machine_here())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**tuning_file.owner(machine_here()), "options": {key: sizes}, **changes}))
    return path


def taken_size():
    """The size of a launch, and the warnings."""
    tuning_file.read.cache_clear()
    kernel, x = Kernel(0), torch.zeros(4, device=DEVICE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        launch(kernel, x, x.clone())
        launch(kernel, x, x.clone())
    assert len(set(kernel.grids)) == 1
    return kernel.grids[0][0], [str(each.message) for each in said]


def test_what_is_known_is_taken_if_it_is_offered():
    warps = machine_here().warps(64)
    known({"BLOCK": 16, "num_warps": warps})
    assert taken_size() == (16, [])
    known({"BLOCK": 32, "num_warps": warps})
    assert taken_size() == (4, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"triton": "0.1"}, "is of another machine"),
        ({"machine": {"name": "another"}}, "is of another machine"),
        ({"options": 3}, "expected sizes under 'options'"),
        ({"options": {"key": {"BLOCK": "16"}}}, "expected sizes under 'options'"),
    ],
)
def test_a_foreign_file_is_ignored_with_one_warning(changes, reason):
    path = known({"BLOCK": 16, "num_warps": machine_here().warps(64)}, **changes)
    size, (said,) = taken_size()
    assert size == 4
    assert said.startswith("measured block sizes are ignored: ")
    assert reason in said
    assert str(path) in said
    assert "\n" not in said


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0\xff"])
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(text):
    path = known({})
    path.write_text(text)
    size, said = taken_size()
    assert (size, len(said)) == (4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuning_file.add(machine_here(), {"key": {"BLOCK": 8}})
    assert tuning_file.read(machine_here()) == {"key": {"BLOCK": 8}}


def test_it_can_be_turned_off_and_placed(monkeypatch, tmp_path):
    assert tuning_file.folder() == tmp_path / "tuning"
    monkeypatch.delenv("LRFDYN_TUNING")
    monkeypatch.setenv("LRFDYN_CACHE", str(tmp_path / "cache"))
    assert tuning_file.folder() == tmp_path / "cache" / "tuning"
    known({"BLOCK": 16, "num_warps": machine_here().warps(64)})
    monkeypatch.setenv("LRFDYN_TUNING", "0")
    assert taken_size() == (4, [])
    tuning_file.add(machine_here(), {"key": {"BLOCK": 8}})
    assert tuning_file.path_of(machine_here()) is None


def test_files_are_of_one_machine_one_triton_and_one_state_of_the_kernels(monkeypatch):
    paths = {
        tuning_file.path_of(each) for each in (H200, replace(H200, multiprocessors=16), replace(H200, name="another"))
    }
    monkeypatch.setattr(tuning_file, "sources", lambda: "others")
    paths.add(tuning_file.path_of(H200))
    monkeypatch.setattr(tuning_file.triton, "__version__", "0.1")
    paths.add(tuning_file.path_of(H200))
    assert len(paths) == 5


def test_several_may_add_at_once():
    everything = {f"kind {i}": {"BLOCK": i} for i in range(12)}
    threads = [threading.Thread(target=tuning_file.add, args=(H200, {k: v})) for k, v in everything.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tuning_file.read.cache_clear()
    assert tuning_file.read(H200) == everything


def test_the_command_measures_what_a_network_launches(monkeypatch, capsys, empty_folder):
    if not GPU:
        assert main(["tune", "spikformer_4_384"]) == 2
        assert "2.9 or newer, got cpu and" in capsys.readouterr().err
        monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
        every = tuning._choices
        monkeypatch.setattr(tuning, "_choices", lambda *given: every(*given)[::4])  # the interpreter is slow
    monkeypatch.setattr(tuning, "device_timer", lambda call: 1.0)
    from lrfdyn import create_model

    options = {"dim": 16, "depth": 4, "heads": 2, "image_size": 8, "time_steps": 2}
    create_model("qkformer_4_384", attention="lrf_dyn", **options).save_pretrained(empty_folder.parent / "model")
    given = ["tune", str(empty_folder.parent / "model"), "--batch", "1", "--precision", "fp32"]
    assert main([*given, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {"ops.dendrite.triton._dendrite_backward", "ops.lif.triton._lif"} <= {r["key"].split()[0] for r in records}
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "0 kinds of launches of" in said
    (path,) = empty_folder.glob("*.json")
    assert f"kept in {path}" in said


@pytest.fixture
def networks(monkeypatch):
    """The networks that the command would launch."""
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
    found = []
    monkeypatch.setattr(tune, "launch_all", lambda model, *_: found.append(model))
    return found


def test_the_command_measures_every_attention_that_it_is_given(networks, tmp_path, capsys):
    from lrfdyn import create_model

    options = {"dim": 16, "depth": 1, "heads": 2, "image_size": 16, "attention_options": {"dilations": [1, 2]}}
    create_model("spikformer_4_384", attention="lrf_ssa", **options).save_pretrained(tmp_path / "model")
    assert main(["tune", str(tmp_path / "model"), "--attention", "lrf_dyn", "LRF_SSA", "ssa"]) == 0
    assert [network.config["attention"] for network in networks] == ["lrf_dyn", "lrf_ssa", "ssa"]
    assert networks[1].blocks[0].attn.lrf.dilations == (1, 2)  # its own
    networks.clear()
    capsys.readouterr()
    assert main(["tune", str(tmp_path / "model"), "--attention", "lrf_ssa", "lrf_dym"]) == 2
    assert "did you mean lrf_dyn" in capsys.readouterr().err
    assert not networks


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(networks, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LRFDYN_TUNING", str(tmp_path / "file"))
    assert main(["tune", "spikformer_4_384"]) == 2
    assert f"LRFDYN_TUNING: cannot write in the folder {tmp_path / 'file'}" in capsys.readouterr().err
    assert not networks

"""The five attentions behind the registry, in two kinds of host."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.attention import ATTENTIONS, attention_label, attention_options, create_attention, lif_host
from lrfdyn.attention.layout import from_heads, from_tokens, to_heads, to_tokens
from lrfdyn.errors import LrfdynError
from lrfdyn.nn.neurons import IntegerSpike
from lrfdyn.ops.lif import Dynamics, lif_reference
from lrfdyn.ops.lrf import lrf_reference
from tests.attention.small import DIM, FIVE, HEADS, build, hosts, images, kind_id, kinds, mixing_weights
from tests.conftest import assert_same, random, shape_id

# --- shapes and gradients


@kinds
@hosts
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 2, 4, 6), (4, 1, 3, 5), (2, 3, 9, 9)], ids=lambda s: shape_id(s, "TBHW")
)
def test_shape_comes_back_and_every_parameter_learns(kind, options, host, shape):
    time, batch, *grid = shape
    attention = build(kind, host, tuple(grid), **options)
    attention.eval()  # one image of one token has no variance to normalise by
    x = images(time, batch, DIM, grid).requires_grad_()
    y = attention(x)
    assert y.shape == x.shape
    assert mixing_weights(attention, x).shape[1:] == (grid[0] * grid[1], grid[0] * grid[1])
    y.backward(random(*y.shape, seed=5))
    grads = {"x": x.grad, **{name: p.grad for name, p in attention.named_parameters()}}
    assert all(g.isfinite().all() for g in grads.values())
    if time * batch * grid[0] * grid[1] > 10:
        # Averages of sparse spikes (vsa) may not fire at all, and then the last layer has nothing to learn from.
        assert all(g.abs().sum() > 0 for name, g in grads.items() if not name.startswith("proj"))


@kinds
@hosts
def test_another_grid_than_at_construction(kind, options, host):
    attention = build(kind, host, (3, 5), **options).eval()
    for grid in ((5, 3), (9, 10)):
        x = images(2, 1, DIM, grid)
        assert attention(x).shape == x.shape


@kinds
@hosts
def test_memory_layout_does_not_matter(kind, options, host):
    attention = build(kind, host, **options).eval()
    x = images(2, 2, DIM, (3, 5))
    q = [getattr(attention, name)(x) for name in attention.projections]
    channels_last = [s.movedim(2, -1).contiguous().movedim(-1, 2) for s in q]
    torch.testing.assert_close(attention.mix(*channels_last), attention.mix(*q), rtol=0, atol=1e-12)


@kinds
def test_images_and_time_steps_are_mixed_apart(kind, options):
    attention = build(kind, **options).eval()
    x = (images(3, 2, DIM, (3, 5)) > 0).double()
    spikes = [x] * len(attention.projections)
    whole = attention.mix(*spikes)
    for t in range(3):
        for b in range(2):
            one = attention.mix(*(s[t : t + 1, b : b + 1] for s in spikes))
            torch.testing.assert_close(whole[t : t + 1, b : b + 1], one, rtol=0, atol=1e-12)


def test_heads_and_tokens_come_back():
    x = images(2, 3, DIM, (3, 5))
    heads, tokens = to_heads(x, HEADS), to_tokens(x)
    assert heads.shape == (6, HEADS, 15, DIM // HEADS)
    assert tokens.shape == (6, 15, DIM)
    # token 7 = row 1, column 2; channel 5 = channel 1 of head 1; image 4 = time 1, sample 1
    assert heads[4, 1, 7, 1] == tokens[4, 7, 5] == x[1, 1, 5, 1, 2]
    assert torch.equal(from_heads(heads, x), x)
    assert torch.equal(from_tokens(tokens, x), x)


# --- each kind against its equation


class Mixing(torch.nn.Module):
    """`mix` as the call of a module, so that its parameters can be given."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *spikes):
        return self.layer.mix(*spikes)


def per_head(attention, spikes):
    """Channels of each head as plain slices: `[T, B, c, N]`."""
    return [list(s.flatten(3).chunk(attention.heads, 2)) for s in spikes]


@hosts
@pytest.mark.parametrize("kind", ["ssa", "causal_ssa", "vsa", "lrf_ssa"])
def test_mix_is_the_equation(kind, host):
    attention = build(kind, host, (4, 6)).eval()
    x = images(2, 2, DIM, (4, 6))
    spikes = [getattr(attention, name)(x) for name in ("q", "k", "v")]
    parts = []
    for q, k, v in zip(*per_head(attention, spikes), strict=True):
        score = torch.einsum("tbcn,tbcm->tbnm", q, k)
        if kind == "vsa":
            score = torch.softmax(score / (DIM / HEADS) ** 0.5, -1)
        else:
            score = score * {"spikformer": 0.125, "sdt_v3": 0.3}[host]
        if kind == "causal_ssa":
            score = score * torch.ones(24, 24).double().tril()
        parts.append(torch.einsum("tbnm,tbcm->tbcn", score, v))
    expected = torch.cat(parts, 2).unflatten(3, (4, 6))
    if kind == "lrf_ssa":
        local = lrf_reference(spikes[2].flatten(0, 1), attention.lrf.weight, (3, 5))
        expected = expected + local.unflatten(0, (2, 2))
    if kind == "vsa":
        expected = attention.norm(expected.flatten(0, 1)).unflatten(0, (2, 2))
    assert expected.abs().sum() > 0
    mixed = attention.mix(*spikes)
    torch.testing.assert_close(mixed, expected)
    assert torch.equal(attention(x), attention.proj(attention.fire(mixed)))


@hosts
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("token", ["value", "qkv"])
def test_lrf_dyn_is_its_equations(token, directions, host):
    options = {"token": token, "directions": directions, "dilations": (1, 3), "dendrites": 4}
    attention = build("lrf_dyn", host, (4, 6), **options).eval()
    x = images(3, 2, DIM, (4, 6))
    v = attention.v(x)
    ratio = v.shape[2] // DIM
    gate, u = 1.0, v
    if token == "qkv":
        # value channel c belongs to query and key channel c // ratio, which lies in the same head
        channel = torch.arange(v.shape[2]) // ratio
        gate, u = attention.q(x)[:, :, channel], attention.k(x)[:, :, channel] * v
    kernel = attention.dendrites.kernel((4, 6))
    tokens = u.flatten(3)
    there, back = kernel if directions == 2 else (kernel, 0 * kernel)
    soma = torch.stack([(tokens[..., : n + 1].flip(-1) * there[: n + 1].T).sum(-1) for n in range(24)], -1)
    soma = soma + torch.stack([(tokens[..., n:] * back[: 24 - n].T).sum(-1) for n in range(24)], -1)
    soma = soma.unflatten(3, (4, 6)).flatten(0, 1)
    y = gate * (soma + lrf_reference(soma, attention.lrf.weight, (1, 3))).unflatten(0, (3, 2))
    bn = attention.norm
    mean, var, weight, bias = (p[:, None, None] for p in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
    mixed = (y - mean) / torch.sqrt(var + bn.eps) * weight + bias
    torch.testing.assert_close(attention.mix(*(getattr(attention, p)(x) for p in attention.projections)), mixed)
    # Normalised, so it fires at the host's ordinary threshold and not at that of its attention.
    fired = lif_reference(mixed, Dynamics.lif(threshold=1.0))[0] if host == "spikformer" else IntegerSpike()(mixed)
    assert 0 < fired.mean() < 1
    torch.testing.assert_close(attention(x), attention.proj(fired))


@hosts
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["lrf_ssa", "causal_ssa"])
@pytest.mark.parametrize(("norm", "scaled"), [(True, False), (False, True), (True, True)])
def test_readings_of_the_local_term(norm, scaled, kind, training, host):
    """s q (k^T v) + [s] [BN] sum of the stencils, in value and in every gradient."""
    attention = build(kind, host, (3, 4), dilations=(1, 2), norm=norm, scale_lrf=scaled).train(training)
    plain = build(kind, host, (3, 4), dilations=())
    bn, scale = attention.lrf.norm, {"spikformer": 0.125, "sdt_v3": 0.3}[host] if scaled else 1.0
    spikes = [s.detach() for s in attention.eval().project(images(2, 2, DIM, (3, 4)))]
    attention.train(training)

    def mix(v, weight, *affine):
        call = dict(zip(("lrf.weight", "lrf.norm.weight", "lrf.norm.bias"), (weight, *affine), strict=False))
        given = {f"layer.{name}": value for name, value in call.items()}
        return torch.func.functional_call(Mixing(attention), given, (*spikes[:2], v))

    def definition(v, weight, *affine):
        local = lrf_reference(v.flatten(0, 1), weight, (1, 2))
        if norm:
            mean, var = (local.mean((0, 2, 3)), local.var((0, 2, 3), correction=0)) if training else statistics
            mean, var, gamma, beta = (x[:, None, None] for x in (mean, var, *affine))
            local = (local - mean) / torch.sqrt(var + bn.eps) * gamma + beta
        return plain.mix(*spikes[:2], v) + scale * local.unflatten(0, (2, 2))

    statistics = (bn.running_mean.clone(), bn.running_var.clone()) if norm else ()
    affine = (bn.weight, bn.bias) if norm else ()
    assert_same(mix, definition, [spikes[2], attention.lrf.weight, *affine])


def test_a_norm_needs_stencils():
    assert build("lrf_ssa", dilations=(), norm=True).state_dict().keys() == build("ssa").state_dict().keys()


@hosts
@pytest.mark.parametrize("kind", ["ssa", "lrf_ssa", "causal_ssa", "vsa"])
def test_frozen_queries_and_keys(kind, host):
    """Their weights take no gradient; all else is as ever, their statistics and the gradient of the input too."""
    free, frozen = (build(kind, host, train_qk=trained).train() for trained in (True, False))
    results = []
    for attention in (free, frozen):
        x = images(3, 2, DIM, (3, 5)).requires_grad_()
        y = attention(x)
        y.backward(random(*y.shape, seed=5))
        grads = {name: p.grad for name, p in attention.named_parameters()}
        results.append((x.grad, y.detach(), grads, dict(attention.named_buffers())))
    (x, y, grads, buffers), (frozen_x, frozen_y, frozen_grads, frozen_buffers) = results
    assert torch.equal(x, frozen_x)
    assert torch.equal(y, frozen_y)
    assert {name for name, grad in frozen_grads.items() if grad is None} == {
        f"{part}.{name}" for part in "qk" for name in ("conv.weight", "bn.weight", "bn.bias")
    }
    assert all(torch.equal(grad, grads[name]) for name, grad in frozen_grads.items() if grad is not None)
    assert all(torch.equal(value, buffers[name]) for name, value in frozen_buffers.items())
    assert frozen_buffers["q.bn.running_mean"].abs().max() > 0


def test_thresholds():
    for kind in ("lrf_dyn", "vsa"):  # normalised before they fire
        assert build(kind).fire.dynamics.threshold == 1.0
    for kind in ("ssa", "causal_ssa", "lrf_ssa"):
        assert build(kind).fire.dynamics.threshold == 0.5


def test_value_token_needs_no_queries_and_keys():
    names = {name.split(".")[0] for name, _ in build("lrf_dyn").named_parameters()}
    assert names == {"v", "dendrites", "lrf", "norm", "proj"}
    names = {name.split(".")[0] for name, _ in build("lrf_dyn", token="qkv").named_parameters()}
    assert names == {"q", "k", "v", "dendrites", "lrf", "norm", "proj"}


@hosts
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_lrf_ssa_without_dilations_is_ssa_bit_for_bit(host, training):
    plain, local = build("ssa", host), build("lrf_ssa", host, seed=1, dilations=())
    local.load_state_dict(plain.state_dict())  # the same keys: no stencils, nothing of them
    results = []
    for attention in (plain, local):
        attention.train(training)
        x = images(3, 2, DIM, (3, 5)).requires_grad_()
        y = attention(x)
        y.backward(random(*y.shape, seed=5))
        grads = {name: p.grad for name, p in attention.named_parameters()}
        kept = {name: b for name, b in attention.named_buffers() if not name.startswith("lrf")}
        results.append({"x": x.grad, "y": y.detach(), **kept, **grads})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    x = images(2, 1, DIM, (3, 5))
    assert torch.equal(mixing_weights(plain, x), mixing_weights(local, x))


@hosts
def test_causal_ssa_with_stencils_is_both_terms(host):
    plain, local = build("causal_ssa", host, (4, 6)), build("causal_ssa", host, (4, 6), seed=1, dilations=(1, 3))
    assert "lrf.weight" not in plain.state_dict()
    local.load_state_dict({**local.state_dict(), **plain.state_dict()})
    x = images(2, 2, DIM, (4, 6))
    spikes = [getattr(plain.eval(), name)(x) for name in "qkv"]
    stencils = lrf_reference(spikes[2].flatten(0, 1), local.lrf.weight, (1, 3)).unflatten(0, (2, 2))
    assert stencils.abs().max() > 0.1
    torch.testing.assert_close(local.eval().mix(*spikes), plain.mix(*spikes) + stencils)
    # The mixing matrix: causal scores, and stencils that look at the rows below.
    weights = mixing_weights(plain, x)
    assert torch.equal(weights, weights.tril())
    assert mixing_weights(local, x).triu(1).abs().max() > 0.1


@pytest.mark.parametrize("m", [8, 14], ids="token{}".format)
def test_only_the_stencils_of_causal_ssa_look_ahead(m):
    attention = build("causal_ssa", dilations=(1,)).eval()
    x = images(3, 2, DIM, (3, 5))
    changed = x.clone()
    changed.view(3, 2, DIM, 15)[..., m] = 3 * random(3, 2, DIM, seed=9)
    spikes = [[getattr(attention, p)(i) for p in "qkv"] for i in (x, changed)]
    difference = (attention.mix(*spikes[0]) - attention.mix(*spikes[1])).flatten(3).abs().amax((0, 1, 2))
    row, column = divmod(m, 5)
    near = [n for n in range(m) if abs(n // 5 - row) <= 1 and abs(n % 5 - column) <= 1]
    far = [n for n in range(m) if n not in near]
    assert difference[near].min() > 1e-3
    assert difference[far].max() == 0


@pytest.mark.parametrize("kind", ["lrf_ssa", "lrf_dyn"])
def test_stencils_start_like_a_convolution_of_nine_inputs(kind):
    """Even from -1/3 to 1/3, in every place of the stencil."""
    torch.manual_seed(0)
    weight = create_attention(kind, 256, 2, (3, 5), lif_host(), dilations=(1, 3)).lrf.weight
    assert weight.shape == (2, 256, 3, 3)
    by_place = weight.detach().transpose(0, 1).flatten(0, 1).double()
    assert (by_place.amax(0) > 0.32).all()
    assert (by_place.amin(0) < -0.32).all()
    assert weight.abs().max() <= 1 / 3
    assert by_place.std().item() == pytest.approx(1 / 27**0.5, rel=0.03)
    assert abs(by_place.mean()) < 0.02


# --- causality


@hosts
@pytest.mark.parametrize("m", [0, 1, 7, 14], ids="token{}".format)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("causal_ssa", {}), ("lrf_dyn", {"dilations": ()}), ("lrf_dyn", {"dilations": (), "token": "qkv"})],
    ids=["causal_ssa", "lrf_dyn-value", "lrf_dyn-qkv"],
)
def test_tokens_reach_only_later_ones(kind, options, host, m):
    attention = build(kind, host, **options).eval()
    x = images(3, 2, DIM, (3, 5))
    changed = x.clone()
    changed.view(3, 2, DIM, 15)[..., m] = 3 * random(3, 2, DIM, seed=9)
    outputs, mixed = [], []
    for image in (x, changed):
        outputs.append(attention(image).flatten(3))
        mixed.append(attention.mix(*(getattr(attention, p)(image) for p in attention.projections)).flatten(3))
    assert torch.equal(outputs[0][..., :m], outputs[1][..., :m])
    # Where dendrites run as a Fourier transform, rounding is spread over all tokens: no spike changes by it.
    torch.testing.assert_close(mixed[0][..., :m], mixed[1][..., :m], rtol=0, atol=1e-12)
    assert (mixed[0] - mixed[1])[..., m:].abs().max() > 1e-3
    if m < 14:
        assert (mixed[0] - mixed[1])[..., m + 1 :].abs().max() > 1e-6


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ssa", {}), ("vsa", {}), ("lrf_ssa", {}), ("lrf_dyn", {"directions": 2, "dilations": ()})],
    ids=kind_id,
)
def test_others_look_ahead(kind, options):
    # The test above would mean nothing if no attention could fail it.
    attention = build(kind, **options).eval()
    x = images(3, 2, DIM, (3, 5))
    changed = x.clone()
    changed[..., 2, 4] += 3
    first, second = (attention.mix(*attention.project(i)).flatten(3) for i in (x, changed))
    assert (first - second)[..., :14].abs().max() > 1e-3


# --- registry and bad input


def test_registry():
    labels = {"ssa": "SSA", "lrf_dyn": "LRF-Dyn", "not installed": "not installed"}
    assert {kind: attention_label(kind) for kind in labels} == labels
    assert all(cls.kind == kind for kind, cls in ATTENTIONS.items())
    assert attention_options("ssa") == attention_options("vsa") == {"train_qk": True}
    readings = {"norm": False, "scale_lrf": False, "train_qk": True}
    assert attention_options("causal_ssa") == {"dilations": (), **readings}
    assert attention_options("lrf_ssa") == {"dilations": (3, 5), **readings}
    dendrites = {"dendrites": 8, "token": "value", "directions": 1, "coupling": "opposite"}
    assert attention_options("lrf_dyn") == {"dilations": (3, 5), **dendrites}
    for kind in FIVE:
        assert type(build(kind)) is ATTENTIONS[kind]


@pytest.mark.parametrize(
    ("kind", "options", "argument"),
    [
        ("ssa", {"heads": 3}, "heads"),
        ("lrf_dyn", {"heads": 0}, "heads"),
        ("lrf_ssa", {"dilations": (3, 3)}, "dilations"),
        ("lrf_ssa", {"dilations": (0, 1)}, "dilations"),
        ("lrf_dyn", {"dilations": (-1,)}, "dilations"),
        ("lrf_dyn", {"dendrites": 3}, "dendrites"),
        ("lrf_dyn", {"dendrites": 0}, "dendrites"),
        ("lrf_dyn", {"dendrites": 1026}, "dendrites"),
        ("lrf_dyn", {"token": "key"}, "token"),
        ("lrf_dyn", {"coupling": "equal"}, "coupling"),
        ("lrf_dyn", {"coupling": ["same"]}, "coupling"),
        ("lrf_dyn", {"norm": True}, "norm"),
        ("lrf_ssa", {"norm": 1}, "norm"),
        ("lrf_ssa", {"scale_lrf": "no"}, "scale_lrf"),
        ("causal_ssa", {"train_qk": None}, "train_qk"),
        ("lrf_dyn", {"directions": 0}, "directions"),
        ("lrf_dyn", {"directions": 3}, "directions"),
        ("lrf_ssa", {"directions": 2}, "directions"),
        ("softmax", {}, "attention"),
        ("ssa", {"dilations": (1,)}, "dilations"),
    ],
)
def test_bad_option_names_the_argument(kind, options, argument):
    with pytest.raises(LrfdynError, match=rf"^{argument}: "):
        build(kind, **options)


@pytest.mark.parametrize("shape", [(2, DIM, 3, 5), (1, 2, DIM + 1, 3, 5), (1, 2, DIM, 15)], ids=shape_id)
@kinds
def test_bad_image_names_the_argument(kind, options, shape):
    with pytest.raises(LrfdynError, match=r"^x: "):
        build(kind, **options)(torch.zeros(shape).double())


@pytest.mark.parametrize(
    ("kind", "options", "near"),
    [
        ("lrf_dny", {}, "lrf_dyn"),
        ("lrfssa", {}, "lrf_ssa"),
        ("lrf_dyn", {"token": "values"}, "value"),
        ("lrf_dyn", {"coupling": "sane"}, "same"),
        ("lrf_dyn", {"dilation": (1,)}, "dilations"),
        ("lrf_dyn", {"dendrite": 8}, "dendrites"),
        ("lrf_dyn", {"direction": 2}, "directions"),
    ],
)
def test_unknown_names_list_near_matches(kind, options, near):
    with pytest.raises(LrfdynError, match=rf"did you mean .*\b{near}\b"):
        build(kind, **options)

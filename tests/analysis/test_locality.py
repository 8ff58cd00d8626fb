"""Cases with a known answer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lrfdyn.analysis.measure.inference import attention_state, inference_peak, peak_allocation
from lrfdyn.analysis.measure.locality import (
    COARSEST,
    DOUBLING,
    FINE,
    LEAST,
    LayerLocality,
    Locality,
    add_by_distance,
    even_max_pool,
    locality,
    manhattan,
    merged,
    placed,
    receptive_field,
    receptive_field_record,
    share_inside,
    uniform_over_past,
)
from lrfdyn.analysis.measure.maps import attention_maps
from lrfdyn.analysis.measure.observe import observe
from lrfdyn.analysis.measure.spikes import firing_rates
from lrfdyn.attention import ATTENTIONS
from lrfdyn.errors import LrfdynError
from lrfdyn.models.base import FeatureInfo
from lrfdyn.nn.neurons import IF
from tests.models.host_checks import digits_model

GRID = (3, 4)


def weight_by_distance(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean normalised weight of a query-key pair, and share of all weight, at each distance 0, 1, 2, ..."""
    distance = manhattan(GRID)
    sums = torch.zeros(2, int(distance.max()) + 1, dtype=torch.float64)
    add_by_distance(sums, weights, distance)
    return sums[0] / sums[1].clamp(min=1), sums[0] / sums[1, 0]


def entropies(weights: torch.Tensor) -> tuple[float, float]:
    """Mean entropy of the queries, and the largest that one has, to a bin of the histogram."""
    layer = LayerLocality(GRID, weights.device)
    layer.add(range(12), weights)
    return float(layer.entropy / layer.queries), int(layer.histogram.nonzero().max()) * math.log(12) / FINE


def distributions(weights: torch.Tensor) -> torch.Tensor:
    return add_by_distance(torch.zeros(2, sum(GRID) - 1, dtype=torch.float64), weights, manhattan(GRID))


def test_distances_by_hand():
    d = manhattan((2, 3))
    assert d[0].tolist() == [0, 1, 2, 1, 2, 3]
    assert torch.equal(d, d.T)


def test_identity_attention_has_distance_and_entropy_zero():
    weights = torch.eye(12, dtype=torch.float64).expand(5, -1, -1)
    weight, share = weight_by_distance(weights)
    assert weight.tolist() == [1.0, 0, 0, 0, 0, 0]
    assert share.tolist() == [1.0, 0, 0, 0, 0, 0]
    assert entropies(weights) == (0, 0)


def scores(weights: torch.Tensor) -> tuple[float, dict[float, float]]:
    """The share of weights that are zero, and that of each bin that is not empty, by the middle of the bin."""
    layer = LayerLocality(GRID, weights.device)
    layer.add(range(12), weights)
    shares = layer.weights / layer.weights.sum()
    bins = {2 ** (i / DOUBLING + LEAST): float(share) for i, share in enumerate(shares[1:]) if share > 0}
    return float(shares[0]), bins


def test_distribution_of_weights_by_hand():
    uniform, alone = torch.full((2, 12, 12), 3.0), torch.eye(12).expand(2, -1, -1)
    assert scores(uniform) == (0, {1: 1})
    zero, bins = scores(alone)
    assert zero == pytest.approx(11 / 12)
    ((middle, share),) = bins.items()
    assert share == pytest.approx(1 / 12)
    assert 12 / 2 ** (0.5 / DOUBLING) <= middle <= 12 * 2 ** (0.5 / DOUBLING)  # all weight of a query, in the last bin
    tiny = torch.full((1, 12, 12), 1e-9)
    tiny[:, :, 0] = 1
    assert scores(tiny)[1][2**LEAST] == pytest.approx(11 / 12)  # what is less has the first bin


def test_distribution_of_weights_equals_one_that_numpy_counts():
    torch.manual_seed(0)
    model, images = digits_model("lrf_ssa"), torch.randn(2, 1, 8, 8)
    found = locality(model, images)["score_histogram"]
    queries = [(row, column) for row in range(8) for column in range(8)]
    maps = [query["average"] for image in attention_maps(model, images, queries)["maps"] for query in image]
    p = 64 * torch.tensor([one for one in maps if one is not None], dtype=torch.float64)
    counts, _ = torch.histogram(p, torch.tensor(found["edges"], dtype=torch.float64))
    assert sum(found["share"]) + found["zero"] == pytest.approx(1)
    torch.testing.assert_close(counts / p.numel(), torch.tensor(found["share"], dtype=torch.float64), atol=0.01, rtol=0)
    assert found["share_by_layer"] == [found["share"]]


def test_uniform_attention_has_log_n_and_the_known_mean_distance():
    n = 12
    weights = torch.full((2, n, n), 3.0, dtype=torch.float64)
    weight, share = weight_by_distance(weights)
    torch.testing.assert_close(weight, torch.full_like(weight, 1 / n))
    # mean |i - j| of two uniform draws from 0..m-1 is (m^2 - 1) / (3 m)
    expected = (GRID[0] ** 2 - 1) / (3 * GRID[0]) + (GRID[1] ** 2 - 1) / (3 * GRID[1])
    assert (share * torch.arange(len(share))).sum().item() == pytest.approx(expected, abs=1e-12)
    mean, largest = entropies(weights)
    assert mean == pytest.approx(math.log(n), abs=1e-12)
    assert largest == pytest.approx(math.log(n) * (FINE - 1) / FINE)


def test_queries_without_weight_are_left_out():
    weights = torch.zeros(1, 12, 12, dtype=torch.float64)
    weights[0, 5, 5] = 2.0
    weight, share = weight_by_distance(weights)
    assert share.tolist() == [1.0, 0, 0, 0, 0, 0]
    assert weight[0] == 1.0
    assert distributions(weights).shape == (1, 12)


def test_silent_attention_is_told_and_not_averaged():
    silent = digits_model("ssa")
    torch.nn.init.constant_(silent.blocks[0].attn.q.bn.bias, -100.0)
    record = locality(silent, torch.randn(3, 1, 8, 8))
    assert record["queries_without_weight"] == 1
    assert record["weight_by_layer"] == [None]
    assert "short_range_share" not in record


def test_model_without_attention_is_an_error():
    for function in (lambda m: locality(m, torch.randn(1, 3, 8, 8)), attention_state):
        with pytest.raises(LrfdynError, match="model: expected one with attention layers"):
            function(nn.Conv2d(3, 3, 1))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_record_of_every_attention(kind):
    built = digits_model(kind)
    for bn in built.modules():
        if isinstance(bn, nn.BatchNorm2d):
            nn.init.constant_(bn.bias, 2.0)  # enough spikes that queries meet keys
    record = locality(built, torch.randn(3, 1, 8, 8))
    assert record["distance"] == list(range(15))
    assert len(record["weight_by_layer"]) == 1
    assert 0 < record["short_range_share"] <= 1
    assert 0 <= record["entropy_mean"] <= record["entropy_uniform"] == pytest.approx(math.log(64))
    histogram = record["entropy_histogram"]
    width = histogram["edges"][1] - histogram["edges"][0]
    assert sum(histogram["density"]) * width == pytest.approx(1)


def busy(kind, **options):
    """A model in which queries meet keys."""
    built = digits_model(kind, **options)
    for bn in built.modules():
        if isinstance(bn, nn.BatchNorm2d):
            nn.init.uniform_(bn.bias, 0.0, 4.0)
    return built.eval()


@pytest.mark.parametrize("kind", ["ssa", "lrf_ssa", "lrf_dyn"])
def test_batches_add_up(kind):
    built, images = busy(kind), torch.randn(6, 1, 8, 8)
    one, three = locality(built, images), locality(built, images.split(2))
    for key in ("short_range_share", "mean_distance", "entropy_mean", "queries_without_weight"):
        assert one[key] == pytest.approx(three[key], rel=1e-6, abs=1e-9)
    assert one["weight"] == pytest.approx(three["weight"], rel=1e-5)
    assert sum(one["share"]) == pytest.approx(1)


def test_no_matrix_of_all_heads_is_ever_held():
    """Memory follows the block and not N x N x heads."""
    built = busy("ssa")
    images = torch.randn(2, 1, 32, 32)  # 1024 tokens: 2 steps x 2 images x heads x 4 MiB if held at once
    observer = Locality(block=2**16)
    peak = peak_allocation(lambda: observe(built, [images], observer))
    whole = 2 * 2 * built.blocks[0].attn.heads * 1024**2 * 4
    assert len(observer.record()["distance"]) == 63
    assert peak < whole


def test_observing_leaves_the_model_as_it_was():
    built = digits_model("ssa").train()
    locality(built, torch.randn(2, 1, 8, 8))
    assert built.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in built.modules())


class Stencil(nn.Module):
    """A stand-in host: one 3x3 convolution over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        nn.init.constant_(self.conv.weight, -0.5)

    def forward_features(self, images):
        return self.conv(images).unsqueeze(0)


def test_receptive_field_of_a_single_stencil():
    field = receptive_field(Stencil(), torch.randn(4, 1, 7, 7))
    expected = torch.zeros(7, 7)
    expected[2:5, 2:5] = 1.0  # two channels of -0.5 each
    torch.testing.assert_close(field, expected)
    shares = share_inside(field, (3, 3))
    assert [s["side"] for s in shares] == [1, 3, 5, 7]
    assert [s["share"] for s in shares] == pytest.approx([1 / 9, 1, 1, 1])


@pytest.mark.parametrize("size", [(5, 9), (9, 5), (6, 10)], ids=str)
def test_receptive_field_of_an_oblong_image(size):
    class Oblong(Stencil):
        feature_info = (FeatureInfo(2, 1),)

    row, column = size[0] // 2, size[1] // 2
    field = receptive_field(Oblong(), torch.randn(2, 1, *size))
    expected = torch.zeros(size)
    expected[row - 1 : row + 2, column - 1 : column + 2] = 1.0
    torch.testing.assert_close(field, expected)
    record = receptive_field_record(Oblong(), torch.randn(2, 1, *size))
    assert record["centre"] == [row, column]
    torch.testing.assert_close(torch.tensor(record["map"]), expected)
    # Squares around the centre, the last of which is as long as the image.
    sides = [s["side"] for s in record["share_inside"]]
    assert sides == [*range(1, 2 * max(row, column), 2), max(size)]
    assert [s["share"] for s in record["share_inside"]] == pytest.approx([1 / 9, *[1] * (len(sides) - 1)])


def test_squares_around_a_pixel_that_is_not_in_the_middle():
    field = torch.arange(15.0).reshape(3, 5)
    shares = {s["side"]: s["share"] for s in share_inside(field, (0, 3))}
    inside = {1: 3, 3: 2 + 3 + 4 + 7 + 8 + 9, 5: 105}
    assert shares == pytest.approx({side: total / 105 for side, total in inside.items()})


def test_receptive_field_of_a_host():
    record = receptive_field_record(digits_model("ssa"), torch.randn(4, 1, 8, 8))
    assert len(record["map"]) == 8
    assert max(map(max, record["map"])) == pytest.approx(1)
    shares = [s["share"] for s in record["share_inside"]]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert [s["side"] for s in record["share_inside"]] == [1, 3, 5, 7, 8]  # no square is larger than the image


def test_squares_end_with_the_longer_side():
    shares = share_inside(torch.ones(4, 12), (2, 4))  # up to 7 pixels from the centre, a square of 15
    assert [s["side"] for s in shares] == [1, 3, 5, 7, 9, 11, 12]
    assert shares[-1]["share"] == pytest.approx(1)
    assert shares[-2]["share"] < 1


def test_firing_rate_by_hand():
    neurons = nn.Sequential(IF())
    currents = torch.tensor([[1.0, 0.0], [1.0, 0.4]])  # two steps, two neurons: one fires twice
    rates = firing_rates(neurons, currents)
    assert rates == {"mean": 0.5, "by_layer": {"0": 0.5}}
    assert firing_rates(neurons, torch.zeros(2, 2))["mean"] == 0


def test_peak_allocation_sees_what_is_held_together():
    def run() -> None:
        a = torch.zeros(250_000)
        b = a + 1
        del a
        (b * 2).sum()

    assert 2_000_000 <= peak_allocation(run) <= 2_100_000


def test_inference_peak_grows_with_the_batch_and_hides_no_weights():
    built = digits_model("ssa")
    one, four = (inference_peak(built, torch.randn(n, 1, 8, 8)) for n in (1, 4))
    assert 3 * one < four < 5 * one
    # At least the largest feature map that exists, input and output of a neuron: 2 T 16 channels 64 tokens 4 bytes
    assert one >= 2 * 2 * 16 * 64 * 4


def test_derived_state_of_a_model():
    terms = {
        t["name"]: t["bytes"] for t in attention_state(digits_model("lrf_dyn", attention_options={"dilations": (1,)}))
    }
    assert terms == {"dendrites": 8 * 16 * 4, "token spikes": 3 * 8 * 16 // 8}


def test_a_large_receptive_field_is_averaged_in_blocks():
    class Large(Stencil):
        feature_info = (FeatureInfo(2, 1),)

    record = receptive_field_record(Large(), torch.randn(1, 1, 130, 130))
    assert record["pixels_per_cell"] == 3
    assert len(record["map"]) == 44
    assert max(map(max, record["map"])) == 1
    assert [s["share"] for s in record["share_inside"][:3]] == pytest.approx([1 / 9, 1, 1])
    assert record["half_side"] == 3


class Pooled(nn.Module):
    """A stand-in host that halves the grid twice with max pools, as the stems do."""

    feature_info = (FeatureInfo(1, 4),)

    def forward_features(self, images):
        for _ in range(2):
            images = nn.functional.max_pool2d(images, 3, 2, 1)
        return images.unsqueeze(0)


def test_receptive_field_is_centred_where_all_inputs_of_a_pool_are_equal():
    """Spikes are equal most of the time; a pool must not prefer the first, nor the squares lie beside the field."""
    images = torch.ones(2, 1, 32, 32)
    field = receptive_field(Pooled(), images)
    rows, columns = field.nonzero().unbind(1)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (13, 19, 13, 19)
    torch.testing.assert_close(field, field.roll((-1, -1), (0, 1)).flip(0, 1))  # around pixel 16
    record = receptive_field_record(Pooled(), images)
    assert record["centre"] == [16, 16]
    shares = {s["side"]: s["share"] for s in record["share_inside"]}
    assert shares[5] < 1
    assert shares[7] == pytest.approx(1)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil_mode"),
    [(3, 2, 1, 1, False), (2, None, 0, 1, False), (3, 1, 1, 2, False), ((3, 2), (2, 1), (1, 0), 1, True)],
)
def test_even_max_pool_is_max_pool(kernel, stride, padding, dilation, ceil_mode):
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    outputs = [
        pool(x, kernel, stride, padding, dilation, ceil_mode) for pool in (nn.functional.max_pool2d, even_max_pool)
    ]
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
    torch.testing.assert_close(*gradients)  # without equals nothing is shared


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_receptive_field_without_the_gradient_of_attention(kind, monkeypatch):
    torch.manual_seed(0)
    built, images = busy(kind), torch.randn(2, 1, 8, 8)
    whole = receptive_field(built, images)
    rest = receptive_field(built, images, through_attention=False)
    assert not torch.equal(rest, whole)
    assert not any(m._forward_hooks for m in built.modules())
    record = receptive_field_record(built, images)
    assert record["without_attention"]["gradient"] == pytest.approx(float(rest.sum() / whole.sum()))
    attention, mix = built.blocks[0].attn, built.blocks[0].attn.mix
    monkeypatch.setattr(attention, "mix", lambda *spikes: mix(*(one.detach() for one in spikes)))
    torch.testing.assert_close(rest, receptive_field(built, images))


def test_uniform_over_the_past():
    """By hand on one row of three tokens: distances 0; 0, 1; 0, 1, 2."""
    past = uniform_over_past((1, 3), 1)
    assert past["mean_distance"] == pytest.approx((0 + 1 / 2 + 1) / 3)
    assert past["short_range_share"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert past["entropy_mean"] == pytest.approx((math.log(2) + math.log(3)) / 3)


def test_the_last_row_is_measured_for_itself():
    layer = LayerLocality((2, 2), torch.device("cpu"))
    weights = torch.zeros(1, 4, 4)
    weights[0, [0, 1, 2, 3], [3, 2, 2, 3]] = 1.0  # the first row looks far away, the last at itself
    for queries in (range(1), range(1, 3), range(3, 4)):
        layer.add(queries, weights[:, queries.start : queries.stop])
    assert layer.last_row[1, 0] == 2
    assert (layer.last_row[0] / 2).tolist() == [1, 0, 0]
    assert (layer.sums[0] / layer.queries).tolist() == [0.5, 0, 0.5]
    record = locality(busy("lrf_dyn"), torch.randn(1, 1, 8, 8))
    assert 0 < record["last_row_short_range_share"] < 1
    # Of a query in the last row, 10 to 16 of 64 tokens are within distance 3.
    assert 10 / 64 < record["last_row_short_range_share_uniform"] < 16 / 64


@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (1, 4), (4, 1), (4, 8), (8, 4)], ids=str)
def test_the_last_row_of_an_oblong_grid(grid):
    """All tokens of the last row and no other, however the queries come in blocks."""
    height, width = grid
    tokens = height * width
    measured = LayerLocality(grid, torch.device("cpu"))
    weights = torch.rand(2, tokens, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for first in range(0, tokens, 3):
        queries = range(first, min(first + 3, tokens))
        measured.add(queries, weights[:, queries.start : queries.stop])
    expected = torch.zeros(2, height + width - 1, dtype=torch.float64)
    p = weights / weights.sum(-1, keepdim=True)
    for query in range(tokens - width, tokens):
        for key in range(tokens):
            distance = abs(query // width - key // width) + abs(query % width - key % width)
            expected[0, distance] += p[:, query, key].sum()
            expected[1, distance] += 2
    torch.testing.assert_close(measured.last_row, expected)
    observer = Locality()
    observer.layers["attn"] = measured
    record, short = observer.record(), max(1, (height + width - 2) // 4)
    assert record["short_distance"] == short
    share = expected[0, : short + 1].sum() / (2 * width)
    assert record["last_row_short_range_share"] == pytest.approx(float(share))
    uniform = expected[1, : short + 1].sum() / (2 * width * tokens)
    assert record["last_row_short_range_share_uniform"] == pytest.approx(float(uniform))


def test_narrow_distributions_of_entropy_are_resolved():
    """Entropies of trained models lie close together: many queries give fine bins, few give wide ones."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.linspace(0, math.log(64), FINE + 1, dtype=torch.float64)
    shown = {}
    for sample in (64, 100_000):
        values = 3.9 + 0.1 * torch.randn(sample, generator=generator, dtype=torch.float64)
        mass = torch.histc(values, FINE, 0, math.log(64)).unsqueeze(0) / sample
        new_edges, masses = merged(edges, mass, sample)
        assert masses.sum() == pytest.approx(mass.sum())
        assert len(new_edges) == masses.shape[1] + 1
        assert (new_edges[0], new_edges[-1]) == (edges[0], edges[-1])
        shown[sample] = int((masses > 0).sum())
    assert 5 <= shown[64] <= 20
    assert shown[100_000] >= 25


def test_bins_are_joined_up_to_the_coarsest():
    """One query with weight everywhere would have bins wider than half the axis."""
    edges, mass = torch.arange(FINE + 1.0), torch.ones(1, FINE)
    assert FINE % COARSEST == 0
    new_edges, masses = merged(edges, mass, 1)
    assert new_edges.tolist() == edges[::COARSEST].tolist()
    assert masses.tolist() == [[COARSEST] * (FINE // COARSEST)]


def test_entropies_on_a_smaller_grid_keep_their_place():
    """A layer of four tokens beside one of sixteen: its largest entropy is log 4 on the common axis too."""
    mass = torch.zeros(FINE, dtype=torch.float64)
    mass[-1] = 1.0
    moved = placed(mass, math.log(4), math.log(16))
    assert moved.sum() == 1
    assert int(moved.argmax()) == FINE // 2 - 1


def test_a_model_without_feature_maps_has_no_receptive_field():
    with pytest.raises(LrfdynError, match="model: expected one with `forward_features`"):
        receptive_field(nn.Identity(), torch.zeros(1, 1, 4, 4))

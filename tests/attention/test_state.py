"""What must be held at inference, counted by hand: d = 8, h = 2, grid 4 x 6 so N = 24."""

from __future__ import annotations

import pytest

from lrfdyn.attention import StateTerm
from lrfdyn.errors import LrfdynError
from tests.attention.small import FIVE, build

Q_AND_K, V = (2 * 24 * 8, 1), (24 * 8, 1)
STATE = [
    ("ssa", {}, [(8 * 8 // 2, 32), Q_AND_K, V], 128 + 48 + 24),
    ("causal_ssa", {}, [(32, 32)], 128),
    # 3 rows of v, and 2 of q and k
    ("causal_ssa", {"dilations": (1,)}, [(32, 32), (3 * 6 * 8, 1), (2 * 2 * 6 * 8, 1)], 128 + 18 + 24),
    # a dilation of 4 reaches no row of the grid
    ("causal_ssa", {"dilations": (1, 4)}, [(32, 32), (3 * 6 * 8, 1), (2 * 2 * 6 * 8, 1)], 128 + 18 + 24),
    ("vsa", {}, [(2 * 24 * 24, 32), Q_AND_K, V], 4608 + 48 + 24),
    ("lrf_ssa", {"dilations": (1,)}, [(32, 32), Q_AND_K, V], 200),
    ("lrf_ssa", {"dilations": ()}, [(32, 32), Q_AND_K, V], 200),
    ("lrf_ssa", {"norm": True, "scale_lrf": True, "train_qk": False}, [(32, 32), Q_AND_K, V], 200),
    ("lrf_dyn", {"dilations": (1,), "dendrites": 4}, [(4 * 8, 32), (3 * 6 * 8, 1)], 128 + 18),
    ("lrf_dyn", {"dilations": ()}, [(8 * 8, 32)], 256),
    ("lrf_dyn", {"dilations": (), "coupling": "same"}, [(8 * 8, 32)], 256),
    # (3, 5) reaches over eleven rows, and the grid has four
    ("lrf_dyn", {}, [(8 * 8, 32), (4 * 6 * 8, 1)], 256 + 24),
    # The way back: dendrites again, and the spikes of all four rows, whatever the stencils reach
    ("lrf_dyn", {"directions": 2, "dilations": ()}, [(2 * 8 * 8, 32), (4 * 6 * 8, 1)], 512 + 24),
    ("lrf_dyn", {"directions": 2, "dilations": (1,), "dendrites": 2}, [(2 * 2 * 8, 32), (4 * 6 * 8, 1)], 128 + 24),
]


@pytest.mark.parametrize(("kind", "options", "terms", "total"), STATE, ids=[f"{s[0]}-{s[3]}bytes" for s in STATE])
def test_state_by_hand(kind, options, terms, total):
    attention = build(kind, grid=(4, 6), **options)
    held = attention.state_terms()
    assert [(term.elements, term.bits) for term in held] == terms
    assert sum(term.bytes for term in held) == total
    assert all(term.name and term.formula for term in held)
    assert attention.state_terms((4, 6)) == held


def test_state_of_lrf_dyn_by_what_is_held_of_the_rows():
    attention = build("lrf_dyn", grid=(9, 6), dilations=(1, 3), token="qkv")
    queries = (4 * 6 * 8, 1)
    expected = {
        "spikes": [(64, 32), (7 * 6 * 8, 1), queries],
        "states": [(5 * 64, 32), (7 * 6 * 8, 1), queries],  # row offsets -3, -1, 0, 1, 3
        "potentials": [(64, 32), (7 * 6 * 8, 32), queries],
    }
    for buffers, terms in expected.items():
        assert [(term.elements, term.bits) for term in attention.state_terms(buffers=buffers)] == terms
    # On three rows the dilation of 3 reaches nothing.
    assert [term.elements for term in attention.state_terms((3, 6), "states")] == [3 * 64, 3 * 6 * 8, 2 * 6 * 8]
    with pytest.raises(LrfdynError, match="buffers: unknown name 'rows'"):
        attention.state_terms(buffers="rows")


def test_state_of_two_directions_by_what_is_held_of_the_rows():
    attention = build("lrf_dyn", grid=(9, 6), dilations=(1, 3), token="qkv", directions=2)
    spikes = (9 * 6 * 8, 1)  # of the tokens, and of the queries
    expected = {
        "spikes": [(2 * 64, 32), spikes, spikes],
        "states": [((5 + 9) * 64, 32), spikes, spikes],  # five row offsets, and below each of nine rows
        "potentials": [(2 * 64, 32), (9 * 6 * 8, 32), spikes, spikes],
    }
    for buffers, terms in expected.items():
        assert [(term.elements, term.bits) for term in attention.state_terms(buffers=buffers)] == terms
    assert attention.state_terms()[0].formula == "2 k d"
    # One row is complete when it has arrived.
    assert [term.elements for term in attention.state_terms((1, 6))] == [2 * 64]
    assert [attention.delay(height) for height in (1, 9)] == [0, 8]


def test_state_with_wide_values_and_another_grid():
    # values are 32 wide; 20 x 10 tokens
    elements = {kind: [t.elements for t in build(kind, "sdt_v3", (4, 6)).state_terms((20, 10))] for kind in FIVE}
    assert elements == {
        "ssa": [8 * 32 // 2, 2 * 200 * 8, 200 * 32],
        "causal_ssa": [128],
        "vsa": [2 * 200 * 200, 3200, 6400],
        "lrf_ssa": [128, 3200, 6400],
        "lrf_dyn": [8 * 32, 11 * 10 * 32],
    }


def test_part_of_a_byte_is_a_byte():
    assert [StateTerm("", "", n, 1).bytes for n in (0, 1, 8, 9)] == [0, 1, 1, 2]

"""What of a trace counts as a collective, and what of it nothing covers."""

import pytest

from bench.scaling import Options, collective_seconds, leaves, main, merged, uncovered
from dsv41.errors import UserError


def test_a_collective_counts_as_covered_where_its_device_computes():
    assert merged([(3, 4), (0, 1), (1, 2), (3.5, 5)]) == [(0, 2), (3, 5)] and uncovered([(0, 4)], [(1, 2), (3, 9)]) == 2
    loop = [(0.0, 9.0, "while.1"), (1.0, 4.0, "fusion.2"), (5.0, 8.0, "all-reduce-start.3")]
    assert leaves(loop) == loop[1:]
    other = [(2.0, 6.0, "ragged-all-to-all.7"), (6.0, 6.5, "fusion.1")]
    found = collective_seconds([[loop, other], [[]]], True)
    # Two streams of one device: 2 to 8 is sending, of which 4 to 6 and 6.5 to 8 are beside nothing; three steps were traced.
    assert found["by_kind"] == {"all-reduce": 1.0, "ragged-all-to-all": pytest.approx(4 / 3)}
    assert (found["seconds"], found["uncovered"]) == (2.0, pytest.approx(3.5 / 3))
    assert found["overlap"] == pytest.approx(1 - 3.5 / 6)
    assert collective_seconds([[loop]], False)["uncovered"] is None


def test_bad_options_are_refused():
    for options, says in (
        ({"meshes": ("data=99",)}, "mesh: found 'data=99' for 99 devices"),
        ({"remat": "blocks"}, "remat: found 'blocks', allowed are none, attention, block; did you mean 'block'"),
        ({"rows": 0}, "rows: found 0, allowed is 1 or more; nearest is 1"),
        ({"length": 20}, "length: found 20, allowed is a multiple of 16"),
    ):
        with pytest.raises(UserError, match=says):
            main(Options(preset="toy", **options))

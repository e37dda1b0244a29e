"""The scheduler against all choices there are, what it may look at, and the calibration of confidences."""

import itertools

import numpy as np
import pytest

from dsv41.errors import UserError
from infer.schedule import (
    Drafting,
    calibrate,
    calibration_error,
    choose_lengths,
    probabilities,
    rate_of,
    read_calibration,
    schedule,
    write_calibration,
)
from tests.models import drafting_config


def saturating(cost, least=1.0):
    """Steps a second of a device that takes time for each token: any expected yield has one maximum."""
    return lambda tokens: 1 / (least + cost * tokens)


def yields(chances, lengths, rate):
    survival = np.cumprod(chances, axis=1)
    expected = sum(1 + survival[r, :length].sum() for r, length in enumerate(lengths))
    return expected * rate(len(chances) + sum(lengths))


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_the_best_of_all_choices(seed):
    rng = np.random.default_rng(seed)
    for requests, cost in itertools.product((1, 2, 3), (0.0, 0.05, 0.3, 2.0)):
        chances, rate = rng.uniform(0.05, 1.0, (requests, 4)), saturating(cost)
        best = max(yields(chances, lengths, rate) for lengths in itertools.product(range(5), repeat=requests))
        assert yields(chances, schedule(chances, rate), rate) == pytest.approx(best, rel=1e-12)


def test_a_decision_looks_at_no_draft_behind_it():
    """The confidence of a slot is of the draft before it: what is behind the verified ones of a request changes nothing."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        chances, rate = rng.uniform(0.05, 1.0, (3, 5)), saturating(rng.uniform(0, 0.5))
        lengths = schedule(chances, rate)
        for r, j in itertools.product(range(3), range(5)):
            # The slot behind the last verified one was looked at and refused; those behind that one were not.
            if j > lengths[r]:
                other = chances.copy()
                other[r, j:] = rng.uniform(0.05, 1.0, 5 - j)
                np.testing.assert_array_equal(schedule(other, rate), lengths)
        # Nor does a verified one depend on what follows it.
        for r, j in itertools.product(range(3), range(5)):
            if j < lengths[r]:
                other = chances.copy()
                other[r, j + 1 :] = rng.uniform(0.05, 1.0, 4 - j)
                assert schedule(other, rate)[r] > j


def test_the_budget_falls_as_load_rises():
    """As many drafts a request as pay: of a device that fills up, fewer in a larger batch, in the end none."""
    rate = lambda tokens: 1 / (1 + max(tokens - 8, 0) * 0.25)  # noqa: E731
    chances = np.tile(np.asarray([[0.9, 0.8, 0.7, 0.6, 0.5]]), (64, 1))
    drafts = [schedule(chances[:n], rate).mean() for n in (1, 2, 4, 8, 16, 64)]
    assert drafts == sorted(drafts, reverse=True)
    assert drafts[0] == 5 and drafts[-1] < 0.5


def test_modes_and_their_limits():
    confidence = np.asarray([[4.0, 2.0, -1.0, 3.0], [-3.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    live = np.asarray([True, True, False])
    lengths = lambda **rule: choose_lengths(Drafting(**rule), confidence, live, lambda _: 1.0).tolist()  # noqa: E731
    assert lengths(mode="off") == [0, 0, 0]
    assert lengths(mode="fixed") == [4, 4, 0]
    assert lengths(mode="fixed", length=2) == [2, 2, 0]
    assert lengths(mode="threshold") == [2, 0, 0]
    assert lengths(mode="threshold", threshold=0.0) == [4, 4, 0]
    assert lengths(mode="scheduled") == [4, 4, 0]
    assert lengths(mode="threshold", threshold=0.9, temperatures=(1.0, 0.5, 1.0, 1.0)) == [2, 0, 0]


@pytest.mark.pitfall("I1")
def test_no_more_drafts_than_the_drafter_was_trained_on():
    config = drafting_config()
    for length in (1, 5):
        Drafting("fixed", length).check(config)
    for length in (0, 6, 7):
        with pytest.raises(UserError, match=rf"draft_length: found {length}, allowed is 1 to 5"):
            Drafting("fixed", length).check(config)
    with pytest.raises(UserError, match=r"draft_threshold: found 1\.5"):
        Drafting("threshold", threshold=1.5).check(config)


def test_rates_between_and_beyond_what_was_measured():
    rate = rate_of({2: 0.010, 4: 0.014, 6: 0.020}, rows=3)
    assert [round(1 / rate(tokens), 6) for tokens in (3, 6, 9, 12, 18, 24)] == [0.01, 0.01, 0.012, 0.014, 0.02, 0.026]
    assert rate_of({2: 0.01}, 1)(7) == 100


def test_temperatures_undo_what_overstates(tmp_path):
    """Confidences that are twice too sure in one slot and half as sure in another: 2.0 and 0.5, to the grid's step."""
    rng = np.random.default_rng(1)
    true = rng.normal(0.5, 1.5, (4000, 3))
    stretch = np.asarray([2.0, 0.5, 1.0])
    accepted = probabilities(true)
    found = calibrate(true * stretch, accepted)
    np.testing.assert_allclose(found, stretch, rtol=0.05)
    product, truth = np.cumprod(probabilities(true * stretch), 1), np.cumprod(accepted, 1)
    fixed = np.cumprod(probabilities(true * stretch, found), 1)
    assert calibration_error(fixed[:, 2], truth[:, 2]) < 0.3 * calibration_error(product[:, 2], truth[:, 2])
    write_calibration(tmp_path, found)
    assert read_calibration(tmp_path, 3) == pytest.approx(found)
    assert read_calibration(tmp_path / "none", 3) == ()
    with pytest.raises(UserError, match="with 5 numbers above 0"):
        read_calibration(tmp_path, 5)

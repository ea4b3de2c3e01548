"""The latency of the next action in a series."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_accel.devices.base._port import LatencyEstimator

SECONDS = st.floats(0.01, 100.0)


def follow(times: list[float], *, count: int = 1) -> LatencyEstimator:
    """Let actions take these durations, one after the other."""
    now = 5.0
    estimator = LatencyEstimator(now)
    for seconds in times:
        now += seconds
        estimator.end(now, count)
    return estimator


@given(SECONDS)
def test_it_takes_two_equal_durations(seconds: float) -> None:
    assert not follow([seconds]).is_steady
    estimator = follow([seconds, seconds])
    assert estimator.is_steady
    # From the end of the last one on.
    assert abs(estimator.due - (5.0 + 3 * seconds)) < 1e-9 * (5.0 + seconds)


@given(SECONDS, st.floats(2.5, 1000.0))
def test_a_pause_does_not_predict_the_next(seconds: float, factor: float) -> None:
    usual, pause = [seconds, seconds], factor * (seconds + 0.01)
    for times in ([*usual, pause], [*usual, pause, seconds], [*usual, pause, seconds, pause]):
        estimator = follow(times)
        assert estimator.is_steady
        assert abs(estimator.seconds - seconds) < 1e-6
    # Two in a row are not a pause.
    assert not follow([*usual, pause, 3 * pause]).is_steady
    # Nor is a shorter duration.
    assert not follow([*usual, pause, pause, seconds]).is_steady


@given(SECONDS, st.floats(2.5, 1000.0), st.integers(1, 20))
def test_alternating_durations_are_never_steady(seconds: float, factor: float, rounds: int) -> None:
    times = [seconds, factor * (seconds + 0.01)] * rounds
    assert not any(follow(times[: end + 1]).is_steady for end in range(len(times)))


def test_a_slightly_longer_duration_makes_it_uncertain() -> None:
    assert not follow([1.0, 1.0, 1.2]).is_steady
    assert follow([1.0, 1.0, 1.2, 1.2]).is_steady


def test_a_pause_before_one_begins_does_not_count() -> None:
    estimator = follow([1.0, 1.0])
    estimator.begin(20.0)
    assert estimator.due == 21.0


def test_the_first_duration_predicts_nothing_however_short() -> None:
    assert not follow([1e-6]).is_steady


@given(SECONDS)
def test_of_several_at_once_nobody_knows(seconds: float) -> None:
    assert not follow([seconds, seconds, seconds], count=2).is_steady

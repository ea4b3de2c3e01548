"""Counts by ranges, and their conclusions, against the values themselves."""

from __future__ import annotations

import math
import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel.telemetry._tally import BOUNDS, MessageTally, Tallies, rate_of

seconds = st.one_of(st.floats(0, 100), st.sampled_from(BOUNDS))


def ignore(path: str, message_type: str, error: BaseException) -> None:
    """Who does not want to know."""


@given(st.lists(st.tuples(seconds, seconds), max_size=50), st.integers(1, 20))
def test_every_value_is_counted_in_its_range(times: list[tuple[float, float]], together: int) -> None:
    tally = MessageTally("a/b", "Add", ignore, 0.0)
    for index, (queue, run) in enumerate(times):
        tally.times += (queue, run)
        if not index % together:
            tally.count()
    assert tally.ended == len(times)
    tally.count()
    for histogram, values in (
        (tally.queue(), [queue for queue, _ in times]),
        (tally.run(), [run for _, run in times]),
    ):
        assert histogram.count == len(values)
        assert histogram.total == pytest.approx(math.fsum(values))
        for bound, count in zip((*BOUNDS, math.inf), histogram.cumulated(), strict=True):
            assert count == sum(value <= bound for value in values)


def test_a_rate_is_that_of_the_last_seconds() -> None:
    history = deque[tuple[float, float]]([(0.0, 0.0)])
    # 10 a second for 20 s, then nothing.
    rates = [rate_of(history, float(now), min(10 * now, 200)) for now in range(1, 31)]
    assert rates[:20] == pytest.approx([10.0] * 20)
    assert rates[-1] == 0.0
    assert len(history) < 10


@pytest.mark.parametrize("seed", range(20))
def test_counters_may_vanish_and_never_fall(seed: int) -> None:
    """Against a model that knows which actors live, and how many messages were served of each type."""
    dice = random.Random(seed)
    most = dice.randint(1, 4)
    tallies = Tallies(most, ignore, 0.0)
    # As the runtime keeps what it was given, for as long as an actor lives.
    given_to: dict[int, dict[str, MessageTally]] = {}
    served: Counter[str] = Counter()
    before: dict[tuple[str, str], int] = {}
    for _ in range(1000):
        step = dice.choice(("begin", "begin", "end", "late", "message", "message", "message", "look"))
        number, message_type = dice.randrange(6), dice.choice("ab")
        path = f"s/{number}"
        if step == "begin" and number not in given_to:
            given_to[number] = {}
            tallies.began(path)
        elif step == "end" and given_to.pop(number, None) is not None:
            tallies.ended(path)
        elif step == "late" and number not in given_to:
            # A dead letter of an ended actor.
            tallies.measured(path, "a").dropped()
        elif step == "message" and number in given_to:
            known = given_to[number]
            if message_type not in known:
                known[message_type] = tallies.measured(path, message_type)
            known[message_type].times += (0.0, 0.0)
            served[message_type] += 1
        elif step == "look":
            found = {key: tally.ended for key, tally in tallies.by_key.items()}
            tallies.saw(0.0)
            assert all(found[key] >= count for key, count in before.items() if key in found)
            before = found
    # Nothing is lost, and nothing is counted twice.
    for message_type in "ab":
        counts = [tally.ended for key, tally in tallies.by_key.items() if key[1] == message_type]
        assert sum(counts) == served[message_type]
    own = [key for key in tallies.by_key if key[0] != "(other)"]
    assert len(own) <= most


def test_dead_letters_of_ended_actors_take_no_room_for_good() -> None:
    tallies = Tallies(10, ignore, 0.0)
    for number in range(100):
        tallies.began(f"s/{number}")
        tallies.ended(f"s/{number}")
        tallies.measured(f"s/{number}", "Note").dropped()
    tallies.began("s/alive")
    assert tallies.measured("s/alive", "Note").path == "s/alive"
    assert sum(tally.dropped_count for tally in tallies.by_key.values()) == 100


def test_parts_of_ended_actors_take_no_room_for_good() -> None:
    tallies = Tallies(10, ignore, 0.0)
    for number in range(100):
        tallies.began(f"s/{number}")
        for name in ("load", "store"):
            tallies.measured(f"s/{number}/{name}", name).times += (0.0, 0.0)
        tallies.ended(f"s/{number}")
    tallies.began("s/alive")
    assert tallies.measured("s/alive/load", "load").path == "s/alive/load"
    assert sum(tally.ended for tally in tallies.by_key.values()) == 200


def test_memory_does_not_grow_with_messages() -> None:
    tally = MessageTally("a/b", "Add", ignore, 0.0)
    for _ in range(100):
        for _ in range(512):
            tally.times += (0.0, 0.001)
        assert len(tally.times) >= tally.max_times
        tally.count()
    assert tally.ended == 51_200
    assert len(tally.recent()) == 1024

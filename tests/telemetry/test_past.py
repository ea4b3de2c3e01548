"""The charts' memory of the time before anybody looks at them."""

from __future__ import annotations

import importlib
import itertools
import json
from typing import Any

import pytest

from trio_accel.telemetry import Histogram, OperationRow, SystemSnapshot

Past: Any = importlib.import_module("trio_accel.telemetry._past").Past
SPREAD = Histogram(bounds=(1.0,), counts=(0, 0))


def snapshot(at: float, count: int, operations: int = 1) -> SystemSnapshot:
    rows = [
        OperationRow(
            path=f"shop/{number}",
            message_type="Ask",
            completed=count,
            failed=number,
            queue=SPREAD,
            run=SPREAD,
            rate=float(number),
            p50=at,
            p99=2 * at,
        )
        for number in range(operations)
    ]
    return SystemSnapshot(
        time=1000.0 + at, system="shop", pid=1, uptime=at, recorded=at, operations=tuple(rows)
    )


def told(past: Any) -> Any:
    return json.loads(past.to_json())


@pytest.mark.parametrize("seconds", [1, 100, 1000, 20_000])
def test_the_whole_time_is_kept_in_bounded_memory(seconds: int) -> None:
    past = Past()
    for second in range(seconds + 1):
        past.add(snapshot(second, 5 * second))
    recent, whole = told(past)["recent"]["rate"], told(past)["whole"]["rate"]
    assert len(recent) == min(seconds, 119)
    assert min(seconds, 100) <= len(whole) < 240
    assert recent[-1] == [1e3 * (1000 + seconds), 5.0]
    # No message is lost with the dropped points.
    assert {rate for _, rate in whole} == {5.0}
    times = [1e6, *(time for time, _ in whole)]
    step = max(after - before for before, after in itertools.pairwise(times))
    assert step <= 1e3 * max(1, seconds / 60)
    assert whole[-1][0] > 1e3 * (1000 + seconds) - step


def test_the_latency_of_the_busiest_messages_is_kept() -> None:
    past = Past()
    for second in range(3):
        past.add(snapshot(second, 0, operations=30))
    latency = told(past)["recent"]["latency"]
    assert latency.keys() == {f"shop/{number} Ask" for number in range(10, 30)}
    assert latency["shop/29 Ask"] == {
        "p50": [[1e6, 0.0], [1.001e6, 1.0], [1.002e6, 2.0]],
        "p99": [[1e6, 0.0], [1.001e6, 2.0], [1.002e6, 4.0]],
    }


def test_points_are_apart() -> None:
    past = Past()
    for tenth in range(21):
        past.add(snapshot(tenth / 10, tenth))
    assert [time for time, _ in told(past)["recent"]["rate"]] == pytest.approx([1000.9e3, 1001.8e3])


def test_a_clock_set_back_adds_points_still() -> None:
    past = Past()
    past.add(snapshot(0.0, 0))
    before = snapshot(1.0, 7)
    past.add(
        SystemSnapshot(time=0.0, system="shop", pid=1, uptime=1.0, recorded=1.0, operations=before.operations)
    )
    assert told(past)["recent"]["rate"] == [[0.0, 7.0]]

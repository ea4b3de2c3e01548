"""The cost of a recording for the loop's thread, in Python calls and in time."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from chosen import BACKEND
from python_calls import python_calls

import trio_accel as ta
from trio_accel import replay
from trio_accel.backends.base import Isolation

Request = Callable[[], Awaitable[object]]

pytestmark = pytest.mark.skipif(
    hasattr(sys, "gettrace") and sys.gettrace() is not None, reason="a tracer makes calls, too"
)


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.skipif(BACKEND != "cpu", reason="the bindings of a driver are Python here, too")
async def test_calls_of_the_loop(device: ta.Device, isolation: Isolation, capsys: Any) -> None:
    x = await device.put(np.ones((8, 8)))
    out = np.empty((8, 8))
    requests: dict[str, tuple[Request, int]] = {
        "operation": (lambda: ta.linalg.scal(1.0, x), 30),
        "transfer": (lambda: x.to_host(out=out), 45),
        "chain": (lambda: ta.arrays.softmax(ta.nn.relu(x @ x), axis=1).to_host(), 70),
    }
    before = {name: await python_calls(request) for name, (request, _) in requests.items()}
    async with replay.record(device, replay.MemoryJournal()):
        during = {name: await python_calls(request) for name, (request, _) in requests.items()}
    after = {name: await python_calls(request) for name, (request, _) in requests.items()}
    added = {name: during[name] - before[name] for name in requests}
    print(isolation, added)
    assert all(0 < added[name] <= most for name, (_, most) in requests.items()), added
    assert all(after[name] <= before[name] for name in requests), (before, after)


class Slow:
    """A journal on a slow disk; notes the thread of each large entry."""

    def __init__(self) -> None:
        self.threads: list[bool] = []
        self.entries_written: list[bytes] = []

    def append(self, entry: bytes, /) -> None:
        if len(entry) > 1 << 19:
            # clock: the time that this work takes decides nothing
            time.sleep(0.005)
            self.threads.append(trio.lowlevel.in_trio_run())
        self.entries_written.append(entry)

    def entries(self) -> Any:
        return iter(self.entries_written)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_the_loop_copies_no_large_contents(
    device: ta.Device, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything larger than 1 MiB is copied, pickled and written by another thread than the loop's."""
    by_loop = 0

    def note(value: Any) -> None:
        nonlocal by_loop
        nbytes = getattr(value, "nbytes", 0)
        by_loop = max(by_loop, nbytes if trio.lowlevel.in_trio_run() else 0)

    for name in ("_blob", "_encode"):
        method = getattr(replay._recorder._DeviceRecorder, name)  # type: ignore[attr-defined]
        monkeypatch.setattr(
            replay._recorder._DeviceRecorder,  # type: ignore[attr-defined]
            name,
            lambda recorder, array, method=method: (note(array), method(recorder, array))[1],
        )
    journal, host = Slow(), np.random.default_rng(0).standard_normal((4 << 20) // 8)
    before = await device.put(host)
    async with replay.record(device, journal) as recording:
        y = await (await device.put(host) + before)
        read = await y.to_host()
        await recording.mark("y", y=y)
        small = await ta.arrays.sum(y).to_host()
    np.testing.assert_array_equal(read, host + host)
    # The host array, the array from before, the result and the mark.
    assert journal.threads == [False] * 16
    assert by_loop == small.nbytes


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_large_contents_are_written_by_a_thread(device: ta.Device, isolation: Isolation) -> None:
    host = np.random.default_rng(0).standard_normal((16 << 20) // 8)
    held = []
    # A machine with other work also holds the loop.
    for _ in range(10):
        journal = Slow()
        before = await device.put(host)
        async with trio.open_nursery() as nursery, replay.record(device, journal) as recording:
            watch = Watch()
            nursery.start_soon(watch.run)
            x = await device.put(host)
            # The array from before is read, and its content is an entry.
            y = await (x + before)
            read = await y.to_host()
            await recording.mark("y", y=y)
            watch.is_over = True
        np.testing.assert_array_equal(read, host + host)
        # Four arrays of 16 parts.
        assert journal.threads == [False] * 64
        held.append(watch.held)
    print([f"{each * 1e3:.1f} ms" for each in held])
    assert min(held) < 0.005, held
    report = await replay.replay(journal, device)
    assert report.is_same, report
    assert report.compared == 2


class Watch:
    """Measures how long the loop is held at most."""

    def __init__(self) -> None:
        self.held = 0.0
        self.is_over = False

    async def run(self) -> None:
        """Run until it is over."""
        last = time.perf_counter()
        while not self.is_over:
            await trio.lowlevel.checkpoint()
            now = time.perf_counter()
            self.held, last = max(self.held, now - last), now

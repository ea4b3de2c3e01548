"""A library is opened in a thread when it is first needed; only what needs it waits."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND, for_ever
from doubling_library import Double, OtherDouble
from isolations import inline
from manual_backend import ManualBackend
from noted_libraries import NotedLibraries

import trio_accel as ta

AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)


@pytest.fixture
def noted(tmp_path: Path) -> NotedLibraries:
    return NotedLibraries(tmp_path)


@pytest.fixture
async def device(
    system: ta.System, isolation: ta.Isolation, noted: NotedLibraries
) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(isolation=isolation, streams=noted, backoff=AT_ONCE)
    async with system.open_device(BACKEND, options=options) as device:
        yield device


async def is_opening(pipe: Path) -> int:
    """Wait until the held opening has begun, and return the end that lets it continue."""
    return await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY)


def go_on(pipe: Path, end: int) -> None:
    """Let the opening end, and those after it go straight on."""
    pipe.unlink()
    os.close(end)


class Transforms:
    """Callers of transforms, each in a task of its own."""

    def __init__(self, device: ta.Device, nursery: trio.Nursery) -> None:
        self.scopes: list[trio.CancelScope] = []
        self.outcomes: dict[int, object] = {}
        self.changed = trio.Event()
        self._device = device
        self._nursery = nursery

    async def ask(self) -> int:
        """One more; returns when it has asked."""
        number = len(self.scopes)
        self.scopes.append(trio.CancelScope())
        self._nursery.start_soon(self._run, number)
        await trio.testing.wait_all_tasks_blocked(0.01)
        return number

    async def _run(self, number: int) -> None:
        with self.scopes[number] as scope:
            try:
                ref = await self._device.ask(ta.fft.Fft(np.arange(4, dtype=complex)))
                self.outcomes[number] = await ref.to_host()
            except Exception as error:  # noqa: BLE001  # looked at by the test
                self.outcomes[number] = error
        if scope.cancelled_caught:
            self.outcomes[number] = "cancelled"
        self.changed.set()

    async def outcome(self, number: int) -> Any:
        while number not in self.outcomes:
            self.changed = trio.Event()
            await self.changed.wait()
        return self.outcomes[number]

    async def is_right(self, number: int) -> bool:
        return np.allclose(await self.outcome(number), np.fft.fft(np.arange(4)), rtol=1e-12)


@pytest.fixture
def transforms(device: ta.Device, nursery: trio.Nursery) -> Transforms:
    return Transforms(device, nursery)


async def test_a_device_opens_with_only_its_memory(manual: ta.Device, backend: ManualBackend) -> None:
    assert [library.name for library in backend.device.opened] == ["memory"]
    await manual.ask(ta.linalg.Nrm2(np.ones(4)))
    assert [library.name for library in backend.device.opened] == ["memory", "blas"]


async def test_only_requests_of_a_library_wait_for_it(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    x = await device.put(np.arange(4.0))
    pipe = noted.hold("fft")
    asked = await transforms.ask()
    end = await is_opening(pipe)
    # An open library, a library opened just now, and the loop.
    assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert await (await ta.linalg.dot(x, x)).item() == 14.0
    assert transforms.outcomes == {}
    go_on(pipe, end)
    assert await transforms.is_right(asked)
    assert noted.names() == ["memory", "fft", "blas"]
    assert {thread for _, thread, _ in noted.opened} == {"thread"}


async def test_several_that_ask_at_once_have_it_opened_once(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    pipe = noted.hold("fft")
    asked = [await transforms.ask() for _ in range(3)]
    submitted = device.submit(ta.fft.Fft(np.arange(4, dtype=complex)))
    go_on(pipe, await is_opening(pipe))
    for one in asked:
        assert await transforms.is_right(one)
    await submitted.wait()
    assert noted.names().count("fft") == 1


async def test_after_a_cancelled_first_request_the_second_gets_the_library(
    noted: NotedLibraries, transforms: Transforms
) -> None:
    pipe = noted.hold("fft")
    first, second = await transforms.ask(), await transforms.ask()
    end = await is_opening(pipe)
    transforms.scopes[first].cancel()
    assert await transforms.outcome(first) == "cancelled"
    assert second not in transforms.outcomes
    go_on(pipe, end)
    assert await transforms.is_right(second)
    assert noted.names().count("fft") == 1


async def test_an_abandoned_library_is_there_for_the_next_request(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    pipe = noted.hold("fft")
    first = await transforms.ask()
    end = await is_opening(pipe)
    transforms.scopes[first].cancel()
    assert await transforms.outcome(first) == "cancelled"
    go_on(pipe, end)
    assert await transforms.is_right(await transforms.ask())
    assert noted.names().count("fft") == 1
    assert device.generation == 1


async def test_an_unclaimed_library_is_closed_with_the_device(
    system: ta.System, isolation: ta.Isolation, noted: NotedLibraries, nursery: trio.Nursery
) -> None:
    """The fixtures see that nothing of the device is left."""
    pipe = noted.hold("fft")
    options = ta.DeviceOptions(isolation=isolation, streams=noted)
    async with system.open_device(BACKEND, options=options) as device:
        transforms = Transforms(device, nursery)
        first = await transforms.ask()
        end = await is_opening(pipe)
        transforms.scopes[first].cancel()
        await transforms.outcome(first)
        nursery.start_soon(device.close)
        await trio.testing.wait_all_tasks_blocked(0.01)
        go_on(pipe, end)
    assert noted.names() == ["fft"]


async def test_a_library_that_cannot_be_opened_fails_only_its_askers(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    refusal = noted.folder / "refuse-fft"
    refusal.touch()
    for _ in range(5):  # more often than a context may crash
        assert isinstance(await transforms.outcome(await transforms.ask()), ta.NotSupportedError)
    x = await device.put(np.arange(4.0))
    assert await (await ta.linalg.dot(x, x)).item() == 14.0
    refusal.unlink()
    assert await transforms.is_right(await transforms.ask())
    assert device.generation == 1


@inline
async def test_the_next_context_opens_the_libraries_of_the_one_before(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    await device.ask(ta.linalg.Nrm2(np.ones(4)))
    assert await transforms.is_right(await transforms.ask())
    await lose(device)
    await until_opened(noted, 2, ["blas", "fft", "memory"])
    assert isinstance(await device.ask(ta.linalg.Nrm2(np.ones(4))), ta.AccelRef)
    assert noted.by_context()[1:] == [["blas", "fft", "memory"]]
    # Of these only one was used.
    await lose(device)
    await until_opened(noted, 3, ["blas"])
    assert await transforms.is_right(await transforms.ask())
    assert noted.by_context()[2][:2] == ["blas", "fft"]


@inline
async def test_a_failure_to_open_in_advance_is_no_error_before_its_use(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    assert await transforms.is_right(await transforms.ask())
    refusal = noted.folder / "refuse-fft"
    refusal.touch()
    await lose(device)
    await until_opened(noted, 2, ["fft", "memory"])
    assert isinstance(await device.ask(ta.linalg.Nrm2(np.ones(4))), ta.AccelRef)
    assert isinstance(await transforms.outcome(await transforms.ask()), ta.NotSupportedError)
    refusal.unlink()
    assert await transforms.is_right(await transforms.ask())
    assert device.generation == 2


@inline
async def test_a_request_does_not_wait_for_a_library_opened_in_advance(
    device: ta.Device, noted: NotedLibraries, transforms: Transforms
) -> None:
    assert await transforms.is_right(await transforms.ask())
    await device.ask(ta.linalg.Nrm2(np.ones(4)))
    pipe = noted.hold("fft")
    await lose(device)
    end = await is_opening(pipe)
    asked = await transforms.ask()
    assert isinstance(await device.ask(ta.linalg.Nrm2(np.ones(4))), ta.AccelRef)
    assert asked not in transforms.outcomes
    go_on(pipe, end)
    assert await transforms.is_right(asked)
    assert sorted(noted.by_context()[1]) == ["blas", "fft", "memory"]


async def lose(device: ta.Device) -> None:
    """Lose the context, and wait for the next."""
    ta.testing.poison(device, "on purpose")
    with pytest.raises(ta.ContextLostError):
        await for_ever(lambda: device.ask(ta.linalg.Nrm2(np.ones(4))))


async def until_opened(noted: NotedLibraries, context: int, names: list[str]) -> None:
    """Wait until a context (the first is 1) has opened these libraries first."""

    def is_opened() -> bool:
        contexts = noted.by_context()
        return len(contexts) >= context and contexts[context - 1][: len(names)] == names

    with trio.fail_after(60):
        while not is_opened():  # noqa: ASYNC110  # a thread opens them and tells nobody
            await trio.sleep(0.001)


@inline
async def test_submissions_while_a_library_opens_precede_later_requests(
    system: ta.System, isolation: ta.Isolation
) -> None:
    # Which of two tasks continues first is up to chance.
    for _ in range(10):
        async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
            x = await device.put(np.ones(4))
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    # Has the library opened, and is handed to it when it is open.
                    nursery.start_soon(device.ask, Double(x))
                    await trio.lowlevel.checkpoint()
                    first = device.submit(Double(x))
                    # Of another library: from now on all that touch the array have turns.
                    second = device.submit(OtherDouble(x))
                await first.wait()
                await second.wait()
            np.testing.assert_array_equal(await x.to_host(), np.full(4, 8.0))

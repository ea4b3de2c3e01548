"""The next worker, and a spare, open the libraries of the generation before in advance."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from isolated import options, replace_worker
from noted_libraries import NotedLibraries
from processes import launcher, until, workers

import trio_accel as ta

FFT = "trio_accel.fft:FftActor"


@pytest.fixture
def noted(tmp_path: Path) -> NotedLibraries:
    return NotedLibraries(tmp_path)


async def norm(device: ta.Device) -> None:
    """Use blas, and nothing else."""
    await device.ask(ta.linalg.Nrm2(np.ones(4)))


async def transform(device: ta.Device) -> None:
    """Use fft, and nothing else."""
    await device.ask(ta.fft.Fft(np.ones(4, complex)))


def pid(device: ta.Device) -> int:
    """The worker that serves."""
    number: int = device.dispatch.process.pid  # type: ignore[attr-defined]
    return number


async def spare(device: ta.Device) -> int:
    """The only spare."""
    await until(lambda: device.dispatch.spares == 1)  # type: ignore[attr-defined]
    (other,) = workers(launcher()) - {pid(device)}
    return other


async def until_opened(noted: NotedLibraries, worker: int, *names: str) -> None:
    """Wait until a worker has opened these, and nothing else."""
    await until(lambda: noted.names(worker) == list(names))


async def test_exactly_the_used_libraries_are_opened_in_advance(
    system: ta.System, noted: NotedLibraries
) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted)) as device:
        assert noted.opened == []
        x = await device.put(np.ones(3))
        await transform(device)
        await norm(device)
        await replace_worker(device)
        await until_opened(noted, pid(device), "memory", "fft", "blas")
        assert {thread for of, thread, _ in noted.opened if of == pid(device)} == {"thread"}
        # The library opened in advance is the one in use.
        await norm(device)
        assert noted.names(pid(device)) == ["memory", "fft", "blas"]
        await replace_worker(device)
        await until_opened(noted, pid(device), "blas")
        await transform(device)
        assert (await x.to_host()).tolist() == [1.0] * 3
        assert noted.names(pid(device)) == ["blas", "fft", "memory"]


async def test_an_unused_generation_reports_nothing(system: ta.System, noted: NotedLibraries) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted)) as device:
        await norm(device)
        await replace_worker(device)
        await replace_worker(device)
        await until_opened(noted, pid(device), "blas")
        await replace_worker(device)
        # Nobody has needed it for this time.
        await device.put(np.ones(3))
        assert noted.names(pid(device)) == ["memory"]


async def test_a_spare_follows_the_used_libraries(system: ta.System, noted: NotedLibraries) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted, spares=1)) as device:
        await norm(device)
        first = await spare(device)
        await until_opened(noted, first, "blas")
        await transform(device)
        await until_opened(noted, first, "blas", "fft")
        await replace_worker(device)
        assert pid(device) == first
        await transform(device)
        await device.put(np.ones(3))
        assert noted.names(first) == ["blas", "fft", "memory"]
        # This one was opened for a generation that has not used blas.
        second = await spare(device)
        await until(lambda: {"fft", "memory"} <= set(noted.names(second)))
        await replace_worker(device)
        await norm(device)
        assert noted.names(second).count("blas") == 1


async def test_a_spare_takes_over_while_it_opens_a_library(
    system: ta.System, noted: NotedLibraries, nursery: trio.Nursery
) -> None:
    pending: list[Any] = []
    async with system.open_device(BACKEND, options=options(streams=noted, spares=1)) as device:
        await norm(device)
        first = await spare(device)
        await until_opened(noted, first, "blas")
        await transform(device)
        await until_opened(noted, first, "blas", "fft")
        await replace_worker(device)
        await norm(device)
        second = await spare(device)
        await until(lambda: "blas" in noted.names(second))
        pipe = noted.hold("random")
        drawn = device.submit(ta.random.Bits(1, 0, (4,)))
        # The worker that serves, and then the spare.
        end = await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY)
        os.close(end)
        await drawn.wait()
        end = await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY)
        await until(lambda: noted.names(second)[-1] == "random")
        await replace_worker(device)
        assert pid(device) == second
        pending.append(device.submit(ta.random.Bits(1, 0, (4,))))
        await norm(device)
        assert not pending[0].is_done
        pipe.unlink()
        os.close(end)
        await pending[0].wait()
        assert noted.names(second).count("random") == 1


async def test_a_failure_to_open_in_advance_is_no_error_before_its_use(
    system: ta.System, noted: NotedLibraries
) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted)) as device:
        await transform(device)
        await norm(device)
        refusal = noted.folder / "refuse-fft"
        refusal.touch()
        await replace_worker(device)
        await until_opened(noted, pid(device), "fft", "blas")
        await norm(device)
        for _ in range(5):  # more often than a context may crash
            with pytest.raises(ta.NotSupportedError, match="fft is refused on purpose"):
                await transform(device)
        refusal.unlink()
        await transform(device)
        assert device.generation == 2


async def test_a_library_fatal_to_every_process_is_not_opened_in_advance_for_ever(
    system: ta.System, noted: NotedLibraries
) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted)) as device:
        x = await device.put(np.ones(3))
        await transform(device)
        (noted.folder / "exit-fft").touch()
        device.dispatch.process.kill()  # type: ignore[attr-defined]
        is_read = False
        with trio.fail_after(60):
            while not is_read or FFT in device.dispatch._pool.in_use.paths:  # type: ignore[attr-defined]
                with suppress(ta.ContextLostError):
                    is_read = (await x.to_host()).tolist() == [1.0] * 3 and device.generation > 1
                await trio.sleep(0.001)
        # Once by the program, and then by two workers at most; one more may be about to.
        assert noted.names().count("fft") <= 4


async def test_a_spare_that_outlives_a_generation_opens_nothing_twice(
    system: ta.System, noted: NotedLibraries
) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted, spares=2)) as device:
        await norm(device)
        await until(lambda: device.dispatch.spares == 2)  # type: ignore[attr-defined]
        spares = workers(launcher()) - {pid(device)}
        for one in spares:
            await until_opened(noted, one, "blas")
        await replace_worker(device)
        (left,) = spares - {pid(device)}
        # In this generation it is used once more.
        await norm(device)
        await transform(device)
        await until(lambda: "fft" in noted.names(left))
        assert noted.names(left) == ["blas", "fft"]


async def test_a_spare_that_finds_its_context_lost_takes_over_nothing(
    system: ta.System, noted: NotedLibraries
) -> None:
    async with system.open_device(BACKEND, options=options(streams=noted, spares=1)) as device:
        first = await spare(device)
        await transform(device)
        await until(lambda: first in noted.holders("fft"))
        (noted.folder / "lose-fft").touch()
        await replace_worker(device)
        assert pid(device) == first
        # Those that follow die of it, and nobody hears of that.
        await until(lambda: len({of for of, _, name in noted.opened if name == "fft"}) >= 4)
        await transform(device)
        (noted.folder / "lose-fft").unlink()
        pool = device.dispatch._pool  # type: ignore[attr-defined]
        await until(lambda: {link.process.pid for link in pool._spares} & noted.holders("fft"))
        await replace_worker(device)
        await transform(device)
        assert device.generation == 3

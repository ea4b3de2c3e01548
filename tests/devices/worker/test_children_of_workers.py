"""Processes started by a worker neither hide its death nor outlive it."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import forking_library
import numpy as np
import pytest
import trio
from isolated import options
from processes import children, command, descriptors, everyone, launcher, until

import trio_accel as ta
from trio_accel.backends.base.kit.modules import search_path
from trio_accel.devices.launcher import _link as _launcher_link
from trio_accel.devices.launcher._launcher import open_launcher

pytestmark = [pytest.mark.any_backend, pytest.mark.own_launcher]

KINDS = ("fork", "c", "system", "daemon", "tree")


def descendants(pid: int) -> set[int]:
    """Living processes below a process."""
    below = {child for child, parent, _ in everyone() if parent == pid and command(child)}
    return below.union(*map(descendants, below))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_with_a_living_child_is_replaced(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv(forking_library.VARIABLE, kind)
    changes = options(libraries=("forking_library:BlasActor",))
    async with system.open_device("cpu", options=changes) as device:
        x = await device.put(np.arange(3.0))
        process: Any = device.dispatch.process  # type: ignore[attr-defined]
        await until(lambda: len(descendants(process.pid)) == (2 if kind == "tree" else 1))
        left = descendants(process.pid)
        for child in left:
            held = descriptors(child)
            # Python does not know that it was forked by C.
            if kind != "c":
                assert {held.get(number, os.devnull) for number in (3, 4)} == {os.devnull}
        process.kill()
        # Neither the heartbeat nor the end of the child is waited for.
        with trio.fail_after(60):
            await until(lambda: device.generation == 2)
            assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(5.0**0.5)
        assert not any(map(command, left))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preload", [(), ("forking_library",)], ids=["fresh", "fork"])
async def test_the_end_of_a_worker_is_reported_after_its_children_have_ended(
    system: ta.System, kind: str, preload: tuple[str, ...]
) -> None:
    workshop = await open_launcher(system)
    folder = os.path.dirname(forking_library.__file__)
    code = (
        f"import os, signal, sys\nsys.path[:] = {[folder, *search_path()]!r}\n"
        f"import forking_library\nforking_library.leave_child({kind!r})\nos.close(3)\nsignal.pause()"
    )
    reader, writer = os.pipe()
    worker = await workshop.start_worker(("-c", code), [writer], preload)
    os.close(writer)
    await until(lambda: len(descendants(worker.pid)) == (2 if kind == "tree" else 1))
    left = descendants(worker.pid)
    worker.kill()
    assert await worker.wait() == "was killed by SIGKILL"
    assert not any(map(command, left))
    assert children(launcher()) == set()
    # The holder of the worker's descriptors has ended.
    await trio.lowlevel.wait_readable(reader)
    os.close(reader)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fork", "system", "tree"])
async def test_the_death_of_the_launcher_ends_children_of_workers(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv(forking_library.VARIABLE, kind)
    changes = options(libraries=("forking_library:BlasActor",))
    async with system.open_device("cpu", options=changes) as device:
        process: Any = device.dispatch.process  # type: ignore[attr-defined]
        await until(lambda: descendants(process.pid))
        left = descendants(process.pid)
        os.kill(launcher(), signal.SIGKILL)
        await until(lambda: device.generation == 2)
        await until(lambda: not any(map(command, left)))


async def test_a_launcher_with_a_held_socket_is_replaced(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A module that it has imported has forked it."""
    (tmp_path / "forking.py").write_text(
        "import os, signal\nif os.getpid() == os.getsid(0) and os.fork() == 0:\n    signal.pause()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workshop = await open_launcher(system)
    worker = await workshop.start_worker(("-c", "import signal; signal.pause()"), (), ("forking",))
    first = launcher()
    (held,) = children(first) - {worker.pid}
    os.kill(first, signal.SIGKILL)
    assert await worker.wait() == "ended with its launcher"
    await until(lambda: not command(held))
    again = await workshop.start_worker(("-c", ""))
    assert await again.wait() == "exited with code 0"


def test_children_are_found_without_the_kernels_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("launcher_program", _launcher_link._PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    try:
        assert program._children() == children()
        monkeypatch.setattr(program, "_SELF", "/proc/self/nothing")
        assert child in children()
        assert program._children() == children()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
async def test_a_fork_bomb_ends_with_its_worker(system: ta.System) -> None:
    """No signal for one process meets the last of a chain."""
    workshop = await open_launcher(system)
    first, folder = launcher(), os.path.dirname(forking_library.__file__)
    code = (
        f"import os, signal, sys\nsys.path[:] = {[folder, *search_path()]!r}\n"
        "import forking_library\nforking_library.leave_chains()\nos.write(3, b'now')\nos.close(3)\n"
        "signal.pause()"
    )
    reader, writer = os.pipe2(os.O_NONBLOCK)
    worker = await workshop.start_worker(("-c", code), [writer])
    os.close(writer)
    with trio.fail_after(60):
        await trio.lowlevel.wait_readable(reader)
        assert os.read(reader, 8) == b"now"
        worker.kill()
        assert await worker.wait() == "was killed by SIGKILL"
    # All processes with the worker's descriptors have ended.
    assert os.read(reader, 8) == b""
    os.close(reader)
    assert launcher() == first

"""The end of a program with devices in workers, by SIGKILL or by Ctrl-C, leaves nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio
from chosen import SEARCHED
from processes import descriptors, launcher, until, wait_dead, workers

pytestmark = pytest.mark.any_backend

APPLICATION = Path(__file__).with_name("device_application.py")
PAGE = 4096
# The settings of the program, and the time limit of its end besides.
GRACE = 0.5
MARGIN = 60.0


@attrs.define(eq=False)
class Application:
    """A program in a session of its own.

    Attributes:
        process: The process.
        facts: Its last report.
    """

    process: trio.Process
    facts: dict[str, object] = attrs.field(factory=dict)
    _said: bytes = b""

    async def wait_said(self, at: str) -> None:
        """Wait until it reports its state."""
        while self.facts.get("at") != at:
            line, found, rest = self._said.partition(b"\n")
            if found:
                self.facts, self._said = json.loads(line), rest
                continue
            more = await self.process.stdout.receive_some()
            assert more, await self.errors()
            self._said += more

    async def errors(self) -> str:
        """Its output about its end."""
        found = b""
        async for part in self.process.stderr:
            found += part
        return found.decode()

    def interrupt(self) -> None:
        """Ctrl-C at its terminal: all of its process group hear of it."""
        os.killpg(self.process.pid, signal.SIGINT)


@asynccontextmanager
async def application(*words: str) -> AsyncGenerator[Application, None]:
    """A running program, which has ended at the end of the test together with its forks."""
    process = await trio.lowlevel.open_process(
        [sys.executable, str(APPLICATION), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1"},
    )
    found = Application(process)
    try:
        with trio.fail_after(60):  # noqa: ASYNC100  # its body is the test
            yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()
        await process.stdout.aclose()
        await process.stderr.aclose()


def shared(pid: int) -> dict[str, int]:
    """Bytes of shared memory among the descriptors of a process; pages of words do not count."""
    found = {}
    for number, target in descriptors(pid).items():
        size = os.stat(f"/proc/{pid}/fd/{number}").st_blocks * 512 if "memfd:" in target else 0
        if size > PAGE:
            found[target] = found.get(target, 0) + size
    return found


@pytest.mark.parametrize(
    "words",
    [(), ("fork",), ("fork", "stop"), ("fork", "spare"), ("hang",), ("fork", "stage")],
    ids="+".join,
)
async def test_nothing_is_left_when_the_application_is_killed(words: tuple[str, ...]) -> None:
    async with application(*words) as app:
        await app.wait_said("working")
        pid = app.process.pid
        first = launcher(pid)
        pidfds = [os.pidfd_open(process) for process in (first, *workers(first))]
        assert len(pidfds) >= 2
        child = int(str(app.facts["child"]))
        if child:
            assert sum(shared(child).values()) > 0
        app.process.kill()
        with trio.fail_after(MARGIN):
            await wait_dead(*pidfds)
            await until(lambda: not (child and shared(child)))
        for pidfd in pidfds:
            os.close(pidfd)


async def interrupted(app: Application, more: float = 0.0) -> None:
    """Check that the terminal is back in time, or this much later, and that nothing is left."""
    start = trio.current_time()
    with trio.move_on_after(GRACE + MARGIN + more) as late:
        await app.process.wait()
    assert not late.cancelled_caught, f"it is still there: {app.facts}"
    print(f"the terminal was back after {trio.current_time() - start:.3f} s")
    errors = await app.errors()
    # Of nothing but the interrupt; a second one may come when Python ends already.
    assert app.process.returncode in (128 + signal.SIGINT, -signal.SIGINT), errors


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "words", [(), ("lose",), ("spare",), ("stage", "lose")], ids=["working", "losing", "spare", "staging"]
)
async def test_ctrl_c_in_the_middle_of_work(words: tuple[str, ...], seed: int) -> None:
    async with application(*words) as app:
        await app.wait_said("working")
        # clock: any moment will do
        await trio.sleep(random.Random(seed).uniform(0.0, 0.3))
        app.interrupt()
        await interrupted(app)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("hang",), ("stop",)], ids="+".join)
async def test_ctrl_c_while_the_worker_does_not_answer(words: tuple[str, ...]) -> None:
    async with application(*words) as app:
        await app.wait_said("working")
        # clock: any moment will do
        await trio.sleep(0.1)
        app.interrupt()
        await interrupted(app)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("stop",)], ids=["working", "stop"])
async def test_ctrl_c_twice(words: tuple[str, ...]) -> None:
    async with application(*words) as app:
        await app.wait_said("working")
        app.interrupt()
        # clock: any moment will do
        await trio.sleep(0.05)
        app.interrupt()
        await interrupted(app)


@pytest.mark.parametrize("seed", range(4))
async def test_ctrl_c_while_the_device_opens(seed: int) -> None:
    async with application() as app:
        await app.wait_said("opening")
        # clock: any moment will do
        await trio.sleep(random.Random(seed).uniform(0.0, 0.4))
        app.interrupt()
        # A cancelled start waits for the launcher, which imports NumPy and SciPy now. That takes half a
        # second on an idle machine.
        await interrupted(app, more=5.0)

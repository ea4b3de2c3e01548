"""A service of everything under a kill each second.

``python -m benchmarks.soak [SECONDS [CLIENTS]]``, such as ``900 12``. It is for the CPU backend, as its
program computes with NumPy; ``benchmarks.gpu`` has a soak for the hardware.

Clients ask for all kinds of work and compare each answer with NumPy's or SciPy's, while a worker is killed,
stopped, poisoned or hung each second, and now and then the launcher of all workers. In between everything
comes to rest, and what the processes hold is counted. The program fails where an answer is wrong, a request
has no outcome, an array that was kept has changed, or something grows.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.collectives import RankFailedError

from ._soak_work import Model, Service, WrongNumbersError, all_work, open_service

__all__ = ["Holdings", "Soak", "main"]

_PATIENCE = 30.0
"""Seconds after which a request counts as one without an outcome."""

_PARTS = 6
_MIB = 1 << 20
# What a request may end with when its worker is lost; any other error is a defect.
_LOST = (
    *(ta.ContextLostError, ta.CompletionTimeoutError, ta.InputFailedError, ta.StaleRefError),
    RankFailedError,
)
_HITS = ("kill", "kill", "kill", "kill", "stop", "poison", "segfault", "hang")
# The launcher takes the workers of both devices with it: once in so many losses.
_LAUNCHER_EVERY = 20


@attrs.frozen(kw_only=True)
class Holdings:
    """What the application and its processes hold while nothing is in flight.

    Attributes:
        descriptors: Open files of all processes.
        processes: The application, the launcher and the workers.
        threads: Of the application.
        memory: Bytes of the application that no file backs (``RssAnon``).
        objects: Python objects that the collector of garbage knows, in the application.
        used: Bytes of device memory in arrays, on both devices.
    """

    descriptors: int
    processes: int
    threads: int
    memory: int
    objects: int
    used: int

    @classmethod
    async def now(cls, *devices: ta.Device) -> Holdings:
        """Count them."""
        for device in devices:
            await device.synchronize()
        gc.collect()
        pids = list(_family(os.getpid()))
        memory = [(await device.statistics()).memory for device in devices]
        return cls(
            descriptors=sum(_entries(pid, "fd") for pid in pids),
            processes=len(pids),
            threads=_entries(os.getpid(), "task"),
            memory=_anonymous(),
            objects=len(gc.get_objects()),
            used=sum(each.used for each in memory),
        )

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.descriptors} descriptors, {self.threads} threads, "
            f"{self.memory / _MIB:.1f} MiB, {self.objects} objects, {self.used} bytes in arrays"
        )


@attrs.define(eq=False)
class Soak:
    """The clients, what they were answered, and what was held in between.

    Attributes:
        service: What they ask.
        seconds: How long they ask, in all.
        clients: How many there are.
        every: Seconds from one loss to the next.
        source: What chooses the losses.
        outcomes: Requests by what became of them.
        by_kind: Right answers by kind of work.
        wrong: What was wrong, in words.
        hits: What was done to the workers.
        held: What was held behind each part.
    """

    service: Service
    seconds: float
    clients: int = 12
    every: float = 1.0
    source: random.Random = attrs.field(factory=random.Random)
    outcomes: Counter[str] = attrs.field(factory=Counter[str])
    by_kind: Counter[str] = attrs.field(factory=Counter[str])
    wrong: list[str] = attrs.field(factory=list[str])
    hits: Counter[str] = attrs.field(factory=Counter[str])
    held: list[Holdings] = attrs.field(factory=list[Holdings])

    async def run(self, say: Callable[[str], object]) -> None:
        """Ask in parts, with a rest behind each.

        Args:
            say: Gets a line behind each part.
        """
        work = all_work(self.service)
        for part in range(_PARTS):
            with trio.move_on_after(self.seconds / _PARTS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._strike)
                    for number in range(self.clients):
                        nursery.start_soon(self._ask, work, np.random.default_rng((part, number)))
            await self._rest()
            self.held.append(await Holdings.now(self.service.first, self.service.second))
            say(f"part {part + 1} of {_PARTS}: {self.held[-1]}; {sum(self.hits.values())} losses")

    async def _rest(self) -> None:
        """Wait until the devices serve again, and compare what was kept."""
        with trio.fail_after(2 * _PATIENCE):
            # A worker that was stopped last is noticed only when it is asked. An update writes the state of
            # the program anew first, without which it serves nothing.
            work = all_work(self.service)
            for name in ("update", *work):
                while True:
                    try:
                        await work[name](np.random.default_rng(0))
                    except _LOST:
                        # A refusal may have come without a checkpoint.
                        await trio.lowlevel.checkpoint()
                        continue
                    except (WrongNumbersError, ta.AccelError, ta.ActorError) as error:
                        self.wrong.append(f"{name} at rest: {error!r}")
                    break
            for kept in self.service.kept:
                try:
                    await kept.check()
                except WrongNumbersError as error:
                    self.wrong.append(str(error))
            while len(list(_family(os.getpid()))) < 7:  # noqa: ASYNC110  # spares start by themselves
                await trio.sleep(0.02)

    async def _ask(self, work: dict[str, Any], rng: np.random.Generator) -> None:
        names = list(work)
        while True:
            name = names[int(rng.integers(len(names)))]
            patience = rng.random() * 0.02 if rng.random() < 0.1 else _PATIENCE
            self.outcomes["begun"] += 1
            outcome = "ended with the part"
            try:
                with trio.move_on_after(patience) as scope:
                    await work[name](rng)
                    outcome = "right"
                    self.by_kind[name] += 1
                if scope.cancelled_caught and patience < _PATIENCE:
                    outcome = "left"
                elif scope.cancelled_caught:
                    outcome = "WITHOUT"
                    self.wrong.append(f"{name}: no outcome within {_PATIENCE:g} s")
            except _LOST as error:
                outcome = type(error).__name__
            except (WrongNumbersError, ta.AccelError, ta.ActorError) as error:
                outcome = "WRONG"
                self.wrong.append(f"{name}: {error!r}")
            finally:
                self.outcomes[outcome] += 1

    async def _strike(self) -> None:
        for number in itertools.count(1):
            await trio.sleep(self.every)
            hit = self.source.choice(_HITS) if number % _LAUNCHER_EVERY else "launcher"
            self.hits[hit] += 1
            if hit in ("kill", "stop", "launcher"):
                self._signal(hit)
            else:
                fault: dict[str, Any] = {hit: True}
                ta.testing.inject_fault(self.service.first, ta.linalg.Matmul, **fault)

    def _signal(self, hit: str) -> None:
        """Send a signal to a worker, a spare one perhaps, or to the launcher."""
        family = [pid for pid in _family(os.getpid()) if pid != os.getpid()]
        launchers = [pid for pid in family if "_launcher_process" in _read(pid, "cmdline")]
        workers = [pid for pid in family if _read(pid, "comm").startswith("accel worker")]
        chosen = launchers if hit == "launcher" else workers
        if chosen:
            with suppress(ProcessLookupError):
                os.kill(
                    self.source.choice(sorted(chosen)), signal.SIGSTOP if hit == "stop" else signal.SIGKILL
                )

    def faults(self) -> list[str]:
        """What was not as it must be; an empty list where all was."""
        found = list(self.wrong)
        if self.outcomes.total() != 2 * self.outcomes["begun"]:
            found.append("the outcomes are not as many as the requests")
        # The first part loads libraries and fills caches.
        early, late = self.held[1 : 1 + _PARTS // 2], self.held[1 + _PARTS // 2 :]
        for name, allowed in (
            *(("descriptors", 4), ("processes", 0), ("threads", 2)),
            *(("memory", 8 * _MIB), ("objects", 3000), ("used", 0)),
        ):
            before, after = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
            if after > before + allowed:
                found.append(f"{name} grew from {before:.0f} to {after:.0f}")
        return found

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.most_common())

        return "\n".join(
            (
                f"outcomes: {listed(self.outcomes)}",
                f"right by kind: {listed(self.by_kind)}",
                f"losses: {sum(self.hits.values())} ({listed(self.hits)})",
                f"generation of the first device {self.service.first.generation}",
            )
        )


def _read(pid: int, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _family(pid: int) -> Iterator[int]:
    """A process and all below it that live."""
    parents = dict[int, list[int]]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            state, _, rest = _read(int(entry.name), "stat").rpartition(")")[2].strip().partition(" ")
            if state and state != "Z":
                parents.setdefault(int(rest.split()[0]), []).append(int(entry.name))
    todo = [pid]
    while todo:
        yield todo[-1]
        todo.extend(parents.get(todo.pop(), ()))


def _entries(pid: int, name: str) -> int:
    with suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/{name}").iterdir())
    return 0


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


async def main(seconds: float = 900.0, clients: int = 12, say: Callable[[str], object] = print) -> list[str]:
    """Open two devices as a service does, and ask them for so many seconds.

    Returns:
        What was not as it must be.
    """
    options = ta.DeviceOptions(
        isolation="process", retry=1, retry_suspects=True, spares=1, stuck_after=3.0, heartbeat_timeout=3.0
    )
    async with (
        ta.open_system("soak") as system,
        system.open_device("cpu", options=options) as first,
        system.open_device("cpu", options=options) as second,
        ta.open_world([first, second]) as world,
    ):
        counts = await first.zeros(4)
        weights = np.random.default_rng(1).integers(-8, 9, (24, 24)).astype(np.float64)
        async with ta.open_program(first, Model, await first.put(weights), counts) as program:
            service = await open_service(system, (first, second), world, program, counts)
            soak = Soak(service, seconds, clients)
            await soak.run(say)
            say(str(soak))
            return soak.faults()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.CRITICAL)
    warnings.filterwarnings("ignore", "open_device", RuntimeWarning)
    arguments: list[Any] = [*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3])]
    faults = trio.run(main, *arguments)
    print(*(f"FAULT: {fault}" for fault in faults[:50]), f"{len(faults)} faults", sep="\n")  # noqa: T201
    raise SystemExit(bool(faults))

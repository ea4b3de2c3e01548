"""A service of everything under a kill each second.

``python -m benchmarks.soak [SECONDS [CLIENTS]]``, such as ``900 12``. It is for the CPU backend, as its
program computes with NumPy; ``benchmarks.gpu`` has a soak for the hardware.

Clients ask for all kinds of work and compare each answer with NumPy's or SciPy's. They read texts that a
program writes through a continuous batcher, and add to durable accounts of a cluster. Beside them, two
devices train with checkpoints. Each second a worker is killed, stopped, poisoned or hung, or an agent of the
cluster is killed, or now and then the launcher of all workers.

A process of its own with a real-time priority asks for ``/health`` all the time, while other clients flood it
with pipelined questions.

In between everything comes to rest, and what the processes hold is counted. The program fails where an answer
is wrong, an answer of ``/health`` takes more than half a second, a request has no outcome, an array that was
kept has changed, an addition is lost or counted twice, a loss differs from that of an undisturbed training,
or something grows.
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
import tempfile
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import cluster
from trio_accel.collectives import RankFailedError
from trio_accel.http import serve

from ._health import Health, asked_beside
from ._soak_lives import Bank, Texts, Training, Writer, losses_of, weights_of_writer
from ._soak_work import Model, Service, WrongNumbersError, all_work, open_service

__all__ = ["Holdings", "Soak", "main"]

_PATIENCE = 30.0
"""Seconds after which a request counts as one without an outcome."""

_PARTS = 6
# Seconds of the first part, at most: the table compares with what was held after a minute.
_FIRST = 60.0
# The application, a launcher with a template, six workers of which two are spare, and two agents.
_PROCESSES = 11
# Clients that flood the service, and the requests that each sends at once.
_FLOODERS, _FLOOD = 2, 100
_MIB = 1 << 20
# Bytes in which a device reserves memory.
_CHUNK = 64 * _MIB
# What a request may end with when its worker is lost; any other error is a defect.
_LOST = (
    *(ta.ContextLostError, ta.CompletionTimeoutError, ta.InputFailedError, ta.StaleRefError),
    RankFailedError,
)
_HITS = ("kill", "kill", "kill", "kill", "agent", "agent", "stop", "poison", "segfault", "hang")
# The launcher takes the workers of both devices with it: once in so many losses.
_LAUNCHER_EVERY = 20
# The table's columns. Of a request that has lost a worker, an error says so.
_COLUMNS = ("all", "right", "lost a worker", "cancelled", "wrong", "without outcome", "lost", "twice")


@attrs.frozen(kw_only=True)
class Holdings:
    """What the application and its processes hold while nothing is in flight.

    Attributes:
        descriptors: Open files of all processes.
        processes: The application, the launcher and the workers.
        threads: Of the application.
        memory: Bytes of the application that no file backs (``RssAnon``).
        resident: Resident bytes of the application, without memory that it shares with workers.
        shared: Resident bytes that it shares with workers (``RssShmem``): the parts of the devices' memory
            that it has touched, which end with the device. They rise until all of a chunk was in use.
        objects: Python objects that the collector of garbage knows, in the application.
        used: Bytes of device memory in arrays, on both devices.
    """

    descriptors: int
    processes: int
    threads: int
    memory: int
    resident: int
    shared: int
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
            memory=_kibibytes("RssAnon") << 10,
            resident=(_kibibytes("RssAnon") + _kibibytes("RssFile")) << 10,
            shared=_kibibytes("RssShmem") << 10,
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
        training: The training beside them.
        seconds: How long they ask, in all.
        clients: How many there are.
        every: Seconds from one loss to the next.
        source: What chooses the losses.
        outcomes: Requests by what became of them.
        by_kind: Requests by kind of work and what became of them.
        wrong: What was wrong, in words.
        hits: What was done to the workers.
        health: How the service answered the process that asks for its health.
        port: Where the service answers.
        held: What was held behind each part.
        start: What was held before the first.
    """

    service: Service
    training: Training
    seconds: float
    clients: int = 12
    every: float = 1.0
    source: random.Random = attrs.field(factory=random.Random)
    outcomes: Counter[str] = attrs.field(factory=Counter[str])
    by_kind: Counter[tuple[str, str]] = attrs.field(factory=Counter[tuple[str, str]])
    wrong: list[str] = attrs.field(factory=list[str])
    hits: Counter[str] = attrs.field(factory=Counter[str])
    health: Health = attrs.field(factory=Health)
    port: int = 0
    held: list[Holdings] = attrs.field(factory=list[Holdings])
    start: Holdings | None = None

    async def run(self, say: Callable[[str], object]) -> None:
        """Ask in parts, with a rest behind each.

        Args:
            say: Gets a line behind each part.
        """
        work = all_work(self.service)
        await self._rest()
        self.start = await Holdings.now(self.service.first, self.service.second)
        first = min(self.seconds / _PARTS, _FIRST)
        later = (self.seconds - first) / (_PARTS - 1)
        for part in range(_PARTS):
            # Not while all is at rest, because counting what is held keeps the loop.
            async with asked_beside(self.port) as health:
                with trio.move_on_after(later if part else first):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._strike)
                        nursery.start_soon(self.training.run, _PATIENCE, _LOST)
                        for _ in range(_FLOODERS):
                            nursery.start_soon(self._flood)
                        for number in range(self.clients):
                            nursery.start_soon(self._ask, work, np.random.default_rng((part, number)))
            self.health.add(health)
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
            self.wrong += await self.service.bank.check()
            while not self._is_whole():  # noqa: ASYNC110  # spares and agents start by themselves
                await trio.sleep(0.02)

    def _is_whole(self) -> bool:
        return self.service.bank.is_whole and len(list(_family(os.getpid()))) == _PROCESSES

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
                self.by_kind[name, outcome] += 1

    async def _flood(self) -> None:
        """Send many requests for health at once, and read the answers, again and again."""
        question = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = question.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        while True:
            with suppress(trio.BrokenResourceError):
                async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
                    await stream.send_all(question * (_FLOOD - 1) + last)
                    async for _ in stream:
                        pass
            await trio.sleep(0.1)

    async def _strike(self) -> None:
        for number in itertools.count(1):
            await trio.sleep(self.every)
            hit = self.source.choice(_HITS) if number % _LAUNCHER_EVERY else "launcher"
            self.hits[hit] += 1
            if hit in ("kill", "stop", "launcher", "agent"):
                self._signal(hit)
            else:
                fault: dict[str, Any] = {hit: True}
                ta.testing.inject_fault(self.service.first, ta.linalg.Matmul, **fault)

    def _signal(self, hit: str) -> None:
        """Send a signal to a worker, a spare one perhaps, to an agent, or to the launcher."""
        family = [pid for pid in _family(os.getpid()) if pid != os.getpid()]
        launchers = [pid for pid in family if "_launcher_process" in _read(pid, "cmdline")]
        workers = [pid for pid in family if _read(pid, "comm").startswith("accel worker")]
        chosen = {"launcher": launchers, "agent": self.service.bank.agents()}.get(hit, workers)
        if chosen:
            with suppress(ProcessLookupError):
                os.kill(
                    self.source.choice(sorted(chosen)), signal.SIGSTOP if hit == "stop" else signal.SIGKILL
                )

    def faults(self) -> list[str]:
        """What was not as it must be; an empty list where all was."""
        found = [*self.wrong, *self.training.wrong, *(self.health.faults() if self.port else ())]
        if self.outcomes.total() != 2 * self.outcomes["begun"]:
            found.append("the outcomes are not as many as the requests")
        # The first part loads libraries and fills caches.
        early, late = self.held[1 : 1 + _PARTS // 2], self.held[1 + _PARTS // 2 :]
        for name, allowed in (
            *(("descriptors", 4), ("processes", 0), ("threads", 2)),
            *(
                ("memory", 8 * _MIB),
                ("resident", 8 * _MIB),
                ("shared", _CHUNK),
                ("objects", 3000),
                ("used", 0),
            ),
        ):
            before, after = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
            if after > before + allowed:
                found.append(f"{name} grew from {before:.0f} to {after:.0f}")
        return found

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.most_common())

        right = Counter(
            {name: count for (name, outcome), count in self.by_kind.items() if outcome == "right"}
        )
        return "\n".join(
            (
                f"outcomes: {listed(self.outcomes)}",
                f"right by kind: {listed(right)}",
                f"additions sent again after: {listed(self.service.bank.errors)}",
                f"trainers ended by: {listed(self.training.errors)}; steps again {self.training.replays}",
                f"losses: {sum(self.hits.values())} ({listed(self.hits)})",
                f"generations of the devices: {', '.join(str(one.generation) for one in self._devices)}",
                str(self.health),
                *self._counts(),
                *self._holdings(),
            )
        )

    @property
    def _devices(self) -> tuple[ta.Device, ...]:
        return (self.service.first, self.service.second, *self.training.devices)

    def _counts(self) -> Iterator[str]:
        """Yield the table of requests."""
        yield "requests".ljust(16) + "".join(f"{name:>16}" for name in _COLUMNS)
        bank, training = self.service.bank, self.training
        groups = {"text": "texts", "addition": "additions"}
        rows = {name: Counter[str]() for name in ("services", *groups.values(), "training steps")}
        for (name, outcome), count in self.by_kind.items():
            row = rows[groups.get(name, "services")]
            row["all"] += count
            known = {"right": "right", "WRONG": "wrong", "WITHOUT": "without outcome"}
            cancelled = dict.fromkeys(("left", "ended with the part"), "cancelled")
            row[{**known, **cancelled}.get(outcome, "lost a worker")] += count
        rows["additions"].update({"lost": bank.lost, "twice": bank.twice})
        wrong = len(training.wrong)
        steps = {"all": training.steps, "right": training.steps - wrong, "wrong": wrong}
        rows["training steps"].update({**steps, "lost": training.lost, "twice": training.twice})
        for name, row in rows.items():
            yield name.ljust(16) + "".join(f"{row[column]:>16}" for column in _COLUMNS)

    def _holdings(self) -> Iterator[str]:
        """Yield the table of what was held."""
        if self.start is None:
            return
        seen = (self.start, self.held[0], self.held[-1])
        first = min(self.seconds / _PARTS, _FIRST)
        yield "held".ljust(16) + "".join(f"{name:>16}" for name in ("start", f"after {first:.0f} s", "end"))
        for name, unit in (
            ("resident", _MIB),
            ("shared", _MIB),
            ("descriptors", 1),
            ("processes", 1),
            ("threads", 1),
        ):
            values = [getattr(one, name) / unit for one in seen]
            label = f"{name} MiB" if unit == _MIB else name
            yield label.ljust(16) + "".join(f"{value:>16.{1 if unit == _MIB else 0}f}" for value in values)


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


def _kibibytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def _bank(system: ta.System, folder: Path) -> AsyncGenerator[Bank, None]:
    """Open a cluster of two nodes, whose agents fork no workers."""
    nodes = cluster.LocalNodes(["left", "right"])
    # Each agent is killed every ten seconds, so the pauses before its restarts never begin anew.
    options = cluster.ClusterOptions(
        devices=("cpu",),
        device=ta.DeviceOptions(isolation="inline"),
        intensity=ta.Intensity(1000, 60.0),
        backoff=ta.Backoff(base=0.2, maximum=1.0),
    )
    store = cluster.SqliteStore(folder / "accounts.sqlite")
    async with cluster.open_cluster(system, nodes, store=store, options=options) as members:
        yield Bank(nodes, members)


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application without routes: `serve` answers ``/health`` itself."""
    assert scope["type"] == "http"


async def main(seconds: float = 900.0, clients: int = 12, say: Callable[[str], object] = print) -> list[str]:
    """Open the devices and the cluster of a service, and ask them for so many seconds.

    Returns:
        What was not as it must be.
    """
    options = ta.DeviceOptions(
        isolation="process", retry=1, retry_suspects=True, spares=1, stuck_after=3.0, heartbeat_timeout=3.0
    )
    # Steps are done again by the trainer, and not by the device.
    ranks = attrs.evolve(options, spares=0, retry=0, retry_suspects=False)
    with tempfile.TemporaryDirectory() as name:
        async with (
            ta.open_system("soak") as system,
            system.open_device("cpu", options=options) as first,
            system.open_device("cpu", options=options) as second,
            ta.open_world([first, second]) as world,
            _bank(system, Path(name)) as bank,
            system.open_device("cpu", options=ranks) as third,
            system.open_device("cpu", options=ranks) as fourth,
        ):
            counts = await first.zeros(4)
            weights = np.random.default_rng(1).integers(-8, 9, (24, 24)).astype(np.float64)
            writer = [await first.put(array) for array in weights_of_writer()]
            training = Training((third, fourth), Path(name), await losses_of(system))
            async with (
                ta.open_program(first, Model, await first.put(weights), counts) as program,
                ta.open_program(first, Writer, *writer) as writes,
            ):
                service = await open_service(
                    system, (first, second), world, program, counts, Texts(writes), bank
                )
                soak = Soak(service, training, seconds, clients)
                async with trio.open_nursery() as nursery:
                    serving = partial(serve, _nothing, port=0, system=system, signals=())
                    soak.port = await nursery.start(serving)
                    await soak.run(say)
                    nursery.cancel_scope.cancel()
                say(str(soak))
                return soak.faults()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.CRITICAL)
    warnings.filterwarnings("ignore", "open_device", RuntimeWarning)
    arguments: list[Any] = [*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3])]
    faults = trio.run(main, *arguments)
    print(*(f"FAULT: {fault}" for fault in faults[:50]), f"{len(faults)} faults", sep="\n")  # noqa: T201
    raise SystemExit(bool(faults))

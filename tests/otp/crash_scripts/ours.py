"""Running scripts on the supervisors of `trio_accel.actors`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import attrs
import trio
import trio.testing

from trio_accel.actors import (
    Actor,
    ActorContext,
    ActorFailedError,
    Backoff,
    Event,
    Intensity,
    Message,
    Policy,
    Ref,
    Request,
    Restart,
    Strategy,
    SupervisorFailed,
    SupervisorScope,
    handles,
    open_system,
)

from .language import Act, Add, Child, Crash, Finish, Remove, Script, Step, Supervisor, Together, Wait, Worker
from .log import RawEvent

__all__ = ["run_on_ours"]

_NO_BACKOFF = Backoff(initial=0.0, base=0.0, jitter=0.0)


class Boom(Exception):  # noqa: N818  # it is no error of anything, only of the script
    """The error of crashing workers."""


@attrs.frozen
class CrashNow(Message["WorkerActor"]):
    """Crash."""


@attrs.frozen
class FinishNow(Message["WorkerActor"]):
    """End on its own."""


@attrs.frozen
class Spawn(Request["SupervisorActor", None]):
    """Start a child; a failing start is not a failure of the supervisor."""

    child: Child


def run_on_ours(script: Script) -> list[RawEvent]:
    """Run a script; returns its log. Time passes only as requested by the script."""
    clock = trio.testing.MockClock()
    return trio.run(_Run(script, clock).run, clock=clock)


class WorkerActor(Actor):
    """A worker of a script."""

    def __init__(self, run: _Run, worker: Worker) -> None:
        self._run = run
        self._worker = worker
        self._is_finished = False

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        run, name, number = self._run, self._worker.name, self._run.next_number(self._worker.name)
        await self._run_hooks("start", number)
        if number in self._worker.fails:
            run.log.append((name, number, "lifespan refused with Boom"))
            raise Boom
        run.log.append((name, number, "lifespan entered"))
        ended = run.running[name] = trio.Event()
        what = "lifespan left"
        try:
            yield
            if self._is_finished:
                what = "lifespan left after finish"
        except Boom:
            what = "lifespan left with Boom"
            raise
        finally:
            run.log.append((name, number, what))
            del run.running[name]
            ended.set()
            # Its supervisor may have cancelled it, and must wait all the same. The whole run is bounded.
            with trio.CancelScope(shield=True):
                if what == "lifespan left":
                    await self._run_hooks("shutdown", number)
                if name in run.held:
                    await run.held[name].wait()

    async def _run_hooks(self, point: str, number: int) -> None:
        await trio.lowlevel.checkpoint()
        for hook in self._worker.hooks:
            if (hook.point, hook.number) == (point, number):
                await self._run.run_hook(hook.act)

    @handles(CrashNow)
    async def crash(self, _: CrashNow) -> None:
        raise Boom

    @handles(FinishNow)
    async def finish(self, _: FinishNow) -> None:
        await trio.lowlevel.checkpoint()
        self._is_finished = True
        self.context.finish()


class SupervisorActor(Actor):
    """A supervisor of a script, below the root."""

    def __init__(self, run: _Run, supervisor: Supervisor) -> None:
        self._run = run
        self._supervisor = supervisor

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        run, name, number = self._run, self._supervisor.name, self._run.next_number(self._supervisor.name)
        run.log.append((name, number, "lifespan entered"))
        for child in self._supervisor.children:
            await run.spawn(context, child)
        try:
            yield
        finally:
            # Its children have ended.
            run.log.append((name, number, "supervisor ended"))

    @handles(Spawn)
    async def add(self, message: Spawn) -> None:
        await self._run.add(self.context, message.child)


_Spawner: TypeAlias = SupervisorScope | ActorContext


class _Run:
    """One run of a script.

    Attributes:
        log: The events.
        running: The running workers, each with an event for its end.
        held: Workers that, having ended, wait before their supervisor may take notice.
    """

    def __init__(self, script: Script, clock: trio.testing.MockClock) -> None:
        self.log: list[RawEvent] = []
        self.running: dict[str, trio.Event] = {}
        self.held: dict[str, trio.Event] = {}
        self._script = script
        self._clock = clock
        self._workers: dict[str, Ref[WorkerActor]] = {}
        self._supervisors: dict[str, Ref[SupervisorActor]] = {}
        self._numbers: dict[str, int] = {}
        self._hooks: list[Act] = []
        self._ended_hooks = 0

    async def run(self) -> list[RawEvent]:
        """Run the script."""
        root = self._script.root
        number = self.next_number(root.name)
        has_started = False
        self.log.append((root.name, number, "lifespan entered"))
        async with open_system("scripts") as system:
            with system.subscribe(self._observe):
                try:
                    async with system.open_supervisor(
                        root.name,
                        strategy=Strategy(root.strategy),
                        intensity=Intensity(root.intensity, root.period),
                    ) as scope:
                        for child in root.children:
                            await self.spawn(scope, child)
                        has_started = True
                        for step in self._script.steps:
                            await self._perform(step, scope)
                            await self._settle()
                except* (ActorFailedError, Boom):
                    # It has given up, as reported to the observer; or a child failed to start.
                    pass
        if has_started:
            self.log.append((root.name, number, "supervisor ended"))
        return self.log

    def next_number(self, name: str) -> int:
        """Count an incarnation."""
        self._numbers[name] = number = self._numbers.get(name, -1) + 1
        return number

    async def spawn(self, spawner: _Spawner, child: Child) -> None:
        """Start a child."""
        restart = Restart(child.restart)
        if isinstance(child, Worker):
            policy = Policy(backoff=_NO_BACKOFF)
            self._workers[child.name] = await spawner.spawn(
                WorkerActor, self, child, name=child.name, restart=restart, policy=policy
            )
            return
        policy = Policy(
            backoff=_NO_BACKOFF,
            strategy=Strategy(child.strategy),
            intensity=Intensity(child.intensity, child.period),
        )
        self._supervisors[child.name] = await spawner.spawn(
            SupervisorActor, self, child, name=child.name, restart=restart, policy=policy
        )

    async def add(self, spawner: _Spawner, child: Child) -> None:
        """Start a child that may be refused or fail to start."""
        await trio.lowlevel.checkpoint()
        # In OTP's words: {error, Reason}.
        with suppress(Boom, ValueError):
            await self.spawn(spawner, child)

    async def act(self, act: Act) -> None:
        """Have a worker end, and wait until it has."""
        await trio.lowlevel.checkpoint()
        ended = self.running.get(act.target)
        if ended is not None:
            self._workers[act.target].tell_nowait(CrashNow() if isinstance(act, Crash) else FinishNow())
            await ended.wait()

    async def run_hook(self, act: Act) -> None:
        """Have a worker end, and give its supervisor every chance to act on that at once."""
        self._hooks.append(act)
        await self.act(act)
        await trio.testing.wait_all_tasks_blocked()
        self._hooks.remove(act)
        self._ended_hooks += 1

    async def _settle(self) -> None:
        await trio.lowlevel.checkpoint()
        ended = -1
        # A hook is woken at the same time as this task, and continues after it or has continued before it.
        while self._hooks or ended != self._ended_hooks:
            ended = self._ended_hooks
            await trio.testing.wait_all_tasks_blocked()

    async def _perform(self, step: Step, root: SupervisorScope) -> None:
        await trio.lowlevel.checkpoint()
        match step:
            case Crash() | Finish():
                await self.act(step)
            case Together(acts):
                await self._act_together(acts)
            case Add(supervisor, child):
                if supervisor == self._script.root.name:
                    await self.add(root, child)
                else:
                    ref = self._supervisors.get(supervisor)
                    if ref is not None and not ref.is_terminated:
                        await ref.ask(Spawn(child))
            case Remove(target):
                known = self._workers.get(target) or self._supervisors.get(target)
                if known is not None:
                    await known.stop()
            case Wait(seconds):
                self._clock.jump(seconds)

    async def _act_together(self, acts: tuple[Act, ...]) -> None:
        await trio.lowlevel.checkpoint()
        self.held = {act.target: trio.Event() for act in acts}
        try:
            for act in acts:
                await self.act(act)
            for held in self.held.values():
                held.set()
                await self._settle()
        finally:
            # The supervisor may have given up over the first, and waits for the others.
            for held in self.held.values():
                held.set()
            self.held = {}

    def _observe(self, event: Event) -> None:
        if isinstance(event, SupervisorFailed):
            name = event.path.rpartition("/")[2]
            self.log.append((name, self._numbers[name], "SupervisorFailed"))

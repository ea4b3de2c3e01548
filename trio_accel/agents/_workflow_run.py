"""One run of a workflow: its steps at work, their results, and what steps may ask of it.

Each step has a task, which waits for the steps and inputs that it needs, and for no others. A step's
outcome is in the journal before any step that needs it starts. Errors of steps never leave their tasks,
because a nursery would wrap them in a group: the first one that counts cancels the run, and `Run.execute`
raises it as it is.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, TypeVarTuple

import attrs
import trio

from ..actors import Backoff, describe
from ..cluster import FencedError, StoreError
from ._workflow_journal import Kept, RunJournal, StepState

__all__ = ["Run", "RunningStep", "StepEvent", "StepFigures", "WorkflowResult", "current_step"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RANDOM = random.Random()  # noqa: S311  # it varies pauses


@attrs.frozen(kw_only=True)
class StepEvent:
    """Something that happens in a run.

    Attributes:
        step: Name of the step or input; of an item of a fan-out with its index, as in ``"score[3]"``.
        kind: ``"started"``, ``"told"`` (by `RunningStep.tell`), ``"failed"`` (an attempt), ``"finished"``,
            ``"skipped"``, or ``"kept"`` (finished before the program was started again).
        value: The value that was told, the result, or the text of the error or reason.
    """

    step: str
    kind: Literal["started", "told", "failed", "finished", "skipped", "kept"]
    value: Any = None


@attrs.frozen(kw_only=True)
class StepFigures:
    """The time of one step.

    Attributes:
        state: ``"waiting"``, ``"running"``, ``"finished"``, ``"failed"`` or ``"skipped"``.
        waited: Seconds from the begin of the run to the start of the step.
        seconds: Seconds of the step so far, pauses between attempts included; of a kept one, in the process
            that made it.
        attempts: How often it was tried; of a fan-out, the sum of its items.
        is_kept: Whether its result comes from the store.
        error: Why it failed or was skipped.
    """

    state: StepState
    waited: float
    seconds: float
    attempts: int
    is_kept: bool
    error: str | None


@attrs.frozen(kw_only=True)
class WorkflowResult:
    """The end of a run.

    Attributes:
        results: Results of the finished steps by their names.
        steps: Figures of all steps by their names.
        seconds: Seconds of the run in this process.
    """

    results: Mapping[str, Any]
    steps: Mapping[str, StepFigures]
    seconds: float


@attrs.frozen(kw_only=True)
class Rule:
    """A step as it was declared; see `Workflow.step`.

    Attributes:
        needs: Names that it waits for.
        required: Those of them without which it is skipped.
        takes: Those of them that the function takes.
        item: Name of the parameter for an item of `over`.
        asks: Those that `when` takes.
    """

    name: str
    function: Callable[..., Awaitable[Any]]
    needs: tuple[str, ...]
    required: frozenset[str]
    takes: frozenset[str]
    item: str | None
    over: str | None
    at_once: int
    when: Callable[..., object] | None
    asks: frozenset[str]
    attempts: int
    backoff: Backoff
    deadline: float | None
    may_fail: bool


@attrs.define(eq=False)
class _Node:
    """A step or an input in a run."""

    name: str
    state: StepState = "waiting"
    value: Any = None
    started: float | None = None
    ended: float | None = None
    attempts: int = 0
    kept_seconds: float | None = None
    ready: trio.Event = attrs.field(factory=trio.Event)

    def end(self, state: StepState, value: object) -> None:
        self.state, self.value, self.ended = state, value, trio.current_time()
        self.ready.set()

    def figures(self, begun: float) -> StepFigures:
        now = trio.current_time()
        started = now if self.started is None else self.started
        seconds = (now if self.ended is None else self.ended) - started
        return StepFigures(
            state=self.state,
            waited=started - begun,
            seconds=max(seconds, 0.0) if self.kept_seconds is None else self.kept_seconds,
            attempts=self.attempts,
            is_kept=self.kept_seconds is not None,
            error=self.value if self.state in {"failed", "skipped"} else None,
        )


class Run:
    """A run of a `Workflow`, as `Workflow.runs` has it while it lasts.

    Attributes:
        key: The key of the run.
    """

    def __init__(
        self,
        where: str,
        key: str,
        rules: Sequence[Rule],
        inputs: Mapping[str, object],
        later: Iterable[str],
        journal: RunJournal,
        events: trio.MemorySendChannel[StepEvent] | None,
    ) -> None:
        self.key: str = key
        self.journal: RunJournal = journal
        self.error: Exception | None = None
        self._where, self._rules, self._inputs, self._events = where, rules, inputs, events
        self._nodes = {rule.name: _Node(rule.name) for rule in rules}
        self._later = {name: _Node(name) for name in later}
        self._begun, self._began = trio.Event(), trio.current_time()
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<Run of {self._where}>"

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the inputs that come later and have not come."""
        return tuple(name for name, node in self._later.items() if node.state == "waiting")

    @property
    def steps(self) -> Mapping[str, StepFigures]:
        """Figures of the steps so far, by their names."""
        return {rule.name: self._nodes[rule.name].figures(self._began) for rule in self._rules}

    async def give(self, **inputs: object) -> None:
        """Give inputs that come later. When this returns, they are in the store.

        Raises:
            ValueError: The workflow has no such input, it was given already, or the run has ended.
            TypeError: It cannot be kept.
            FencedError, StoreError: The run cannot write any more; it fails with the same error.
        """
        await self._begun.wait()
        for name, value in inputs.items():
            node = self._later.get(name)
            if node is None:
                known = ", ".join(self._later) or "no input that comes later"
                raise ValueError(f"{self._where}: give: there is no {name!r}; it has {known}")
            if node.state != "waiting" or self._scope.cancel_called:
                why = "was given already" if node.state != "waiting" else "comes too late: the run has ended"
                raise ValueError(f"{self._where}: give: {name} {why}")
            node.state = "running"
            try:
                await self.journal.keep(name, Kept("finished", value))
            except BaseException as error:
                node.state = "waiting"
                if isinstance(error, (FencedError, StoreError)):
                    self.fail(error)
                raise
            node.end("finished", value)
            await self.tell(StepEvent(step=name, kind="finished", value=value))

    async def execute(self) -> WorkflowResult:
        """Run the steps that are not kept, and return the results; see `Workflow.run`."""
        try:
            await self.journal.begin(self._inputs)
            self._load()
            if not self.journal.is_finished:
                await self._run_steps()
                await self.journal.finish()
        finally:
            self._scope.cancel()
            self._begun.set()
        nodes = [self._nodes[rule.name] for rule in self._rules]
        return WorkflowResult(
            results={node.name: node.value for node in nodes if node.state == "finished"},
            steps=self.steps,
            seconds=trio.current_time() - self._began,
        )

    def _load(self) -> None:
        """Take over what is kept, and let those go on that wait for it."""
        for rule in self._rules:
            node = self._nodes[rule.name]
            if kept := self.journal.find(rule.name):
                node.started, node.attempts, node.kept_seconds = self._began, kept.attempts, kept.seconds
                node.end(kept.state, kept.value)
        for node in self._later.values():
            if kept := self.journal.find(node.name):
                node.end(kept.state, kept.value)
        for name, value in self._inputs.items():
            node = self._nodes[name] = _Node(name)
            node.end("finished", value)
        self._nodes |= self._later
        for name in {name for rule in self._rules for name in rule.needs} - self._nodes.keys():
            node = self._nodes[name] = _Node(name)
            node.end("skipped", "it was not given")

    async def _run_steps(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._begun.set()
                for rule in self._rules:
                    nursery.start_soon(self._run_step, rule, name=f"{self._where}: {rule.name}")
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error

    async def _run_step(self, rule: Rule) -> None:
        node = self._nodes[rule.name]
        try:
            if node.state != "waiting":
                kind: Literal["kept", "skipped"] = "kept" if node.state == "finished" else "skipped"
                await self.tell(StepEvent(step=node.name, kind=kind, value=node.value))
                return
            for name in rule.needs:
                await self._nodes[name].ready.wait()
            await self._start(rule, node)
        except Exception as error:  # noqa: BLE001  # a step may raise anything
            self.fail(error)

    async def _start(self, rule: Rule, node: _Node) -> None:
        node.started = trio.current_time()
        values = {
            name: found.value for name in rule.needs if (found := self._nodes[name]).state == "finished"
        }
        if lacking := [name for name in rule.needs if name in rule.required - values.keys()]:
            # It follows from what is kept, so it is not kept itself.
            await self._end(
                node, "skipped", f"{lacking[0]} was {self._nodes[lacking[0]].state}", is_kept=True
            )
            return
        try:
            asked = {name: value for name, value in values.items() if name in rule.asks}
            if rule.when is not None and not rule.when(**asked):
                await self._end(node, "skipped", "its condition was false")
                return
            node.state = "running"
            taken = {name: value for name, value in values.items() if name in rule.takes}
            if rule.item is None:
                result = await self._attempt(rule, node, rule.name, taken)
            else:
                result = await self._fan_out(rule, node, rule.item, taken, values)
        except Exception as error:
            if self.error is not None or not rule.may_fail:
                raise
            await self._end(node, "failed", describe(error))
            return
        # The items of a fan-out are kept already.
        await self._end(node, "finished", result, is_kept=rule.item is not None)

    async def _end(self, node: _Node, state: StepState, value: object, *, is_kept: bool = False) -> None:
        if not is_kept:
            seconds = trio.current_time() - (node.started or 0.0)
            await self.keep(node.name, Kept(state, value, seconds, node.attempts))
        node.end(state, value)
        kind: Literal["finished", "skipped"] = "finished" if state == "finished" else "skipped"
        await self.tell(StepEvent(step=node.name, kind=kind, value=value))

    async def _fan_out(
        self, rule: Rule, node: _Node, item: str, taken: Mapping[str, object], values: Mapping[str, Any]
    ) -> list[Any]:
        """Run a step for each item, so many at once, and return the results in the order of the items."""
        try:
            items = list(values[rule.over or ""])
        except TypeError:
            raise TypeError(
                f"{self._where}: {rule.name} needs a list of items, and {rule.over} is "
                f"{values[rule.over or '']!r:.100}"
            ) from None
        results: list[Any] = [None] * len(items)
        numbers = iter(range(len(items)))
        errors: list[Exception] = []

        async def work() -> None:
            for number in numbers:
                name = f"{rule.name}[{number}]"
                try:
                    results[number] = await self._run_item(rule, node, name, {**taken, item: items[number]})
                except Exception as error:  # noqa: BLE001  # it is raised below, alone
                    errors.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(rule.at_once, len(items))):
                nursery.start_soon(work)
        if errors:
            raise errors[0]
        return results

    async def _run_item(self, rule: Rule, node: _Node, name: str, taken: Mapping[str, object]) -> Any:
        if (kept := self.journal.find(name)) is not None:
            return kept.value
        begun = trio.current_time()
        result = await self._attempt(rule, node, name, taken)
        await self.keep(name, Kept("finished", result, trio.current_time() - begun))
        return result

    async def _attempt(self, rule: Rule, node: _Node, name: str, taken: Mapping[str, object]) -> Any:
        """Call the function until it returns, so often, within the deadline."""
        await self.tell(StepEvent(step=name, kind="started"))
        if rule.deadline is None:
            return await self._attempts(rule, node, name, taken)
        with trio.move_on_after(rule.deadline):
            return await self._attempts(rule, node, name, taken)
        raise trio.TooSlowError(f"{self._where}: {name} took longer than {rule.deadline:g} s")

    async def _attempts(self, rule: Rule, node: _Node, name: str, taken: Mapping[str, object]) -> Any:
        for attempt in range(rule.attempts):
            if attempt:
                await trio.sleep(rule.backoff.delay(attempt - 1, _RANDOM))
            node.attempts += 1
            running = _CURRENT.set(RunningStep(self, name, attempt))
            try:
                return await rule.function(**taken)
            except Exception as error:
                await self.tell(StepEvent(step=name, kind="failed", value=describe(error)))
                if self.error is not None or attempt + 1 == rule.attempts:
                    error.add_note(f"in {self._where}: {name}, attempt {attempt + 1} of {rule.attempts}")
                    raise
            finally:
                _CURRENT.reset(running)
        raise AssertionError("there is at least one attempt")

    async def keep(self, name: str, kept: Kept) -> None:
        """Keep an outcome; if that fails, the run fails."""
        try:
            await self.journal.keep(name, kept)
        except Exception as error:
            self.fail(error)
            raise

    async def tell(self, event: StepEvent) -> None:
        """Send an event; if nobody reads events any more, the run fails."""
        if self._events is None:
            return
        try:
            await self._events.send(event)
        except trio.BrokenResourceError as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """End the run with an error, unless it has one already."""
        if self.error is None:
            self.error = error
        self._scope.cancel()


class RunningStep:
    """The step that the current task works for.

    Attributes:
        name: Its name; of an item of a fan-out with its index, as in ``"score[3]"``.
        key: A text that is the same at each attempt and after each restart of the program, and that no other
            step or item has. Give it to services that take a key of idempotency.
        attempt: Number of the attempt, from 0.
    """

    def __init__(self, run: Run, name: str, attempt: int) -> None:
        self.name: str = name
        self.key: str = f"{run.journal.entity}/{name}"
        self.attempt: int = attempt
        self._run, self._called = run, set[str]()

    def __repr__(self) -> str:
        return f"<RunningStep {self.key}, attempt {self.attempt}>"

    async def tell(self, value: object) -> None:
        """Send a value, such as a token, to the reader of the run's events, and wait until there is room.

        Raises:
            trio.BrokenResourceError: The reader has left. The run ends with the same error.
        """
        await self._run.tell(StepEvent(step=self.name, kind="told", value=value))

    async def once(self, name: str, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call an async function, and keep its result. A later attempt gets the result without the call.

        If the program is killed between the end of the call and the write, the call is made again.

        Args:
            name: What the result is found by, such as ``f"turn {number}"``.
            function: The function.
            args: Its arguments.

        Raises:
            ValueError: This attempt has had a call of that name.
            TypeError: The result cannot be kept.
            FencedError, StoreError: The run cannot write any more. It ends with the same error.
        """
        if name in self._called:
            raise ValueError(f"once: {self.key} has called {name!r} in this attempt already; use other names")
        self._called.add(name)
        known_by = f"{self.name}.{name}"
        kept = self._run.journal.find(known_by)
        if kept is None:
            begun = trio.current_time()
            value = await function(*args)
            kept = Kept("finished", value, trio.current_time() - begun)
            await self._run.keep(known_by, kept)
        found: T = kept.value
        return found


_CURRENT: ContextVar[RunningStep] = ContextVar("trio_accel.agents.current_step")


def current_step() -> RunningStep:
    """Return the step that the current task works for.

    Raises:
        RuntimeError: The task works for no step.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise RuntimeError("current_step: this task works for no step of a Workflow") from None

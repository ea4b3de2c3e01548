"""A run of a workflow: its running steps, their results, and the functions for steps.

Each step has a task, which waits only for the steps and inputs that it needs. A step's outcome is in the
journal before any step that needs it starts. Errors of steps never leave their tasks, because a nursery would
wrap them in a group: the first one that counts cancels the run, and `Run.execute` raises it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, TypeVarTuple

import attrs
import trio

from ..actors import Backoff, Leavable, TaskEvent, describe
from ..cluster import FencedError, StoreError
from ._workflow_journal import Kept, RunJournal, StepState

__all__ = ["Run", "RunStep", "RunningStep", "StepEvent", "WorkflowResult", "current_step"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Kind: TypeAlias = Literal["started", "told", "failed", "finished", "skipped", "kept"]

_RANDOM = random.Random()  # noqa: S311  # it varies pauses


@attrs.frozen
class StepEvent:
    """An event of a run.

    Attributes:
        step: The name of the step or input; for an item of a fan-out with its index, as in ``"score[3]"``.
        kind: ``"started"``, ``"told"`` (by `RunningStep.tell`), ``"failed"`` (an attempt, or the step),
            ``"finished"``, ``"skipped"``, or ``"kept"`` (finished in an earlier run of the key).
        value: The value of `RunningStep.tell`, the result, or the text of the error or reason.
    """

    step: str
    kind: _Kind
    value: Any = None


@attrs.frozen(kw_only=True)
class StepRule:
    """A declared step; see `Workflow.step`.

    Attributes:
        needs: The names that it waits for, and whether it is skipped without them.
        takes: The needed names that the function takes.
        asks: The needed names that `when` takes.
        item: The name of the parameter for an item of `over`.
    """

    name: str
    function: Callable[..., Awaitable[Any]]
    needs: Mapping[str, bool]
    takes: frozenset[str]
    asks: frozenset[str]
    item: str | None
    over: str | None
    at_once: int
    when: Callable[..., object] | None
    attempts: int
    backoff: Backoff
    deadline: float
    may_fail: bool


@attrs.define(eq=False)
class RunStep:
    """A step or an input of a run.

    Attributes:
        name: The name.
        state: ``"waiting"``, ``"running"``, ``"finished"``, ``"failed"`` or ``"skipped"``.
        value: The result; for a failed or skipped step, the reason.
        waited: Seconds from the beginning of the run to the start of the step.
        seconds: Seconds from there to its end, including pauses between attempts; for a stored result, the
            seconds in the process that made it.
        attempts: The number of attempts; for a fan-out, the sum over its items.
        is_kept: Whether it has finished in an earlier run of the key.
    """

    name: str
    state: StepState = "waiting"
    value: Any = attrs.field(default=None, repr=False)
    waited: float = 0.0
    seconds: float = 0.0
    attempts: int = 0
    is_kept: bool = False
    ready: TaskEvent = attrs.field(factory=TaskEvent, repr=False, init=False)

    def end(self, outcome: Kept) -> None:
        """Let steps that wait for it continue."""
        self.state, self.value = outcome.state, outcome.value
        self.seconds, self.attempts = outcome.seconds, outcome.attempts
        self.ready.set()


@attrs.frozen
class WorkflowResult:
    """The end of a run.

    Attributes:
        steps: All steps by their names, with their times.
        seconds: Seconds of the run in this process.
    """

    steps: Mapping[str, RunStep]
    seconds: float

    @property
    def results(self) -> dict[str, Any]:
        """Results of the finished steps by their names."""
        return {name: step.value for name, step in self.steps.items() if step.state == "finished"}


@attrs.define(eq=False, repr=False)
class Run:
    """A run of a `Workflow`, found in `Workflow.runs` while it lasts.

    Attributes:
        key: The key of the run.
        steps: All steps by their names.
    """

    key: str
    journal: RunJournal
    _rules: Sequence[StepRule]
    _inputs: Mapping[str, object]
    _later: Mapping[str, RunStep]
    _events: trio.MemorySendChannel[StepEvent] | None
    steps: dict[str, RunStep] = attrs.field(init=False)
    error: Exception | None = attrs.field(default=None, init=False)
    _input_values: Mapping[str, Callable[[], Any]] = attrs.field(
        factory=dict[str, Callable[[], Any]], init=False
    )
    _begun: TaskEvent = attrs.field(factory=TaskEvent, init=False)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    def __attrs_post_init__(self) -> None:
        self.steps = {rule.name: RunStep(rule.name) for rule in self._rules}

    def __repr__(self) -> str:
        return f"<Run {self.journal.label}>"

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the later inputs that are not given yet."""
        return tuple(name for name, step in self._later.items() if step.state == "waiting")

    async def give(self, **inputs: object) -> None:
        """Give later inputs. When this returns, they are in the store.

        Raises:
            ValueError: The workflow lacks such an input, it was given already, or the run has ended.
            TypeError: It cannot be stored.
            FencedError, StoreError: The run can no longer write; it ends with the same error.
        """
        await self._begun.wait()
        for name, value in inputs.items():
            if name not in self.missing or self._scope.cancel_called:
                waits = ", ".join(self.missing) or "no input"
                raise ValueError(f"{self.journal.label}: give: {name!r} is not awaited; it waits for {waits}")
            step = self._later[name]
            step.state = "running"
            try:
                outcome = await self.journal.keep(name, Kept("finished", value))
            except BaseException as error:
                step.state = "waiting"
                if isinstance(error, (FencedError, StoreError)):
                    self.fail(error)
                raise
            step.end(outcome)
            await self.tell(name, "finished", step.value)

    async def execute(self) -> WorkflowResult:
        """Run the steps without stored outcomes, and return the results; see `Workflow.run`."""
        begun = trio.current_time()
        try:
            inputs = await self.journal.begin(self._inputs)
            for step in (*self.steps.values(), *self._later.values()):
                if outcome := self.journal.find(step.name):
                    step.is_kept = True
                    step.end(outcome)
            if not self.journal.is_finished:
                await self._run_steps(begun, inputs)
                await self.journal.finish()
                # Readers of events may have changed the values, and the store has them.
                for step in self.steps.values():
                    if step.state == "finished":
                        step.value = self._outcome(step.name).value
        finally:
            self._scope.cancel()
            self._begun.set()
        return WorkflowResult(self.steps, trio.current_time() - begun)

    def _outcome(self, name: str) -> Kept:
        outcome = self.journal.find(name)
        assert outcome is not None  # it has ended
        return outcome

    async def _run_steps(self, begun: float, inputs: Mapping[str, Callable[[], Any]]) -> None:
        steps = {**self.steps, **self._later}
        for name in {name for rule in self._rules for name in rule.needs} - steps.keys():
            steps[name] = RunStep(name)
            steps[name].end(Kept("finished", None) if name in inputs else Kept("skipped", ""))
        self._input_values = inputs
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._begun.set()
                for rule in self._rules:
                    nursery.start_soon(self._run_step, rule, steps, begun, name=rule.name)
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error

    async def _run_step(self, rule: StepRule, steps: Mapping[str, RunStep], begun: float) -> None:
        step = steps[rule.name]
        try:
            for name in () if step.is_kept else rule.needs:
                await steps[name].ready.wait()
            if not step.is_kept:
                step.waited = trio.current_time() - begun
                await self._work(rule, step, steps)
            is_kept = step.is_kept and step.state == "finished"
            kind: Any = "kept" if is_kept else step.state
            await self.tell(step.name, kind, step.value)
        except Exception as error:  # noqa: BLE001  # a step may raise anything
            self.fail(error)

    async def _work(self, rule: StepRule, step: RunStep, steps: Mapping[str, RunStep]) -> None:
        available = {name for name in rule.needs if steps[name].state == "finished"}
        for name, is_needed in rule.needs.items():
            if is_needed and name not in available:
                # It follows from the outcomes of others, so it is not kept.
                step.end(Kept("skipped", f"{name} was {steps[name].state}", attempts=0))
                return

        def chosen(names: frozenset[str]) -> dict[str, Any]:
            return {name: self._value(name) for name in names & available}

        step.state, begun = "running", trio.current_time()
        state: StepState = "finished"
        value: Any
        try:
            if rule.when is not None and not rule.when(**chosen(rule.asks)):
                state, value = "skipped", "its condition was false"
            elif rule.over is None:
                value = await self._call(rule, step, rule.name, lambda: chosen(rule.takes))
            else:
                value = await self._fan_out(rule, step, self._value(rule.over), lambda: chosen(rule.takes))
        except Exception as error:
            if self.error is not None or not rule.may_fail:
                raise
            state, value = "failed", describe(error)
        is_list = rule.over is not None and state == "finished"
        outcome = Kept(state, value, trio.current_time() - begun, step.attempts, is_list)
        step.end(await self.keep(rule.name, outcome))

    def _value(self, name: str) -> Any:
        """Return the value of a finished step or of an input, which the caller may change with a store."""
        if name in self._input_values:
            return self._input_values[name]()
        return self._outcome(name).value

    async def _fan_out(
        self, rule: StepRule, step: RunStep, collection: Any, take: Callable[[], dict[str, Any]]
    ) -> list[Any]:
        label = f"{self.journal.label}: {rule.name}"
        if isinstance(collection, (set, frozenset)):
            # Another process iterates over it in another order, and results are kept by position.
            raise TypeError(f"{label} needs items in an order, and {rule.over} is a set; return sorted(...)")
        try:
            items = list(collection)
        except TypeError:
            raise TypeError(
                f"{label} needs a list of items, and {rule.over} is {collection!r:.100}"
            ) from None
        results: list[Any] = [None] * len(items)
        numbers = iter(range(len(items)))
        errors: list[Exception] = []

        async def work() -> None:
            for number in numbers:
                name = f"{rule.name}[{number}]"
                try:
                    if (outcome := self.journal.find(name)) is None:
                        begun = trio.current_time()
                        item = self.journal.copies(name, items[number])
                        take_all = partial(_with_item, take, rule.item or "", item)
                        value = await self._call(rule, step, name, take_all)
                        outcome = await self.keep(name, Kept("finished", value, trio.current_time() - begun))
                    results[number] = outcome.value
                except Exception as error:  # noqa: BLE001  # it is raised below, in no group
                    errors.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(rule.at_once, len(items))):
                nursery.start_soon(work)
        if errors:
            raise errors[0]
        return results

    async def _call(
        self, rule: StepRule, step: RunStep, name: str, take: Callable[[], dict[str, Any]]
    ) -> Any:
        """Call the function until it returns, within the attempts and the deadline."""
        await self.tell(name, "started")
        with trio.move_on_after(rule.deadline):
            for attempt in range(rule.attempts):
                if attempt:
                    await trio.sleep(rule.backoff.delay(attempt - 1, _RANDOM))
                step.attempts += 1
                token = _CURRENT.set(RunningStep(self, name, attempt))
                try:
                    return await rule.function(**take())
                except Exception as error:
                    await self.tell(name, "failed", describe(error))  # noqa: ASYNC120  # a run that ends
                    if self.error is not None or attempt + 1 == rule.attempts:
                        label = f"{self.journal.label}: {name}"
                        error.add_note(f"in {label}, attempt {attempt + 1} of {rule.attempts}")
                        raise
                finally:
                    _CURRENT.reset(token)
        raise trio.TooSlowError(f"{self.journal.label}: {name} took longer than {rule.deadline:g} s")

    async def keep(self, name: str, outcome: Kept) -> Kept:
        """Keep an outcome, and return what is kept; if that fails, the run fails."""
        try:
            return await self.journal.keep(name, outcome)
        except Exception as error:
            self.fail(error)
            raise

    async def tell(self, name: str, kind: _Kind, value: object = None) -> None:
        """Send an event; if nobody reads events any longer, the run fails."""
        if self._events is not None:
            try:
                await Leavable(self._events.send(StepEvent(name, kind, value)))
            except trio.BrokenResourceError as error:
                self.fail(error)
                raise

    def fail(self, error: Exception) -> None:
        """End the run with an error, unless it already failed."""
        self.error = self.error or error
        self._scope.cancel()


def _with_item(take: Callable[[], dict[str, Any]], name: str, item: Callable[[], Any]) -> dict[str, Any]:
    return {**take(), name: item()}


@attrs.define(eq=False)
class RunningStep:
    """The step that the current task works for.

    Attributes:
        name: The name; for an item of a fan-out with its index, as in ``"score[3]"``.
        attempt: Number of the attempt, from 0.
    """

    _run: Run = attrs.field(repr=False)
    name: str
    attempt: int
    _called: set[str] = attrs.field(factory=set[str], init=False, repr=False)

    @property
    def key(self) -> str:
        """A unique text of this step or item, the same at each attempt and after each restart.

        Give it to services that take a key of idempotency.
        """
        return f"{self._run.journal.entity}/{self.name}"

    async def tell(self, value: object) -> None:
        """Send a value, such as a token, to the reader of the run's events, and wait until there is room.

        Raises:
            trio.BrokenResourceError: The reader has left. The run ends with the same error.
        """
        await self._run.tell(self.name, "told", value)

    async def once(self, name: str, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call an async function, and keep its result. A later attempt gets the result without the call.

        If the program is killed between the end of the call and the write, the call is made again.

        Args:
            name: A name for the result, such as ``f"turn {number}"``.
            function: The function.
            args: Its arguments.

        Raises:
            ValueError: This attempt has already made a call with that name.
            TypeError: The result cannot be stored. The run ends with the same error.
            FencedError, StoreError: The run can no longer write. It ends with the same error.
        """
        if name in self._called:
            raise ValueError(f"once: {self.key} has called {name!r} in this attempt already; use other names")
        self._called.add(name)
        known_by = f"{self.name}.{name}"
        if (outcome := self._run.journal.find(known_by)) is None:
            outcome = await self._run.keep(known_by, Kept("finished", await function(*args)))
        value: T = outcome.value
        return value


_CURRENT: ContextVar[RunningStep] = ContextVar("trio_accel.agents.current_step")


def current_step() -> RunningStep:
    """Return the step that the current task works for.

    Raises:
        RuntimeError: The task works for no step.
    """
    step = _CURRENT.get(None)
    if step is None:
        raise RuntimeError("current_step: this task works for no step of a Workflow")
    return step

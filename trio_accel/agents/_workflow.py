"""Workflows: async functions that need one another by the names of their parameters."""

from __future__ import annotations

import inspect
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from graphlib import CycleError, TopologicalSorter
from typing import Any, NoReturn, TypeVar, cast, overload

import trio

from ..actors import (
    Actor,
    ActorContext,
    ActorSnapshot,
    Backoff,
    apart,
    must_be_count,
    must_be_positive,
    nearest,
)
from ..cluster import Store
from ..cluster._store import check_store
from ._workflow_journal import RunJournal
from ._workflow_run import Run, RunStep, StepEvent, StepRule, WorkflowResult

__all__ = ["Workflow", "WorkflowTree"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Awaitable[Any]])

_RESERVED = {"store", "key", "events"}
_OPTIONS = ("over", "at_once", "when", "attempts", "backoff", "deadline", "may_fail")
# Other names of options, as other libraries have them.
_SYNONYMS = {
    "timeout": "deadline",
    "retries": "attempts",
    "max_attempts": "attempts",
    "concurrency": "at_once",
    "max_concurrency": "at_once",
    "condition": "when",
    "if_": "when",
    "optional": "may_fail",
    "for_each": "over",
    "map": "over",
    "delay": "backoff",
}
_AT_ONCE = 8
_BACKOFF = Backoff(initial=0.1, base=0.2, maximum=10.0)
# The maximum number of runs in a tree, and the actor states closest to the states of steps.
_MAX_SHOWN, _SHOWN = 100, {"waiting": "starting", "running": "running"}


class Workflow:
    """Steps that begin when their inputs are available.

    A step is an async function, and has the function's name. Its parameters are the names of the steps and
    inputs that it needs. All other names are inputs, which `run` takes::

        flow = Workflow("answers")

        @flow.step(attempts=3, deadline=10.0)
        async def pages(question: str) -> list[str]: ...

        @flow.step(over="pages", at_once=4)
        async def score(page: str, question: str) -> float: ...

        @flow.step()
        async def answer(question: str, pages: list[str], score: list[float]) -> str: ...

        found = await flow.run(question="Why?")
        print(found.results["answer"])

    If you start a run again under its key and with its store, finished steps are not repeated. A step runs
    again if the program ended between its end and the write. So give `RunningStep.key` to services that
    have effects. With a store, each call of a step gets copies of what the store has, so that a step which
    changes its arguments gives the same results after a restart. Without a store, steps share their values.

    Args:
        name: Name in stores, trees and errors.

    Attributes:
        name: See above.
        runs: The current runs in this process, by their keys.

    Raises:
        ValueError: The name is empty or has a slash.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"Workflow: name must be a text without a slash, got {name!r}")
        self.name: str = name
        self.runs: dict[str, Run] = _Runs()
        self._rules: dict[str, StepRule] = {}
        self._later: list[str] = []

    def __repr__(self) -> str:
        return f"<Workflow {self.name}: {len(self._rules)} steps, {len(self.runs)} runs>"

    @overload
    def step(self, function: FunctionT, /) -> FunctionT: ...

    @overload
    def step(
        self,
        *,
        over: str | None = None,
        at_once: int | None = None,
        when: Callable[..., object] | None = None,
        attempts: int = 1,
        backoff: Backoff = _BACKOFF,
        deadline: float | None = None,
        may_fail: bool = False,
    ) -> Callable[[FunctionT], FunctionT]: ...

    def step(  # type: ignore[misc]  # mypy misreads `**unknown`
        self,
        function: Callable[..., Awaitable[Any]] | None = None,
        /,
        *,
        over: str | None = None,
        at_once: int | None = None,
        when: Callable[..., object] | None = None,
        attempts: int = 1,
        backoff: Backoff = _BACKOFF,
        deadline: float | None = None,
        may_fail: bool = False,
        **unknown: object,
    ) -> Any:
        """Make a step of an async function, by ``@flow.step`` or ``@flow.step(...)``.

        The function stays as it is.

        A parameter without a default needs its step or input: if that is skipped or fails, this step is
        skipped. A parameter with a default also waits, but its step may fail or be skipped.

        Args:
            function: The function, if there are no options.
            over: The name of a step or input with several items. The function is called for each, as its
                first parameter, whatever its name is. The result is the list of the function's results, in
                order.
            at_once: The maximum number of concurrent items, by default 8.
            when: A function of other names, which decides whether this step is run or skipped.
            attempts: The maximum number of function calls for each item; after any `Exception` it is called
                again.
            backoff: Pauses between attempts: `initial` before the second, `base` before the third.
            deadline: The maximum seconds of the step, or of an item, including attempts and pauses. After
                that it is cancelled and fails with `trio.TooSlowError`.
            may_fail: Whether the run continues without this step if it fails.
            unknown: Options that do not exist, for their error.

        Raises:
            ValueError: A step or input has this name already, the step closes a circle, or an option is out
                of range.
            TypeError: The function is not async, or has parameters without names, or an option is unknown or
                has another type.
            RuntimeError: The workflow is running.
        """
        label = f"Workflow {self.name}: step"
        _check_unknown(label, unknown)
        _check_option(label, "over", over, (str, type(None)), "the name of a step or input")
        _check_option(label, "when", when, (Callable, type(None)), "a function of other names")
        _check_option(label, "backoff", backoff, Backoff, "a Backoff")
        _check_option(label, "may_fail", may_fail, bool, "True or False")
        if at_once is not None and over is None:
            raise ValueError(f"{label}: at_once counts items, so it needs over")
        must_be_count(f"{label}: attempts", attempts)
        max_at_once = must_be_count(f"{label}: at_once", _AT_ONCE if at_once is None else at_once)
        limit = math.inf if deadline is None else must_be_positive(f"{label}: deadline", deadline)

        def declare(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            name = getattr(function, "__name__", "")
            if not inspect.isroutine(function) and not inspect.iscoroutinefunction(function):
                raise TypeError(f"{label}: a step must be an async function, got {function!r}")
            self._check_new(name)
            is_async = inspect.iscoroutinefunction(function)
            if not is_async:
                raise TypeError(f"{label} {name}: a step must be an async function, got {function!r}")
            takes = _parameters_of(f"{label} {name}", function)
            item = next(iter(takes), None) if over else None
            if over:
                if item is None:
                    raise TypeError(f"{label} {name}: its first parameter must take an item of {over}")
                takes = {parameter: is_needed for parameter, is_needed in takes.items() if parameter != item}
            asks = _parameters_of(f"{label} {name}: when", when) if when else {}
            needs = {**asks, **takes, **({over: True} if over else {})}
            for parameter in asks.keys() & takes.keys():
                needs[parameter] = asks[parameter] or takes[parameter]
            if wrong := _RESERVED & needs.keys():
                raise ValueError(f"{label} {name}: {min(wrong)} is an option of run, so no step can need it")
            self._check_circle(name, needs)
            self._rules[name] = StepRule(
                name=name,
                function=function,
                needs=needs,
                takes=frozenset(takes),
                asks=frozenset(asks),
                item=item,
                over=over,
                at_once=max_at_once,
                when=when,
                attempts=attempts,
                backoff=backoff,
                deadline=limit,
                may_fail=may_fail,
            )
            return function

        return declare if function is None else declare(function)

    def input(self, name: str) -> None:
        """Declare a later input, given by `Run.give`: steps that need it wait.

        Raises:
            ValueError: A step or input has this name already.
            RuntimeError: The workflow is running.
        """
        self._check_new(name)
        self._later.append(name)

    @apart
    async def run(
        self,
        *,
        store: Store | None = None,
        key: str | None = None,
        events: trio.MemorySendChannel[StepEvent] | None = None,
        **inputs: object,
    ) -> WorkflowResult:
        """Run all steps that no earlier run of this key has finished.

        If a step fails, all others are cancelled, and its error is raised unchanged, with a note. If this
        call is cancelled, all steps are. With a store, both can be run again under the same key and inputs.
        For a finished run, the stored results are returned.

        Args:
            store: Keeps inputs and results, by pickle. It is open. Another program that runs this key takes
                the run over, and this one fails with `FencedError` at its next write. No cluster uses it.
            key: Name of the run; needed with a store.
            events: Gets a `StepEvent` for all that happens, and is closed at the end. Steps wait while it is
                full. If its reader leaves, the run ends with `trio.BrokenResourceError`.
            inputs: The inputs, by the names that steps need.

        Raises:
            TypeError: `key` is missing or not a str, `store` is not a `Store`, an input is missing or
                unknown, or a value cannot be kept.
            ValueError: An input has the name of a step, the run was begun with other inputs, or a run with
                this key is running in this process.
            FencedError, StoreError: See `Store.write`.
        """
        label = f"Workflow {self.name}"
        if events is not None and not hasattr(events, "send"):
            raise TypeError(f"{label}: events must be a trio.MemorySendChannel, got {events!r}")
        async with events or nullcontext():
            check_store(label, store)
            if key is not None and (not isinstance(cast("object", key), str) or not key):
                raise TypeError(f"{label}: key must be a str that is not empty, got {key!r}")
            self._check_inputs(label, inputs)
            if key is None and store is not None:
                raise TypeError(f"{label}: a run with a store needs a key")
            key = uuid.uuid4().hex if key is None else key
            if key in self.runs:
                raise ValueError(f"{label}: a run of the key {key!r} goes on in this process already")
            journal = RunJournal(f"{label}, run {key}", f"workflow/{self.name}/{key}", store)
            later = {name: RunStep(name) for name in self._later}
            run = self.runs[key] = Run(key, journal, list(self._rules.values()), inputs, later, events)
            try:
                return await run.execute()
            finally:
                del self.runs[key]

    def mermaid(self) -> str:
        """Return a picture of the steps, as a text of Mermaid.

        Inputs are round, and later ones have two circles. Dotted arrows are needs with a default, and thick
        ones lead to a step for each item.
        """
        graph = TopologicalSorter({name: rule.needs for name, rule in self._rules.items()})
        numbers = {name: f"n{number}" for number, name in enumerate(graph.static_order())}
        lines = ["flowchart TD"]
        for name, number in numbers.items():
            shape = "[{}]" if name in self._rules else "((({})))" if name in self._later else "([{}])"
            lines.append(f"    {number}" + shape.format(f'"{name}"'))
        for rule in self._rules.values():
            for name, is_needed in rule.needs.items():
                arrow = "==>" if name == rule.over else "-->" if is_needed else "-.->"
                lines.append(f"    {numbers[name]} {arrow} {numbers[rule.name]}")
        return "\n".join(lines)

    def _check_new(self, name: str) -> None:
        if self.runs:
            raise RuntimeError(f"Workflow {self.name}: it is running; declare {name} before")
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise ValueError(f"Workflow {self.name}: a name must be that of a parameter, got {name!r}")
        if name in self._rules or name in self._later:
            raise ValueError(f"Workflow {self.name}: it has a {name} already")

    def _check_circle(self, name: str, needs: Iterable[str]) -> None:
        graph = {step_name: rule.needs for step_name, rule in self._rules.items()}
        try:
            TopologicalSorter({**graph, name: needs}).prepare()
        except CycleError as error:
            path = " -> ".join(error.args[1])
            raise ValueError(f"Workflow {self.name}: step {name} closes a circle: {path}") from None

    def _check_inputs(self, label: str, inputs: Mapping[str, object]) -> None:
        produced = {*self._rules, *self._later}
        if wrong := inputs.keys() & produced:
            how = "is a step" if (name := min(wrong)) in self._rules else "comes later: give it by Run.give"
            raise ValueError(f"{label}: {name} {how}, and cannot be given to run")
        free = {name for rule in self._rules.values() for name in rule.needs} - produced
        if wrong := inputs.keys() - free:
            advice = nearest(min(wrong), free) if free else "it takes none"
            raise TypeError(f"{label}: no step needs an input {min(wrong)!r}; {advice}")
        for rule in self._rules.values():
            for name in rule.needs:
                if rule.needs[name] and name not in {*inputs, *produced}:
                    raise TypeError(
                        f"{label}: nobody makes {name!r}, which {rule.name} needs: give it to run, or make a "
                        "step of that name"
                    )


def _check_unknown(label: str, unknown: Iterable[str]) -> None:
    for name in unknown:
        hint = f"write {_SYNONYMS[name]}=" if name in _SYNONYMS else nearest(name, _OPTIONS)
        raise TypeError(f"{label}: there is no option {name!r}; {hint}")


def _check_option(label: str, name: str, value: object, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{label}: {name} must be {expected}, got {value!r}")


class _Runs(dict[str, Run]):
    """The runs by their keys, with an error for other keys."""

    def __missing__(self, key: object) -> NoReturn:
        listing = ", ".join(map(repr, [*self][:10])) or "there are none"
        raise KeyError(f"no run of the key {key!r} goes on in this process; current runs: {listing}")


def _parameters_of(label: str, function: Callable[..., object]) -> dict[str, bool]:
    """Return the parameters of a function, and whether each is required."""
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise TypeError(f"{label}: each parameter must be a name that it needs, got {parameter}")
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


class WorkflowTree(Actor):
    """Shows the runs of workflows, with their steps, in the tree of actors and on the dashboard.

    Start it with ``await system.spawn(WorkflowTree, flow)``.

    Args:
        workflows: The workflows.
    """

    def __init__(self, *workflows: Workflow) -> None:
        for flow in workflows:
            _check_option("WorkflowTree", "workflows", flow, Workflow, "Workflow objects")
        self._workflows = workflows

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Show them while this actor lives."""
        context.show(lambda: tuple(self._shown(context.path)))
        yield

    def _shown(self, path: str) -> Iterator[ActorSnapshot]:
        runs = [(flow.name, run) for flow in self._workflows for run in flow.runs.values()]
        for name, run in runs[:_MAX_SHOWN]:
            run_path = f"{path}/{name} {run.key.replace('/', ' ')}"
            steps = tuple(
                ActorSnapshot(
                    path=f"{run_path}/{step.name}",
                    actor_class="step",
                    state=_SHOWN.get(step.state, "terminated"),
                    note=f"{step.state}, attempt {step.attempts}",
                )
                for step in run.steps.values()
            )
            yield ActorSnapshot(path=run_path, actor_class="Run", state="running", children=steps)

"""The errors of requests that were not begun: each class of the package, and all code that uses them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import pytest
import trio
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    CircuitOpenError,
    ExpertsFailedError,
    ModelOutputError,
    ModelRetiredError,
    NoAnswerError,
    NoReplicaError,
    NoRoomError,
    PagesFullError,
    RateLimitError,
    RetryBudget,
    Router,
    StaleGradientsError,
    Submit,
    SwapFailedError,
    TaskSubmitActor,
    UnknownTenantError,
    is_failure,
    retry,
    was_never_executed,
)

PUBLIC = ("trio_accel", "trio_accel.actors", "trio_accel.patterns", "trio_accel.backends.base")
AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)

Said: TypeAlias = Literal["elsewhere", "refused", "perhaps"]
"""Not begun, and one may ask again; not begun, for good; or it may have been executed."""

ABSTRACT = {ta.ActorError, ta.AccelError, ta.LibraryError, ta.NotExecutedError}
"""Bases, which are not raised."""

TABLE: dict[type[Exception], Said] = {
    ta.ActorStoppedError: "elsewhere",
    ta.ActorRestartingError: "elsewhere",
    ta.MailboxFullError: "elsewhere",
    ta.QueueFullError: "elsewhere",
    NoReplicaError: "elsewhere",
    NoRoomError: "elsewhere",
    PagesFullError: "elsewhere",
    ta.AskCycleError: "refused",
    UnknownTenantError: "refused",
    StaleGradientsError: "refused",
    RateLimitError: "refused",
    CircuitOpenError: "refused",
    ta.ActorFailedError: "perhaps",
    ta.ContextLostError: "perhaps",
    ta.ContextPoisonedError: "perhaps",
    ta.DeviceLostError: "perhaps",
    ta.OutOfMemoryError: "perhaps",
    ta.StaleRefError: "perhaps",
    ta.InputFailedError: "perhaps",
    ta.CompilationError: "perhaps",
    ta.LinAlgError: "perhaps",
    ta.OutOfRangeError: "perhaps",
    ta.PlacementError: "perhaps",
    ta.DriverError: "perhaps",
    ta.CompletionTimeoutError: "perhaps",
    ta.NotSupportedError: "perhaps",
    ta.programs.Refused: "perhaps",
    ModelOutputError: "perhaps",
    ModelRetiredError: "perhaps",
    ExpertsFailedError: "perhaps",
    NoAnswerError: "perhaps",
    SwapFailedError: "perhaps",
}

OF_THE_CALLER = (ValueError, TypeError, ta.NotSupportedError)

EXTRA: dict[str, object] = {
    "path": "test/first",
    "retry_after": 1.0,
    "index": 3,
    "axis": 0,
    "length": 2,
    "requested": 2,
    "free": 1,
    "version": 1,
    "current": 5,
    "total": 1,
    "library": "blas",
    "code": 1,
    "errors": {},
    "declined": (),
}


def make(kind: type[Exception]) -> Exception:
    """An error of a class, with its required arguments."""
    parameters = inspect.signature(kind.__init__).parameters
    needed = {
        name: EXTRA[name]
        for name, parameter in parameters.items()
        if name in EXTRA and parameter.default is inspect.Parameter.empty
    }
    return kind("it said so", **needed)


class Once(TaskSubmitActor[int, str]):
    """Fails with an error the first time."""

    def __init__(self, says: str, errors: list[Exception]) -> None:
        self.says = says
        self.errors = errors

    async def answer(self, item: int) -> str:
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop()
        return self.says


def test_the_table_has_each_public_class() -> None:
    public = {
        found
        for module in PUBLIC
        for name in importlib.import_module(module).__all__
        if inspect.isclass(found := getattr(importlib.import_module(module), name))
        and issubclass(found, Exception)
    }
    assert set(TABLE) | ABSTRACT == public
    assert not set(TABLE) & ABSTRACT


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
async def test_all_who_decide_by_it_agree(
    kind: type[Exception], system: ta.System, autojump_clock: MockClock
) -> None:
    said = TABLE[kind]
    error = make(kind)
    assert was_never_executed(error) == (said != "perhaps")
    assert is_failure(error) == (
        said == "elsewhere"
        or (said == "perhaps" and (kind is ModelOutputError or not isinstance(error, OF_THE_CALLER)))
    )

    async def model(item: int, errors: list[Exception] = [error]) -> str:  # noqa: B006  # once in all
        await trio.lowlevel.checkpoint()
        if errors:
            raise errors.pop()
        return "again"

    assert await told(lambda: retry(model, budget=RetryBudget(), backoff=AT_ONCE)(1)) == (
        "again" if said == "elsewhere" else kind.__name__
    )
    # A router passes on the requests that the actor itself has refused; this is named in errors of actors.
    first = await system.spawn(Once, "first", [error], name="first")
    none: list[Exception] = []
    router = await system.spawn(Router, [first, await system.spawn(Once, "second", none)])
    goes_on = said == "elsewhere" and isinstance(error, ta.ActorError)
    assert await told(lambda: router.ask(Submit(1))) == ("second" if goes_on else kind.__name__)


async def told(ask: Callable[[], Awaitable[object]]) -> object:
    """The result, or the class of the error."""
    try:
        return await ask()
    except Exception as error:  # noqa: BLE001  # it is the result
        return type(error).__name__


async def test_of_a_group_nobody_knows() -> None:
    assert not was_never_executed(ExceptionGroup("several", [ta.MailboxFullError("full", path="test/a")]))
    assert not was_never_executed(trio.TooSlowError())
    found: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(trio.Cancelled) as caught:
            await trio.lowlevel.checkpoint()
        found.append(caught.value)
    assert [was_never_executed(error) for error in found] == [False]

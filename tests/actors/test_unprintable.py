"""Errors that cannot be printed: they go where others go, and break nothing on the way."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from sample_actors import AT_ONCE, Do, DoGrouped, Events, Number, Puppet, Run

from trio_accel.actors import (
    Actor,
    ActorContext,
    ActorFailedError,
    ActorRestarted,
    ActorSystem,
    Backoff,
    Directive,
    Policy,
    Ref,
    Request,
    Restart,
    handles,
    open_system,
)
from trio_accel.actors._errors import leaves

wait = trio.testing.wait_all_tasks_blocked


class NoReprError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def nested(depth: int) -> Exception:
    """A group with a repr that exceeds Python's stack."""
    error: Exception = NoReprError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("outer", [error, ValueError("beside")])
    return error


ERRORS = [
    pytest.param(lambda: NoReprError("the text"), "NoReprError: the text", id="repr"),
    pytest.param(NoTextError, "NoTextError: (it cannot be printed)", id="str"),
    pytest.param(
        lambda: ExceptionGroup("two", [NoTextError(), ValueError("beside")]),
        "NoTextError: (it cannot be printed); ValueError: beside",
        id="group",
    ),
]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    """Records are formatted, as where logging is configured; if that fails, so does the test."""
    caplog.set_level(logging.DEBUG, "trio_accel")


@attrs.frozen
class Fail(Request["Lived", None]):
    error: Exception


class Lived(Actor):
    """Holds a nursery of its own while it serves."""

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            yield
            nursery.cancel_scope.cancel()

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise message.error


def raising(error: Exception) -> Any:
    async def act(actor: Puppet) -> None:
        raise error

    return act


@pytest.mark.parametrize(("make", "text"), ERRORS)
@pytest.mark.parametrize("message_class", [Do, DoGrouped, Run])
async def test_a_crash(
    system: ActorSystem,
    make: Any,
    text: str,
    message_class: Any,
    events: Events,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    error = make()
    message = message_class(raising(error))
    if isinstance(message, Request):
        with pytest.raises(ActorFailedError) as caught:
            await ref.ask(message)
        assert caught.value.__cause__ is error
        assert str(caught.value).endswith(text)
    else:
        await ref.tell(message)
    assert await ref.ask(Number()) == 1
    [event] = events.of(ActorRestarted)
    # A nursery makes another group of the same errors.
    assert list(leaves(event.error)) == list(leaves(error))
    node = system.tree().find("s/puppet")
    assert node.last_error == text
    assert text in str(node)
    [record] = [record for record in caplog.records if "crashed" in record.msg]
    assert "which cannot be printed" in record.getMessage()


@pytest.mark.parametrize(("make", "text"), ERRORS)
async def test_a_crash_through_a_nursery_of_the_lifespan(system: ActorSystem, make: Any, text: str) -> None:
    ref = await system.spawn(Lived, name="lived", policy=AT_ONCE)
    error = make()
    with pytest.raises(ActorFailedError) as caught:
        await ref.ask(Fail(error))
    assert caught.value.__cause__ is error
    await wait()
    node = system.tree().find("s/lived")
    assert (node.state, node.restarts, node.last_error) == ("running", 1, text)


async def test_groups_deeper_than_the_stack(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    with pytest.raises(ActorFailedError, match="NoReprError: innermost; ValueError: beside; ValueError"):
        await ref.ask(Do(raising(nested(3000))))
    assert await ref.ask(Number()) == 1


@pytest.mark.parametrize("directive", [Directive.STOP, Directive.RESUME])
@pytest.mark.parametrize("message_class", [Do, Run])
async def test_other_directives(system: ActorSystem, directive: Directive, message_class: Any) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={NoReprError: directive}))
    error = NoReprError("the text")
    message = message_class(raising(error))
    if isinstance(message, Request):
        expected = ActorFailedError if directive is Directive.STOP else NoReprError
        with pytest.raises(expected):
            await ref.ask(message)
    else:
        await ref.tell(message)
    await wait()
    assert ref.is_terminated == (directive is Directive.STOP)
    if ref.is_terminated:
        assert (await ref.wait_terminated()).error is error


async def test_an_error_that_escalates_to_the_top() -> None:
    error = NoTextError()
    with pytest.raises(ExceptionGroup) as caught:  # noqa: ASYNC401, PT012
        async with open_system("s") as system:
            ref = await system.spawn(Puppet, policy=Policy(directives={NoTextError: Directive.ESCALATE}))
            await ref.tell(Run(raising(error)))
            await trio.sleep_forever()
    [failed] = caught.value.exceptions
    assert isinstance(failed, ActorFailedError)
    assert failed.__cause__ is error


@pytest.mark.parametrize("is_supervisor", [False, True], ids=["system", "supervisor"])
async def test_an_error_of_the_body(is_supervisor: bool) -> None:
    error = NoReprError("the text")
    with pytest.raises(ExceptionGroup) as caught:  # noqa: ASYNC401, PT012
        async with open_system("s") as system:
            if not is_supervisor:
                raise error
            async with system.open_supervisor("below"):
                raise error
    found, rest = caught.value.split(NoReprError)
    assert rest is None
    assert found is not None
    while isinstance(found, BaseExceptionGroup):
        [found] = found.exceptions
    assert found is error


@pytest.mark.parametrize("in_start", [True, False], ids=["start", "end"])
async def test_an_error_of_a_lifespan(system: ActorSystem, in_start: bool) -> None:
    error = NoReprError("the text")
    if in_start:
        with pytest.raises(NoReprError) as caught:
            await system.spawn(Puppet, None, raising(error))
        assert caught.value is error
    else:
        ref = await system.spawn(Puppet, None, None, raising(error))
        await ref.stop()
        assert (await ref.wait_terminated()).error is error


async def test_a_failure_next_to_a_cancellation_is_not_hidden(system: ActorSystem) -> None:
    """The group of both passes through the nurseries; the cancellation finds its scope, the failure stays."""
    error = NoReprError("the text")

    async def act(actor: Puppet) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise error

    ref = await system.spawn(Puppet, restart=Restart.TEMPORARY, name="puppet")
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ActorFailedError):
                await ref.ask(DoGrouped(act))

        nursery.start_soon(ask)
        await wait()
        ref.cancel("enough")
    assert (await ref.wait_terminated()).error is error


async def test_messages_and_events_that_cannot_be_printed(
    system: ActorSystem, puppet: Ref[Puppet], caplog: pytest.LogCaptureFixture
) -> None:
    class NoRepr:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    with pytest.raises(TypeError, match="<NoRepr, which cannot be printed> is not a message"):
        await puppet.ask(NoRepr())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def observer(event: object) -> None:
        raise ValueError("of the observer")

    ref = await system.spawn(Puppet, policy=Policy(backoff=Backoff(base=0.0)))
    with system.subscribe(observer), pytest.raises(ActorFailedError):
        await ref.ask(Do(raising(NoReprError("the text"))))
    await wait()
    assert any("an observer failed on <MessageFailed, which" in text for text in caplog.messages)

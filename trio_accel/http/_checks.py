"""Checks of the parts that a service needs, for its probes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import attrs
import trio

from ..actors import ActorError, is_number, validator
from ..backends.base import AccelError
from ..devices import Device

__all__ = ["Check"]

_logger = logging.getLogger("trio_accel.http")
_REASON_CHARACTERS = 200
_SECONDS = 0.5


@attrs.frozen
class Check:
    """A check of a part of the program, for ``/ready`` of `serve`.

    Attributes:
        name: The name of the part in the answers of probes.
        ask: An async function, or a function that may block, which runs in a thread. It returns True or None
            if the part can serve, and otherwise False or a short reason. An answer shows the reason, and the
            class of an error that it raises without its text, which may hold secrets.
        seconds: Seconds until the part counts as unable to serve.
        restarts: Whether the process should be restarted if the check fails. Then ``/health`` also asks it.
    """

    name: str = attrs.field(
        validator=validator("be a text", lambda value: isinstance(value, str) and bool(value))
    )
    ask: Callable[[], Any] = attrs.field(validator=validator("be a function", callable))
    seconds: float = attrs.field(
        default=_SECONDS,
        kw_only=True,
        validator=validator("be seconds above 0", lambda value: is_number(value, 0.0) and value > 0),
    )
    restarts: bool = attrs.field(
        default=False,
        kw_only=True,
        validator=validator("be True or False", lambda value: isinstance(value, bool)),
    )
    # A function that blocks for longer keeps only one thread.
    _limiter: trio.CapacityLimiter = attrs.field(
        factory=partial(trio.CapacityLimiter, 1), init=False, eq=False, repr=False
    )

    async def fault(self) -> str | None:
        """Return the name of the part and why it cannot serve now, or None."""
        reason: str | bool | None = f"no answer within {self.seconds:g} s"
        with trio.move_on_after(self.seconds):
            try:
                reason = await self._ask_part()
            except Exception as error:
                _logger.info("the check %r failed", self.name, exc_info=True)
                reason = type(error).__name__
        if reason is None or reason is True:
            return None
        return f"{self.name}: {(reason or 'failed')[:_REASON_CHARACTERS]}"

    async def _ask_part(self) -> str | bool | None:
        call = self.ask if inspect.iscoroutinefunction(self.ask) else self._in_thread
        answer = await cast("Callable[[], Awaitable[Any]]", call)()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is None or isinstance(answer, (bool, str)):
            return answer
        return f"returned {type(answer).__name__}"

    async def _in_thread(self) -> Any:
        return await trio.to_thread.run_sync(self.ask, abandon_on_cancel=True, limiter=self._limiter)


@runtime_checkable
class _HasFault(Protocol):
    def fault(self) -> str | None: ...


@runtime_checkable
class _HasDevices(Protocol):
    @property
    def devices(self) -> Sequence[Device]: ...


Part: TypeAlias = "Check | Device | _HasFault | _HasDevices"
"""A part that probes ask: a check, a device, a cluster, or a trainer for its devices."""


def checks_of(parts: Iterable[Part]) -> list[Check]:
    """Return the checks of parts.

    Raises:
        TypeError: A part is none that probes can ask.
    """
    checks: list[Check] = []
    for part in parts:
        if isinstance(part, Check):
            checks.append(part)
        elif isinstance(part, Device):
            checks.append(Check(part.path, partial(_ask_device, part)))
        elif isinstance(part, _HasFault):
            checks.append(Check(type(part).__name__.lower(), partial(_ask_fault, part)))
        elif isinstance(part, _HasDevices):
            checks += checks_of(part.devices)
        else:
            raise TypeError(
                f"serve: checks must be Check(...), devices, clusters or trainers, got {part!r:.80}"
            )
    return checks


def device_of(check: Check) -> Device | None:
    """Return the device that a check from `checks_of` asks, or None for other checks."""
    ask: Any = check.ask
    device: Device | None = ask.args[0] if getattr(ask, "func", None) is _ask_device else None
    return device


async def _ask_device(device: Device) -> str | None:
    try:
        await device.statistics()
    except (AccelError, ActorError) as error:
        return f"does not answer ({type(error).__name__})"
    return None


async def _ask_fault(part: _HasFault) -> str | None:
    return part.fault()


async def faults_of_checks(checks: Iterable[Check]) -> list[str]:
    """Ask checks at the same time, and return why parts cannot serve, in the order of the checks."""
    faults: dict[int, str] = {}

    async def ask(number: int, check: Check) -> None:
        if (fault := await check.fault()) is not None:
            faults[number] = fault

    async with trio.open_nursery() as nursery:
        for number, check in enumerate(checks):
            nursery.start_soon(ask, number, check)
    return [faults[number] for number in sorted(faults)]

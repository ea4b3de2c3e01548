"""How functions that ask for transforms are declared: a name and a docstring, a signature, and a message."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, cast

from ..backends.base.ops import FftNorm
from ..devices import AccelRef, Operand, Operation, device_of
from ._actor import FftActor

__all__ = ["asks", "one_axis", "several_axes", "two_axes"]

ParametersP = ParamSpec("ParametersP")
_Ask: TypeAlias = Callable[ParametersP, Coroutine[Any, Any, AccelRef]]
_Message: TypeAlias = Callable[..., Operation[FftActor, AccelRef]]

# Of these each copy has its own.
NAME: str = ""
MESSAGE: _Message = Operation


def asks(
    signature: _Ask[ParametersP], message: _Message
) -> Callable[[Callable[[], None]], _Ask[ParametersP]]:
    """Declare a function that asks for a transform.

    It is a copy of another function, which asks for this message and has the name and the docstring of what
    is decorated. So a call takes no longer than that of a function that is written out.

    Args:
        signature: `one_axis`, `several_axes` or `two_axes`.
        message: Class of the message.
    """
    assert isinstance(signature, FunctionType)

    def declare(own: Callable[[], None]) -> _Ask[ParametersP]:
        name = own.__name__
        code = signature.__code__.replace(co_name=name, co_qualname=name)
        function = FunctionType(
            code, {**globals(), "NAME": name, "MESSAGE": message}, name, signature.__defaults__
        )
        function.__kwdefaults__ = signature.__kwdefaults__
        function.__annotations__ = signature.__annotations__
        function.__module__, function.__doc__ = own.__module__, own.__doc__
        return cast("_Ask[ParametersP]", function)

    return declare


async def one_axis(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Ask for a transform along one axis."""
    return await device_of(NAME, a, out).ask(MESSAGE(a, n, axis, norm, out))


async def several_axes(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Ask for a transform along several axes, by default all."""
    return await device_of(NAME, a, out).ask(MESSAGE(a, s, axes, norm, out))


async def two_axes(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Ask for a transform along several axes, by default the last two."""
    return await device_of(NAME, a, out).ask(MESSAGE(a, s, axes, norm, out))

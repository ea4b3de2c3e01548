"""Functions with a signature declared once are functions like any other."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

import trio_accel as ta

_ONE = "a, n=None, axis=-1, norm=None, *, out=None"
_SEVERAL = "a, s=None, axes=None, norm=None, *, out=None"
_TWO = "a, s=None, axes=(-2, -1), norm=None, *, out=None"
_SIGNATURES = {
    stem + ending: signature
    for stem in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    for ending, signature in (("", _ONE), ("n", _SEVERAL), ("2", _TWO))
}


class Recorder(ta.devices.Device):
    """A device that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def ask(self, message: Any) -> Any:
        self.asked.append(message)
        return message


# Only its `ask` is called.
Recorder.__abstractmethods__ = frozenset()


class OnDevice:
    """An operand with a device."""

    def __init__(self, device: Recorder) -> None:
        self.device = device


def test_these_are_all() -> None:
    functions = {name for name in ta.fft.__all__ if hasattr(getattr(ta.fft, name), "message")}
    assert functions == set(_SIGNATURES)


@pytest.mark.parametrize("name", sorted(_SIGNATURES))
async def test_the_trace_of_one(name: str) -> None:
    function = getattr(ta.fft, name)
    signature = inspect.signature(function)
    bare = [part.replace(annotation=part.empty) for part in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({_SIGNATURES[name]})"
    assert signature.return_annotation == "AccelRef"
    assert not inspect.iscoroutinefunction(function)
    assert (function.__name__, function.__qualname__) == (name, name)
    assert function.__doc__
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match=rf"^fft\.{name}: there is no option 'k'; there are "):
        await function(None, k=3)


@pytest.mark.parametrize("name", sorted(_SIGNATURES))
async def test_requests_of_one(name: str) -> None:
    function, device = getattr(ta.fft, name), Recorder()
    operand, out = OnDevice(device), OnDevice(device)
    message = await function(operand, 8 if name[-1] == "t" else (8, 4), norm="ortho", out=out)
    assert device.asked == [message]
    # Some of these classes also have a public name.
    assert type(message) is function.message is getattr(ta.fft, name.capitalize(), function.message)
    assert function.message.__name__ == name.capitalize()
    assert function.message.__module__ == function.__module__
    assert (message.a, message.norm, message.out) == (operand, "ortho", out)
    if name[-1] == "t":
        assert (message.n, message.axis) == (8, -1)
    else:
        axes: Sequence[int] | None = (-2, -1) if name[-1] == "2" else None
        assert (message.s, message.axes) == ((8, 4), axes)
    with pytest.raises(TypeError, match=f"^fft.{name}: no operand is on a device"):
        await function([1.0, 2.0])

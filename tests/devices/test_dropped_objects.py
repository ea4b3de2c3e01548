"""No registry of the package keeps an object of the program alive: each kind is made, used and dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel.actors import Actor, Message, Request, handles
from trio_accel.backends.base.kit.checks import NATIVE
from trio_accel.devices import LibraryActor, Operand, opened, operation
from trio_accel.devices.operations._operation import operation_name
from trio_accel.patterns import Batcher, Submit

COUNT = 100


class Listener:
    """Observes events of a system, and operations of a device."""

    def __call__(self, *_: object) -> None:
        pass


class Held:
    """Stands for memory of the program, which a function closes over."""

    factor = 2.0


Make = Callable[[ta.Device, ta.AccelRef, int], Awaitable[Any]]


async def _custom_gradient(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()
    f = ta.custom_gradient(lambda x: x * held.factor, lambda g, y, x: g * held.factor)
    await ta.grad(lambda x: ta.arrays.sum(f(x)))(x)
    await f(x)
    return held, f


async def _gradient(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()
    gradient = ta.grad(lambda x: ta.arrays.sum(x * held.factor))
    await gradient(x)
    _, pull = await ta.vjp(lambda x: x * held.factor, x)
    return held, gradient, pull


async def _step(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held, table = Held(), np.full(4, float(number))

    @ta.step(static="value")
    def traced(x: ta.AccelRef, scale: float, value: Any = None) -> ta.Call[ta.AccelRef]:
        return x * held.factor * scale + table

    value = Held()
    for scale in (1.0, 2.0):
        await traced(x, scale)
        await traced(x, scale, value)
    return held, table, traced, value


async def _elementwise(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    f = ta.jit.elementwise(f"x * {number + 2} + 1")
    for _ in range(3):
        await f(x)
    await ta.grad(lambda x: ta.arrays.sum(f(x)))(x)
    return f


async def _sloped(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    f = ta.jit.elementwise(f"x * {number + 2}", slopes={"x": f"g * {number + 2}"})
    await ta.grad(lambda x: ta.arrays.sum(f(x)))(x)
    return f


async def _reduction(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    f = ta.jit.reduction(f"x * {number + 2}")
    for _ in range(3):
        await f(x)
    await ta.grad(f)(x)
    return f


async def _graph(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()

    async def body(x: ta.AccelRef) -> ta.AccelRef:
        return await (x * held.factor)

    graph = await ta.graphs.capture(device, body, x)
    await graph.replay()
    return graph, held, body


async def _operation(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    class OwnActor(LibraryActor):
        library = __name__

    async def own(a: Operand) -> ta.AccelRef:
        """Compute nothing."""
        ...  # noqa: PIE790  # as `operation` wants it

    own.__qualname__ = own.__name__ = f"own_{number}"
    declared = operation("a(n) -> out(n)", actor=OwnActor, dtypes=NATIVE)(own)
    assert declared.spec.descriptor().cls is declared.spec
    assert operation_name(declared.message)
    assert declared.message(x).operation
    await trio.lowlevel.checkpoint()
    return own, declared, declared.spec, declared.message, OwnActor


async def _actor(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    @attrs.frozen
    class Add(Request["Adder", int]):
        amount: int

    @attrs.frozen
    class Note(Message["Adder"]):
        text: str

    class Adder(Actor):
        @handles(Add)
        async def add(self, message: Add) -> int:
            return message.amount + 1

        @handles(Note)
        async def note(self, message: Note) -> None:
            pass

    async with ta.open_system(f"actors-{number}") as system:
        adder = await system.spawn(Adder, name="adder")
        assert await adder.ask(Add(1)) == 2
        await adder.tell(Note("noted"))
        listener = Listener()
        system.subscribe(listener)
    return Add, Note, Adder, adder, listener


async def _batcher(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()

    async def model(items: Any) -> Any:
        return [item * held.factor for item in items]

    async with ta.open_system(f"batchers-{number}") as system:
        batcher = await system.spawn(Batcher[float, float], model, name="batcher")
        assert await batcher.ask(Submit(1.0)) == 2.0
    return held, model, batcher


async def _hook(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    listener = Listener()
    with opened(device).observed(listener, lambda ask: ask):
        await (x + 1)
    return listener


KINDS: dict[str, Make] = {
    name.removeprefix("_"): make
    for name, make in globals().items()
    if name.startswith("_") and not name.startswith("__") and callable(make)
}


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("kind", KINDS)
async def test_dropped_objects_are_freed(device: ta.Device, kind: str) -> None:
    make, x = KINDS[kind], await device.put(np.ones(4))
    kept: list[weakref.ref[Any]] = []
    for number in range(COUNT):
        made = await make(device, x, number)
        kept += [weakref.ref(part) for part in (made if isinstance(made, tuple) else (made,))]
        del made
    gc.collect()
    survivors = [ref() for ref in kept]
    assert [type(survivor).__name__ for survivor in survivors if survivor is not None] == []

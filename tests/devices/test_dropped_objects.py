"""No registry of the package keeps an object of the program alive: each kind is made, used and dropped."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel import agents, cluster, jit, telemetry
from trio_accel.actors import Actor, Message, Request, handles
from trio_accel.backends.base import Isolation
from trio_accel.backends.base.contract import dtypes
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


# A module of the program, with whatever devices and nodes find by its name.
MODULE = """
from typing import Any

import attrs

import trio_accel as ta
from trio_accel.cluster import Entity
from trio_accel.programs import Array, report_progress


@attrs.frozen
class Add(ta.Request[Any, float]):
    x: float


class Held:
    pass


class Layer:
    def __init__(self, weights: Array) -> None:
        self.weights, self.held = weights, Held()

    def forward(self, x: Array) -> Array:
        report_progress(1)
        return x * self.weights


class Counter(Entity):
    def __init__(self, home: Any) -> None:
        self.total = 0.0

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        self.total += message.x
        return self.total


def double(x: Array) -> Array:
    return 2 * x


def double_cpu(x: Array, out: Array) -> None:
    out[...] = 2 * x
"""


@contextmanager
def module(number: int) -> Generator[Any, None, None]:
    made = ModuleType(f"dropped_{number}")
    exec(textwrap.dedent(MODULE), made.__dict__)
    sys.modules[made.__name__] = made
    try:
        yield made
    finally:
        del sys.modules[made.__name__]


async def _program(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    with module(number) as made:
        weights, listener = np.full(4, 2.0), Listener()
        async with ta.open_program(device, made.Layer, weights) as program:
            with ta.programs.on_progress(listener):
                y = await program.ask(made.Layer.forward, x)
        assert (await y.to_host())[0] == 2.0
        return weights, listener, program, made.Layer, made.Layer.forward, made.Held, made


async def _function(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    listener = Listener()
    # An open device keeps some functions for the next call.
    options = ta.DeviceOptions(isolation="inline")
    with module(number) as made:
        async with (
            ta.open_system(f"functions-{number}") as system,
            system.open_device("cpu", options=options) as own,
        ):
            y = await own.put(np.ones(4))
            with ta.watch_progress(listener):
                y = await ta.run(made.double, y)
            assert (await y.to_host())[0] == 2.0
        return made.double, listener, own, system, made


async def _kernel(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()
    with module(number) as made:
        kernel = jit.Kernel(
            f"double_{number}",
            "the text is not compiled for the CPU",
            parameters={"x": jit.reads("float64"), "out": jit.writes("float64", shape=lambda x: x.shape)},
            grid=lambda x: int(held.factor),
            block=1,
            cpu=f"{made.__name__}:double_cpu",
        )
        (y,) = await kernel(x)
        assert (await y.to_host())[0] == 2.0
        return held, made.double_cpu, made


async def _cached(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held, question, answer = Held(), Held(), Held()

    async def model(item: Any) -> Any:
        assert item is question
        await (x * held.factor)
        return answer

    cache: Any = agents.Cache(model, max_entries=4, key=id)
    for _ in range(2):
        assert await cache(question) is answer
    return held, question, answer, model, cache


async def _workflow(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held, flow = Held(), agents.Workflow(f"flow-{number}")

    @flow.step()
    async def scaled(item: Any) -> Any:
        await (x * held.factor)
        return item

    @flow.step()
    async def same(scaled: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return scaled

    item = Held()
    assert (await flow.run(item=item)).results["same"] is item
    return held, item, flow, scaled, same


async def _index(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    index = agents.VectorIndex(device, 4)
    await index.add(np.arange(4), np.eye(4))
    await index.search(np.ones(4), 2)
    return index


async def _entity(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    with module(number) as made:
        options = ta.DeviceOptions(isolation="inline")
        async with (
            ta.open_system(f"entities-{number}") as system,
            system.open_devices(["cpu"], options=options) as devices,
            cluster.open_entities(system, devices) as router,
        ):
            entity = router.entity(made.Counter, "key")
            assert await entity.ask(made.Add(1.0)) == 1.0
        return made.Counter, made.Add, entity, router, system, made


async def _recorder(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    async with ta.open_system(f"recorded-{number}") as system:
        listener = Listener()
        with telemetry.record(system) as recorder, system.subscribe(listener):
            recorder.counter("tokens").add(1, model="small")
            recorder.snapshot()
    return system, listener, recorder


async def _dtype(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()
    # As in a program whose first array of this dtype has metadata.
    dtypes._member_cache.pop(np.dtype("float64"), None)
    described = np.dtype("float64", metadata={"held": held})
    assert ta.DType.of(described) is ta.DType.float64
    await device.put(np.ones(4, described))
    return held


async def _served(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    held = Held()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert held.factor == 2.0
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(ta.http.serve, app, port=0, signals=()))
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b" 204 " in await stream.receive_some()
        nursery.cancel_scope.cancel()
    return held, app


async def _deferred(device: ta.Device, x: ta.AccelRef, number: int) -> Any:
    listener = Listener()

    @attrs.frozen
    class Later(Request["Waits", int]):
        pass

    class Waits(Actor):
        @handles(Later)
        async def later(self, message: Later) -> ta.DeferredReply[int]:
            return self.context.defer(on_cancel=listener)

    async with ta.open_system(f"deferred-{number}") as system:
        ref = await system.spawn(Waits, name="waits")
        with trio.move_on_after(0):
            await ref.ask(Later())
    return listener, Later, Waits, ref


KINDS: dict[str, Make] = {
    name.removeprefix("_"): make
    for name, make in globals().items()
    if name.startswith("_") and not name.startswith("__") and callable(make)
}


# Kinds that need something of this process, or open devices and systems of their own.
INLINE = ("actor", "batcher", "cached", "deferred", "entity", "function", "kernel", "operation", "program")
INLINE += ("recorder", "served", "workflow")
CASES: list[tuple[str, Isolation]] = [
    *[(kind, "inline") for kind in KINDS],
    *[(kind, "process") for kind in KINDS if kind not in INLINE],
]


@pytest.mark.parametrize(("kind", "isolation"), CASES)
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

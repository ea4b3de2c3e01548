"""Branches and loops of graphs: the bodies that run, their counts, and the refusals."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import endless_loop
import numpy as np
import pytest
import trio
from chosen import BACKEND
from graph_arrays import N, close, matrix

import trio_accel as ta
from trio_accel import graphs, jit, linalg

# A graph of the driver is captured after the third replay.
REPLAYS = 5

add = jit.elementwise("s = a + b", name="add")
positive = jit.elementwise("go = n > 0", name="positive")
larger = jit.elementwise("go = r > bound", name="larger")
newton = jit.elementwise("x = 0.5 * (old + a / old)", name="newton")


async def flag(device: ta.Device, value: bool = False) -> ta.AccelRef:
    return await device.put(np.bool_(value))


def roots(a: Any, bound: float) -> tuple[Any, int]:
    """Square roots by Newton's iteration, and how many turns it took."""
    x, turns = a.copy(), 0
    while True:
        old = x
        x, turns = 0.5 * (old + a / old), turns + 1
        if not np.linalg.norm(old - x) > bound:
            return x, turns


async def test_newtons_iteration_until_the_residual_is_small(device: ta.Device) -> None:
    """Arguments of the body, other arrays that it uses, and intermediate results within it."""
    residual = await device.put(np.float64(0.0))

    async def body(x: ta.AccelRef, a: ta.AccelRef, go: ta.AccelRef) -> None:
        old = await x.copy()
        await newton(old, a, out=x)
        await linalg.axpy(-1.0, x, old)
        await linalg.nrm2(old, out=residual)
        await larger(residual, 1e-13, out=go)

    async def step(x: ta.AccelRef, a: ta.AccelRef, go: ta.AccelRef) -> ta.AccelRef:
        return await graphs.while_(go, body, x, a, go, limit=100)

    def given(seed: int) -> Any:
        return np.random.default_rng(seed).uniform(0.1, 10.0 ** (seed - 1), N)

    first = [await device.put(given(1)), await device.put(given(1)), await flag(device, True)]
    graph = await graphs.capture(device, step, *first)
    for seed in (1, 2, 3, 1, 5, 2, 4):
        x, a, go = await device.put(given(seed)), await device.put(given(seed)), await flag(device, True)
        count = await graph(x, a, go)
        expected, turns = roots(given(seed), 1e-13)
        assert (await count.item(), await go.item()) == (turns, False)
        await close(x, expected)
        np.testing.assert_allclose(await x.to_host(), np.sqrt(given(seed)), rtol=1e-15)


async def test_power_iteration(device: ta.Device) -> None:
    """The largest eigenvalue of a matrix, in turns that the device counts."""
    host = matrix(1)
    host = host @ host.T
    a, x = await device.put(host), await device.put(np.ones(N))
    norm, change = await device.put(np.float64(0)), await device.put(np.float64(0))
    go = await flag(device, True)
    scaled = jit.elementwise("x = y / norm", name="scaled")

    async def body() -> None:
        old = await x.copy()
        y = await linalg.matmul(a, x)
        await linalg.nrm2(y, out=norm)
        await scaled(y, norm, out=x)
        await linalg.axpy(-1.0, x, old)
        await linalg.nrm2(old, out=change)
        await larger(change, 1e-10, out=go)

    graph = await graphs.capture(device, lambda: graphs.while_(go, body, limit=10_000))
    for turn in range(REPLAYS):
        await x.fill(1.0 + turn)
        await go.fill(1)
        turns = int(await (await graph.replay()).item())
        assert 10 < turns < 10_000
        np.testing.assert_allclose(await norm.item(), np.linalg.eigvalsh(host)[-1], rtol=1e-9)


async def countdown(
    device: ta.Device, *, limit: int | None = None
) -> tuple[graphs.Graph[ta.AccelRef], ta.AccelRef, ta.AccelRef, ta.AccelRef]:
    """A graph that halves an array n times; the array, n, and the condition."""
    x, n, go = await device.put(np.ones(N)), await device.put(np.int64(0)), await flag(device)

    async def body() -> None:
        await linalg.scal(0.5, x)
        await add(n, -1, out=n)
        await positive(n, out=go)

    async def step() -> ta.AccelRef:
        await positive(n, out=go)
        return await graphs.while_(go, body, limit=limit)

    return await graphs.capture(device, step), x, n, go


async def test_turns_are_counted_and_limited(device: ta.Device) -> None:
    for limit in (None, 7, 1):
        graph, x, n, go = await countdown(device, limit=limit)
        host = np.ones(N)
        for turns in (3, 0, 40, 7, 8, 0, 1):
            await n.fill(turns)
            count = await graph.replay()
            run = min(turns, limit or turns)
            host = host * 0.5**run
            assert (count.shape, count.dtype, await count.item()) == ((), ta.DType.int64, run)
            # A loop that reached its limit left the condition as it was.
            assert (await go.item(), await n.item()) == (turns > run, turns - run)
            np.testing.assert_array_equal(await x.to_host(), host)


async def test_one_of_two(device: ta.Device) -> None:
    """A branch never taken before a graph of the driver was captured, and a branch that needs memory."""
    x, y, out = await device.put(matrix(1)), await device.put(matrix(2)), await device.put(matrix(3))
    condition = await device.put(np.int32(0))

    async def product(x: ta.AccelRef, out: ta.AccelRef) -> None:
        await linalg.matmul(await linalg.matmul(x, y), y, out=out)

    async def step(x: ta.AccelRef, out: ta.AccelRef) -> ta.AccelRef:
        await graphs.if_(condition, product, x, out, orelse=_doubled)
        await graphs.if_(condition, _doubled, x, out)
        return await out.copy()

    graph = await graphs.capture(device, step, x, out)
    assert len(graph) == 3
    host = matrix(3)
    for value in (0, 0, 0, 0, 3, 0, -1, 1 << 30):
        await condition.fill(value)
        result = await graph.replay()
        host = 2 * (matrix(1) @ matrix(2) @ matrix(2)) if value else 2 * host
        await close(out, host)
        await close(result, host)


async def _doubled(x: ta.AccelRef, out: ta.AccelRef) -> ta.AccelRef:
    return await linalg.scal(2.0, out)


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64", "bool"])
async def test_types_of_conditions(device: ta.Device, dtype: str) -> None:
    largest = 1 if dtype == "bool" else np.iinfo(dtype).max
    # Of an array, at some place in it.
    numbers = await device.put(np.array([0, 1, largest], dtype))
    number = await device.put(np.array([0], dtype))
    counts = await device.put(np.zeros(3, np.int64))

    async def counted(place: int) -> None:
        await add(counts[place : place + 1], 1, out=counts[place : place + 1])

    async def step() -> None:
        await graphs.if_(numbers[1:2], lambda: counted(0))
        await graphs.if_(number, lambda: counted(1))
        await graphs.switch(number, [lambda: counted(1), lambda: counted(2)])

    graph = await graphs.capture(device, step)
    for _ in range(4):
        await graph.replay()
    assert (await counts.to_host()).tolist() == [4, 4, 0]
    await number.fill(1)
    await graph.replay()
    assert (await counts.to_host()).tolist() == [5, 5, 1]
    await number.fill(largest)
    await numbers.fill(0)
    await graph.replay()
    assert (await counts.to_host()).tolist() == ([5, 6, 2] if dtype == "bool" else [5, 6, 1])


async def test_one_of_several(device: ta.Device) -> None:
    x, number = await device.put(np.ones(N)), await device.put(np.int32(0))

    async def change_the_number() -> None:
        await add(number, 1, out=number)
        await linalg.scal(5.0, x)

    bodies: list[graphs.Body] = [
        lambda: linalg.scal(2.0, x),
        change_the_number,
        lambda: linalg.scal(7.0, x),
    ]
    graph = await graphs.capture(device, lambda: graphs.switch(number, bodies))
    host = np.ones(N)
    for value in (2, 2, 2, 2, 0, 1, 3, -1, 1 << 30, 1):
        await number.fill(value)
        await graph.replay()
        # The branch that changes the number does not choose another branch by it.
        host = host * {0: 2.0, 1: 5.0, 2: 7.0}.get(value, 1.0)
        assert await number.item() == (2 if value == 1 else value)
        np.testing.assert_array_equal(await x.to_host(), host)


async def test_outside_of_a_step(device: ta.Device) -> None:
    """The same as operations of their own, with a graph or a function, also submitted."""
    x, n, go = await device.put(np.ones(N)), await device.put(np.int64(5)), await flag(device, True)

    async def body(x: ta.AccelRef, n: ta.AccelRef) -> None:
        await linalg.scal(0.5, x)
        await add(n, -1, out=n)
        await positive(n, out=go)

    for turn in range(REPLAYS):
        await n.fill(5)
        await go.fill(1)
        assert await (await graphs.while_(go, body, x, n)).item() == 5
        np.testing.assert_array_equal(await x.to_host(), np.full(N, 0.5 ** (5 * turn + 5)))
    graph = await graphs.capture(device, body, x, n)
    await x.fill(1.0)
    for turn in range(REPLAYS):
        await go.fill(1)
        pending = device.submit(graphs.While(go, graph, (x, n), limit=3))
        doubled = device.submit(linalg.Scal(8.0, x))
        skipped = device.submit(graphs.If(go, graph, (x, n)))
        await doubled.wait()
        await skipped.wait()
        assert await pending.value.item() == 1
        np.testing.assert_array_equal(await x.to_host(), np.full(N, 4.0 ** (turn + 1)))
    # The same graph twice; and arrays of the host for reading only.
    add_host = await graphs.capture(device, _both, await x.copy(), x)
    await device.ask(graphs.If(go, add_host, (np.ones(N), x), add_host))
    np.testing.assert_array_equal(await x.to_host(), np.full(N, 4.0**REPLAYS + 2))


async def test_a_loop_in_the_middle_of_other_work(device: ta.Device) -> None:
    """Hazards: writers of a body's arrays come before or after the loop, on other streams."""
    graph, x, n, _ = await countdown(device)
    await n.fill(0)
    host = np.ones(N)
    waiting: list[ta.Pending[Any]] = []
    for turn in range(1, 8):
        waiting.append(device.submit(_set(n, turn)))
        waiting.append(device.submit(linalg.Scal(3.0, x)))
        waiting.append(device.submit(graphs.Replay(graph)))
        spectrum = device.submit(ta.fft.Fft(x))
        waiting.append(device.submit(linalg.Scal(5.0, x)))
        host = host * 3.0 * 0.5**turn
        await close(await spectrum.wait(), np.fft.fft(host))
        host = host * 5.0
    for one in waiting:
        await one.wait()
    np.testing.assert_array_equal(await x.to_host(), host)


def _set(n: ta.AccelRef, value: int) -> Any:
    """The message that sets a number, which was zero."""
    return add.compute(n, value, out=n)


async def test_views_and_arrays_from_outside_of_the_body(device: ta.Device) -> None:
    """A body uses arguments of the step, which are views of other arrays in the next replay."""
    wide = await device.put(matrix(1, 4 * N, 2 * N))
    numbers = await device.put(np.array([3, 1, 2, 0], np.int64))

    async def step(part: ta.AccelRef, n: ta.AccelRef) -> ta.AccelRef:
        doubled = await part.copy()
        go = await positive(n)

        async def body() -> None:
            await linalg.axpy(1.0, doubled[1], part[0])
            await add(n, -1, out=n)
            await positive(n, out=go)

        await graphs.while_(go, body)
        return await doubled.copy()

    graph = await graphs.capture(device, step, wide[:N, ::2], numbers[0])
    host, counts = matrix(1, 4 * N, 2 * N), [3, 1, 2, 0]
    for turn in range(8):
        place = turn % 4
        part = host[place * N : (place + 1) * N, ::2]
        await add(numbers[place], counts[place], out=numbers[place]) if turn > 3 else None
        copied = part.copy()
        result = await graph(wide[place * N : (place + 1) * N, ::2], numbers[place])
        part[0] += counts[place] * part[1]
        await close(result, copied)
        await close(wide, host)
    assert (await numbers.to_host()).tolist() == [0, 0, 0, 0]


async def test_numbers_of_collatz(device: ta.Device) -> None:
    """A branch in a loop in a loop, in a graph in a graph."""
    start, n, odd = [await device.put(np.int64(0)) for _ in range(3)]
    total, go, outer = await device.put(np.int64(0)), await flag(device), await flag(device)
    odd_of = jit.elementwise("odd = n % 2", name="odd_of")
    up, down = jit.elementwise("m = 3 * n + 1", name="up"), jit.elementwise("m = n // 2", name="down")

    async def turn() -> None:
        await odd_of(n, out=odd)
        await graphs.if_(odd, lambda: up(n, out=n), orelse=lambda: down(n, out=n))
        await larger(n, 1, out=go)

    async def one() -> None:
        await add(start, 0, out=n)
        await larger(n, 1, out=go)
        await add(total, await graphs.while_(go, turn), out=total)
        await add(start, -1, out=start)
        await positive(start, out=outer)

    async def step() -> ta.AccelRef:
        await positive(start, out=outer)
        return await graphs.while_(outer, one)

    inner = await graphs.capture(device, step)
    graph = await graphs.capture(device, inner)
    expected = 0
    for most in (3, 1, 0, 9, 27, 2):
        await start.fill(most)
        assert await (await graph.replay()).item() == most
        expected += sum(map(collatz, range(1, most + 1)))
        assert await total.item() == expected


def collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return steps


async def test_results_of_a_body_are_useless_outside(device: ta.Device) -> None:
    x, go = await device.put(np.ones(N)), await flag(device, True)
    made: list[ta.AccelRef] = []

    async def body() -> None:
        made.append(await x.copy())

    async def step() -> None:
        await graphs.if_(go, body)
        await linalg.scal(2.0, made[0])

    with pytest.raises(ta.StaleRefError, match="released"):
        await graphs.capture(device, step)
    with pytest.raises(ValueError, match="a body cannot return arrays that it makes"):
        await graphs.capture(device, lambda: graphs.if_(go, x.copy))
    np.testing.assert_array_equal(await x.to_host(), np.ones(N))


async def test_memory_is_kept_and_given_back(device: ta.Device) -> None:
    await device.synchronize()
    before = (await device.statistics()).memory.used
    graph, x, n, go = await countdown(device)
    await n.fill(2)
    count = await graph.replay()
    for _ in range(REPLAYS):
        assert await graph.replay() is count
    await device.synchronize()
    held = sum(ref.block.nbytes for ref in (x, n, go, count))
    assert (await device.statistics()).memory.used == before + held
    graph.close()
    del graph, x, n, go, count
    await device.synchronize()
    assert (await device.statistics()).memory.used == before


async def raises(kind: type[Exception], text: str, make: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(kind, match=text):
        await make()


async def test_wrong_conditions_and_limits(device: ta.Device) -> None:
    x, go, real = await device.put(np.ones(N)), await flag(device), await device.put(np.float64(1))
    many = await device.put(np.ones(2, np.int32))
    none: Any = np.bool_(True)

    async def body() -> None:
        await linalg.scal(2.0, x)

    async def changes(flag: ta.AccelRef) -> None:
        await positive(flag, out=flag)

    graph = await graphs.capture(device, body)
    for kind, text, make in (
        (TypeError, "If: condition must be an AccelRef, got bool", lambda: graphs.if_(none, body)),
        (TypeError, "While: condition must be an AccelRef, got bool", lambda: graphs.while_(none, body)),
        (TypeError, "Switch: number must be an AccelRef, got bool", lambda: graphs.switch(none, [body])),
        (TypeError, "condition must hold an integer or a truth value", lambda: graphs.if_(real, body)),
        (TypeError, "number must hold an integer", lambda: graphs.switch(real, [body])),
        (ValueError, "condition must be a single element, got shape", lambda: graphs.if_(many, body)),
        (ValueError, "bodies must be one at least", lambda: graphs.switch(go, [])),
        (ValueError, "the body does not change the condition", lambda: graphs.while_(go, body)),
        (ValueError, "limit must be from 1", lambda: graphs.while_(go, body, limit=0)),
        (ValueError, "limit must be from 1", lambda: graphs.while_(go, body, limit=2**63)),
        (TypeError, "limit must be an integer", lambda: graphs.while_(go, body, limit=_any(1.5))),
        (TypeError, "limit must be an integer", lambda: graphs.while_(go, body, limit=True)),
        (TypeError, "step must be an async function", lambda: graphs.if_(go, _any(3))),
        (TypeError, "body must be a Graph", lambda: device.ask(graphs.While(go, _any(body)))),
        (TypeError, "body 1 must be a Graph", lambda: device.ask(graphs.If(go, graph, (), _any(body)))),
        (TypeError, "the graph takes 0 arrays", lambda: graphs.if_(go, graph, x)),
        (ValueError, "asked .* for no operation", lambda: graphs.if_(go, _nothing)),
        (ValueError, "must not share memory", lambda: graphs.if_(go, _both, x, x)),
    ):
        await raises(kind, text, make)
        # Also in a step.
        await raises(kind, text, lambda make=make: graphs.capture(device, make))
    graph.close()
    await raises(RuntimeError, "the graph is closed", lambda: graphs.if_(go, graph))
    await raises(ta.StaleRefError, "condition", lambda: _with_released(device, changes))
    np.testing.assert_array_equal(await x.to_host(), np.ones(N))


def _any(value: object) -> Any:
    return value


async def _nothing() -> None:
    pass


async def _both(x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.axpy(2.0, x, y)


async def _with_released(device: ta.Device, body: Callable[[ta.AccelRef], Awaitable[None]]) -> None:
    condition = await flag(device)
    graph = await graphs.capture(device, body, await flag(device))
    condition.release()
    await graphs.if_(condition, graph, await flag(device))


async def test_a_body_refuses_unsupported_operations(device: ta.Device) -> None:
    go, spd = await flag(device, True), await device.put(np.eye(N))
    for body, text in (
        (spd.to_host, "to_host: .* array of the host"),
        (lambda: linalg.cholesky(spd), "linalg.cholesky: .* status words"),
    ):
        with pytest.raises(ta.NotSupportedError, match=text):
            await graphs.capture(device, lambda body=body: graphs.if_(go, body))


async def test_a_cancelled_body_leaves_nothing(device: ta.Device) -> None:
    x, go = await device.put(np.ones(N)), await flag(device, True)

    async def body() -> None:
        await linalg.scal(2.0, x)
        await trio.sleep_forever()

    with trio.move_on_after(0.01) as scope:
        await graphs.capture(device, lambda: graphs.if_(go, body))
    assert scope.cancelled_caught
    np.testing.assert_array_equal(await (await linalg.scal(2.0, x)).to_host(), np.full(N, 2.0))


async def test_dot(device: ta.Device) -> None:
    x, go = await device.put(np.ones(N)), await flag(device, True)

    async def body() -> None:
        await linalg.scal(2.0, x)
        await positive(go, out=go)

    async def step() -> ta.AccelRef:
        await graphs.while_(go, body)
        await graphs.if_(go, lambda: linalg.scal(2.0, x), orelse=lambda: linalg.scal(3.0, x))
        return await x.copy()

    text = (await graphs.capture(device, step)).dot()
    assert re.findall(r"  (n\d) \[label=\"([\w.]+)", text) == [
        ("n0", "graphs.While"),
        ("n1", "graphs.If"),
        ("n2", "devices.Copy"),
    ]
    assert {("n0", "n1"), ("n1", "n2")} <= set(re.findall(r"  (n\d) -> (n\d);", text))
    # One for each of the two, and one for each body in them.
    assert len(re.findall("subgraph cluster_", text)) == 2 + 3
    assert re.findall(r"n1_\d_\d \[label=\"([\w.]+)", text) == ["linalg.Scal", "linalg.Scal"]
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("before", [0, REPLAYS])
async def test_a_loop_that_never_ends_is_stuck(system: ta.System, isolation: Any, before: int) -> None:
    """One by one, and in a graph of the driver: the device comes back, also in this process."""
    if (BACKEND, isolation) != ("cuda", "inline"):
        await endless_loop.comes_back(system, BACKEND, isolation, before)
        return
    # Memory given up by the device in its own process may stay there.
    program = [sys.executable, endless_loop.__file__, BACKEND, isolation, str(before)]
    done = await trio.run_process(program, capture_stdout=True)
    assert done.stdout == b"it has come back\n"


async def test_a_device_is_closed_while_a_loop_runs(system: ta.System, isolation: Any) -> None:
    if BACKEND == "cuda" and isolation == "inline":
        pytest.skip("what runs when a device is closed keeps its memory")
    options = ta.DeviceOptions(isolation=isolation, close_grace=0.1)
    async with system.open_device(BACKEND, options=options) as device:
        go = await flag(device, True)
        pending = device.submit(
            graphs.While(go, await graphs.capture(device, lambda: positive(go, out=go)), limit=None)
        )
        # clock: any moment will do
        await trio.sleep(0.05)
    with pytest.raises(ta.AccelError):
        await pending.wait()


@pytest.mark.parametrize("isolation", ["process"])
async def test_after_a_loss(system: ta.System, isolation: Any) -> None:
    """Arrays live on, and the graph is prepared again, in each generation."""
    at_once = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)
    options = ta.DeviceOptions(isolation=isolation, backoff=at_once, intensity=ta.Intensity(100, 60.0))
    async with system.open_device(BACKEND, options=options) as device:
        graph, x, n, _ = await countdown(device)
        host = np.ones(N)
        for generation in range(1, 4):
            for turns in range(REPLAYS):
                await n.fill(turns)
                assert await (await graph.replay()).item() == turns
                host = host * 0.5**turns
                np.testing.assert_array_equal(await x.to_host(), host)
            assert device.generation == generation
            ta.testing.poison(device)
            while device.generation == generation:
                try:
                    await n.copy()
                except (ta.ContextLostError, ta.StaleRefError):
                    await trio.lowlevel.checkpoint()

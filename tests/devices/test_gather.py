"""Several calls as one request: shared calls run once, and results have the bits of their steps."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from chain_programs import STEPS, Program, outcome, programs
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from isolations import inline, isolated
from test_call_counts import python_calls

import trio_accel as ta
from trio_accel import arrays, linalg

pytestmark = pytest.mark.any_backend

Host = npt.NDArray[Any]
# The first is recorded, the others are runs of the template; then neighbours are joined.
TURNS = 8
ONES = np.ones((3, 3))


def same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


def numbers(turn: int, *shape: int) -> Host:
    """Integers with equal products in NumPy and on a device; others in each turn."""
    return np.random.default_rng(turn).integers(-9, 9, shape or (3, 3)).astype(np.float64)


def found(device: ta.Device) -> int:
    """How many requests of this device ran by a template."""
    chains: Any = device.chains  # type: ignore[attr-defined]
    return chains.kept.counts.hits + chains.kept.counts.recorded  # type: ignore[no-any-return]


async def blocks(device: ta.Device) -> int:
    gc.collect()
    await device.synchronize()
    return (await device.statistics()).memory.blocks


async def requests(device: ta.Device, ask: Callable[[], Awaitable[Any]]) -> list[str]:
    """The operations that a device was asked for, by an observer of its messages."""
    names: list[str] = []
    plain = device.ask

    async def noted(message: Any) -> Any:
        names.append(message.operation)
        return await plain(message)

    device.ask = noted  # type: ignore[method-assign]
    try:
        await ask()
    finally:
        device.ask = plain  # type: ignore[method-assign]
    return names


async def test_results_and_their_shared_operands_are_one_request(device: ta.Device) -> None:
    for turn in range(TURNS):
        host = numbers(turn)
        x = await device.put(host)
        both: list[Any] = []

        async def ask(x: ta.AccelRef = x, both: list[Any] = both) -> None:
            k = x @ x
            both += await ta.gather(k + 1.0, (k * 2.0).to_host(), k, arrays.sum(k).item())

        told = await requests(device, ask)
        # The first is recorded, by its steps.
        assert len(told) == 1 or turn == 0
        assert told[-1] == (
            "linalg.matmul, arrays.add, arrays.multiply, AccelRef.to_host, arrays.sum, AccelRef.to_host"
        )
        a, b, k, total = both
        same(await a.to_host(), host @ host + 1.0)
        same(b, host @ host * 2.0)
        same(await k.to_host(), host @ host)
        assert total == (host @ host).sum()
    assert found(device) == TURNS


async def test_each_kernel_runs_once(device: ta.Device) -> None:
    """A step that changes an array would be seen twice."""
    x = await device.put(np.zeros(3))
    for turn in range(TURNS):
        more = arrays.add(x, 1.0, out=x)
        a, b, c, d = await ta.gather(more + 1.0, more * 2.0, more, more)
        same(await a.to_host(), np.full(3, turn + 2.0))
        same(await b.to_host(), np.full(3, 2.0 * (turn + 1)))
        assert c is d
        same(await c.to_host(), np.full(3, turn + 1.0))
        same(await x.to_host(), np.full(3, turn + 1.0))


async def test_all_kinds_of_results(device: ta.Device) -> None:
    for turn in range(TURNS):
        host = numbers(turn, 4, 4)
        x = await device.put(host)
        y = x * 3.0
        results = await ta.gather(
            x,
            y,
            y[1:],
            y.to_host(),
            y[1:].to_host(),
            y.T.to_host(),
            y.to_host(),
            x.to_host(),
            x,
            arrays.max(y).item(),
            (y[:0]).to_host(),
            arrays.top_k(y[0], 2),
            ta.gather(y, x),
        )
        plain = host * 3.0
        assert results[0] is x
        assert results[8] is x
        assert results[1] is results[12][0]
        assert results[12][1] is x
        for place, expected in ((1, plain), (2, plain[1:])):
            same(await results[place].to_host(), expected)
        for place, expected in (
            (3, plain),
            (4, plain[1:]),
            (5, plain.T),
            (6, plain),
            (7, host),
            (10, plain[:0]),
        ):
            same(results[place], expected)
            assert results[place].flags.writeable
        assert results[9] == plain.max()
        assert type(results[9]) is float
        same(await results[11].values.to_host(), np.sort(plain[0])[:1:-1])
        # Each belongs to the caller.
        results[3][:] = 7.0
        same(results[6], plain)
    assert found(device) >= TURNS - 1


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
async def test_to_host_of_several(device: ta.Device) -> None:
    for turn in range(TURNS):
        host = numbers(turn) + 20.0 * np.eye(3)
        x = await device.put(host)
        product, (q, r), kept, number = await ta.gather(
            x @ x, linalg.qr(x), x, arrays.sum(x).item()
        ).to_host()
        same(product, host @ host)
        np.testing.assert_allclose(q @ r, host, atol=1e-13)
        same(kept, host)
        assert number == host.sum()
        # A call with several results of its own.
        q, r = await linalg.qr(x + 0.0).to_host()
        np.testing.assert_allclose(q @ r, host, atol=1e-13)
        found = await arrays.top_k(x[0], 2).to_host()
        same(found.values, np.sort(host[0])[:0:-1])  # type: ignore[attr-defined]
    device_array = await device.put(np.eye(3))
    with pytest.raises(TypeError, match=r"^to_host: the call must return one array, .*; leave out= away$"):
        await linalg.qr(device_array).to_host(out=np.ones(3))  # type: ignore[call-overload]


async def test_large_results_are_fetched(device: ta.Device) -> None:
    host = np.arange(20_000.0)
    x = await device.put(host)
    for turn in range(TURNS):
        a, b, c, d, total = await ta.gather(
            (x + float(turn)).to_host(),
            x[:3].to_host(),
            (x * 2.0)[:6000].to_host(),
            x.to_host(),
            arrays.sum(x).item(),
        )
        same(a, host + turn)
        same(b, host[:3])
        same(c, host[:6000] * 2.0)
        same(d, host)
        assert total == host.sum()
    assert found(device) >= TURNS - 1


async def test_a_result_that_a_later_call_changes(device: ta.Device) -> None:
    """Its bytes belong to its turn, as in a run step by step."""
    for turn in range(TURNS):
        host = numbers(turn)
        x = await device.put(host)
        y = x + 1.0
        before, after, seen, x_before, x_after = await ta.gather(
            y.to_host(), y.fill(5.0), y.to_host(), x.to_host(), x.fill(9.0).to_host()
        )
        same(before, host + 1.0)
        same(await after.to_host(), np.full((3, 3), 5.0))
        # `y` is not the call that changes it, so it is read in its own turn.
        assert seen.shape == (3, 3)
        same(x_before, host)
        same(x_after, np.full((3, 3), 9.0))


async def test_no_call_one_call_and_many(device: ta.Device) -> None:
    x = await device.put(ONES)
    assert await ta.gather() == ()
    for _ in range(TURNS):
        (only,) = await ta.gather(x + 1.0)
        same(await only.to_host(), ONES + 1.0)
        refs = await ta.gather(x, x)
        assert refs[0] is x
        assert refs[1] is x
        many = await ta.gather(*[(x * float(n)).to_host() for n in range(300)])
        assert [one[0, 0] for one in many] == [float(n) for n in range(300)]


async def test_calls_of_several_devices(system: ta.System, device: ta.Device) -> None:
    async with system.open_device(BACKEND, options=INLINE, name="other") as other:
        x, y = await device.put(numbers(0)), await other.put(numbers(1))
        for turn in range(TURNS):
            k, m = x @ x, y @ y
            a, b, c, d, e, f = await ta.gather(k + 1.0, m * float(turn), k, y, m.to_host(), x)
            same(await a.to_host(), numbers(0) @ numbers(0) + 1.0)
            assert b.device is other
            same(await b.to_host(), numbers(1) @ numbers(1) * turn)
            assert c.device is device
            assert d is y
            same(e, numbers(1) @ numbers(1))
            assert f is x
        assert found(device) == found(other) == TURNS
        # One that uses arrays of both is refused in the words of its step, the others are not run twice.
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^arrays\.multiply: x2 is on test/other, this runs on "):
                await ta.gather(x + 1.0, (x + 1.0) * y)
        # An intermediate result on the host can be used anywhere.
        a, b = await ta.gather(x + 1.0, arrays.add(y, (x * 2.0).to_host()))
        same(await b.to_host(), numbers(1) + numbers(0) * 2.0)
        with pytest.raises(TypeError, match="axis"):
            await ta.gather(x + 1.0, arrays.sum(y * 2.0, axis="0"))  # type: ignore[arg-type]
        # Nothing of the refused ones waits.
        assert await blocks(device) <= 8


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
async def test_one_that_fails(device: ta.Device) -> None:
    x, singular = await device.put(ONES), await device.put(np.zeros((3, 3)))
    for _ in range(3):
        with pytest.raises(ta.LinAlgError, match=r"^linalg\.solve: .*singular"):
            await ta.gather(x + 1.0, linalg.solve(singular * 1.0, ONES), (x * 2.0).to_host())
        with pytest.raises(ValueError, match=r"^arrays\.multiply: .*broadcast"):
            await ta.gather(x + 1.0, x * np.ones(7))
        with pytest.raises(ValueError, match=r"^item: the array must have exactly one element"):
            await ta.gather(x + 1.0, (x * 2.0).item())
    assert await blocks(device) <= 3
    x.release()
    with pytest.raises(ta.StaleRefError, match=r"^arrays\.add: x1: its memory was released"):
        await ta.gather(singular * 2.0, x + 1.0)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (
        lambda x: [x + 1.0, [x * 2.0]],
        r"^gather: argument 1 must be a call, got a list; .*: ta\.gather\(\*calls\)$",
    ),
    "a dict": (lambda x: {"a": x + 1.0}, r"got a dict; .*: ta\.gather\(\*calls\.values\(\)\)$"),
    "a tuple": (lambda x: (x + 1.0, {x * 2.0}), r"got a tuple; pass its members one by one"),
    "a generator": (lambda x: (x + 1.0 for _ in "ab"), r"got a generator; pass its members one by one"),
    "a host array": (lambda x: np.ones(2), r"must be a call or an AccelRef, got an array .*; leave it out"),
    "a number": (lambda x: 2.0, r"got 2\.0; leave it out, because it needs no request"),
    "None": (lambda x: None, r"got None"),
    "a function": (lambda x: arrays.add, r"call it by itself: await add\(\.\.\.\)"),
    "a Pending": (lambda x: (x + 1.0).start(), r"its reply is pending\.value"),
}


@pytest.mark.filterwarnings("ignore:<Call arrays.add> was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", REFUSED)
async def test_no_calls(device: ta.Device, kind: str) -> None:
    make, text = REFUSED[kind]
    x = await device.put(np.ones(2))
    wrong = make(x)
    first = x * 2.0
    with pytest.raises(TypeError, match=text):
        ta.gather(first, wrong)
    # The refusal is enough: no warning follows.
    del first


async def test_mistakes(device: ta.Device) -> None:
    x = await device.put(ONES)
    used = x + 1.0
    await used
    with pytest.raises(RuntimeError, match=r"await both calls at once: await ta\.gather\(a, b\)$"):
        await ta.gather(x * 2.0, used)
    both = ta.gather(x * 2.0, x + 1.0)
    await both
    with pytest.raises(RuntimeError, match="<Call gather> was awaited before"):
        await both
    started = ta.gather(x * 2.0, x + 1.0)
    with pytest.raises(ta.NotSupportedError, match=r"^gather: cannot be started; start each of its calls"):
        started.start()
    with pytest.raises(TypeError, match="there is no option 'return_exceptions'"):
        ta.gather(return_exceptions=True)  # type: ignore[call-overload]
    with pytest.warns(RuntimeWarning, match="<Call gather> was never awaited") as noted:
        ta.gather(x * 2.0, x + 1.0)
    assert len(noted) == 1


async def test_started_calls_stay(device: ta.Device) -> None:
    x = await device.put(ONES)
    a, b = (x + 1.0).start(), (x * 2.0).start()
    c, d = await ta.gather(a.value * 2.0, a.value + b.value)
    same(await c.to_host(), ONES * 4.0)
    same(await d.to_host(), ONES * 4.0)


async def test_in_a_graph(device: ta.Device) -> None:
    async def step(x: ta.AccelRef) -> tuple[ta.AccelRef, ta.AccelRef]:
        k = x @ x
        return await ta.gather(k + 1.0, k)

    x = await device.put(numbers(3))
    graph = await ta.graphs.capture(device, step, x)
    a, b = await graph.replay()
    same(await a.to_host(), numbers(3) @ numbers(3) + 1.0)
    same(await b.to_host(), numbers(3) @ numbers(3))


async def test_in_a_task(device: ta.Device) -> None:
    x = await device.put(ONES)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ta.gather, x + 1.0, x * 2.0)
    assert await blocks(device) <= 2


async def test_cancelled_anywhere(device: ta.Device) -> None:
    x = await device.put(ONES)
    done = 0
    for turns in range(12):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    nonlocal done
                    k = x @ x
                    await ta.gather(k + 1.0, (k * 2.0).to_host())
                    done += 1

                nursery.start_soon(ask)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
    a, b = await ta.gather(x + 1.0, (x * 2.0).to_host())
    same(b, ONES * 2.0)
    del a
    assert await blocks(device) <= 2
    assert device.generation == 1


KINDS = [kind for kind in STEPS if kind != "solve" and not kind.startswith(("out", "fill", "assign"))]


async def check(device: ta.Device, program: Program, picks: list[int]) -> None:
    """Gather some of a program's values, and compare with each on its own."""
    for turn in range(4):
        leaves = await program.put(device, turn)
        values = program.values(leaves)
        chosen = [values[pick % len(values)] for pick in picks]
        ends = [one.to_host() if place % 2 else one for place, one in enumerate(chosen)]
        gathered: Any = ta.gather(*ends)
        try:
            results = await gathered
        except (ta.AccelError, ValueError, TypeError) as error:
            gathered = type(error), str(error)
            results = []
        expected: list[Any] = []
        for pick in picks:
            again = program.values(leaves)
            expected.append(await outcome(again[pick % len(again)].to_host()))
        if not results:
            assert gathered in expected
            continue
        for result, plain in zip(results, expected, strict=True):
            host = await result.to_host() if isinstance(result, ta.AccelRef) else result
            assert (host.dtype, host.shape, host.tobytes()) == plain


async def search(device: ta.Device, most: int) -> None:
    picks = st.lists(st.integers(0, 20), min_size=1, max_size=5)

    @given(program=programs(kinds=KINDS), picks=picks)
    @settings(max_examples=most, deadline=None, derandomize=True)
    def run(program: Program, picks: list[int]) -> None:
        trio.from_thread.run(check, device, program, picks)

    await trio.to_thread.run_sync(run)
    assert device.generation == 1


@pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")
@inline
async def test_any_results_of_a_program(device: ta.Device) -> None:
    await search(device, 25)
    assert found(device) > 25


@pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")
@isolated
async def test_any_results_of_a_program_in_a_worker(device: ta.Device) -> None:
    await search(device, 8)


@inline
async def test_three_results_cost_little_more_than_one(device: ta.Device) -> None:
    if device.info.backend != "cpu":
        pytest.skip("the bindings of a driver are Python here, too")
    x = await device.put(ONES)

    def chain() -> Awaitable[Any]:
        k = x @ x
        return ((k + 1.0) * (k * 2.0)).to_host()

    def gathered() -> Awaitable[Any]:
        k = x @ x
        return ta.gather((k + 1.0).to_host(), (k * 2.0).to_host(), k.to_host())

    one, three = await python_calls(chain), await python_calls(gathered)
    assert three - one <= 40, (one, three)

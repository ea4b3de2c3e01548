"""Calls that compose: a chain has the results of its steps, asked, recorded, or kept by then."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from isolations import inline

import trio_accel as ta
from trio_accel import arrays, linalg, nn
from trio_accel.devices.operations._blocks import Block

pytestmark = pytest.mark.any_backend

Host = npt.NDArray[Any]
# Bytes of host arrays that a chain takes in its message.
SMALL = 64 << 10
# The first is recorded, the others are runs of the template.
TURNS = 4


def numbers(turn: int, *shape: int, dtype: str = "float64") -> Host:
    """Other numbers in each turn."""
    return np.random.default_rng(turn).standard_normal(shape or (4, 4)).astype(dtype)


def same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


def is_kept(device: ta.Device) -> bool:
    """Whether a chain of this device has run by a template."""
    chains: Any = device.chains  # type: ignore[attr-defined]
    return chains.kept.counts.hits > 0


async def test_a_nested_expression_has_the_bits_of_its_steps(device: ta.Device) -> None:
    for turn in range(TURNS):
        x, w, b = numbers(turn, 3, 4), await device.put(numbers(turn + 9)), await device.put(numbers(7, 4))
        found = await arrays.softmax(nn.relu(x @ w + b) * 2.0, axis=1).to_host()
        hidden = await nn.relu(await arrays.add(await linalg.matmul(x, w), b))
        same(found, await (await arrays.softmax(await arrays.multiply(hidden, 2.0), axis=1)).to_host())
    assert is_kept(device)


async def test_results_stay_on_the_device_as_they_do_of_steps(device: ta.Device) -> None:
    kept: list[tuple[ta.AccelRef, Host]] = []
    for turn in range(TURNS):
        x = await device.put(numbers(turn))
        y = await ((x + 1.0) * x)[1:, ::2].T
        assert y.shape == (2, 3)
        kept.append((y, ((numbers(turn) + 1.0) * numbers(turn))[1:, ::2].T))
    assert is_kept(device)
    # Each run has memory of its own.
    for ref, expected in kept:
        same(await ref.to_host(), expected)


async def test_a_call_used_twice_runs_once(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    for turn in range(TURNS):
        # It changes the array, so that another run would be seen.
        more = arrays.add(x, 1.0, out=x)
        same(await (more + more).to_host(), np.full(3, 2.0 * (turn + 2)))
        same(await x.to_host(), np.full(3, turn + 2.0))


async def test_a_host_array_may_occur_twice(device: ta.Device) -> None:
    x = await device.put(np.arange(3.0))
    for turn in range(TURNS):
        h = numbers(turn, 3)
        same(await (x * h + h).to_host(), np.arange(3.0) * h + h)
    # The same structure, but for that.
    for turn in range(TURNS):
        h, other = numbers(turn, 3), numbers(turn + 50, 3)
        same(await (x * h + other).to_host(), np.arange(3.0) * h + other)
        same(await (x * h + h).to_host(), np.arange(3.0) * h + h)


async def test_an_array_may_occur_twice(device: ta.Device) -> None:
    async def both(a: ta.AccelRef, b: ta.AccelRef) -> Host:
        return await ((a - b) * a).to_host()

    for turn in range(TURNS):
        x, y = await device.put(numbers(turn)), await device.put(numbers(turn + 50))
        same(await both(x, x), np.zeros((4, 4)) * numbers(turn))
        same(await both(x, y), (numbers(turn) - numbers(turn + 50)) * numbers(turn))
        same(await both(x.T, x), (numbers(turn).T - numbers(turn)) * numbers(turn).T)


NUMBERS: dict[str, tuple[Any, ...]] = {
    "zeros": (0.0, -0.0, np.float64(-0.0), np.float64(0.0)),
    "not a number": (np.nan, float("inf"), -np.inf),
    "kinds": (1, 1.0, 1 + 0j, np.float32(1), np.array(1.0), np.array(1.0, "f4")),
    "complex zeros": (complex(0.0, -0.0), complex(-0.0, 0.0), 0j, -0j),
}


@pytest.mark.parametrize("kind", NUMBERS)
async def test_calls_distinguish_numbers(device: ta.Device, kind: str) -> None:
    x = await device.put(np.array([0.0, -0.0, 1.5, -2.0], np.float32))
    expected = [
        await (await arrays.multiply(await arrays.negative(x), one)).to_host() for one in NUMBERS[kind]
    ]
    for _ in range(TURNS):
        for one, result in zip(NUMBERS[kind], expected, strict=True):
            same(await ((-x) * one).to_host(), result)


async def test_nan_is_distinguished_by_its_sign(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    for _ in range(TURNS):
        for sign in (1.0, -1.0):
            nan = math.copysign(math.nan, sign)
            same(await arrays.copysign(x + 1.0, nan).to_host(), np.full(3, 2.0 * sign))
            z = (x * 1j).fill(complex(1.0, nan))
            same(np.signbit((await z.to_host()).imag), np.full(3, sign < 0))


DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "bfloat16",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
async def test_host_arrays_and_results_of_each_dtype(device: ta.Device, dtype: str) -> None:
    plain = ta.DType.of(dtype).dtype
    for shape in ((), (0, 3), (5,), (2, 3)):
        x = await device.put(np.ones(shape, plain))
        for turn in range(TURNS):
            host = (np.arange(np.prod(shape), dtype=int) + turn).reshape(shape).astype(plain)
            found = await arrays.where(arrays.equal(host, x), host, x).to_host()
            same(found, np.where(host == np.ones(shape, plain), host, np.ones(shape, plain)).astype(plain))
            assert found.flags.writeable
            assert found.flags.c_contiguous
    assert is_kept(device)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
async def test_casts_to_float8(device: ta.Device, dtype: str) -> None:
    x = await device.put(np.zeros(7, np.float32))
    for turn in range(TURNS):
        host = numbers(turn, 7, dtype="float32")
        found = await (x + host).cast(dtype).to_host()
        same(found, host.astype(ta.DType.of(dtype).dtype))
        same(
            await (x + found.astype("float32")).cast(dtype).cast("float32").to_host(), found.astype("float32")
        )


def _read_only(host: Host) -> Host:
    host.flags.writeable = False
    return host


LAYOUTS: dict[str, Callable[[Host], Host]] = {
    "Fortran": np.asfortranarray,
    "transposed": lambda host: host.T,
    "backwards": lambda host: host[::-1, ::-1],
    "every other": lambda host: host.repeat(2, axis=1)[:, ::2],
    "broadcast": lambda host: np.broadcast_to(host[:1], host.shape),
    "read-only": _read_only,
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_host_arrays_of_any_strides(device: ta.Device, layout: str) -> None:
    x = await device.put(numbers(5))
    for turn in range(TURNS):
        host = LAYOUTS[layout](numbers(turn))
        same(await (host - x).T.to_host(), (host - numbers(5)).T)
        same(await linalg.matmul(host, x).to_host(), await (await linalg.matmul(host.copy(), x)).to_host())


async def test_a_host_array_is_read_when_the_await_begins(device: ta.Device) -> None:
    x = await device.put(np.zeros(3))
    for turn in range(TURNS):
        host = np.full(3, float(turn))
        found: list[Host] = []

        async def ask(host: Host = host, found: list[Host] = found) -> None:
            found.append(await ((x + 1.0) * 2.0 + host).to_host())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            # Tasks of one turn run in any order: by the second one it has begun.
            for _ in range(2):
                await trio.lowlevel.checkpoint()
            host[...] = np.nan
        same(found[0], np.full(3, turn + 2.0))


async def test_large_host_arrays_and_results_go_step_by_step(
    device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trio_accel.devices")
    x = await device.put(np.ones(SMALL // 8 + 1))
    for turn in range(TURNS):
        host = numbers(turn, SMALL // 8 + 1)
        same(await ((x + host) * 2.0).to_host(), (1.0 + host) * 2.0)
    told = [record.getMessage() for record in caplog.records]
    assert told.count("arrays.add, arrays.multiply, AccelRef.to_host goes step by step") == 1
    assert not is_kept(device)


@pytest.mark.skipif(BACKEND == "third", reason="it has no graphs")
async def test_the_log_explains_why_a_chain_runs_step_by_step(
    device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trio_accel.devices")
    x = await device.put(np.arange(4.0))
    for _ in range(TURNS):
        same(await arrays.compress(x > 1.0, x * 2.0).to_host(), [4.0, 6.0])
    (record,) = [record for record in caplog.records if "is in no graph" in record.getMessage()]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ta.NotSupportedError)


@pytest.mark.parametrize("count", [SMALL // 8 - 1, SMALL // 8])
async def test_as_much_of_the_host_as_a_chain_takes(device: ta.Device, count: int) -> None:
    x = await device.put(np.ones(count))
    for turn in range(TURNS):
        same(await ((x + numbers(turn, count)) * 2.0).to_host(), (1.0 + numbers(turn, count)) * 2.0)
    assert is_kept(device)


async def test_in_place_between_runs(device: ta.Device) -> None:
    x, w = await device.put(np.zeros((2, 2))), await device.put(np.eye(2))
    for turn in range(TURNS):
        await x.assign(numbers(turn, 2, 2))
        await w[0].fill(float(turn))
        expected = np.eye(2)
        expected[0] = turn
        same(await ((x @ w) + x).to_host(), numbers(turn, 2, 2) @ expected + numbers(turn, 2, 2))


async def test_in_place_inside_of_a_chain(device: ta.Device) -> None:
    for turn in range(TURNS):
        x, y = await device.put(numbers(turn)), await device.put(numbers(turn))
        filled = (x * 2.0).fill(float(turn))
        same(await (filled + x).to_host(), turn + numbers(turn))
        # The result is the given array, and not a copy of it.
        out = await arrays.add(x + 1.0, y, out=y)
        assert out.block is y.block
        same(await y.to_host(), numbers(turn) + 1.0 + numbers(turn))
        await (x + 1.0).assign(y)


async def test_only_a_view_of_the_argument_is_changed(device: ta.Device) -> None:
    for turn in range(TURNS):
        x = await device.put(np.zeros((4, 4)))
        out = await arrays.add(np.ones((2, 2)) * turn, 1.0 + x[:2, :2], out=x[1:3, 1:3])
        assert out.block is x.block
        expected = np.zeros((4, 4))
        expected[1:3, 1:3] = turn + 1.0
        same(await x.to_host(), expected)


async def test_lists_of_calls(device: ta.Device) -> None:
    for turn in range(TURNS):
        x = await device.put(numbers(turn))
        host = numbers(turn + 50)
        expected = np.concatenate([numbers(turn) + 1.0, host, numbers(turn)])
        same(await arrays.concat([x + 1.0, host, x]).to_host(), expected)
        same(
            await arrays.stack((x * 2.0, x, -x), axis=1).to_host(),
            np.stack([numbers(turn) * 2.0, numbers(turn), -numbers(turn)], axis=1),
        )


async def test_results_of_several_arrays(device: ta.Device) -> None:
    both = ta.jit.elementwise("s = x + y; d = x - y", outputs=("s", "d"))
    for turn in range(TURNS):
        x = await device.put(numbers(turn))
        total, difference = await both(x * 2.0, x)
        same(await total.to_host(), numbers(turn) * 2.0 + numbers(turn))
        same(await difference.to_host(), numbers(turn) * 2.0 - numbers(turn))
    assert is_kept(device)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bool", "int8", "complex128", "bfloat16"])
async def test_items(device: ta.Device, dtype: str) -> None:
    for turn in range(TURNS):
        x = await device.put(np.full((1, 1), turn, ta.DType.of(dtype).dtype))
        item = await arrays.where(arrays.equal(x, x.T), x, x.T).item()
        plain = await x.item()
        assert type(item) is type(plain)
        assert item == plain


async def test_solvers_are_steps_too(device: ta.Device) -> None:
    if "solver" not in device.libraries:
        pytest.skip("the device has no solvers")
    for turn in range(TURNS):
        x = await device.put(numbers(turn))
        squares = await (x @ x.T + np.eye(4))
        factor = await (await linalg.cholesky(squares)).to_host()
        same(await linalg.cholesky(x @ x.T + np.eye(4)).to_host(), factor)
        with pytest.raises(ta.LinAlgError, match=r"^linalg\.cholesky: the matrix is not positive definite"):
            await (linalg.cholesky(x @ x.T * -1.0) + 1.0).to_host()
    chains: Any = device.chains  # type: ignore[attr-defined]  # an open device has them
    assert chains.kept.counts.hits + chains.kept.counts.recorded == 3 * TURNS
    assert device.generation == 1


async def test_a_call_is_an_asynchronous_function_for_a_nursery(device: ta.Device) -> None:
    x = await device.put(np.eye(2))
    async with trio.open_nursery() as nursery:
        for _ in range(TURNS):
            nursery.start_soon(linalg.matmul, x, x)
            nursery.start_soon(lambda: arrays.add(x, 1.0, out=x))
    same(await x.to_host(), np.eye(2) + TURNS)


async def test_sixteen_tasks_share_a_template(device: ta.Device) -> None:
    w = await device.put(numbers(99))
    expected = [await (await linalg.matmul(numbers(task), w)).to_host() for task in range(16)]

    async def ask(task: int) -> None:
        for _ in range(TURNS):
            found = await ((numbers(task) @ w) * 2.0).to_host()
            same(found, expected[task] * 2.0)

    async with trio.open_nursery() as nursery:
        for task in range(16):
            nursery.start_soon(ask, task)
    assert is_kept(device)


async def test_calls_in_a_captured_graph(device: ta.Device) -> None:
    x, w = await device.put(numbers(1)), await device.put(numbers(2))

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        return await (nn.relu(x @ w) + 1.0)[:2]

    for _ in range(TURNS):
        await step(x)
    with await ta.graphs.capture(device, step, x) as graph:
        for turn in range(TURNS):
            await x.assign(numbers(turn))
            y = await graph.replay()
            same(await y.to_host(), await (await step(x)).to_host())


async def test_a_call_describes_its_result(device: ta.Device) -> None:
    x = await device.put(np.ones((2, 3), np.float32))
    call = arrays.sum((x + 1.0)[:, 1:], axis=0)
    assert (call.shape, call.dtype, call.ndim, call.size, call.nbytes) == ((2,), ta.DType.float32, 1, 2, 8)
    assert len(call) == 2
    same(await call.to_host(), np.full(2, 4.0, np.float32))
    later = linalg.cholesky(x[:2, :2])
    assert later.shape == (2, 2)
    later.close()


async def test_a_started_call_is_a_pending_operation(device: ta.Device) -> None:
    x = await device.put(np.eye(3))
    pending = ((x + 1.0) @ x).start()
    doubled = pending.value * 2.0
    same(await doubled.to_host(), (np.eye(3) + 1.0) * 2.0)
    assert (await pending.wait()) is pending.value


async def blocks_of(device: ta.Device) -> int:
    return (await device.statistics()).memory.blocks


async def test_a_kept_structure_holds_no_array(device: ta.Device) -> None:
    blocks: list[weakref.ref[Block]] = []
    hosts: list[weakref.ref[Host]] = []
    for turn in range(TURNS):
        x, y, host = await device.put(numbers(turn)), await device.put(numbers(turn)), numbers(turn)
        blocks += [weakref.ref(ref.block) for ref in (x, y)]
        hosts.append(weakref.ref(host))
        for call in (x + host, arrays.add(x * 2.0, 1.0, out=y), (x + y)[1:].fill(0.0), (x @ y).to_host()):
            reply = await call
            if isinstance(reply, ta.AccelRef):
                blocks.append(weakref.ref(reply.block))
        del x, y, host, reply, call
    gc.collect()
    assert [block() for block in blocks if block() is not None] == []
    assert [host() for host in hosts if host() is not None] == []
    assert is_kept(device)


async def test_an_awaited_call_holds_no_array(device: ta.Device) -> None:
    for _ in range(TURNS):
        x, host = await device.put(numbers(1)), numbers(2)
        block, array = weakref.ref(x.block), weakref.ref(host)
        inner = x + host
        call = inner * 2.0
        await call.to_host()
        del x, host
        gc.collect()
        assert block() is None
        assert array() is None
        assert repr(call) == "<Call arrays.multiply>"


async def test_results_in_between_go_early(device: ta.Device) -> None:
    x = await device.put(np.ones(1 << 15))
    before = (await device.statistics()).memory.used
    for _ in range(TURNS - 1):
        y: Any = x
        for _ in range(64):
            y = y + 1.0
        await y
        peak = (await device.statistics()).memory
        assert peak.used < before + 8 * x.nbytes


@inline
async def test_a_chain_as_long_as_it_may_be(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    y: Any = x
    for _ in range(4094):
        y = y + 1.0
    same(await y.to_host(), np.full(3, 4095.0))


async def test_recently_used_calls_are_kept(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.chains.kept, "bound", 8)  # type: ignore[attr-defined]
    x = await device.put(np.ones(2))
    chains: Any = device.chains  # type: ignore[attr-defined]
    for number in range(3, 40):
        await ((x + 0.5) * 2.0)
        await ((x + 0.5) ** float(number))
    # The repeated one is made once, and again to fuse its steps; each other one is made for itself.
    assert (chains.kept.counts.recorded, chains.kept.counts.hits) == (1 + 37 + 1, 37 - 2)
    assert len(chains.kept.plans) <= 8


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
async def test_a_number_that_changes_is_handed_over(device: ta.Device, dtype: str) -> None:
    chains: Any = device.chains  # type: ignore[attr-defined]
    x, y = await device.put(numbers(1, dtype=dtype)), await device.put(numbers(2, dtype=dtype))
    for turn in range(9):
        rate, scale = 0.1 + 0.37 * turn, 1.0 / (turn + 3)
        expected = await arrays.subtract(x, await arrays.multiply(rate, y))
        expected = await arrays.add(0.25, await arrays.divide(expected, scale))
        same(await (0.25 + (x - rate * y) / scale).to_host(), await expected.to_host())
    # Two with their numbers, one without, and one with fused steps. Operations computed in another dtype have
    # a template for each number.
    assert (chains.kept.counts.recorded == 4) == (dtype in ("float32", "float64"))
    for number in (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e300, 1e-300):
        same(await ((x * number) + 1.0).to_host(), await (await (await (x * number) + 1.0)).to_host())


async def test_a_call_for_any_number_is_kept(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.chains.kept, "bound", 8)  # type: ignore[attr-defined]
    chains: Any = device.chains  # type: ignore[attr-defined]
    x = await device.put(np.ones(3))
    for number in range(40):
        same(await ((x * (number * 0.5)) + 1.0).to_host(), np.full(3, number * 0.5 + 1.0))
    # Two with their numbers, one without, and one with fused steps.
    assert chains.kept.counts.recorded == 4


@pytest.mark.parametrize("kind", [list, tuple])
async def test_a_number_in_a_sequence_is_not_handed_over(device: ta.Device, kind: Any) -> None:
    x = await device.put(np.ones(3))
    for turn in range(6):
        for several in (kind([turn + 0.5]), kind([turn + 0.5, 0.5])):
            with pytest.raises(TypeError, match=r"^arrays\.add: x2 must be a number or an array, got"):
                await arrays.add(x * 2.0, several)


async def test_a_call_ends_with_its_device() -> None:
    async with ta.open_system("test") as system:
        async with system.open_device(BACKEND, options=INLINE) as device:
            x = await device.put(np.ones(2))
            call = (x + 1.0) * 2.0
        with pytest.raises((ta.DeviceLostError, ta.StaleRefError)):
            await call


async def test_the_written_reference_is_the_result(device: ta.Device) -> None:
    x, y = await device.put(numbers(1)), await device.put(numbers(2))
    for _ in range(TURNS):
        assert await arrays.add(x * 2.0, 1.0, out=y) is y
        assert await linalg.gemm(1.0, x, x + 1.0, 0.0, y) is y
        assert await linalg.axpy(2.0, numbers(1), y) is y
        view = y[1:]
        assert await arrays.add(x[1:] * 2.0, 1.0, out=view) is view


async def test_calls_that_make_arrays_are_operands(device: ta.Device) -> None:
    for turn in range(TURNS):
        row = arrays.arange(device, 3.0)
        found = await (arrays.ones(device, (2, 3)) * float(turn) + row).to_host()
        same(found, np.full((2, 3), float(turn)) + np.arange(3.0))
        host = numbers(turn)
        found = await (arrays.asarray(device, host) @ host).to_host()
        same(found, await (await linalg.matmul(await device.put(host), host)).to_host())
    call = arrays.ones(device, (2, 3)) * 2.0
    assert call.shape == (2, 3)
    call.close()


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
async def test_arrays_in_other_objects(device: ta.Device) -> None:
    x = await device.put(np.eye(3) * 2.0)
    factors = await linalg.lu(x)
    for turn in range(TURNS):
        found = await (linalg.lu_solve(factors, numbers(turn, 3)) * 2.0).to_host()
        np.testing.assert_allclose(found, numbers(turn, 3), rtol=1e-12)


async def test_memory_kept_for_intermediate_results_makes_room(system: ta.System) -> None:
    options = ta.DeviceOptions(memory_limit=1 << 20)
    device = await system.open_device("cpu", options=options, name="small")
    x = await device.put(np.ones(80_000, np.float32))
    for _ in range(TURNS):
        same(await arrays.sum(arrays.sort(x * 2.0) + 1.0).to_host(), np.float32(240_000))
    del x
    # All of it can be had again.
    last = await device.put(np.ones((1 << 20) - 4096, np.uint8))
    assert last.nbytes > 1 << 19
    await device.close()

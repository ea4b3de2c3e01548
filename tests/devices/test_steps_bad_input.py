"""The refusals of a step with their words, and its treatment of state, many structures and losses."""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from step_programs import outcome_of

import trio_accel as ta
from trio_accel.backends.base import Isolation

N = 8


@pytest.fixture
async def x(device: ta.Device) -> ta.AccelRef:
    """An array of ones."""
    return await device.put(np.ones(N))


async def refused(asked: Any, error: type[BaseException], text: str) -> None:
    with pytest.raises(error) as caught:
        await asked
    assert str(caught.value) == text


async def test_a_function_that_awaits(x: Any) -> None:
    async def waits(x: Any) -> Any:
        return await (x + 1.0)

    with pytest.raises(TypeError) as caught:
        ta.step(waits)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert str(caught.value) == (
        f"step: {waits.__qualname__} is async; a step is a plain function that returns a call and awaits "
        "nothing"
    )
    await refused(
        ta.step(named("hidden", waits))(x),
        TypeError,
        "step hidden: the function must return a call, or several in tuples, lists and dictionaries, got "
        "coroutine; a step awaits nothing, so it cannot use async functions",
    )


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function of this name."""

    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    call.__qualname__ = name
    return call


async def test_generators_and_objects_that_cannot_be_called() -> None:
    async def yields() -> Any:
        yield 1

    with pytest.raises(TypeError, match=r"^step: .*yields is async; a step is a plain function"):
        ta.step(yields)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(TypeError, match=r"^step: 3 is not a function$"):
        ta.step(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(TypeError, match=r"^step: static must be names of parameters, got 2$"):
        ta.step(lambda x: x, static=2)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ValueError, match=r"^step: .*<lambda> does not take the parameter 'k' of static$"):
        ta.step(lambda x: x, static="k")


@pytest.mark.parametrize(
    ("result", "kind"),
    [(None, "NoneType"), (3.0, "float"), ((), "tuple"), ({"a": 1}, "dict with 1"), ([], "list")],
)
async def test_a_function_that_returns_no_call(x: Any, result: object, kind: str) -> None:
    await refused(
        ta.step(named("f", lambda _: result))(x),
        TypeError,
        f"step f: the function must return a call, or several in tuples, lists and dictionaries, got {kind}",
    )


async def test_a_function_returns_a_number_next_to_a_call(x: Any) -> None:
    def f(x: Any, scale: float) -> Any:
        return {"y": x * scale, "scale": scale}

    f.__qualname__ = "f"
    await refused(
        ta.step(f)(x, 2.0),
        TypeError,
        "step f: the function must return a call, or several in tuples, lists and dictionaries, got dict "
        "with 2.0",
    )


async def test_a_function_that_uses_another_array(device: ta.Device, x: Any) -> None:
    w = await device.put(np.full(N, 2.0))
    step = ta.step(named("f", lambda x: x + w))
    for _ in range(2):
        await refused(
            step(x),
            ValueError,
            f"step f: the function uses an array on {device.path} that is not among its arguments; pass it "
            "as an argument, because the step would keep this array when your program makes a new one",
        )
    # A part of an argument is an argument, and an array that extends further is not.
    part = ta.step(named("g", lambda x: (x + w[0]).to_host()))
    with pytest.raises(ValueError, match="that is not among its arguments"):
        await part(w[2:4])


@pytest.mark.parametrize(
    "decide",
    [
        lambda x, k: x * 2.0 if k > 0 else x * 1.0,
        lambda x, k: x * 2.0 if k else x * 1.0,
        lambda x, k: x * 2.0 if k == 1.5 else x * 1.0,
        lambda x, k: x * math.sqrt(k),
        lambda x, k: x[: int(k)] * 1.0,
        lambda x, k: x * max(k, 0.0),
        lambda x, k: x * round(k),
        lambda x, k: x * (np.ones(N) * k),
        lambda x, k: x * (np.float32(2.0) * k),
        lambda x, k: x * (k * np.ones(N)),
        lambda x, k: x * np.exp(k),
        lambda x, k: x * {1.5: 2.0}.get(k, 1.0),
        lambda x, k: x * 2.0 if k in {1.5, 2.5} else x * 1.0,
    ],
)
async def test_a_branch_by_a_number(x: Any, decide: Callable[..., Any]) -> None:
    def f(x: Any, k: float) -> Any:
        return decide(x, k)

    f.__qualname__ = "f"
    await refused(
        ta.step(f)(x, 1.5),
        TypeError,
        "step f: the value of k is not known while the step is traced, because the number may differ at each "
        "call; name it, ta.step(static='k'), to trace each value, or compute with it before the step",
    )
    by_value = ta.step(f, static="k")
    for value in (1.5, -2.5, 1.5):
        try:
            expected = await outcome_of(decide(x, value))
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                await by_value(x, value)
        else:
            assert await outcome_of(by_value(x, value)) == expected


async def test_a_branch_by_an_array(x: Any) -> None:
    step = ta.step(named("f", lambda x: x * 2.0 if ta.arrays.sum(x) > 0 else x))
    with pytest.raises(TypeError, match="await"):
        await step(x)


async def test_state_is_read_when_it_is_traced(device: ta.Device, x: Any) -> None:
    state = [1.0]
    traced: list[float] = []

    def f(x: Any) -> Any:
        traced.append(state[0])
        return (x * state[0]).to_host()

    step = ta.step(f)
    for value in (1.0, 2.0, 3.0):
        state[0] = value
        np.testing.assert_array_equal(await step(x), np.ones(N))
    assert traced == [1.0]
    # Another structure reads it again.
    np.testing.assert_array_equal(await step(await device.put(np.ones(N + 1))), np.full(N + 1, 3.0))
    assert traced == [1.0, 3.0]


async def test_host_arrays_of_the_closure_are_read_when_it_is_traced(x: Any) -> None:
    table = np.full(N, 2.0)
    step = ta.step(lambda x, h: (x * table + h).to_host())
    for _ in range(40):
        np.testing.assert_array_equal(await step(x, np.ones(N)), np.full(N, 3.0))
        table += 1.0


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "complex64", "float16", "bfloat16"])
async def test_a_number_next_to_a_dtype_without_number_slots(device: ta.Device, dtype: str) -> None:
    x = await device.put(np.ones(N, ta.DType(dtype).dtype))
    step = ta.step(lambda x, k: (x * k).to_host())
    for k in (0.5, 1.5, 2.0, 0.5):
        assert await outcome_of(step(x, k)) == await outcome_of((x * k).to_host())


async def test_dtypes_without_a_promotion(device: ta.Device, x: Any) -> None:
    step = ta.step(lambda x, y: x + y)
    for dtype in ("float16", "int32", "uint64"):
        y = await device.put(np.ones(N, dtype))
        for _ in range(2):
            assert await outcome_of(step(x, y)) == await outcome_of(x + y)
    halves = await device.put(np.ones(N, "float16")), await device.put(np.ones(N, ta.DType.bfloat16.dtype))
    expected = await outcome_of(_sum(*halves))
    for _ in range(2):
        assert await outcome_of(step(*halves)) == expected
    for dtype in ("O", "U3", "M8[s]"):
        with pytest.raises(TypeError) as caught:
            await step(x, np.zeros(N, dtype))
        with pytest.raises(TypeError) as plain:
            await (x + np.zeros(N, dtype))
        assert str(caught.value)
        assert type(caught.value) is type(plain.value)


async def _sum(x: Any, y: Any) -> Any:
    return await (x + y)


@pytest.mark.parametrize("is_warm", [False, True])
async def test_arrays_of_two_devices(
    system: ta.System, device: ta.Device, x: Any, isolation: Isolation, is_warm: bool
) -> None:
    step = ta.step(named("f", lambda x, y: (x + y).to_host()))
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, name="other", options=options) as other:
        y = await other.put(np.ones(N))
        for _ in range(40 * is_warm):
            await step(x, x[::-1])
            z = await device.put(np.ones(N))
            await step(x, z)
        for first, second, here, there in ((x, y, device, other), (y, x, other, device)):
            await refused(
                step(first, second),
                ValueError,
                f"step f: an argument is on {there.path}, this runs on {here.path}; copy it there: await "
                "x.copy_to(device)",
            )
        # Each device has plans of its own.
        for one in (x, y):
            np.testing.assert_array_equal(await step(one, one), np.full(N, 2.0))
        # A borrowed array is the reader's.
        async with device.borrow(y) as borrowed:
            for _ in range(3):
                np.testing.assert_array_equal(await step(x, borrowed), np.full(N, 2.0))


async def test_a_borrowed_array_spoils_no_plan(
    system: ta.System, device: ta.Device, x: Any, isolation: Isolation
) -> None:
    traced: list[None] = []

    def f(x: Any, y: Any) -> Any:
        traced.append(None)
        return (x + y).to_host()

    step = ta.step(f)
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, name="other", options=options) as other:
        y = await other.put(np.ones(N))
        async with device.borrow(y) as borrowed:
            await step(x, borrowed)
        z = await device.put(np.ones(N))
        await step(x, z)
        traced.clear()
        for _ in range(3):
            np.testing.assert_array_equal(await step(x, z), np.full(N, 2.0))
        assert not traced


async def test_a_step_that_calls_itself(x: Any) -> None:
    @ta.step
    def again(x: Any) -> Any:
        return again(x) + 1.0

    with pytest.raises(RecursionError, match=r"again calls itself while it is traced; write a loop in it$"):
        await again(x)


async def test_steps_in_steps(x: Any) -> None:
    inner = ta.step(lambda x, k: x * k)
    outer = ta.step(lambda x, k: (inner(x, k + 1.0) + inner(x, 2.0)).to_host())
    for k in (0.5, 1.5, 2.5):
        np.testing.assert_array_equal(await outer(x, k), np.full(N, k + 3.0))
    # By a call it is part of another request.
    np.testing.assert_array_equal(await inner(x + 1.0, 2.0).to_host(), np.full(N, 4.0))  # type: ignore[attr-defined]


async def test_from_a_thread(x: Any) -> None:
    step = ta.step(named("f", lambda x, k: (x * k).to_host()))

    def in_another_run() -> None:
        with pytest.raises(RuntimeError, match="belongs to another thread or Trio run; use get or wait"):
            trio.run(step, x, 2.0)

    await trio.to_thread.run_sync(in_another_run)
    for _ in range(40):
        await step(x, 2.0)
    await trio.to_thread.run_sync(in_another_run)

    def by_this_run() -> None:
        np.testing.assert_array_equal(trio.from_thread.run(step, x, 3.0), np.full(N, 3.0))

    await trio.to_thread.run_sync(by_this_run)


async def test_a_hundred_structures(device: ta.Device, caplog: pytest.LogCaptureFixture) -> None:
    kept: Any = device.chains.kept  # type: ignore[attr-defined]
    before = len(kept.plans)
    traced: list[None] = []

    def f(x: Any) -> Any:
        traced.append(None)
        return (x + 1.0).to_host()

    f.__qualname__ = "f"
    step = ta.step(f)
    with caplog.at_level(logging.WARNING, "trio_accel.devices"):
        for _ in range(2):
            for size in range(1, 101):
                np.testing.assert_array_equal(await step(await device.put(np.ones(size))), np.full(size, 2.0))
            # Each is kept.
            assert len(traced) == 100
            assert len(kept.plans) == before + 100
    # The plans end with the step.
    del step, f
    gc.collect()
    assert len(kept.plans) == before
    (record,) = caplog.records
    assert record.getMessage() == (
        "step f was traced for 32 structures of its arguments: each dtype, shape and layout of an array, and "
        "each value of an integer, is one; pass what changes as a float or as an array"
    )


async def test_the_table_is_bounded(device: ta.Device) -> None:
    kept: Any = device.chains.kept  # type: ignore[attr-defined]
    kept.bound = 16
    traced: list[int] = []

    def f(x: Any, k: int) -> Any:
        traced.append(k)
        return (x * k).to_host()

    step, x = ta.step(f), await device.put(np.ones(N))
    for k in range(64):
        np.testing.assert_array_equal(await step(x, k), np.full(N, float(k)))
        # A repeatedly used one stays.
        await step(x, 0)
        assert len(kept.plans) <= 16
    # The clock's first turn passes nothing, as all were used.
    assert traced.count(0) < 8
    assert len(traced) < 72


@pytest.mark.parametrize(("dtype", "number"), [("float32", 1e300), ("float32", -3.5e38), ("float64", 1e308)])
async def test_a_number_that_overflows(device: ta.Device, dtype: str, number: float) -> None:
    x = await device.put(np.full(N, 2.0, dtype))
    step = ta.step(lambda x, k: (x * (k + k)).to_host())
    for _ in range(40):
        assert await outcome_of(step(x, 1.0)) == await outcome_of((x * 2.0).to_host())
    for k in (number, -number, math.inf, math.nan, 0.0, -0.0):
        assert await outcome_of(step(x, k)) == await outcome_of((x * (k + k)).to_host())


async def test_arithmetic_of_numbers_fails_as_in_python(x: Any) -> None:
    step = ta.step(lambda x, k: (x * (1.0 / k)).to_host())
    for _ in range(40):
        np.testing.assert_array_equal(await step(x, 4.0), np.full(N, 0.25))
    with pytest.raises(ZeroDivisionError):
        await step(x, 0.0)
    power = ta.step(lambda x, k: (x * k**0.5).to_host())
    np.testing.assert_array_equal(await power(x, 4.0), np.full(N, 2.0))
    # A complex number changes the dtype.
    assert await outcome_of(power(x, -4.0)) == await outcome_of((x * (-4.0) ** 0.5).to_host())
    np.testing.assert_array_equal(await power(x, 9.0), np.full(N, 3.0))


@pytest.mark.parametrize(
    ("given", "kind"),
    [({1, 2}, "set"), (object(), "object"), (lambda: 1, "function"), (iter([]), "list_iterator")],
)
async def test_arguments_outside_the_structure(x: Any, given: object, kind: str) -> None:
    def f(x: Any, y: Any) -> Any:
        return x + 1.0

    f.__qualname__ = "f"
    text = (
        f"step f: an argument (y) is of type {kind}; give arrays, numbers, strings, tuples, lists and "
        "dictionaries of these, or a hashable value whose parameter ta.step(static=...) names"
    )
    if callable(given):
        text = text.replace("function;", "function; call it by itself: await <lambda>(...);")
    await refused(ta.step(f)(x, given), TypeError, text)
    await refused(ta.step(f)(x, y=given), TypeError, text)
    await refused(ta.step(f)(x, [given]), TypeError, text)
    static = ta.step(f, static="y")
    if not isinstance(given, set):
        np.testing.assert_array_equal(await (await static(x, given)).to_host(), np.full(N, 2.0))
    else:
        await refused(static(x, given), TypeError, text)


async def test_no_array_on_a_device() -> None:
    await refused(
        ta.step(named("f", lambda x, k: x * k))(np.ones(N), 2.0),
        TypeError,
        "step f: no argument is an array on a device, which says where it runs; put one there: await "
        "device.put(x)",
    )


async def test_methods(x: Any) -> None:
    class Model:
        scale = 3.0

        @ta.step
        def asked(self, x: Any) -> Any:
            return x * self.scale

        def plain(self, x: Any) -> Any:
            return (x * self.scale).to_host()

    with pytest.raises(TypeError) as caught:
        Model().asked(x)
    assert str(caught.value) == (
        f"step {Model.__qualname__}.asked: a method cannot be a step, because its object is not an array; "
        "make a step of a function, or ta.step(object.method)"
    )
    np.testing.assert_array_equal(await ta.step(Model().plain)(x), np.full(N, 3.0))


async def test_wrong_arguments_of_the_function(x: Any) -> None:
    step: Any = ta.step(named("f", lambda x: x + 1.0))
    with pytest.raises(TypeError, match="positional argument"):
        await step(x, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        await step(x, y=2)


@pytest.mark.parametrize("when", ["while it is traced", "before"])
async def test_a_loss(system: ta.System, isolation: Isolation, when: str) -> None:
    options = ta.DeviceOptions(
        isolation=isolation,
        backoff=ta.Backoff(base=0.0),
        intensity=ta.Intensity(9, 60.0),
        retry=2,
        retry_suspects=True,
    )
    traced: list[None] = []

    def f(x: Any, k: float) -> Any:
        traced.append(None)
        if len(traced) == 1:
            ta.testing.poison(device)
        return (x * k).to_host()

    step = ta.step(f)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(N))
        # The libraries are open: opening one on a lost context is another story.
        for _ in range(2):
            await (x * 2.0).to_host()
        if when == "before":
            traced.append(None)
            for _ in range(20):
                await step(x, 2.0)
            ta.testing.poison(device)
        if isolation == "process":
            # Its memory outlives the worker.
            with trio.fail_after(60):
                np.testing.assert_array_equal(await step(x, 3.0), np.full(N, 3.0))
        else:
            with pytest.raises((ta.StaleRefError, ta.ContextLostError)):
                await step(x, 3.0)
            x = await device.put(np.ones(N))
        for number in range(30):
            np.testing.assert_array_equal(await step(x, float(number)), np.full(N, float(number)))
        count = len(traced)
        await step(x, 3.0)
        assert len(traced) == count
        assert device.generation == 2


async def test_an_array_damaged_elsewhere_is_used(device: ta.Device, x: Any) -> None:
    both = await device.put(np.arange(2.0 * N))
    step = ta.step(lambda x: (x * 2.0).to_host())
    await step(both[:N])
    both.block.mark_damaged("a test", None, [both[N:].spec])
    np.testing.assert_array_equal(await step(both[:N]), 2.0 * np.arange(N))
    with pytest.raises(ta.StaleRefError, match="spoiled by"):
        await step(both[N:])


@pytest.mark.parametrize("name", ["rest", "named"])
def test_a_static_name_of_several_arguments(name: str) -> None:
    def f(x: Any, *rest: float, k: float = 1.0, **named: float) -> Any:
        return x * (rest[0] + named["scale"])

    f.__qualname__ = "f"
    with pytest.raises(ValueError, match="static must name single parameters") as caught:
        ta.step(f, static=name)
    assert str(caught.value) == (
        f"step: static must name single parameters, and {name!r} of f takes several arguments"
    )


async def test_a_static_name_next_to_several_arguments(x: Any) -> None:
    def f(x: Any, *rest: float, k: float = 1.0) -> Any:
        return (x * rest[0] * rest[1] if k > 0 else x * rest[0]).to_host()

    step = ta.step(f, static="k")
    for value in (1.0, 2.0, 3.0):
        np.testing.assert_array_equal(await step(x, 2.0, value, k=1.0), np.full(N, 2.0 * value))
    assert repr(step).endswith("traced 1 times>")


async def test_a_name_for_its_structures(x: Any) -> None:
    step: Any = ta.step(named("f", lambda x: x + 1.0))
    assert repr(step) == "<step f, traced 0 times>"
    await step(x)
    assert repr(step) == "<step f, traced 1 times>"

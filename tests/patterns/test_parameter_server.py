"""A parameter server: its steps match the formulas, and a loss costs the push that it hits."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from cancel_at import CancelAt
from chosen import BACKEND
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import trio_accel as ta
from trio_accel import nn
from trio_accel.patterns import (
    GetStatistics,
    Parameters,
    ParameterServer,
    ParameterState,
    Pull,
    Push,
    StaleGradientsError,
    Submit,
)
from trio_accel.testing import inject_fault

# Two contexts of one device are two devices here, on a machine with one.
pytestmark = pytest.mark.filterwarnings("ignore:open_device. .* is open already:RuntimeWarning")

PROCESS = ta.DeviceOptions(isolation="process")
Arrays = dict[str, Any]
SHAPES = {"w": (3, 4), "b": (4,), "scale": ()}


def arrays(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


def flat(given: Mapping[str, Any]) -> Any:
    return np.concatenate([np.ravel(given[name]) for name in SHAPES])


async def on_host(parameters: Parameters) -> Any:
    return flat({name: await array.to_host() for name, array in parameters.arrays.items()})


def sgd(p: Any, g: Any, slots: list[Any], number: int) -> Any:
    return p - 0.1 * g


def momentum(p: Any, g: Any, slots: list[Any], number: int) -> Any:
    slots[0] = g if number == 1 else 0.9 * slots[0] + g
    return p - 0.1 * slots[0]


def adamw(p: Any, g: Any, slots: list[Any], number: int) -> Any:
    slots[:] = 0.9 * slots[0] + 0.1 * g, 0.999 * slots[1] + 0.001 * g * g
    mean, square = slots[0] / (1 - 0.9**number), slots[1] / (1 - 0.999**number)
    return p * (1 - 0.01 * 0.1) - 0.01 * mean / (np.sqrt(square) + 1e-8)


Formula = Callable[[Any, Any, list[Any], int], Any]
Rule = tuple[int, Callable[..., Awaitable[object]], Formula]
RULES: dict[str, Rule] = {
    "sgd": (0, lambda p, g, number: nn.sgd(p, g, lr=0.1), sgd),
    "momentum": (1, lambda p, g, m, number: nn.sgd(p, g, m, lr=0.1, momentum=0.9), momentum),
    "adamw": (2, partial(nn.adamw, lr=0.01, weight_decay=0.1), adamw),
}


@pytest.mark.parametrize("name", RULES)
async def test_a_hundred_steps_in_order_match_the_formulas(
    system: ta.System, device: ta.Device, name: str
) -> None:
    count, step, formula = RULES[name]
    state = await ParameterState.put(device, arrays(0), slots=count)
    server = await system.spawn(ParameterServer, state, step, max_staleness=0)
    want, slots = flat(arrays(0)), [np.zeros(17) for _ in range(count)]
    for number in range(1, 101):
        gradients = arrays(number)
        want = formula(want, flat(gradients), slots, number)
        sent: Arrays = dict(gradients)
        if number % 3 == 1:
            sent = {one: await device.put(array) for one, array in gradients.items()}
        elif number % 3 == 2:
            sent["b"] = await device.put(gradients["b"])
        made = await server.ask(Submit(Push(sent, number - 1)))
        assert made.version == number
    pulled = await server.ask(Submit(Pull()))
    assert {one: array.shape for one, array in pulled.arrays.items()} == SHAPES
    np.testing.assert_allclose(await on_host(pulled), want, rtol=1e-12, atol=1e-14)


async def test_pulled_parameters_stay_unchanged(system: ta.System, device: ta.Device) -> None:
    state = await ParameterState.put(device, arrays(0))
    server = await system.spawn(ParameterServer, state, RULES["sgd"][1])
    before = await server.ask(Submit(Pull()))
    after = await server.ask(Submit(Push(arrays(1), 0)))
    np.testing.assert_array_equal(await on_host(before), flat(arrays(0)))
    np.testing.assert_allclose(await on_host(after), flat(arrays(0)) - 0.1 * flat(arrays(1)), rtol=1e-14)
    assert (before.version, after.version) == (0, 1)


async def test_outdated_gradients_are_refused(system: ta.System, device: ta.Device) -> None:
    state = await ParameterState.put(device, arrays(0))
    server = await system.spawn(ParameterServer, state, RULES["sgd"][1], max_staleness=2)
    for version in (0, 0, 0, 1, 3):
        await server.ask(Submit(Push(arrays(1), version)))
    with pytest.raises(StaleGradientsError, match="version 2 are too old for version 5; pull them") as caught:
        await server.ask(Submit(Push(arrays(1), 2)))
    assert (caught.value.version, caught.value.current) == (2, 5)
    counts = await server.ask(GetStatistics())
    assert (counts.version, counts.stale, counts.answered, counts.failed) == (5, 1, 5, 1)
    np.testing.assert_allclose(
        await on_host(await server.ask(Submit(Pull()))), flat(arrays(0)) - 0.5 * flat(arrays(1)), rtol=1e-12
    )


async def test_the_age_is_that_of_the_moment_of_the_step(system: ta.System, device: ta.Device) -> None:
    begun, go = trio.Event(), trio.Event()

    async def slow(p: ta.AccelRef, g: ta.AccelRef, number: int) -> None:
        begun.set()
        await go.wait()
        await nn.sgd(p, g, lr=0.1)

    state = await ParameterState.put(device, arrays(0))
    server = await system.spawn(ParameterServer, state, slow, max_staleness=0)
    outcomes: list[str] = []

    async def push() -> None:
        try:
            await server.ask(Submit(Push(arrays(1), 0)))
            outcomes.append("taken")
        except StaleGradientsError:
            outcomes.append("stale")

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(push)
        await begun.wait()
        # The parameters can be had while a step is taken.
        assert (await server.ask(Submit(Pull()))).version == 0
        go.set()
    assert sorted(outcomes) == ["stale", "taken"]


async def test_a_refused_push_changes_nothing(system: ta.System, device: ta.Device) -> None:
    state = await ParameterState.put(device, arrays(0))
    server: Any = await system.spawn(ParameterServer, state, RULES["sgd"][1])
    right = arrays(1)
    nan = right | {"b": np.array([0.0, math.nan, 0.0, 0.0])}
    wrong: list[tuple[object, type[Exception], str]] = [
        (Push(right | {"more": right["b"]}, 0), ValueError, "; 'more' differ"),
        (Push({"w": right["w"]}, 0), ValueError, "; 'b', 'scale' differ"),
        (Push(right | {"w": right["w"].T}, 0), ValueError, r"'w' must have shape \(3, 4\), got \(4, 3\)"),
        (Push(right | {"b": right["b"].astype("f4")}, 0), TypeError, "'b' must be of float64, got float32"),
        (Push(right | {"b": [0.0] * 4}, 0), TypeError, "'b' must be an array, got list"),
        (Push([1.0], 0), TypeError, "gradients must be a mapping, got list"),  # type: ignore[arg-type]
        (Push(right, 1), ValueError, "version must be at least 0 and at most 0, got 1"),
        (Push(right, -1), ValueError, "version must be at least 0"),
        (Push(right, True), TypeError, "version must be an integer, got True"),
        (Push(nan, 0), ValueError, "a gradient has NaN or infinity; nothing was changed"),
        (Push(right | {"scale": np.array(math.inf)}, 0), ValueError, "NaN or infinity"),
        (None, TypeError, r"an item must be Pull\(\) or Push"),
    ]
    for item, error, match in wrong:
        with pytest.raises(error, match=match):
            await server.ask(Submit(item))
    pulled = await server.ask(Submit(Pull()))
    assert pulled.version == 0
    np.testing.assert_array_equal(await on_host(pulled), flat(arrays(0)))


async def test_nan_is_taken_if_so_chosen(system: ta.System, device: ta.Device) -> None:
    state = await ParameterState.put(device, arrays(0))
    server = await system.spawn(ParameterServer, state, RULES["sgd"][1], on_nan="allow")
    made = await server.ask(Submit(Push(arrays(1) | {"scale": np.array(math.nan)}, 0)))
    found = await on_host(made)
    assert math.isnan(found[-1])
    np.testing.assert_allclose(found[:-1], (flat(arrays(0)) - 0.1 * flat(arrays(1)))[:-1], rtol=1e-14)


async def test_wrong_options(device: ta.Device) -> None:
    put: Any = ParameterState.put
    for given, error, match in (
        (({},), ValueError, "at least one parameter"),
        (({"a": np.zeros(2), "b": np.zeros(2, "f4")},), TypeError, "floating dtype, got float32, float64"),
        (({"a": np.zeros(2, int)},), TypeError, "floating dtype, got int64"),
    ):
        with pytest.raises(error, match=match):
            await put(device, *given)
    for slots in (-1, 17):
        with pytest.raises(ValueError, match="slots must be at least 0 and at most 16"):
            await put(device, arrays(0), slots=slots)
    state, server = await put(device, arrays(0)), ParameterServer
    made: Any = server
    for error, match, call in (
        (TypeError, "state must be a ParameterState", lambda: made(arrays(0), nn.sgd)),
        (TypeError, "step must be an async function", lambda: made(state, None)),
        (ValueError, "max_staleness must be at least 0", lambda: made(state, nn.sgd, max_staleness=-1)),
        (ValueError, "on_nan must be one of", lambda: made(state, nn.sgd, on_nan="skip")),
    ):
        with pytest.raises(error, match=match):
            call()


async def test_a_step_that_fails_and_a_restart_lose_nothing(system: ta.System, device: ta.Device) -> None:
    fails = True

    async def step(p: ta.AccelRef, g: ta.AccelRef, m: ta.AccelRef, number: int) -> None:
        await nn.sgd(p, g, m, lr=0.1, momentum=0.9)
        if fails:
            raise LookupError("it was taken on a copy")

    state = await ParameterState.put(device, arrays(0), slots=1)
    server = await system.spawn(ParameterServer, state, step)
    with pytest.raises(LookupError):
        await server.ask(Submit(Push(arrays(1), 0)))
    fails = False
    for _ in range(2):
        # A new incarnation of the server continues.
        await server.stop()
        server = await system.spawn(ParameterServer, state, step)
        await server.ask(Submit(Push(arrays(1), state.version)))
    want = flat(arrays(0)) - 0.1 * (1 + 1.9) * flat(arrays(1))
    np.testing.assert_allclose(await on_host(await server.ask(Submit(Pull()))), want, rtol=1e-13)


# A least-squares problem with gradients computed by workers on devices of their own.
POINTS = np.random.default_rng(5).standard_normal((64, 4))
TARGETS = POINTS @ np.array([1.0, -2.0, 0.5, 3.0])


def slope(w: Any, share: slice) -> Any:
    return POINTS[share].T @ (POINTS[share] @ w - TARGETS[share]) / 16


async def test_a_killed_worker_loses_its_push_and_nothing_else(system: ta.System) -> None:
    """Of two workers, one is killed four times at its product; the sum of accepted gradients is there."""
    home = await system.open_device(BACKEND, options=PROCESS)
    places = [await system.open_device(BACKEND, options=PROCESS) for _ in range(2)]
    taken: list[tuple[int, int, Any]] = []
    lost = [0, 0]

    async def step(p: ta.AccelRef, g: ta.AccelRef, number: int) -> None:
        await nn.sgd(p, g, lr=0.05)

    state = await ParameterState.put(home, {"w": np.zeros(4)})
    # A worker that waits for its device may be late by all pushes of the other one.
    server = await system.spawn(ParameterServer, state, step, max_staleness=40)

    async def work(who: int) -> None:
        device, share = places[who], slice(32 * who, 32 * who + 32)
        done = 0
        while done < 20:
            pulled = await server.ask(Submit(Pull()))
            w = await pulled.arrays["w"].to_host()
            if who and done in (3, 7, 11, 15) and lost[1] < (done + 1) // 4:
                inject_fault(device, ta.linalg.Matmul, kill=True)
            try:
                x = await device.put(POINTS[share])
                rest = await (x @ w - TARGETS[share])
                gradient = await (rest @ x / 16)
                made = await server.ask(Submit(Push({"w": gradient}, pulled.version)))
            except (ta.ContextLostError, ta.StaleRefError, ta.InputFailedError):
                lost[who] += 1
                continue
            taken.append((made.version, pulled.version, slope(w, share)))
            done += 1

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for who in range(2):
                nursery.start_soon(work, who)
    assert lost == [0, 4]
    # Each push with a reply is one step, and there is no other.
    assert sorted(version for version, _, _ in taken) == list(range(1, 41))
    want = -0.05 * sum(gradient for _, _, gradient in taken)
    found = await server.ask(Submit(Pull()))
    np.testing.assert_allclose(await found.arrays["w"].to_host(), want, rtol=1e-10)
    assert (await server.ask(GetStatistics())).repeated == 0
    for device in (home, *places):
        await device.close()


async def test_a_kill_of_its_own_device_loses_nothing(system: ta.System) -> None:
    """The worker of the server's device is killed at copies and at steps; all pushes are taken once."""
    home = await system.open_device(BACKEND, options=PROCESS)
    count, step, formula = RULES["adamw"]
    state = await ParameterState.put(home, arrays(0), slots=count)
    server = await system.spawn(ParameterServer, state, step)
    want, slots = flat(arrays(0)), [np.zeros(17) for _ in range(count)]
    for number in range(1, 13):
        if number % 3 == 0:
            inject_fault(home, "nn.adamw" if number % 2 else "devices.Copy", kill=True)
        want = formula(want, flat(arrays(number)), slots, number)
        made = await server.ask(Submit(Push(arrays(number), number - 1)))
        assert made.version == number
    np.testing.assert_allclose(await on_host(made), want, rtol=1e-12, atol=1e-14)
    assert home.generation == 5
    assert (await server.ask(GetStatistics())).repeated == 4
    await home.close()


class Life(RuleBasedStateMachine):
    """Requests of workers, in any order, against NumPy. It runs in a thread next to Trio's."""

    system: ta.System
    device: ta.Device

    @initialize(most=st.one_of(st.none(), st.integers(0, 3)), name=st.sampled_from(sorted(RULES)))
    def begin(self, most: int | None, name: str) -> None:
        self.most, (self.count, step, self.formula) = most, RULES[name]
        self.want, self.slots, self.version = flat(arrays(0)), [np.zeros(17)] * self.count, 0
        self.history = [self.want]
        self.kept: list[Parameters] = []
        trio.from_thread.run(self.open, step)

    async def open(self, step: Callable[..., Awaitable[object]]) -> None:
        self.state = await ParameterState.put(self.device, arrays(0), slots=self.count)
        self.server = await self.system.spawn(ParameterServer, self.state, step, max_staleness=self.most)

    def teardown(self) -> None:
        if hasattr(self, "server"):
            trio.from_thread.run(self.server.stop)

    def advance(self, gradients: Arrays) -> None:
        self.version += 1
        self.want = self.formula(self.want, flat(gradients), self.slots, self.version)
        self.history.append(self.want)

    @rule(age=st.integers(0, 6), seed=st.integers(1, 9))
    def push(self, age: int, seed: int) -> None:
        version, gradients = max(self.version - age, 0), arrays(seed)
        asked = partial(self.server.ask, Submit(Push(gradients, version)))
        if self.most is not None and self.version - version > self.most:
            with pytest.raises(StaleGradientsError):
                trio.from_thread.run(asked)
            return
        self.advance(gradients)
        assert trio.from_thread.run(asked).version == self.version

    @rule(seed=st.integers(1, 9), wrong=st.sampled_from(["name", "shape", "dtype", "nan", "future"]))
    def refused(self, seed: int, wrong: str) -> None:
        gradients, version = arrays(seed), self.version
        if wrong == "name":
            del gradients["b"]
        elif wrong == "shape":
            gradients["b"] = gradients["b"][:2]
        elif wrong == "dtype":
            gradients["b"] = gradients["b"].astype("f4")
        elif wrong == "nan":
            gradients["w"][1, 1] = math.nan
        else:
            version += 1
        with pytest.raises((ValueError, TypeError)):
            trio.from_thread.run(partial(self.server.ask, Submit(Push(gradients, version))))

    @rule()
    def pull(self) -> None:
        pulled = trio.from_thread.run(partial(self.server.ask, Submit(Pull())))
        assert pulled.version == self.version
        self.kept.append(pulled)

    @rule(step=st.integers(1, 40), seed=st.integers(1, 9))
    def cancelled(self, step: int, seed: int) -> None:
        """The whole step was taken, or none, at any point of its caller's cancellation."""

        async def ask() -> int:
            with trio.CancelScope() as scope:
                instrument = CancelAt(scope, step)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await self.server.ask(Submit(Push(arrays(seed), self.version)))
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            return (await self.server.ask(Submit(Pull()))).version

        found = trio.from_thread.run(ask)
        assert found in (self.version, self.version + 1)
        if found > self.version:
            self.advance(arrays(seed))

    @invariant()
    def all_that_was_pulled_is_as_it_was(self) -> None:
        for parameters in self.kept[-3:]:
            found = trio.from_thread.run(on_host, parameters)
            np.testing.assert_allclose(found, self.history[parameters.version], rtol=1e-11, atol=1e-13)


async def test_any_order_of_requests_is_that_of_a_model(system: ta.System, device: ta.Device) -> None:
    kind: Any = type("Life", (Life,), {"system": system, "device": device})
    run = partial(
        run_state_machine_as_test,
        kind,
        settings=settings(max_examples=25, stateful_step_count=15, deadline=None, derandomize=True),
    )
    await trio.to_thread.run_sync(run)

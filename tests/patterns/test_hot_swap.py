"""Replacing a serving model: no request is lost or doubled, and at most two models are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import Strategy
from trio_accel.patterns import (
    Deployment,
    GetStatistics,
    HotSwap,
    HotSwapStatistics,
    ModelRetiredError,
    Submit,
    Swap,
    SwapFailedError,
    Swapped,
)

Answer = tuple[str, object]
Models = ta.Ref[HotSwap[float, Answer]]


@attrs.define
class Shelf:
    """Models by version, and the loaded and served ones. An item is the seconds that its answer takes."""

    loaded: list[str] = attrs.field(factory=list[str])
    most: int = 0
    begun: list[Answer] = attrs.field(factory=list[Answer])
    closed: list[str] = attrs.field(factory=list[str])

    def opening(
        self, version: str, *, loading: float = 0.0, closing: float = 0.0, bad: Exception | None = None
    ) -> Callable[[], AbstractAsyncContextManager[Callable[[float], Awaitable[Answer]]]]:
        @asynccontextmanager
        async def load() -> AsyncGenerator[Callable[[float], Awaitable[Answer]], None]:
            self.loaded.append(version)
            self.most = max(self.most, len(self.loaded))
            try:
                # clock: a mock clock of the caller, or work of any duration
                await trio.sleep(loading)
                if bad is not None:
                    raise bad
                yield model
                # clock: a mock clock of the caller, or work of any duration
                await trio.sleep(closing)
            finally:
                self.loaded.remove(version)
                self.closed.append(version)

        async def model(item: float) -> Answer:
            self.begun.append((version, item))
            # clock: a mock clock of the caller, or work of any duration
            await trio.sleep(item)
            return version, item

        return load

    def deployment(self, version: str = "v0") -> Deployment[float, Answer]:
        return Deployment(self.opening(version), version)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@attrs.frozen
class Crash(ta.Message["Crashing"]):
    """Crash the actor."""


class Crashing(HotSwap[float, Answer]):
    @ta.handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise OSError("a crash")


async def spawn(system: ta.System, shelf: Shelf, **options: Any) -> Models:
    ref: Models = await system.spawn(Crashing, shelf.deployment(), **options, name="models")
    return ref


async def statistics(models: Models) -> HotSwapStatistics:
    found = await models.ask(GetStatistics())
    assert isinstance(found, HotSwapStatistics)
    return found


async def test_fifty_swaps_under_a_stream_of_requests(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf)
    answers: list[tuple[int, Answer]] = []

    async def client(number: int) -> None:
        for turn in range(200):
            item = 0.01 + number / 1000 + turn / 1e6
            answers.append((number, await models.ask(Submit(item))))
            assert answers[-1][1][1] == item

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(client, number)
        for swap in range(1, 51):
            done = await models.ask(Swap(shelf.opening(f"v{swap}", loading=0.005), f"v{swap}"))
            assert (done.version, done.previous) == (f"v{swap}", f"v{swap - 1}")
            assert done.load_time == pytest.approx(0.005)
            assert done.drain_time <= 0.02
    assert len(answers) == len(shelf.begun) == 1000
    # Each was executed once, and a client's answers never return to an older model.
    assert max(Counter(item for _, item in shelf.begun).values()) == 1
    for number in range(5):
        versions = [int(str(answer[0])[1:]) for client, answer in answers if client == number]
        assert versions == sorted(versions)
    assert shelf.most == 2
    assert shelf.loaded == ["v50"]
    found = await statistics(models)
    assert (found.version, found.swaps, found.answered, found.in_flight) == ("v50", 50, 1000, 0)
    await models.stop()
    assert shelf.loaded == []


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=20),
    swaps=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans()), max_size=6),
)
def test_each_call_is_served_by_the_model_of_its_moment(
    calls: list[tuple[int, int]], swaps: list[tuple[int, int, bool]]
) -> None:
    """Calls come at even moments, and swaps end at odd ones: a tenth of a second is between two moments."""
    shelf, served, switched = Shelf(), dict[int, str](), list[tuple[float, str]]()

    async def call(models: Models, number: int, at: int, lasts: int) -> None:
        await trio.sleep(at / 10)
        version, _ = await models.ask(Submit(lasts / 10))
        served[number] = version

    async def swap(models: Models, number: int, at: int, loading: int, is_bad: bool) -> None:
        await trio.sleep(at / 10)
        bad = LookupError("it is bad") if is_bad else None
        version = f"v{number}"
        begun = trio.current_time()
        try:
            done = await models.ask(
                Swap(shelf.opening(version, loading=loading / 10 + 0.05, bad=bad), version)
            )
        except SwapFailedError:
            return
        switched.append((begun + done.load_time, version))

    async def main() -> None:
        async with ta.open_system("test") as system:
            models = await spawn(system, shelf)
            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number, (at, lasts) in enumerate(calls):
                    nursery.start_soon(call, models, number, at, lasts)
                for number, one in enumerate(swaps, 1):
                    nursery.start_soon(swap, models, number, *one)
            moments = [(at - start, version) for at, version in sorted(switched)]
            for number, (at, _) in enumerate(calls):
                earlier = [version for when, version in moments if when < at / 10]
                assert served[number] == (earlier[-1] if earlier else "v0")
            assert shelf.most <= 2
            assert len(shelf.loaded) == 1
        assert shelf.loaded == []
        assert len(shelf.begun) == len(calls)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def fails(model: Callable[[float], Awaitable[Answer]]) -> None:
    version, _ = await model(0.0)
    if version != "v0":
        raise ArithmeticError("its answers are wrong")


async def hangs(model: Callable[[float], Awaitable[Answer]]) -> None:
    version, _ = await model(0.0)
    if version != "v0":
        await trio.sleep_forever()


async def test_a_model_with_a_failing_probe_is_not_taken(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf, probe=fails)
    with pytest.raises(SwapFailedError, match=r"v1 was not taken, and v0 serves on.*wrong") as caught:
        await models.ask(Swap(shelf.opening("v1"), "v1"))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert await models.ask(Submit(0.0)) == ("v0", 0.0)
    assert (shelf.loaded, shelf.closed) == (["v0"], ["v1"])
    found = await statistics(models)
    assert (found.failed_swaps, found.swaps, found.next, found.previous) == (1, 0, None, None)


async def test_a_model_that_cannot_be_loaded(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf)
    with pytest.raises(SwapFailedError, match="no such file"):
        await models.ask(Swap(shelf.opening("v1", bad=FileNotFoundError("no such file")), "v1"))
    assert await models.ask(Submit(0.0)) == ("v0", 0.0)
    assert shelf.loaded == ["v0"]


async def test_a_probe_that_hangs_ends_with_the_deadline_of_the_swap(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf, probe=hangs)
    with trio.move_on_after(5) as scope:
        await models.ask(Swap(shelf.opening("v1"), "v1"))
    assert scope.cancelled_caught
    await wait_all_tasks_blocked()
    assert shelf.loaded == ["v0"]
    assert await models.ask(Submit(1.0)) == ("v0", 1.0)
    assert (await statistics(models)).failed_swaps == 1


@pytest.mark.parametrize("seconds", [0.5, 1.5])
async def test_a_cancelled_swap(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock, seconds: float
) -> None:
    """Before the switch nothing has changed; afterwards, the new model serves."""
    models = await spawn(system, shelf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, Submit(9.0))
        await wait_all_tasks_blocked()
        with trio.move_on_after(seconds):
            await models.ask(Swap(shelf.opening("v1", loading=1.0), "v1"))
        expected = "v0" if seconds < 1 else "v1"
        assert (await models.ask(Submit(0.0)))[0] == expected
    await trio.sleep(20)
    assert shelf.loaded == [expected]


async def test_a_second_swap_is_refused_while_one_is_under_way(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf)
    done: list[Swapped] = []

    async def swap() -> None:
        done.append(await models.ask(Swap(shelf.opening("v1", loading=1.0), "v1")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, Submit(3.0))
        nursery.start_soon(swap)
        await trio.sleep(0.5)
        with pytest.raises(SwapFailedError, match="v2 was not loaded: v1 is being loaded"):
            await models.ask(Swap(shelf.opening("v2"), "v2"))
        await trio.sleep(1.0)
        with pytest.raises(SwapFailedError, match=r"v0 has 1 requests? left and is not closed yet"):
            await models.ask(Swap(shelf.opening("v2"), "v2"))
    assert [one.version for one in done] == ["v1"]
    assert (await models.ask(Swap(shelf.opening("v2"), "v2"))).previous == "v1"
    assert shelf.most == 2


async def test_an_old_model_that_hangs_makes_room_in_time(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf, drain_for=2.0)
    errors: list[BaseException] = []

    async def ask() -> None:
        try:
            await models.ask(Submit(1e6))
        except ModelRetiredError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        done = await models.ask(Swap(shelf.opening("v1"), "v1"))
        assert done.drain_time == pytest.approx(2.0)
    assert "v0 was replaced" in str(errors[0])
    assert shelf.loaded == ["v1"]
    assert (await statistics(models)).retired == 1


async def test_after_a_restart_the_model_of_the_last_swap_serves(system: ta.System, shelf: Shelf) -> None:
    models: ta.Ref[Crashing] = await system.spawn(Crashing, shelf.deployment(), name="models")
    await models.ask(Swap(shelf.opening("v1"), "v1"))
    await models.tell(Crash())
    while system.tree().find("test/models").restarts == 0:  # noqa: ASYNC110  # nobody is told
        await trio.sleep(0.001)
    assert await models.ask(Submit(0.0)) == ("v1", 0.0)
    assert shelf.loaded == ["v1"]


async def test_a_pending_call_at_a_restart_does_not_reach_the_closed_model(
    shelf: Shelf, autojump_clock: MockClock
) -> None:
    late: list[Answer] = []

    class Begun(list[Answer]):
        def append(self, answer: Answer) -> None:
            if answer[0] not in shelf.loaded:
                late.append(answer)

    shelf.begun = Begun()
    together = ta.SystemOptions(strategy=Strategy.ONE_FOR_ALL)
    async with ta.open_system("test", options=together) as system:
        sibling: Models = await system.spawn(Crashing, Shelf().deployment(), name="sibling")
        models = await spawn(system, shelf)

        async def ask() -> None:
            with suppress(ta.ActorFailedError, ta.ActorRestartingError):
                await models.ask(Submit(0.0))

        # The order in which Trio runs tasks is random.
        for _ in range(50):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sibling.tell, Crash())
                for _ in range(20):
                    nursery.start_soon(ask)
                    await trio.lowlevel.checkpoint()
            await trio.sleep(10)
    assert not late


async def test_a_model_is_loaded_again_if_its_context_ends_on_its_own(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    @asynccontextmanager
    async def short() -> AsyncGenerator[Callable[[float], Awaitable[Answer]], None]:
        # A limit for loading that holds for the model's life too.
        with trio.move_on_after(5):
            async with shelf.opening("v0")() as model:
                yield model

    models: Models = await system.spawn(HotSwap, Deployment(short, "v0"), name="models")
    await trio.sleep(7)
    assert await models.ask(Submit(0.0)) == ("v0", 0.0)
    assert shelf.loaded == ["v0"]
    assert system.tree().find("test/models").restarts >= 1


async def test_a_drain_answers_accepted_requests(
    system: ta.System, shelf: Shelf, autojump_clock: MockClock
) -> None:
    models = await spawn(system, shelf)
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await models.ask(Submit(2.0)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        await models.stop(drain=True)
    assert answers == [("v0", 2.0)]
    assert shelf.loaded == []


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Deployment(None), "opening must be a function"),  # type: ignore[arg-type]
        (lambda: Swap("model", "v1"), "opening must be a function"),  # type: ignore[arg-type]
        (lambda: HotSwap(None), "HotSwap: deployment must be Deployment\\(opening\\), .* got None"),  # type: ignore[arg-type]
        (lambda: HotSwap(Deployment(Shelf().opening("a")), probe=3), "probe must be"),  # type: ignore[arg-type]
    ],
)
def test_senseless_arguments_are_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        make()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_to_drain_that_makes_no_sense(seconds: float) -> None:
    with pytest.raises(ValueError, match="drain_for"):
        HotSwap(Deployment(Shelf().opening("a")), drain_for=seconds)


async def test_a_first_model_that_fails_its_probe_is_an_error_of_spawn(
    system: ta.System, shelf: Shelf
) -> None:
    async def refuses(model: Callable[[float], Awaitable[Answer]]) -> None:
        raise ArithmeticError("none is good")

    with pytest.raises(ArithmeticError, match="none is good"):
        await spawn(system, shelf, probe=refuses)
    assert shelf.loaded == []


class Scale:
    """A program: its weights are an array of the device."""

    def __init__(self, weights: ta.programs.Array) -> None:
        self.weights = weights

    def apply(self, x: ta.programs.Array) -> ta.programs.Array:
        return self.weights * x


@pytest.mark.slow
async def test_weights_are_replaced_on_a_device_with_a_lost_worker(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=2)
    async with system.open_device("cpu", options=options) as device:

        def opening(factor: float) -> Callable[[], AbstractAsyncContextManager[Any]]:
            @asynccontextmanager
            async def load() -> AsyncGenerator[Callable[[Any], Awaitable[Any]], None]:
                weights = await device.put(np.full(3, factor))
                async with ta.open_program(device, Scale, weights) as program:

                    async def model(item: Any) -> Any:
                        return await (await program.ask(Scale.apply, item)).to_host()

                    yield model

            return load

        models: ta.Ref[HotSwap[Any, Any]] = await system.spawn(
            HotSwap[Any, Any], Deployment(opening(2.0), "two"), name="models"
        )
        x = np.arange(3.0)
        for factor in (3.0, 4.0):
            ta.testing.inject_fault(device, ta.linalg.Scal, kill=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(models.ask, Swap(opening(factor), str(factor)))
                with pytest.raises(ta.AccelError):
                    await ta.linalg.scal(2.0, await device.put(np.ones(3)))
            np.testing.assert_array_equal(await models.ask(Submit(x)), factor * x)
        assert device.generation == 3
        await models.stop()
        # The weights of all models are given back.
        await device.synchronize()
        assert (await device.statistics()).memory.used == 0

"""The batcher: errors of a model, limits, overflow, and its end. Composition: test_batcher_model."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable

import attrs
import numpy as np
import outcome
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    Batcher,
    BatcherStatistics,
    GetStatistics,
    ModelOutputError,
    Submit,
    SubmitActor,
    is_request_error,
)

BatchModel = Callable[[list[int]], Awaitable[object]]


class Doubler:
    """A model that notes its calls, and can be made to fail for some items."""

    def __init__(self, fails: Callable[[list[int]], Exception | None] = lambda items: None) -> None:
        self.calls: list[list[int]] = []
        self.fails = fails
        self.seconds = 1.0

    async def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        # clock: a mock clock of the caller, or work of any duration
        await trio.sleep(self.seconds)
        error = self.fails(items)
        if error is not None:
            raise error
        return [2 * item for item in items]


async def ask_all(batcher: ta.Ref[Batcher[int, object]], items: list[int]) -> list[object]:
    """Ask for several items at once: the results, or the errors."""
    results: dict[int, object] = {}

    async def ask(item: int) -> None:
        result = await outcome.acapture(batcher.ask, Submit(item))
        results[item] = result.error if isinstance(result, outcome.Error) else result.value

    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(ask, item)
            # In this order: Trio shuffles tasks.
            await trio.testing.wait_all_tasks_blocked()
    return [results[item] for item in items]


async def count(batcher: ta.Ref[Batcher[int, object]]) -> BatcherStatistics:
    statistics: BatcherStatistics = await batcher.ask(GetStatistics())
    seen = statistics
    assert seen.requests == (
        seen.waiting + seen.in_flight + seen.answered + seen.failed + seen.cancelled + seen.refused
    )
    return seen


async def spawn(system: ta.System, model: object, **options: object) -> ta.Ref[Batcher[int, object]]:
    options = {"max_size": 8, "max_wait": 1.0, "adaptive": False, "name": "batcher", **options}
    ref: ta.Ref[Batcher[int, object]] = await system.spawn(Batcher, model, **options)  # type: ignore[arg-type]
    return ref


async def test_calls_go_through_the_model_together(system: ta.System, autojump_clock: MockClock) -> None:
    model = Doubler()
    batcher = await spawn(system, model)
    assert await ask_all(batcher, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [*range(2, 21, 2)]
    assert model.calls == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10]]
    statistics = await count(batcher)
    assert (statistics.batches, statistics.batched, statistics.launches) == (2, 10, 2)


async def test_a_batch_waits_for_as_many_as_came_before(system: ta.System, autojump_clock: MockClock) -> None:
    batcher = await spawn(system, Doubler(), max_in_flight=1, adaptive=True)

    async def seconds(count: int) -> float:
        start = trio.current_time()
        await ask_all(batcher, [*range(count)])
        return trio.current_time() - start - 1.0

    # Alone, again and again; then five at once, of which four meet a batch that runs.
    assert [await seconds(1) for _ in range(3)] == pytest.approx([0, 0, 0])
    assert await seconds(5) == pytest.approx(1)
    assert (await count(batcher)).last_size == 4
    # As many as before: at once. Then fewer, which wait for more in vain, once.
    assert [await seconds(size) for size in (4, 4, 2, 2)] == pytest.approx([0, 0, 1, 0])
    other = await spawn(system, Doubler(), name="patient")
    for item in range(3):
        start = trio.current_time()
        await other.ask(Submit(item))
        assert trio.current_time() - start == pytest.approx(2.0)
        await trio.sleep(5)


async def test_only_the_bad_call_fails(system: ta.System, autojump_clock: MockClock) -> None:
    model = Doubler(lambda items: OSError(f"no {max(items)}") if 5 in items else None)
    batcher = await spawn(system, model)
    *others, bad = await ask_all(batcher, [0, 1, 2, 3, 4, 6, 7, 5])
    assert others == [0, 2, 4, 6, 8, 12, 14]
    assert isinstance(bad, OSError)
    assert str(bad) == "no 5"
    # The batch, and two halves at each of three steps.
    assert len(model.calls) == 1 + 2 * 3
    assert (await count(batcher)).failed == 1


@pytest.mark.parametrize("splits", [0, 1, 2])
async def test_a_model_that_always_fails_is_called_a_few_times(
    system: ta.System, autojump_clock: MockClock, splits: int
) -> None:
    model = Doubler(lambda items: OSError(f"no {items}"))
    batcher = await spawn(system, model, splits=splits)
    errors = await ask_all(batcher, [*range(8)])
    assert len(model.calls) == {0: 1, 1: 3, 2: 7}[splits]
    parts = {0: [[*range(8)]], 1: [[0, 1, 2, 3], [4, 5, 6, 7]], 2: [[0, 1], [2, 3], [4, 5], [6, 7]]}[splits]
    assert [str(error) for error in errors] == [f"no {part}" for part in parts for _ in part]
    # Each caller has an exception of its own: the traceback belongs to its task.
    assert len({id(error) for error in errors}) == 8


async def test_only_the_bad_calls_in_one_half_fail(system: ta.System, autojump_clock: MockClock) -> None:
    batcher = await spawn(system, Doubler(lambda items: OSError() if {4, 7} & {*items} else None))
    results = await ask_all(batcher, [*range(8)])
    assert [isinstance(result, OSError) for result in results] == [item in (4, 7) for item in range(8)]
    assert [result for result in results if not isinstance(result, OSError)] == [0, 2, 4, 6, 10, 12]


def _losses() -> list[Exception]:
    poisoned = ta.ContextPoisonedError("lost", device="cpu:0")
    return [
        poisoned,
        ta.DeviceLostError("gone", device="cpu:0"),
        ta.CompletionTimeoutError("hung", device="cpu:0"),
        ta.QueueFullError("full", device="cpu:0"),
        ta.ActorFailedError("crashed", path="demo/model"),
        ta.ActorStoppedError("stopped", path="demo/model"),
        ExceptionGroup("several", [OSError("first"), poisoned]),
    ]


@pytest.mark.parametrize("loss", _losses(), ids=lambda loss: type(loss).__name__)
async def test_a_loss_is_blamed_on_nobody_and_nothing_runs_again(
    system: ta.System, autojump_clock: MockClock, loss: Exception
) -> None:
    model = Doubler(lambda items: loss if len(model.calls) == 1 else None)
    batcher = await spawn(system, model)
    errors = await ask_all(batcher, [1, 2, 3])
    assert [type(error) for error in errors] == [type(loss)] * 3
    assert [str(error) for error in errors] == [str(loss)] * 3
    assert model.calls == [[1, 2, 3]]
    assert await ask_all(batcher, [4]) == [8]


async def test_a_batch_to_blame_for_a_loss_is_halved(system: ta.System, autojump_clock: MockClock) -> None:
    """Once; then on, where a part of it has succeeded."""

    def lost(bad: set[int]) -> Doubler:
        blamed = ta.ContextPoisonedError("lost", device="cpu:0", is_to_blame=True)
        return Doubler(lambda items: blamed if bad & {*items} else None)

    one, two = lost({5}), lost({2, 5})
    results = await ask_all(await spawn(system, one), [*range(8)])
    assert isinstance(results.pop(5), ta.ContextPoisonedError)
    assert results == [0, 2, 4, 6, 8, 12, 14]
    assert len(one.calls) == 1 + 2 * 3
    # A bad call in each half: the model may be broken.
    errors = await ask_all(await spawn(system, two, name="two"), [*range(8)])
    assert [type(error) for error in errors] == [ta.ContextPoisonedError] * 8
    assert two.calls == [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("splits", [0, 1])
async def test_a_refused_batch_is_halved_to_the_end(
    system: ta.System, autojump_clock: MockClock, splits: int
) -> None:
    bad = {0, 3, 4, 7}
    model = Doubler(lambda items: ta.programs.Refused(f"no {items}") if bad & {*items} else None)
    results = await ask_all(await spawn(system, model, splits=splits), [*range(8)])
    if not splits:
        assert [str(result) for result in results] == ["no [0, 1, 2, 3, 4, 5, 6, 7]"] * 8
        return
    assert {item for item in range(8) if isinstance(results[item], ta.programs.Refused)} == bad
    assert [results[number] for number in (1, 2, 5, 6)] == [2, 4, 10, 12]


async def test_the_program_names_the_divisible_failures(system: ta.System, autojump_clock: MockClock) -> None:
    model = Doubler(lambda items: ValueError("bad") if 2 in items else None)

    def no_value_error(error: Exception) -> bool:
        return not isinstance(error, ValueError)

    batcher = await spawn(system, model, divides=no_value_error)
    assert [type(error) for error in await ask_all(batcher, [1, 2])] == [ValueError, ValueError]

    def broken(error: Exception) -> bool:
        raise OSError("divides is broken")

    other = await spawn(system, model, divides=broken, name="other")
    errors = await ask_all(other, [1, 2])
    assert [type(error) for error in errors] == [ValueError, ValueError]
    assert isinstance(errors[0], ValueError)
    assert "divides is broken" in errors[0].__notes__[0]
    assert is_request_error(ta.OutOfMemoryError("full", device="cpu:0", requested=2, free=1, total=1))


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1], "1 result"),
        ([1, 2, 3], "3 result"),
        ([], "0 result"),
        (None, "NoneType"),
        (7, "int"),
        ({0: 1, 1: 2}, "dict"),
        ({1, 2}, "set"),
        ("ab", "str"),
        ((number for number in range(2)), "generator"),
        (np.float64(3.0), "float64"),
        (np.array(3.0), "ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_invalid_results(
    system: ta.System, autojump_clock: MockClock, returned: object, text: str
) -> None:
    calls: list[int] = []

    async def model(items: list[int]) -> object:
        calls.append(len(items))
        return returned

    batcher = await spawn(system, model)
    errors = await ask_all(batcher, [1, 2])
    assert [type(error) for error in errors] == [ModelOutputError] * 2
    assert all(f"the model returned {text}" in str(error) for error in errors)
    assert calls == [2]


async def test_sequences_arrays_and_errors_in_their_place_are_results(
    system: ta.System, autojump_clock: MockClock
) -> None:
    answers: list[object] = [(1, 2), np.array([[1.0, 2.0], [3.0, 4.0]]), [outcome.Error(OSError("bad")), 5]]
    calls: list[int] = []

    async def model(items: list[int]) -> object:
        calls.append(len(items))
        return answers[len(calls) - 1]

    batcher = await spawn(system, model)
    assert await ask_all(batcher, [1, 2]) == [1, 2]
    first, second = await ask_all(batcher, [1, 2])
    np.testing.assert_array_equal([first, second], answers[1])  # type: ignore[arg-type]
    error, value = await ask_all(batcher, [1, 2])
    assert (str(error), value) == ("bad", 5)
    assert isinstance(error, OSError)
    assert calls == [2, 2, 2]


async def test_an_error_that_cannot_be_copied_is_shared(system: ta.System, autojump_clock: MockClock) -> None:
    class OddError(Exception):
        def __init__(self, one: int, *, two: int) -> None:
            super().__init__(one, two)

    batcher = await spawn(system, Doubler(lambda items: OddError(1, two=2)), splits=0)
    assert [type(error) for error in await ask_all(batcher, [1, 2])] == [OddError, OddError]


async def test_a_model_that_hangs_keeps_its_place_until_its_askers_go(
    system: ta.System, autojump_clock: MockClock
) -> None:
    ended: list[float] = []

    async def model(items: list[int]) -> list[int]:
        if items != [3]:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(trio.current_time())
        return items

    batcher = await spawn(system, model, max_size=2, max_in_flight=2)
    start = trio.current_time()

    async def impatient(item: int, seconds: float) -> None:
        with trio.move_on_after(seconds) as scope:
            await batcher.ask(Submit(item))
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(start + seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(impatient, 1, 10)
        nursery.start_soon(impatient, 2, 20)
        await wait_all_tasks_blocked()
        # The other place is free.
        assert await batcher.ask(Submit(3)) == 3
    assert ended == pytest.approx([start + 20])
    statistics = await count(batcher)
    assert (statistics.cancelled, statistics.answered, statistics.batches_running) == (2, 1, 0)


async def test_a_cancelled_model_has_no_results(system: ta.System, autojump_clock: MockClock) -> None:
    async def model(items: list[int]) -> object:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.cancel()
            await trio.sleep(1)
            return items  # noqa: ASYNC121  # it is never reached

    async def late(items: list[int]) -> object:
        with trio.fail_after(1):
            await trio.sleep_forever()

    batcher = await spawn(system, model)
    assert [type(error) for error in await ask_all(batcher, [1, 2])] == [ModelOutputError] * 2
    other = await spawn(system, late, name="late")
    assert [type(error) for error in await ask_all(other, [1, 2])] == [trio.TooSlowError] * 2


async def test_a_model_that_fails_and_is_cancelled_at_once_costs_other_batches_nothing(
    system: ta.System, autojump_clock: MockClock
) -> None:
    calls: list[list[int]] = []

    async def fails_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cannot be closed")

    async def model(items: list[int]) -> object:
        calls.append(items)
        if 0 not in items:
            await trio.sleep(2)
            return items
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_at_the_end)
            nursery.start_soon(trio.sleep_forever)
        return None

    batcher = await spawn(system, model, max_size=1)
    results: list[object] = []

    async def ask_others() -> None:
        results.extend(await ask_all(batcher, [1]))

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(1):
            nursery.start_soon(ask_others)
            await ask_all(batcher, [0])
    assert results == [1]
    assert sorted(calls) == [[0], [1]]
    statistics = await batcher.ask(GetStatistics())
    assert (statistics.requests, statistics.answered, statistics.cancelled) == (2, 1, 1)


class Stop(BaseException):
    """An exception outside `Exception` ends the program, as everywhere in Trio."""


def test_a_base_exception_ends_the_system(autojump_clock: MockClock) -> None:
    async def model(items: list[int]) -> object:
        raise Stop

    seen: list[object] = []

    async def main() -> None:
        async with ta.open_system("demo") as system:
            batcher = await spawn(system, model)
            try:
                await batcher.ask(Submit(1))
            except BaseException as error:
                seen.append(error)
                raise

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: ASYNC401  # it may be nested
        trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)
    assert caught.group_contains(Stop)
    assert len(seen) == 1


async def test_only_an_item_that_fits_into_no_batch_fails(
    system: ta.System, autojump_clock: MockClock
) -> None:
    def cost(item: int) -> float:
        if item == 4:
            raise LookupError("no such item")
        return {5: 11.0, 6: math.nan, 7: -1.0, 8: math.inf}.get(item, 4.0)

    model = Doubler()
    batcher = await spawn(system, model, cost=cost, max_cost=10.0)
    results = await ask_all(batcher, [*range(1, 10)])
    assert results[:3] == [2, 4, 6]
    assert results[8] == 18
    assert [type(error) for error in results[3:8]] == [LookupError, *[ValueError] * 4]
    assert "costs 11, and there are at most 10 at once" in str(results[4])
    assert sorted(map(sorted, model.calls)) == [[1, 2], [3, 9]]
    assert (await count(batcher)).refused == 5


class Incomparable:
    """A key with a hash but without comparisons, like the tensors of some libraries."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise OSError("ambiguous")


async def test_only_incomparable_keys_fail(system: ta.System, autojump_clock: MockClock) -> None:
    batcher = await spawn(system, Doubler(), max_size=4, bucket=Incomparable, adaptive=False)
    first, second = await ask_all(batcher, [1, 2])
    assert first == 2
    assert isinstance(second, OSError)
    assert system.tree().find(batcher.path).restarts == 0
    seen = await count(batcher)
    assert (seen.answered, seen.refused) == (1, 1)


async def test_buckets_are_never_mixed_and_a_bad_key_fails_only_itself(
    system: ta.System, autojump_clock: MockClock
) -> None:
    model = Doubler()

    def key(item: int) -> object:
        return [] if item == 9 else item % 2

    batcher = await spawn(system, model, bucket=key)
    results = await ask_all(batcher, [1, 2, 3, 9, 4])
    assert results[:3] == [2, 4, 6]
    assert isinstance(results[3], TypeError)
    assert results[4] == 8
    assert model.calls == [[1, 3], [2, 4]]


async def test_requests_beyond_the_queue(system: ta.System, autojump_clock: MockClock) -> None:
    model = Doubler()
    batcher = await spawn(system, model, max_size=2, max_in_flight=1, capacity=2)
    # Two run, two wait, one is too many.
    results = dict(zip([1, 2, 3, 4, 5], await ask_all(batcher, [1, 2, 3, 4, 5]), strict=True))
    assert isinstance(results.pop(5), ta.MailboxFullError)
    assert results == {item: 2 * item for item in results}
    assert (await count(batcher)).refused == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_size": 0}, ValueError, "max_size must be at least 1, got 0"),
        ({"max_size": True}, TypeError, "max_size"),
        ({"max_size": 2.0}, TypeError, "max_size"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight"),
        ({"splits": -1}, ValueError, "splits"),
        ({"max_wait": -1}, ValueError, "max_wait must be a finite number of at least 0, got -1"),
        ({"max_wait": "soon"}, TypeError, "max_wait must be a number"),
        ({"max_wait": math.nan}, ValueError, "max_wait"),
        ({"max_wait": math.inf}, ValueError, "max_wait"),
        ({"max_cost": 3}, ValueError, "go together"),
        ({"cost": len}, ValueError, "go together"),
        ({"cost": len, "max_cost": 0}, ValueError, "max_cost must be a finite number above 0"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"model": None}, TypeError, "a model is an async callable"),
    ],
)
async def test_options_that_make_no_sense(
    system: ta.System, options: dict[str, object], error: type[Exception], text: str
) -> None:
    given = {"model": Doubler(), **options}
    with pytest.raises(error, match=text):
        await spawn(system, **given)


class Rows(SubmitActor[list[int], list[int]]):
    """An actor that serves batches."""

    async def call(self, item: list[int]) -> list[int]:
        await trio.sleep(1)
        return [3 * one for one in item]


async def test_submit_actors_are_models_and_a_batcher_is_one(
    system: ta.System, autojump_clock: MockClock
) -> None:
    rows = await system.spawn(Rows, name="rows")
    batcher = await spawn(system, rows)
    ask = ta.patterns.as_callable(batcher)
    results: list[object] = []

    async def one(item: int) -> None:
        results.append(await ask(item))

    async with trio.open_nursery() as nursery:
        for item in (1, 2):
            nursery.start_soon(one, item)
    assert sorted(results) == [3, 6]  # type: ignore[type-var]
    await rows.stop()
    assert [type(error) for error in await ask_all(batcher, [1, 2])] == [ta.ActorStoppedError] * 2


async def test_a_drain_answers_all_and_a_stop_answers_none(
    system: ta.System, autojump_clock: MockClock
) -> None:
    for drain in (True, False):
        model = Doubler()
        batcher = await spawn(system, model, max_size=2, max_in_flight=1, name=f"drained {drain}")
        results: list[object] = []
        async with trio.open_nursery() as nursery:

            async def keep(batcher: ta.Ref[Batcher[int, object]], results: list[object]) -> None:
                results += await ask_all(batcher, [1, 2, 3])

            nursery.start_soon(keep, batcher, results)
            await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            await trio.sleep(0.5)
            await batcher.stop(drain=drain)
        if drain:
            assert results == [2, 4, 6]
        else:
            # The third one was in no batch yet.
            assert [type(error) for error in results] == [ta.ActorFailedError] * 2 + [ta.ActorStoppedError]


@attrs.frozen
class Fall(ta.Message["Sibling"]):
    """Crash."""


class Sibling(ta.Actor):
    """Takes the others with it."""

    @ta.handles(Fall)
    async def fall(self, message: Fall) -> None:
        raise OSError("a crash")


async def test_calls_do_not_hang_when_the_incarnation_is_replaced(autojump_clock: MockClock) -> None:
    options = ta.SystemOptions(strategy=ta.Strategy.ONE_FOR_ALL)
    async with ta.open_system("demo", options=options) as system:
        batcher = await spawn(system, Doubler(), max_size=2, max_in_flight=1)
        sibling = await system.spawn(Sibling, name="sibling")
        results: list[object] = []
        async with trio.open_nursery() as nursery:

            async def keep() -> None:
                results.extend(await ask_all(batcher, [1, 2, 3]))

            nursery.start_soon(keep)
            await trio.sleep(0.5)
            await sibling.tell(Fall())
        assert [type(error) for error in results] == [ta.ActorFailedError] * 2 + [ta.ActorRestartingError]
        assert await ask_all(batcher, [4, 5]) == [8, 10]


async def test_there_is_one_timer_at_most(system: ta.System, autojump_clock: MockClock) -> None:
    def timers() -> int:
        scopes = [scope for scope in gc.get_objects() if type(scope) is trio.CancelScope]
        return sum(scope._registered_deadline < math.inf for scope in scopes)

    model = Doubler()
    model.seconds = math.inf  # sleeps, and has no deadline
    batcher = await spawn(system, model, max_in_flight=4, bucket=int)
    assert timers() == 0
    async with trio.open_nursery() as nursery:
        for item in range(20):
            nursery.start_soon(batcher.ask, Submit(item))
        await wait_all_tasks_blocked()
        assert timers() == 1
        # All places are taken: there is nothing to wait for but the model.
        await trio.sleep(10)
        assert timers() == 0
        assert (await count(batcher)).batches_running == 4
        nursery.cancel_scope.cancel()
    assert timers() == 0
    assert (await count(batcher)).cancelled == 20

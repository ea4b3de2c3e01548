"""Sources of batches that several calls of `steps` share: each batch is used once, and in order."""

from __future__ import annotations

import gc
import io
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
import trio
import trio.testing
from test_trainer import config
from tqdm.asyncio import tqdm
from train_models import CallMlp, batches

import trio_accel as ta
from trio_accel import train

GIVEN = list(itertools.islice(batches(8), 14))
INLINE = ta.DeviceOptions(isolation="inline")


@asynccontextmanager
async def opened(**changes: Any) -> AsyncGenerator[train.Trainer, None]:
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"], options=INLINE) as devices,
        train.open_trainer(devices, CallMlp, config(**changes), width=3) as trainer,
    ):
        yield trainer


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """The losses of a training with one list of batches."""

    async def main() -> list[float]:
        async with opened() as trainer:
            return [step.loss async for step in trainer.steps(GIVEN)]

    return trio.run(main)


class Loader:
    """An iterable with one iterator for all calls of `iter`."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


class Own:
    """An iterator by its methods."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> Any:
        if self.number == len(GIVEN):
            raise StopIteration
        self.number += 1
        return GIVEN[self.number - 1]


class AsyncOwn:
    """An async iterator by its methods, which takes some turns of the loop."""

    def __init__(self) -> None:
        self.own = Own()

    def __aiter__(self) -> AsyncOwn:
        return self

    async def __anext__(self) -> Any:
        for batch in self.own:
            await trio.lowlevel.checkpoint()
            return batch
        raise StopAsyncIteration


async def produced() -> AsyncGenerator[Any, None]:
    for batch in GIVEN:
        with trio.CancelScope():
            await trio.lowlevel.checkpoint()
        yield batch


def received() -> Any:
    send, receive = trio.open_memory_channel[Any](len(GIVEN))
    for batch in GIVEN:
        send.send_nowait(batch)
    send.close()
    return receive


def from_function() -> Callable[[int], Any]:
    iterator = iter(GIVEN)
    return lambda first: iterator


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: GIVEN,
    "function": lambda: lambda first: GIVEN[first:],
    "function with one iterator": from_function,
    "iterator": lambda: iter(GIVEN),
    "generator": lambda: (batch for batch in GIVEN),
    "map": lambda: map(dict, GIVEN),
    "islice": lambda: itertools.islice(itertools.cycle(GIVEN), len(GIVEN)),
    "own": Own,
    "loader of an iterator": lambda: Loader(iter(GIVEN)),
    "loader of a generator": lambda: Loader(batch for batch in GIVEN),
    "async": AsyncOwn,
    "async generator": produced,
    "channel": received,
}


async def to_the_end(trainer: train.Trainer, source: Any, until: int) -> list[float]:
    return [step.loss async for step in trainer.steps(source, until=until)]


async def taken(trainer: train.Trainer, source: Any, found: list[float]) -> None:
    """Add the losses of steps until there is an error."""
    async for step in trainer.steps(source):
        found.append(step.loss)  # noqa: PERF401  # those before the error are wanted


async def with_a_break(trainer: train.Trainer, source: Any, until: int) -> list[float]:
    found: list[float] = []
    async for step in trainer.steps(source):
        found.append(step.loss)
        if step.number == until:
            break
    # Batches fetched in advance are ready.
    await trio.testing.wait_all_tasks_blocked(0.001)
    return found


async def with_an_error(trainer: train.Trainer, source: Any, until: int) -> list[float]:
    """The last step fails before it is committed."""
    found: list[float] = []
    compute = trainer._replicas.compute

    async def failing(works: Any) -> Any:
        if works[0].number == until + 1:
            raise ArithmeticError("once")
        return await compute(works)

    trainer._replicas.compute = failing  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="once"):
        await taken(trainer, source, found)
    trainer._replicas.compute = compute  # type: ignore[method-assign]
    return found


async def with_a_cancellation(trainer: train.Trainer, source: Any, until: int) -> list[float]:
    found: list[float] = []
    compute = trainer._replicas.compute
    with trio.CancelScope() as scope:

        async def cancelled(works: Any) -> Any:
            if works[0].number == until + 1:
                scope.cancel()
            return await compute(works)

        trainer._replicas.compute = cancelled  # type: ignore[method-assign]
        await taken(trainer, source, found)
    trainer._replicas.compute = compute  # type: ignore[method-assign]
    return found


ENDS = [to_the_end, with_a_break, with_an_error, with_a_cancellation]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", SOURCES)
async def test_each_batch_is_used_once_and_in_order(losses: list[float], kind: str, end: Any) -> None:
    found: list[float] = []
    source = SOURCES[kind]()
    async with opened() as trainer:
        for until in (3, 4, 9):
            found += await end(trainer, source, until)
        found += await to_the_end(trainer, source, 20)
        assert trainer.progress.batches == len(GIVEN)
    np.testing.assert_array_equal(found, losses)


async def test_several_sources_in_turn(losses: list[float]) -> None:
    """Each begins with the first batch of the training, and batches that others gave are left out of it."""
    one, two, found = iter(GIVEN), (batch for batch in GIVEN), list[float]()
    async with opened() as trainer:
        for number, source in enumerate((one, two, GIVEN, one, two, iter(GIVEN), one)):
            found += await to_the_end(trainer, source, 2 * number + 2)
    np.testing.assert_array_equal(found, losses)


async def test_nothing_is_fetched_in_advance_of_the_last_step(losses: list[float]) -> None:
    source = Own()
    async with opened() as trainer:
        assert await to_the_end(trainer, source, 5) == losses[:5]
        assert source.number == 5
        assert await to_the_end(trainer, source, 5) == []
        assert source.number == 5


class Stumbling(Own):
    """It raises once before some batches."""

    def __next__(self) -> Any:
        stumbles = self.number in (0, 3, 4) and not hasattr(self, f"was_{self.number}")
        if stumbles:
            setattr(self, f"was_{self.number}", True)
            raise ConnectionError(f"before {self.number}")
        return super().__next__()


async def test_an_iterator_raises_and_continues(losses: list[float]) -> None:
    source, found = Stumbling(), list[float]()
    async with opened() as trainer:
        for number in (0, 3, 4):
            with pytest.raises(ConnectionError, match=f"before {number}"):
                await taken(trainer, source, found)
            assert trainer.progress.batches == len(found) == number
        found += await to_the_end(trainer, source, 20)
    np.testing.assert_array_equal(found, losses)


async def test_a_training_that_stops_at_a_batch_has_not_used_it() -> None:
    given = [
        {**batch, "x": batch["x"] * (np.nan if number == 2 else 1)} for number, batch in enumerate(GIVEN)
    ]
    for source in (given, iter(given)):
        async with opened(on_nan="stop") as trainer:
            for _ in range(2):
                assert len(await to_the_end(trainer, source, 9)) in (0, 2)
            assert trainer.progress.batches == 2


async def test_an_iterator_after_a_checkpoint(losses: list[float], tmp_path: Path) -> None:
    saved = train.Checkpoint(tmp_path, every=4)
    async with opened(checkpoint=saved) as trainer:
        await to_the_end(trainer, GIVEN, 4)
    source = iter(GIVEN)
    async with opened(checkpoint=saved) as trainer:
        assert await to_the_end(trainer, source, 6) == losses[4:6]
        assert await to_the_end(trainer, source, 20) == losses[6:]


async def test_generators_that_nobody_else_keeps_end() -> None:
    ended: list[int] = []

    def made(number: int) -> Iterator[Any]:
        try:
            yield from GIVEN
        finally:
            ended.append(number)

    async with opened() as trainer:
        for number in range(3):
            await to_the_end(trainer, made(number), number + 1)
        await trio.testing.wait_all_tasks_blocked(0.001)
        gc.collect()
        assert ended == [0, 1, 2]


async def test_two_loops_over_one_iterator(losses: list[float]) -> None:
    source: Any = iter(GIVEN)
    async with opened() as trainer:
        one, two = trainer.steps(source), trainer.steps(source)
        found = [(await anext(each)).loss for _ in range(5) for each in (one, two)]
    assert found == losses[:10]


async def test_data_must_be_iterable() -> None:
    source: Any = 3
    async with opened() as trainer:
        with pytest.raises(TypeError, match="'int' object is not iterable"):
            await anext(trainer.steps(source))


@pytest.mark.parametrize("until", [None, 3])
async def test_steps_report_their_progress(until: int | None) -> None:
    events: list[ta.ProgressEvent] = []
    async with opened() as trainer:
        with ta.watch_progress(events.append):
            steps = [step async for step in trainer.steps(GIVEN[:3], until=until)]
    assert [event.done for event in events] == [1, 2, 3, 3]
    assert {(event.name, event.unit, event.total) for event in events} == {("train", "steps", until)}
    assert [event.is_over for event in events] == [False, False, False, True]
    assert events[0].note.startswith(f"loss {steps[0].loss:.4f}  rate ")


async def test_a_bar_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    console = rich.console.Console(file=io.StringIO(), width=120, force_terminal=True)
    monkeypatch.setattr("rich.progress.get_console", lambda: console)
    async with opened() as trainer:
        losses = [step.loss async for step in trainer.steps(GIVEN[:3], until=3, progress=True)]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/3  steps" in shown
    assert f"loss {losses[-1]:.4f}" in shown
    with ta.track_progress("after it") as report:
        report(1)
    assert console.file.getvalue() == shown  # type: ignore[attr-defined]


async def test_tqdm_wraps_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # it would start a thread
    file = io.StringIO()
    async with opened() as trainer:
        steps = tqdm(trainer.steps(GIVEN[:3], until=3), total=3, desc="steps", file=file)
        assert [step.number async for step in steps] == [1, 2, 3]
    assert "steps: 100%" in file.getvalue()

"""Cascades: which stage answers, and what happens where none can."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    Cascade,
    CascadeAnswer,
    CascadeStatistics,
    GetStatistics,
    ModelOutputError,
    NoAnswerError,
    Stage,
    Submit,
)

Scored = tuple[str, float]


def second(result: Scored) -> float:
    return result[1]


def saying(text: str, confidence: float) -> Callable[[str], Awaitable[Scored]]:
    async def model(item: str) -> Scored:
        await trio.lowlevel.checkpoint()
        return f"{text} {item}", confidence

    return model


def failing(error: Exception) -> Callable[[str], Awaitable[Scored]]:
    async def model(item: str) -> Scored:
        await trio.lowlevel.checkpoint()
        raise error

    return model


def stage(name: str, confidence: float, threshold: Any = 0.5, **options: Any) -> Stage[str, Scored]:
    return Stage(name, saying(name, confidence), confidence=second, threshold=threshold, **options)


async def ask(system: ta.System, *stages: Stage[str, Scored], **options: Any) -> CascadeAnswer[Scored]:
    cascade = await system.spawn(Cascade, stages, **options)
    return await cascade.ask(Submit("x"))


async def test_the_first_sufficiently_confident_stage_answers(system: ta.System) -> None:
    answer = await ask(system, stage("tiny", 0.3), stage("small", 0.5), stage("large", 0.9))
    assert (answer.result, answer.stage, answer.confidence) == (("small x", 0.5), "small", 0.5)
    assert answer.is_confident
    assert [(one.stage, one.confidence, one.error) for one in answer.declined] == [("tiny", 0.3, None)]


async def test_a_stage_without_confidence_always_answers(system: ta.System) -> None:
    answer = await ask(system, stage("tiny", 0.3), Stage("large", saying("large", 0.0)))
    assert (answer.stage, answer.confidence, answer.is_confident) == ("large", None, True)


async def test_an_error_that_does_not_fall_through_is_the_askers(system: ta.System) -> None:
    error = KeyError("bad item")
    bad = Stage("tiny", failing(error), confidence=second, falls_through=(trio.TooSlowError,))
    with pytest.raises(KeyError) as caught:
        await ask(system, bad, stage("large", 1.0))
    assert caught.value is error


async def test_a_failing_stage_falls_through_if_it_may(system: ta.System) -> None:
    error = trio.TooSlowError()
    bad = Stage("tiny", failing(error), confidence=second, falls_through=(trio.TooSlowError, OSError))
    cascade = await system.spawn(Cascade, [bad, stage("large", 1.0)])
    answer = await cascade.ask(Submit("x"))
    assert answer.stage == "large"
    assert answer.declined[0].error is error
    counted: CascadeStatistics = await cascade.ask(GetStatistics())
    shown = [(one.name, one.begun, one.sure, one.unsure, one.failed) for one in counted.stages]
    assert shown == [("tiny", 1, 0, 0, 1), ("large", 1, 1, 0, 0)]
    assert (counted.begun, counted.answered) == (1, 1)


@pytest.mark.parametrize("value", [math.nan, "high", None, [0.1, 0.2], 10**400])
async def test_a_nan_confidence_is_a_failure_of_the_stage(system: ta.System, value: Any) -> None:
    def confidence(result: Scored) -> float:
        return value

    bad = Stage("tiny", saying("tiny", 1.0), confidence=confidence)
    with pytest.raises(ModelOutputError, match="confidence of stage 'tiny'"):
        await ask(system, bad, stage("large", 1.0))
    allowed = attrs.evolve(bad, falls_through=(ModelOutputError,))
    assert (await ask(system, allowed, stage("large", 1.0))).stage == "large"


@pytest.mark.parametrize(("unsure", "expected"), [("last", "c"), ("best", "a")])
async def test_without_a_confident_stage_one_answers_all_the_same(
    system: ta.System, unsure: str, expected: str
) -> None:
    stages = [stage("a", 0.4), stage("b", 0.1), stage("c", 0.3)]
    broken = Stage("d", failing(OSError()), falls_through=(OSError,))
    answer = await ask(system, *stages, broken, unsure=unsure)
    assert answer.stage == expected
    assert not answer.is_confident
    assert sorted([answer.stage, *(one.stage for one in answer.declined)]) == ["a", "b", "c", "d"]


async def test_or_the_asker_learns_why_none_has(system: ta.System) -> None:
    with pytest.raises(NoAnswerError, match=r"a: confidence 0\.4; b: confidence 0.1") as caught:
        await ask(system, stage("a", 0.4), stage("b", 0.1), unsure="raise")
    assert [one.confidence for one in caught.value.declined] == [0.4, 0.1]


async def test_if_all_have_failed_the_last_error_is_the_cause(system: ta.System) -> None:
    errors = [OSError("one"), OSError("two")]
    stages = [
        Stage(str(n), failing(error), confidence=second, falls_through=(OSError,))
        for n, error in enumerate(errors)
    ]
    with pytest.raises(NoAnswerError, match="0: OSError: one; 1: OSError: two") as caught:
        await ask(system, *stages)
    assert caught.value.__cause__ is errors[1]


async def test_a_slow_stage_holds_up_nobody_else(autojump_clock: MockClock, system: ta.System) -> None:
    async def slow_for_some(item: float) -> float:
        await trio.sleep(item)
        return item

    cascade = await system.spawn(Cascade, [Stage("only", slow_for_some)])
    begun, ends = trio.current_time(), dict[float, float]()

    async def one(seconds: float) -> None:
        await cascade.ask(Submit(seconds))
        ends[seconds] = trio.current_time() - begun

    async with trio.open_nursery() as nursery:
        for seconds in (100.0, 1.0, 10.0):
            nursery.start_soon(one, seconds)
    assert ends == {seconds: pytest.approx(seconds) for seconds in (1.0, 10.0, 100.0)}


async def test_a_slow_stage_makes_way(autojump_clock: MockClock, system: ta.System) -> None:
    async def hangs(item: str) -> Scored:
        with trio.fail_after(5):
            await trio.sleep_forever()
        raise AssertionError

    slow = Stage("tiny", hangs, confidence=second, falls_through=(trio.TooSlowError,))
    begun = trio.current_time()
    assert (await ask(system, slow, stage("large", 1.0))).stage == "large"
    assert trio.current_time() - begun == pytest.approx(5)


async def test_a_threshold_may_be_of_numpy(system: ta.System) -> None:
    answer = await ask(system, stage("tiny", 0.3, np.float32(0.2)), stage("large", 1.0))
    assert answer.stage == "tiny"


async def test_a_cascade_is_a_stage_of_another(system: ta.System) -> None:
    inner = await system.spawn(Cascade, [stage("tiny", 0.2)])

    def confidence(answer: CascadeAnswer[Scored]) -> float:
        return answer.confidence or 0.0

    outer = await system.spawn(Cascade, [Stage("inner", inner, confidence=confidence, threshold=0.1)])
    answer = await outer.ask(Submit("x"))
    assert answer.result.result == ("tiny x", 0.2)


@pytest.mark.parametrize(
    ("stages", "options", "text"),
    [
        ([], {}, "at least one stage"),
        ([stage("a", 0.1), stage("a", 0.1)], {}, "a name of its own"),
        ([Stage("a", saying("a", 0.1)), stage("b", 0.1)], {}, "'a' needs confidence="),
        ([stage("a", 0.1)], {"unsure": "guess"}, "unsure must be one of"),
    ],
)
async def test_an_invalid_cascade_is_refused(
    system: ta.System, stages: list[Stage[str, Scored]], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await system.spawn(Cascade, stages, **options)


async def test_a_bare_model_is_not_a_stage(system: ta.System) -> None:
    stages: Any = [saying("a", 0.1)]
    with pytest.raises(TypeError, match=r"stages must be Stage\(name, model\), got <function"):
        await system.spawn(Cascade, stages)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (("a", 3), {}, TypeError),
        (("a", saying("a", 0.1)), {"confidence": 0.5}, TypeError),
        (("a", saying("a", 0.1)), {"threshold": "high"}, TypeError),
        (("a", saying("a", 0.1)), {"threshold": math.nan}, ValueError),
        (("a", saying("a", 0.1)), {"falls_through": (int,)}, TypeError),
        (("a", saying("a", 0.1)), {"falls_through": OSError}, TypeError),
        (("a", saying("a", 0.1)), {"treshold": 0.5}, TypeError),
    ],
)
def test_an_invalid_stage_is_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"Stage|a model is"):
        Stage(*arguments, **options)


class FallsError(Exception):
    """The errors that every stage of the model below passes on."""


# The outcome of a stage: its confidence; or whether its failure falls through.
behaviours = st.lists(st.floats(0, 1) | st.booleans(), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    behaviours, st.lists(st.floats(0, 1), min_size=5, max_size=5), st.sampled_from(["last", "best", "raise"])
)
def test_it_behaves_like_a_plain_loop(does: list[float | bool], limits: list[float], unsure: str) -> None:
    stages: list[Stage[str, Scored]] = []
    for number, one in enumerate(does):
        error = FallsError() if one is True else OSError()
        model = failing(error) if isinstance(one, bool) else saying(str(number), one)
        stages.append(
            Stage(
                str(number), model, confidence=second, threshold=limits[number], falls_through=(FallsError,)
            )
        )

    async def main() -> object:
        async with ta.open_system("test") as system:
            try:
                return (await ask(system, *stages, unsure=unsure)).stage
            except (OSError, NoAnswerError) as error:
                return type(error)

    assert trio.run(main) == expected(does, limits, unsure)


def expected(does: list[float | bool], limits: list[float], unsure: str) -> object:
    seen: list[tuple[float, int]] = []
    for number, one in enumerate(does):
        if one is False:
            return OSError
        if one is True:
            continue
        if one >= limits[number]:
            return str(number)
        seen.append((one, number))
    if not seen or unsure == "raise":
        return NoAnswerError
    highest = max(confidence for confidence, _ in seen)
    first = next(number for confidence, number in seen if confidence == highest)
    return str(first if unsure == "best" else seen[-1][1])

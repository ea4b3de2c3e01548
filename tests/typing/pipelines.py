"""Refusals of type checkers for pipelines; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import outcome

import trio_accel as ta
from trio_accel.patterns import Batcher, Pipeline, PipelineStage, open_results


async def load(path: Path) -> bytes:
    return path.read_bytes()  # noqa: ASYNC240


async def length(data: bytes) -> int:
    return len(data)


async def half(number: int) -> float:
    return number / 2


class Shown:
    async def __call__(self, number: float) -> str:
        return f"{number}"


async def stages(system: ta.System, batcher: ta.Ref[Batcher[bytes, int]]) -> None:
    assert_type(await system.spawn(Pipeline, load), ta.Ref[Pipeline[Path, bytes]])
    assert_type(await system.spawn(Pipeline, load, length), ta.Ref[Pipeline[Path, int]])
    assert_type(await system.spawn(Pipeline, load, batcher, half), ta.Ref[Pipeline[Path, float]])
    options = PipelineStage(length, workers=2, name="length")
    assert_type(options, PipelineStage[bytes, int])
    pipeline = await system.spawn(Pipeline, load, options, half, Shown(), name="pipeline")
    assert_type(pipeline, ta.Ref[Pipeline[Path, str]])
    inner = await system.spawn(Pipeline, half, Shown())
    assert_type(await system.spawn(Pipeline, load, length, inner), ta.Ref[Pipeline[Path, str]])
    await system.spawn(Pipeline, load, half)  # type: ignore[arg-type]
    await system.spawn(Pipeline, load, options, Shown(), half)  # type: ignore[arg-type]
    await system.spawn(Pipeline, load, batcher, load)  # type: ignore[arg-type]
    await system.spawn(Pipeline[Path, str], load, length)  # type: ignore[arg-type]
    await system.spawn(Pipeline)  # type: ignore[arg-type]
    PipelineStage(length, workers="2")  # type: ignore[arg-type]


async def results(pipeline: ta.Ref[Pipeline[Path, int]], paths: list[Path]) -> None:
    async with open_results(pipeline, paths) as plain:
        assert_type(await anext(plain), int)
        async for number in plain:
            assert_type(number, int)
    async with open_results(pipeline, paths, outcomes=True) as told:
        async for result in told:
            assert_type(result, outcome.Value[int] | outcome.Error)
    open_results(pipeline, ["path"])  # type: ignore[arg-type]
    open_results(length, [b"", b""], limit=3.5)  # type: ignore[call-overload]

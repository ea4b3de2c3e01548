"""Types of programs; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import trio_accel as ta
from trio_accel.programs import Array, FunctionProgram, ItemStream, Program


class Encoder:
    def __init__(self, weights: Array, *, heads: int = 12) -> None: ...

    def encode(self, ids: Array, mask: Array, *, scale: float = 1.0) -> Array: ...

    def loss(self, ids: Array) -> float: ...

    def pairs(self, ids: Array) -> dict[str, list[tuple[Array, int]]]: ...

    def rows(self) -> NDArray[np.float64]: ...

    @ta.programs.method(updates=["ids"], refuses=())
    def name(self, ids: Array) -> str | None: ...

    def other(self) -> Other: ...

    @ta.programs.method(out=lambda ids, mask: ((ids.shape[0], 384), "float32"), updates=["mask"])
    def embed(self, ids: Array, mask: Array, *, out: Array = None) -> None: ...

    def tokens(self, prompt: list[int], *, most: int = 8) -> Iterator[int]: ...

    @ta.programs.method(resumes=True, prefetch=2)
    def states(self, length: int, resume: Sequence[object] = ()) -> Iterator[NDArray[np.float64]]: ...


class Other:
    def encode(self, ids: Array) -> Array: ...


def total(x: Array) -> float: ...


def squares(x: Array) -> NDArray[np.float64]: ...


def double(x: Array, factor: float = 2.0) -> Array:
    return x * factor


async def programs(device: ta.Device, ids: ta.AccelRef, mask: ta.AccelRef) -> None:
    encoder = await ta.open_program(device, Encoder, ids, heads=6, name="encoder")
    assert_type(encoder, Program[Encoder])
    async with ta.open_program(device, Encoder, ids, intensity=ta.Intensity(3, 5.0)) as other:
        assert_type(other, Program[Encoder])
    assert_type(await encoder.ask(Encoder.encode, ids, mask, scale=0.5), Any)
    assert_type(await encoder.ask(Encoder.embed, ids, mask=mask, out=ids), Any)
    assert_type(await encoder.ask("encode", ids, mask), Any)
    # Plain values come as they are returned; arrays come as references.
    assert_type(await encoder.ask(Encoder.loss, ids), float)
    assert_type(await encoder.ask(Encoder.pairs, ids), dict[str, list[tuple[Any, int]]])
    assert_type(await encoder.ask(Encoder.rows), ta.AccelRef)
    assert_type(await encoder.ask(Encoder.name, ids), str | None)
    assert_type(await encoder.ask(Encoder.other), Any)
    assert_type(await ta.run(total, ids), float)
    assert_type(await ta.run(squares, ids), ta.AccelRef)
    assert_type(await ta.run(double, ids, 2.0), Any)
    await encoder.ask(Encoder.encode, ids)  # type: ignore[call-overload]  # mask is missing
    await encoder.ask(Encoder.encode, ids, mask, 0.5)  # type: ignore[call-overload]  # scale is a keyword
    await encoder.ask(Encoder.encode, ids, mask, scale="x")  # type: ignore[arg-type]
    await encoder.ask(Other.encode, ids)  # type: ignore[call-overload]  # another class's
    await ta.open_program(device, Encoder, ids, backoff=3)  # type: ignore[call-overload]
    function = await ta.open_program(device, double)
    assert_type(await function.ask(ids, factor=3.0), Any)
    await function.ask(ids, factor="x")  # type: ignore[arg-type]
    await function.ask()  # type: ignore[call-arg]
    assert_type(encoder.name, str)
    assert_type(await encoder.aclose(), None)


async def annotated(program: FunctionProgram[[Array], float], ids: ta.AccelRef) -> None:
    assert_type(await program.ask(ids), float)


async def items(encoder: Program[Encoder], x: ta.AccelRef) -> None:
    async with encoder.stream(Encoder.tokens, [1, 2], most=4) as tokens:
        assert_type(tokens, ItemStream[int])
        reader: AsyncIterator[int] = tokens
        async for token in reader:
            assert_type(token, int)
    async with encoder.stream(Encoder.states, 3) as states:
        assert_type(await anext(states), ta.AccelRef)
    async with encoder.stream("tokens", [1]) as unknown:
        assert_type(await anext(unknown), Any)
    encoder.stream(Encoder.tokens, [1], most="x")  # type: ignore[arg-type]
    encoder.stream(Encoder.loss, x)  # type: ignore[call-overload]  # it yields nothing

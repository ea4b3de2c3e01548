"""Random chains of operations: a replay has the bits of the operations asked one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

INPUTS, CONSTANTS = 2, 1
MOST_ARRAYS = 8

Hosts = list[npt.NDArray[Any]]


@attrs.frozen
class Step:
    """One operation of a chain, on arrays by their numbers modulo how many there are.

    Attributes:
        kind: The kind of step.
        first: An operand.
        second: The other one, or the array to change.
        factor: A number.
        drops: Whether the first array besides arguments and constants is dropped afterwards.
    """

    kind: str
    first: int
    second: int
    factor: float
    drops: bool


async def matmul(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    return await linalg.matmul(x, y.T)


async def copy(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    return await x.copy()


async def cast(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    return await (await x.cast("float32")).cast("float64")


async def full(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    return await x.device.full(x.shape, step.factor)


async def submit(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    pending = y.device.submit(linalg.Scal(step.factor, y))
    return y.device.submit(linalg.Matmul(pending.value, x, None)).value


async def scal(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.scal(step.factor, y)


async def fill(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await y[:1].fill(step.factor)


async def matmul_out(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.matmul(x, x, out=y)


async def gemm(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.gemm(step.factor, x, x, 0.25, y, "T", "N")


async def axpy(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.axpy(step.factor, x, y)


async def views(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.axpy(step.factor, x[1:, ::2], y[:-1, ::2])


async def swap(step: Step, x: ta.AccelRef, y: ta.AccelRef) -> None:
    await linalg.swap(x, y)


MAKE = {"matmul": matmul, "copy": copy, "cast": cast, "full": full, "submit": submit}
CHANGE = {"scal": scal, "fill": fill}
CHANGE_ANOTHER = {"matmul_out": matmul_out, "gemm": gemm, "axpy": axpy, "views": views, "swap": swap}


def steps() -> st.SearchStrategy[Step]:
    numbers = st.integers(0, MOST_ARRAYS)
    kinds = st.sampled_from([*MAKE, *CHANGE, *CHANGE_ANOTHER])
    return st.builds(Step, kinds, numbers, numbers, st.sampled_from([0.5, -1.25, 2.0]), st.booleans())


async def run_step(step: Step, arrays: list[ta.AccelRef]) -> None:
    """Ask for an operation; its results are appended to the list."""
    x, y = arrays[step.first % len(arrays)], arrays[step.second % len(arrays)]
    if step.kind in MAKE:
        arrays.append(await MAKE[step.kind](step, x, y))
    elif step.kind in CHANGE:
        await CHANGE[step.kind](step, x, y)
    elif x.block is not y.block:
        await CHANGE_ANOTHER[step.kind](step, x, y)
    kept = INPUTS + CONSTANTS
    if len(arrays) > kept + 1 and (step.drops or len(arrays) > MOST_ARRAYS):
        # Its memory is free for the next ones.
        del arrays[kept]


async def run_chain(
    program: Sequence[Step], constant: ta.AccelRef, *inputs: ta.AccelRef
) -> tuple[ta.AccelRef, ...]:
    arrays = [*inputs, constant]
    for step in program:
        await run_step(step, arrays)
    return arrays[-1], arrays[0], arrays[-1].T


async def read(refs: Sequence[ta.AccelRef]) -> Hosts:
    return [await ref.to_host() for ref in refs]


def matrices(seed: int, n: int) -> Hosts:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((n, n)) / n for _ in range(INPUTS + CONSTANTS)]


def same(first: Hosts, second: Hosts) -> None:
    for one, other in zip(first, second, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()


async def check(device: ta.Device, program: list[Step], n: int) -> None:
    """The chain one by one, as a graph in place, and as a graph on other arrays, in turns."""
    program = [*program, Step("copy", 0, 0, 1.0, False)]
    hosts, others = matrices(1, n), matrices(2, n)
    plain = [await device.put(host) for host in hosts]
    mine = [await device.put(host) for host in hosts]

    async def step(*inputs: ta.AccelRef) -> tuple[ta.AccelRef, ...]:
        return await run_chain(program, mine[-1], *inputs)

    with await ta.graphs.capture(device, step, *mine[:INPUTS]) as graph:
        same(await read(mine), hosts)
        for turn in range(4):
            expected = await run_chain(program, plain[-1], *plain[:INPUTS])
            if turn % 2:
                # On other arrays, with the initial contents of the capture: the constant is one.
                given = [await device.put(host) for host in await read(mine[:INPUTS])]
                found = await graph(*given)
                mine_now = [*given, mine[-1]]
                for ref, array in zip(mine[:INPUTS], given, strict=True):
                    await linalg.scal(0.0, ref)
                    await linalg.axpy(1.0, array, ref)
            else:
                found = await graph.replay()
                mine_now = mine
            same(await read(found), await read(expected))
            same(await read(mine_now), await read(plain))
        given = [await device.put(host) for host in others]
        assert len(await graph(*given[:INPUTS])) == 3


async def search(device: ta.Device, most: int) -> None:
    # Each failure of a property is found again at the same place.
    @given(program=st.lists(steps(), max_size=12), n=st.sampled_from([1, 3, 8]))
    @settings(max_examples=most, deadline=None, derandomize=True)
    def run(program: list[Step], n: int) -> None:
        trio.from_thread.run(check, device, program, n)

    await trio.to_thread.run_sync(run)
    assert device.generation == 1


async def test_a_replay_has_the_bits_of_the_operations_one_by_one(device: ta.Device) -> None:
    await search(device, 40)

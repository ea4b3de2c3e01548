"""Random programs of branches and loops: a graph leaves in its registers what an interpreter does."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import graphs, jit

REGISTERS = 3
# Small, so that conditions are zero often.
MODULUS = 5

step_of = jit.elementwise(f"s = (a * r + b + t) % {MODULUS}", name="step_of")


@attrs.frozen
class Step:
    """A register becomes ``a * r + b + other``, modulo a small number."""

    register: int
    other: int
    a: int
    b: int


@attrs.frozen
class Branch:
    """One of some programs is run; with a single test, the first or the second."""

    register: int
    bodies: tuple[Program, ...]
    is_test: bool


@attrs.frozen
class Loop:
    """A program is run as long as a register is not zero; the turns are added to another one."""

    register: int
    total: int
    body: Program
    limit: int


Program: TypeAlias = "tuple[Step | Branch | Loop, ...]"


def programs() -> st.SearchStrategy[Program]:
    registers, factors = st.integers(0, REGISTERS - 1), st.integers(0, MODULUS - 1)
    simple = st.builds(Step, registers, registers, factors, factors)

    def deeper(inner: st.SearchStrategy[Step | Branch | Loop]) -> st.SearchStrategy[Step | Branch | Loop]:
        body = st.lists(inner, min_size=1, max_size=3).map(tuple)
        return st.one_of(
            st.builds(Branch, registers, st.tuples(body), st.just(True)),
            st.builds(Branch, registers, st.tuples(body, body), st.just(True)),
            st.builds(Branch, registers, st.lists(body, min_size=1, max_size=3).map(tuple), st.just(False)),
            st.builds(Loop, registers, registers, body, st.integers(1, 4)),
        )

    return st.lists(st.recursive(simple, deeper, max_leaves=6), min_size=1, max_size=4).map(tuple)


def interpret(program: Program, registers: list[int]) -> None:
    for each in program:
        value = registers[each.register]
        if isinstance(each, Step):
            registers[each.register] = (each.a * value + each.b + registers[each.other]) % MODULUS
        elif isinstance(each, Branch):
            number = int(not value) if each.is_test else value
            if number < len(each.bodies):
                interpret(each.bodies[number], registers)
        else:
            turns = 0
            while turns < each.limit and registers[each.register]:
                interpret(each.body, registers)
                turns += 1
            registers[each.total] = (registers[each.total] + turns) % MODULUS


async def run(program: Program, registers: Sequence[ta.AccelRef]) -> None:
    for each in program:
        register = registers[each.register]
        if isinstance(each, Step):
            await step_of(register, each.a, each.b, registers[each.other], out=register)
        elif isinstance(each, Branch) and each.is_test:
            first, *rest = [body_of(body, registers) for body in each.bodies]
            await graphs.if_(register, first, orelse=rest[0] if rest else None)
        elif isinstance(each, Branch):
            await graphs.switch(register, [body_of(body, registers) for body in each.bodies])
        else:
            turns = await graphs.while_(register, body_of(each.body, registers), limit=each.limit)
            total = registers[each.total]
            await step_of(total, 1, 0, turns, out=total)


def body_of(program: Program, registers: Sequence[ta.AccelRef]) -> Callable[[], Awaitable[None]]:
    return lambda: run(program, registers)


async def check(device: ta.Device, program: Program) -> None:
    refs = [await device.put(np.int64(0)) for _ in range(REGISTERS)]
    with await graphs.capture(device, lambda: run(program, refs)) as graph:
        # One by one, captured, and with branches that were not taken before.
        for turn in range(6):
            values = [(turn * (number + 1) + number) % MODULUS for number in range(REGISTERS)]
            for ref, value in zip(refs, values, strict=True):
                await ref.fill(value)
            await graph.replay()
            interpret(program, values)
            assert [await ref.item() for ref in refs] == values


async def test_a_graph_does_what_an_interpreter_does(
    device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_accel.devices")

    @given(programs())
    @settings(max_examples=25, deadline=None, derandomize=True)
    def search(program: Program) -> None:
        trio.from_thread.run(check, device, program)

    await trio.to_thread.run_sync(search)
    assert device.generation == 1
    # On CUDA each of them was captured.
    assert not [message for message in caplog.messages if "one by one" in message]

"""Casts between all dtypes, also of numbers outside the range of the other one, have one answer."""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np
import pytest
from both_executors import Array, Executors, same_bits

import trio_accel as ta
from trio_accel import jit

pytestmark = [pytest.mark.no_device, pytest.mark.one_backend]

DTYPES = [each for each in ta.DType if not each.value.startswith("float8")]
INTEGERS = [each for each in DTYPES if each.kind in ("int", "uint")]
NUMBERS = [
    0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, 127.0, 128.0, -128.0, -129.0, 255.0, 256.0, 300.7, -300.7, 32768.0,
    65536.0, 2.0**31 - 1, 2.0**31, -(2.0**31), -(2.0**31) - 1, 3e9, -3e9, 2.0**32, 2.0**53, 1e10, -1e10,
    2.0**63, -(2.0**63), 1e19, 2.0**64, -(2.0**64), 1e30, -1e30, 1e300, -1e300, math.nan, math.inf, -math.inf,
]  # fmt: skip
CONSTANTS = ["1e10", "-1e10", "1e19", "-1e30", "inf", "-inf", "nan", "-1.0", "300.7", "-0.5", "3e9", "-3e9"]


def numbers_of(dtype: ta.DType) -> Array:
    if dtype.kind == "bool":
        return np.array([False, True])
    if dtype.kind in ("int", "uint"):
        limits = np.iinfo(dtype.dtype)
        near = (0, 1, -1, 100, 200, 2**31, 2**32 + 5, -(2**31) - 7, 2**53 + 1, 2**62 + 3, 2**63 - 1)
        ends = limits.min, limits.max
        return np.array([*ends, *(n for n in near if limits.min <= n <= limits.max)], dtype.dtype)
    with np.errstate(all="ignore"):
        real = np.array(NUMBERS)
        both = real if dtype.kind != "complex" else real + 1j * real[::-1].copy()
        return both.astype(dtype.dtype)


def wrapped(number: float, bits: int, *, is_signed: bool) -> int:
    """Return the integer of this many bits made of a number by the x86-64 conversion instructions."""

    def by_instruction(number: float, bits: int) -> int:
        is_held = math.isfinite(number) and -(2 ** (bits - 1)) <= math.trunc(number) < 2 ** (bits - 1)
        return math.trunc(number) if is_held else -(2 ** (bits - 1))

    if bits == 64 and not is_signed and number >= 2.0**63:
        made = by_instruction(number - 2.0**63, 64) ^ (1 << 63)
    else:
        made = by_instruction(number, 64 if bits == 64 or (bits == 32 and not is_signed) else 32)
    made %= 1 << bits
    return made - (1 << bits) if is_signed and made >= 1 << (bits - 1) else made


@pytest.mark.parametrize("source", DTYPES, ids=str)
async def test_a_cast_has_one_answer(executors: Executors, source: ta.DType) -> None:
    """As one element and as many, adjacent and scattered, by a copy, by NumPy and compiled."""
    x = np.tile(numbers_of(source), 3)
    targets = [each for each in DTYPES if source.kind != "complex" or each.kind == "complex"]
    outputs = [f"o{number}" for number in range(len(targets))]
    text = "; ".join(f"{out} = {each}(x)" for out, each in zip(outputs, targets, strict=True))
    expression: Any = jit.elementwise(text, inputs=("x",), outputs=outputs)
    on_device = await executors.device.put(x)
    copies = [await (await on_device.cast(each)).to_host() for each in targets]
    for mode in ("never", "always"):
        executors.choose(mode)
        for count in (1, 3, 17, len(x)):
            scattered = (await executors.device.put(np.repeat(x[:count], 2)))[::2]
            for given in (on_device[:count], scattered):
                made = await expression(given)
                alone = [await (await given.cast(each)).to_host() for each in targets]
                for target, copy, one, by in zip(targets, copies, made, alone, strict=True):
                    assert same_bits(await one.to_host(), copy[:count].copy()), (mode, count, target)
                    assert same_bits(by, copy[:count].copy()), (count, target)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the conversions of another processor")
@pytest.mark.parametrize("source", ["float32", "float64"])
async def test_a_number_that_an_integer_does_not_hold(executors: Executors, source: str) -> None:
    x = numbers_of(ta.DType(source))
    on_device = await executors.device.put(x)
    for target in INTEGERS:
        bits, is_signed = 8 * target.itemsize, target.kind == "int"
        made = await (await on_device.cast(target)).to_host()
        assert made.tolist() == [wrapped(one, bits, is_signed=is_signed) for one in x.tolist()], target


@pytest.mark.parametrize("target", INTEGERS, ids=str)
async def test_a_compiler_that_knows_the_number_makes_no_other_one(
    executors: Executors, target: ta.DType
) -> None:
    texts = [f"{target}({of}({one}))" for one in CONSTANTS for of in ("float64", "float32")]
    texts += [f"{target}(s * {one})" for one in (1, 2, -1)]
    outputs = [f"o{number}" for number in range(len(texts))]
    y, numbers = np.ones(40), np.float64(1e10)
    for first in range(0, len(texts), 9):
        lines = [
            f"{out} = {text}"
            for out, text in zip(outputs[first : first + 9], texts[first : first + 9], strict=True)
        ]
        inputs = ("s", "y") if "s *" in "".join(lines) else ("y",)
        expression: Any = jit.elementwise(
            "; ".join([*lines, "z = y + 1"]), inputs=inputs, outputs=[*outputs[first : first + 9], "z"]
        )
        await executors.compare(
            lambda y, ask=expression, inputs=inputs: ask(numbers, y) if "s" in inputs else ask(y), y
        )


async def test_a_chain_answers_alike_at_its_first_call_and_at_its_hundredth(executors: Executors) -> None:
    x = np.tile(np.array(NUMBERS), 700)
    for mode in ("auto", "always"):
        executors.choose(mode)
        on_device = await executors.device.put(x)
        found = []
        for _ in range(100):
            chain = (on_device * 2.0).cast("int32").cast("float64") + on_device.cast("uint32").cast("float64")
            found.append(await (await chain).to_host())
        executors.choose("never")
        with np.errstate(all="ignore"):
            want = (x * 2.0).astype(np.int32).astype(np.float64) + x.astype(np.int64).astype(np.uint32)
        for one in found:
            assert same_bits(one, want)

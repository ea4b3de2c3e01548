"""Each function with a gradient, in each run: its first case in the kinds that found most wrong numbers.

The other cases are tests in the modules that are imported here, of which a run takes a sample. A device for
each function would take most of the time, so many functions share one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_functions import NUMBERED, test_gradients_match_differences
from test_operands import (
    test_a_gradient_has_the_dtype_of_its_argument,
    test_a_host_operand_leaves_the_other_gradients_as_they_are,
)
from test_twice import FOUND, test_the_gradient_counts_each_place_once

import trio_accel as ta

NAMES = [name for name, number in NUMBERED if number == 0]
KINDS: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "base": (test_gradients_match_differences, [(name, 0) for name in NAMES]),
    "host": (test_a_host_operand_leaves_the_other_gradients_as_they_are, [(name, 0) for name in NAMES]),
    "dtype": (test_a_gradient_has_the_dtype_of_its_argument, [(name, 0) for name in NAMES]),
    "twice": (test_the_gradient_counts_each_place_once, [(name, "call") for name in FOUND]),
}
# They are not collected here, too.
del test_gradients_match_differences, test_a_host_operand_leaves_the_other_gradients_as_they_are
del test_a_gradient_has_the_dtype_of_its_argument, test_the_gradient_counts_each_place_once
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_case_of_each_function(device: ta.Device, kind: str, part: int) -> None:
    test, cases = KINDS[kind]
    check: Callable[..., Awaitable[None]] = inspect.unwrap(test)
    wrong, count = dict[str, str](), 0
    for case in cases[part::PARTS]:
        try:
            await check(device, *case)
            count += 1
        except pytest.skip.Exception:
            continue
        except Exception as error:  # noqa: BLE001  # all wrong ones are listed
            wrong[str(case[0])] = f"{type(error).__name__}: {error}"[:300]
    assert not wrong
    assert count > 5

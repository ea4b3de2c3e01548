"""Comparisons of fused functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import trio
from array_numbers import wide

import trio_accel as ta

ROUNDED = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "complex64": 2e-6}


async def stepwise(device: ta.Device, function: Callable[..., Any], *given: Any, **named: Any) -> ta.AccelRef:
    """Call a function with arrays of the blocking namespace, which computes each step by `ta.arrays`."""
    space = ta.interop.array_api(device)

    def run() -> Any:
        return function(*[space.asarray(x) if isinstance(x, np.ndarray) else x for x in given], **named)

    found: ta.AccelRef = (await trio.to_thread.run_sync(run)).ref
    return found


async def outcome(of: Any) -> ta.AccelRef | type[Exception]:
    try:
        made: ta.AccelRef = await of
    except (TypeError, ValueError) as error:
        # An axis out of bounds is a ValueError of NumPy's own.
        return TypeError if isinstance(error, TypeError) else ValueError
    return made


async def assert_same(found: ta.AccelRef, want: ta.AccelRef, what: object = "") -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape), what
    tolerance = ROUNDED.get(found.dtype.value, 1e-12)
    got, expected = wide(await found.to_host()), wide(await want.to_host())
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, err_msg=str(what))

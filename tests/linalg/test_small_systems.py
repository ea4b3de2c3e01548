"""Stacks of small systems on a processor: one call for all matrices, and the bits of one matrix."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE

import trio_accel as ta
from trio_accel import linalg

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="of the kernels of the CPU backend")


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "complex128"])
async def test_a_stack_of_small_systems_is_one_call(
    system: ta.System, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lapack: Any = importlib.import_module("trio_accel.backends.cpu.libraries._fortran").Lapack
    calls, call = list[str](), lapack.__call__

    def counted(this: Any, name: str, *arguments: Any) -> None:
        calls.append(name)
        call(this, name, *arguments)

    monkeypatch.setattr(lapack, "__call__", counted)
    generator = np.random.default_rng(6)
    a = (generator.normal(size=(50, 2, 2)) + 2 * np.eye(2)).astype(dtype)
    b = generator.normal(size=(50, 2, 3)).astype(dtype)
    async with system.open_device("cpu", options=INLINE) as device:
        there, sides = await device.put(a), await device.put(b)
        found = await (await linalg.solve(there, sides)).to_host()
        np.testing.assert_array_equal(found, np.linalg.solve(a, b))
        # One matrix has the bits that it has in the stack.
        alone = await (await linalg.solve(there[7], sides[7])).to_host()
        np.testing.assert_array_equal(alone, found[7])
        np.testing.assert_array_equal(await (await linalg.inv(there)).to_host(), np.linalg.inv(a))
        assert not calls
        # LAPACK reports the singular matrix.
        a[31] = 1
        with pytest.raises(ta.LinAlgError, match=r"solve: matrix 31 of the stack is singular"):
            await linalg.solve(a, sides)
        assert "gesv" in calls

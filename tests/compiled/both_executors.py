"""Shared helpers for tests of compiled expressions: both executors in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import pytest

import trio_accel as ta
from trio_accel.backends.cpu.compiled import _compiler, _plans

Array: TypeAlias = npt.NDArray[Any]


@attrs.define
class Executors:
    """A device of this process, and the variable that selects one of both executors."""

    device: ta.Device
    monkeypatch: pytest.MonkeyPatch

    def choose(self, mode: str) -> None:
        """Have one of them run the next operations; nothing is planned yet."""
        self.monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", mode)
        _plans.forget()

    async def run(self, mode: str, ask: Callable[..., Any], *arrays: Array, **named: Any) -> list[Array]:
        """Ask for an expression of arrays; fails where it was to be compiled, and was not."""
        self.choose(mode)
        given = [await self.device.put(each) for each in arrays]
        before = _compiler.counts.compiled
        made = await ask(*given, **named)
        assert (_compiler.counts.compiled > before) is (mode == "always"), "the other executor ran"
        several: Sequence[ta.AccelRef] = [made] if isinstance(made, ta.AccelRef) else made
        return [await each.to_host() for each in several]

    async def compare(self, ask: Callable[..., Any], *arrays: Array, **named: Any) -> list[Array]:
        """Require that both make the same bits."""
        by_numpy = await self.run("never", ask, *arrays, **named)
        compiled = await self.run("always", ask, *arrays, **named)
        for got, want in zip(compiled, by_numpy, strict=True):
            assert same_bits(got, want), f"{got} in place of {want}"
        return compiled


def same_bits(got: Array, want: Array) -> bool:
    """Return whether arrays have the same dtype, shape and bits; NaN has any."""
    return got.dtype == want.dtype and got.shape == want.shape and bool(equal_bits(got, want).all())


def equal_bits(got: Array, want: Array) -> Array:
    """Return for each element whether its bits are the same; NaN has any."""
    if got.dtype.kind == "c":
        return equal_bits(np.real(got).copy(), np.real(want).copy()) & equal_bits(
            np.imag(got).copy(), np.imag(want).copy()
        )
    bits = f"u{got.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)
    return equal if got.dtype.kind in "biu" else equal | (np.isnan(got) & np.isnan(want))

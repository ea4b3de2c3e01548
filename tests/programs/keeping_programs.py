"""Methods that keep borrowed arrays as objects of other libraries. Workers import this module."""

from __future__ import annotations

from typing import Any

from foreign_arrays import ByDlpack, ByInterface

import trio_accel as ta
from trio_accel.programs import Array


class Keeps:
    """Keeps it until its instance is released."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def by_dlpack(self, x: Array) -> float:
        self.kept.append(ByDlpack(x))
        return float(self.kept[-1].seen.sum())

    def by_interface(self, x: Array) -> float:
        self.kept.append(ByInterface(x))
        return float(self.kept[-1].seen.sum())

    def the_object(self, x: Array) -> float:
        self.kept.append(x)
        return float(ByDlpack(x).seen.sum())

    @ta.programs.method(updates=["target"])
    def target(self, x: Array, target: Array) -> None:
        taken = ByDlpack(target)
        taken.seen[...] = ByDlpack(x).seen
        self.kept.append(taken)

    @ta.programs.method(out=lambda x: (x.shape, x.dtype))
    def out(self, x: Array, *, out: Array = None) -> None:
        taken = ByDlpack(out)
        taken.seen[...] = ByDlpack(x).seen
        self.kept.append(taken)

    def count(self) -> int:
        return len(self.kept)


class Lets:
    """Keeps nothing."""

    def reads(self, x: Array) -> float:
        return float(ByDlpack(x).seen.sum() + ByInterface(x).seen.sum())

    def gives(self, x: Array) -> Any:
        return {"all": x, "view": _viewed(x)}

    @ta.programs.method(updates=["target"])
    def leaves_cycle(self, x: Array, target: Array) -> Any:
        cycle: list[Any] = [ByDlpack(x), ByDlpack(target)]
        cycle.append(cycle)
        return _viewed(target)


class OnCuda(ByDlpack):
    """A GPU library's array over the memory of an argument."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self.shape, self.dtype = array.shape, array.dtype
        self._interface: dict[str, Any] = array.__cuda_array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface


def _viewed(x: Any) -> Any:
    return OnCuda(x) if hasattr(x, "__cuda_array_interface__") else x[:]

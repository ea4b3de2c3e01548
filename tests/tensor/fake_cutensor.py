"""Functions of cuTENSOR in nvmath's binding, computed by NumPy in memory of the stand-in driver."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from cuda.bindings import driver
from numpy.lib.stride_tricks import as_strided
from nvmath.bindings.cutensor import cuTENSORError

NOWHERE = 1 << 40
SINGLE, DOUBLE = 11, 12
# The memory that a plan may take, and that it takes.
ESTIMATE, WORKSPACE = 2000, 1000
DTYPES: dict[int, tuple[Any, Any]] = {
    # The type of elements, and the type of factors, which determines the type of the computation.
    0: (np.float32, np.float32),
    1: (np.float64, np.float64),
    2: (np.float16, np.float32),
    4: (np.complex64, np.complex64),
    5: (np.complex128, np.complex128),
    14: (ml_dtypes.bfloat16, np.float32),
}


class ComputeDesc:
    COMPUTE_32F = staticmethod(lambda: SINGLE)
    COMPUTE_64F = staticmethod(lambda: DOUBLE)


class Cutensor:
    """The functions; their results are numbers of objects, which are in `live` until they are destroyed.

    Attributes:
        live: Values by their numbers.
        planned: Subscripts of the plans.
        ran: How often any was executed.
        refused: Status of plans, where there are none.
    """

    def __init__(self) -> None:
        self.live: dict[int, Any] = {}
        self.planned: list[str] = []
        self.ran = 0
        self.refused = 0
        self._numbers = itertools.count(100)

    def functions(self) -> dict[str, Any]:
        """Everything by the names in nvmath's module."""
        names = [name for name in dir(self) if name.startswith(("create", "estimate", "plan_", "contract"))]
        kinds = ("", "_tensor_descriptor", "_operation_descriptor", "_plan_preference", "_plan")
        made = {f"destroy{kind}": self.live.pop for kind in kinds}
        return {**made, **{name: getattr(self, name) for name in names}, "ComputeDesc": ComputeDesc}

    def _make(self, value: Any) -> int:
        number = next(self._numbers)
        self.live[number] = value
        return number

    def create(self) -> int:
        return self._make("handle")

    def create_tensor_descriptor(
        self,
        handle: int,
        num_modes: int,
        extent: Sequence[int],
        stride: Sequence[int],
        data_type: int,
        alignment: int,
    ) -> int:
        assert num_modes == len(extent) == len(stride)
        assert all(size > 1 for size in extent)
        assert all(step > 0 for step in stride), "each stride must be larger than zero"
        if alignment < 4:
            # The library refuses 1 and 2 for float32. It was not asked for types of two bytes.
            raise cuTENSORError(7)
        return self._make((tuple(extent), tuple(stride), data_type, alignment))

    def create_contraction(self, handle: int, *given: Any) -> int:
        a, of_a, op_a, b, of_b, op_b, c, of_c, op_c, d, of_d, compute = given
        assert (op_a, op_b, op_c) == (1, 1, 1)
        assert c == d
        assert of_c == of_d
        assert compute == (DOUBLE if self.live[a][2] in (1, 5) else SINGLE)
        terms = ["".join(map(chr, modes)) for modes in (of_a, of_b, of_d)]
        assert all(len(set(term)) == len(term) for term in terms)
        return self._make(("{},{}->{}".format(*terms), [self.live[one] for one in (a, b, d)]))

    def create_plan_preference(self, handle: int, algo: int, jit: int) -> int:
        assert (algo, jit) == (-1, 0)
        return self._make("preference")

    def estimate_workspace_size(self, handle: int, desc: int, pref: int, kind: int) -> int:
        assert self.live[pref] == "preference"
        assert kind == 2
        return ESTIMATE

    def create_plan(self, handle: int, desc: int, pref: int, limit: int) -> int:
        if self.refused:
            raise cuTENSORError(self.refused)
        assert self.live[handle] == "handle"
        assert self.live[pref] == "preference", "the library refuses a plan without one"
        assert limit == ESTIMATE
        self.planned.append(self.live[desc][0])
        return self._make(self.live[desc])

    def plan_get_attribute(self, handle: int, plan: int, attr: int, buf: int, size: int) -> None:
        assert (attr, size) == (0, 8)
        ctypes.c_uint64.from_address(buf).value = WORKSPACE

    def contract(self, handle: int, plan: int, *given: int) -> None:
        alpha, a, b, beta, c, d, workspace, workspace_size, stream = given
        if a == NOWHERE:
            raise cuTENSORError(13)
        assert c == d
        assert workspace
        assert workspace % 256 == 0
        assert workspace_size == WORKSPACE
        assert driver.cuStreamSynchronize(stream)[0] == 0
        subscripts, layouts = self.live[plan]
        factor = DTYPES[layouts[0][2]][1]
        left, right, out = (_at(*one) for one in zip((a, b, d), layouts, strict=True))
        wide = np.result_type(factor, np.float64)
        made = _number(alpha, factor) * np.einsum(subscripts, left.astype(wide), right.astype(wide))
        more = _number(beta, factor)
        out[...] = (made + more * out.astype(wide) if more else made).astype(out.dtype)
        self.ran += 1


def _at(address: int, layout: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> Any:
    extents, steps, code, alignment = layout
    assert address % alignment == 0
    dtype = np.dtype(DTYPES[code][0])
    reach = 1 + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return as_strided(np.frombuffer(memory, dtype), extents, [step * dtype.itemsize for step in steps])


def _number(address: int, dtype: Any) -> Any:
    size = np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)[0]

"""Solutions with sparse triangles by compiled loops, row by row in an order of levels.

The rows of a level only need rows of earlier levels. In this order the processor works at several rows at a
time, because they do not wait for one another.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import numpy as np

from ...base import HostArray
from ._compiler import Entry, compile_text, mode

_TYPES = {
    "float32": "float",
    "float64": "double",
    "complex64": "std::complex<float>",
    "complex128": "std::complex<double>",
    "int32": "int32_t",
    "int64": "int64_t",
}
# Products of complex numbers are made without a look at infinities.
_OPTIONS = ("-fcx-limited-range",)

_TEXT = """
#include <algorithm>
#include <complex>
#include <cstdint>
#include <vector>
typedef %(index)s Index;
typedef %(value)s Value;
struct Arguments {
    // The triangle, by rows.
    const Index *starts, *columns;
    const Value *values;
    // The same in the order of levels, without the diagonal, of which there are the inverses.
    int64_t *rows, *begins;
    Index *others;
    Value *factors, *inverses;
    const Value *b;
    Value *x;
    int64_t count, is_lower, is_unit;
};

static void arrange(const Arguments &a)
{
    std::vector<int64_t> level(a.count), first;
    for (int64_t step = 0; step < a.count; step++) {
        const int64_t row = a.is_lower ? step : a.count - 1 - step;
        int64_t own = 0;
        for (Index place = a.starts[row]; place < a.starts[row + 1]; place++) {
            const Index column = a.columns[place];
            if (a.is_lower ? column < row : column > row)
                own = std::max(own, level[column] + 1);
        }
        level[row] = own;
        if ((int64_t)first.size() < own + 2)
            first.resize(own + 2);
        first[own + 1]++;
    }
    for (size_t number = 1; number < first.size(); number++)
        first[number] += first[number - 1];
    for (int64_t row = 0; row < a.count; row++)
        a.rows[first[level[row]]++] = row;
    int64_t stored = 0;
    for (int64_t number = 0; number < a.count; number++) {
        const int64_t row = a.rows[number];
        Value own = a.is_unit;
        a.begins[number] = stored;
        for (Index place = a.starts[row]; place < a.starts[row + 1]; place++) {
            const Index column = a.columns[place];
            if (column == row) {
                if (!a.is_unit)
                    own += a.values[place];
            } else if ((column < row) == (bool)a.is_lower) {
                a.others[stored] = column;
                a.factors[stored++] = a.values[place];
            }
        }
        a.inverses[number] = Value(1) / own;
    }
    a.begins[a.count] = stored;
}

static void solve(const Arguments &a)
{
    for (int64_t number = 0; number < a.count; number++) {
        const int64_t row = a.rows[number];
        Value sum = a.b[row];
        for (int64_t place = a.begins[number]; place < a.begins[number + 1]; place++)
            sum -= a.factors[place] * a.x[a.others[place]];
        a.x[row] = sum * a.inverses[number];
    }
}

extern "C" __attribute__((visibility("default")))
long long run(const char *packed, long long is_solution, long long)
{
    const Arguments &a = *(const Arguments *)packed;
    (is_solution ? solve : arrange)(a);
    return 0;
}
"""
_ARGUMENTS = struct.Struct("=10Q3q")


@functools.cache
def _find(value: str, index: str) -> Entry | None:
    """Compile the loops for two types, or find them in the disk cache; blocks."""
    return compile_text(_TEXT % {"value": _TYPES[value], "index": _TYPES[index]}, _OPTIONS)


class CompiledTriangle:
    """A triangle of a square matrix, arranged for solutions.

    Args:
        entry: The loops.
        arrays: Row pointers, columns and values, which were checked, and must not move.
        is_lower: Whether rows need earlier rows, not later ones.
        is_unit: Whether the diagonal counts as ones.
    """

    def __init__(self, entry: Entry, arrays: list[HostArray], *, is_lower: bool, is_unit: bool) -> None:
        indptr, indices, data = self._given = [np.ascontiguousarray(array) for array in arrays]
        count = len(indptr) - 1
        self._entry, self._count, self._dtype = entry, count, data.dtype
        outputs: list[HostArray] = [
            np.empty(count, np.int64),
            np.empty(count + 1, np.int64),
            np.empty_like(indices),
            np.empty_like(data),
            np.empty(count, data.dtype),
        ]
        self._made = outputs
        self._addresses = [array.ctypes.data for array in (*self._given, *outputs)]
        self._sizes = count, is_lower, is_unit
        entry(_ARGUMENTS.pack(*self._addresses, 0, 0, *self._sizes), 0, 0)

    def bind(self, b: HostArray, x: HostArray) -> Callable[[], object]:
        """Return a function that solves for a vector; neither the vector nor the solution may move."""
        data = _ARGUMENTS.pack(*self._addresses, b.ctypes.data, x.ctypes.data, *self._sizes)
        # The triangle has to live as long as the function.
        return lambda: self._entry(data, 1, 0)


def arrange(arrays: list[HostArray], *, is_lower: bool, is_unit: bool) -> CompiledTriangle | None:
    """Arrange a triangle for solutions with vectors; return None without a compiler. Blocks."""
    if mode() == "never":
        return None
    entry = _find(arrays[2].dtype.name, arrays[0].dtype.name)
    return entry and CompiledTriangle(entry, arrays, is_lower=is_lower, is_unit=is_unit)

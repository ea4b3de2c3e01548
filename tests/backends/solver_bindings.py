"""Bindings of cuSOLVER and cuBLAS, as far as the dense solvers call them: LAPACK on the stand-in's memory."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg.lapack
from cuda.bindings import driver

Array = npt.NDArray[Any]

_LETTERS = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}
_CODES = {0: np.float32, 1: np.float64, 4: np.complex64, 5: np.complex128}
_FIRST_ADDRESS = 1 << 32


def _at(address: int, dtype: Any, *shape: int) -> Array:
    """Memory, by columns."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype).reshape(shape, order="F")


def _lapack(name: str, dtype: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = scipy.linalg.lapack.get_lapack_funcs(name, dtype=dtype)
    return function


class Bindings:
    """Both modules in one; each call is computed at once, after the earlier work of its stream.

    Attributes:
        calls: The calls: names and arguments, with addresses as ``"@"``.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._handles = itertools.count(1)
        self._streams: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            shown = ["@" if type(value) is int and value >= _FIRST_ADDRESS else value for value in arguments]
            self.calls.append((name, *shown))
            if name.startswith("create"):
                return next(self._handles)
            if name.startswith("destroy"):
                return None
            if name == "set_stream":
                self._streams[arguments[0]] = arguments[1]
                return None
            if name.endswith("_buffer_size"):
                return (1024, 512) if name.startswith("x") else 64
            driver.cuStreamSynchronize(self._streams.get(arguments[0], 0))
            if name.startswith("x"):
                getattr(self, f"_{name}")(*arguments[2:])
            else:
                getattr(self, f"_{name[1:]}")(_LETTERS[name[0]], *arguments[1:])
            return None

        return call

    def _xpotrf(self, uplo: int, n: int, code: int, a: int, *rest: int) -> None:
        self._potrf(_CODES[code], uplo, n, a, rest[-1])

    def _potrf(self, dtype: Any, uplo: int, n: int, a: int, info: int) -> None:
        matrix = _at(a, dtype, n, n)
        matrix[:], _at(info, np.int32, 1)[:] = _lapack("potrf", dtype)(matrix, lower=uplo == 0, clean=0)

    def _potrf_batched(self, dtype: Any, uplo: int, n: int, a: int, _: int, info: int, count: int) -> None:
        for number, place in enumerate(_at(a, np.int64, count)):
            self._potrf(dtype, uplo, n, int(place), info + 4 * number)

    def _xgetrf(self, m: int, n: int, code: int, a: int, _: int, pivots: int, *rest: int) -> None:
        self._getrf(_CODES[code], m, n, a, _at(pivots, np.int64, min(m, n)), rest[-1])

    def _getrf(self, dtype: Any, m: int, n: int, a: int, pivots: Array, info: int) -> None:
        matrix = _at(a, dtype, m, n)
        matrix[:], found, _at(info, np.int32, 1)[:] = _lapack("getrf", dtype)(matrix)
        pivots[:] = found + 1

    def _getrf_batched(self, dtype: Any, n: int, a: int, _: int, pivots: int, info: int, count: int) -> None:
        for number, place in enumerate(_at(a, np.int64, count)):
            found = _at(pivots + 4 * n * number, np.int32, n)
            self._getrf(dtype, n, n, int(place), found, info + 4 * number)

    def _xgetrs(
        self,
        trans: int,
        n: int,
        columns: int,
        code: int,
        a: int,
        _: int,
        pivots: int,
        __: int,
        x: int,
        *rest: int,
    ) -> None:
        self._getrs(_CODES[code], trans, n, columns, a, _at(pivots, np.int64, n), x)
        _at(rest[-1], np.int32, 1)[:] = 0

    def _getrs(self, dtype: Any, trans: int, n: int, columns: int, a: int, pivots: Array, x: int) -> None:
        sides, found = _at(x, dtype, n, columns), (pivots - 1).astype(np.int32)
        sides[:] = _lapack("getrs", dtype)(_at(a, dtype, n, n), found, sides, trans)[0]

    def _getrs_batched(
        self, dtype: Any, trans: int, n: int, columns: int, a: int, _: int, *rest: int
    ) -> None:
        pivots, x, __, said, count = rest
        _at(said, np.int32, 1)[:] = 0
        places = zip(_at(a, np.int64, count), _at(x, np.int64, count), strict=True)
        for number, (place, side) in enumerate(places):
            found = _at(pivots + 4 * n * number, np.int32, n)
            self._getrs(dtype, trans, n, columns, int(place), found, int(side))

    def _xgeqrf(self, m: int, n: int, code: int, a: int, _: int, __: int, tau: int, *rest: int) -> None:
        matrix, dtype = _at(a, _CODES[code], m, n), _CODES[code]
        matrix[:], _at(tau, dtype, min(m, n))[:], _, _at(rest[-1], np.int32, 1)[:] = _lapack("geqrf", dtype)(
            matrix
        )

    def _orgqr(self, dtype: Any, m: int, n: int, k: int, a: int, _: int, tau: int, *rest: int) -> None:
        name = "ungqr" if np.dtype(dtype).kind == "c" else "orgqr"
        matrix = _at(a, dtype, m, n)
        matrix[:] = _lapack(name, dtype)(matrix, _at(tau, dtype, k))[0]
        _at(rest[-1], np.int32, 1)[:] = 0

    _ungqr = _orgqr

    def _xgesvd(
        self,
        job: int,
        _: int,
        m: int,
        n: int,
        code: int,
        a: int,
        __: int,
        real: int,
        s: int,
        ___: int,
        u: int,
        *rest: int,
    ) -> None:
        dtype, letter, vh = _CODES[code], chr(job), rest[2]
        matrix = _at(a, dtype, m, n)
        left, values, right = np.linalg.svd(matrix, full_matrices=letter == "A")
        _at(s, _CODES[real], n)[:] = values
        if letter != "N":
            _at(u, dtype, *left.shape)[:], _at(vh, dtype, n, n)[:] = left, right
        _at(rest[-1], np.int32, 1)[:] = 0

    def _gesvdj_batched(
        self,
        dtype: Any,
        _: int,
        m: int,
        n: int,
        a: int,
        __: int,
        s: int,
        u: int,
        ___: int,
        v: int,
        *rest: int,
    ) -> None:
        info, count, k, size = rest[3], rest[5], min(m, n), np.dtype(dtype).itemsize
        real = np.empty(0, dtype).real.dtype
        for number in range(count):
            left, values, right = np.linalg.svd(_at(a + number * m * n * size, dtype, m, n))
            _at(s + number * k * real.itemsize, real, k)[:] = values
            _at(u + number * m * m * size, dtype, m, m)[:] = left
            _at(v + number * n * n * size, dtype, n, n)[:] = right.conj().T
            _at(info + 4 * number, np.int32, 1)[:] = 0

    def _xsyev_batched(
        self, job: int, uplo: int, n: int, code: int, a: int, _: int, real: int, w: int, *rest: int
    ) -> None:
        info, count = rest[-2:]
        dtype, kind = _CODES[code], _CODES[real]
        for number in range(count):
            matrix = _at(a + number * n * n * np.dtype(dtype).itemsize, dtype, n, n)
            values, vectors = np.linalg.eigh(matrix, "U" if uplo else "L")
            _at(w + number * n * np.dtype(kind).itemsize, kind, n)[:] = values
            if job:
                matrix[:] = vectors
            _at(info + 4 * number, np.int32, 1)[:] = 0

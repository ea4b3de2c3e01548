"""Bindings of cuBLASLt, limited to the calls of fused products: NumPy in float64 on the stand-in's memory."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from nvmath.bindings import cublasLt

Array = npt.NDArray[Any]

_TYPES: dict[int, Any] = {
    0: np.float32,
    1: np.float64,
    2: np.float16,
    3: np.int8,
    10: np.int32,
    14: ml_dtypes.bfloat16,
    28: ml_dtypes.float8_e4m3fn,
    29: ml_dtypes.float8_e5m2,
}
_Desc, _Layout, _Epilogue = cublasLt.MatmulDescAttribute, cublasLt.MatrixLayoutAttribute, cublasLt.Epilogue


def _number(address: int, dtype: Any) -> Any:
    return np.frombuffer(ctypes.string_at(address, np.dtype(dtype).itemsize), dtype)[0]


def _scaled(get: Any, name: str, array: Array) -> Array:
    """Apply scales of 128 elements of a row (4), or of 128 by 128 (5), as observed on an H100."""
    mode, address, (rows, k) = get[f"{name}_SCALE_MODE"], get[f"{name}_SCALE_POINTER"], array.shape
    if mode not in (4, 5):
        return array
    along = -(-k // 128)
    if mode == 4:
        scales = _columns(address, np.dtype(np.float32), rows, along, rows)
    else:
        padded = -(-along // 4) * 4
        scales = _columns(address, np.dtype(np.float32), along, -(-rows // 128), padded).T
        scales = scales.repeat(128, 0)[:rows]
    scaled: Array = array * scales.repeat(128, 1)[:, :k]
    return scaled


def _columns(address: int, dtype: Any, rows: int, columns: int, leading: int) -> Array:
    """A matrix by columns."""
    size = np.dtype(dtype).itemsize
    nbytes = ((columns - 1) * leading + rows) * size
    memory = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray((rows, columns), dtype, memory, 0, (size, leading * size))


class LtBindings:
    """The module; each call is computed at once, after the earlier work of its stream.

    Attributes:
        alive: How many descriptors there are.
        asked: How often heuristics were asked for.
        ways: How many ways there are.
    """

    def __init__(self) -> None:
        self.alive = 0
        self.asked = 0
        self.ways = 1
        self.multiplied: list[int] = []
        self._ids = itertools.count(1)
        self._made: dict[int, dict[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_create") or name == "create":
            return self._create
        if name.endswith("_destroy") or name == "destroy":
            return self._destroy
        if name.endswith("_set_attribute"):
            return self._set
        return getattr(cublasLt, name)

    def _create(self, *values: Any) -> int:
        self.alive += 1
        number = next(self._ids)
        self._made[number] = {"values": values}
        return number

    def _destroy(self, number: int) -> None:
        self.alive -= 1
        del self._made[number]

    def _set(self, number: int, attribute: int, address: int, nbytes: int) -> None:
        self._made[number][int(attribute)] = int.from_bytes(ctypes.string_at(address, nbytes), "little")

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        """Return as many ways as there are."""
        *_, most, found, count = arguments
        self.asked += 1
        ways = min(most, self.ways)
        ctypes.c_int32.from_address(count).value = ways
        size = cublasLt.matmul_heuristic_result_dtype.itemsize
        for way in range(ways):
            ctypes.c_uint64.from_address(found + way * size).value = way
            ctypes.c_uint64.from_address(found + way * size + 64).value = 4

    def matmul(self, handle: int, desc: int, *arguments: int) -> None:
        """Multiply each of a stack."""
        alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, way, workspace, nbytes, stream = arguments
        driver.cuStreamSynchronize(stream)
        self.multiplied.append(ctypes.c_uint64.from_address(way).value)
        assert workspace or not nbytes
        what = self._made[desc]
        scale = _TYPES[what["values"][1]]
        factors = float(_number(alpha, scale)), float(_number(beta, scale))
        for batch in range(self._made[of_d].get(int(_Layout.BATCH_COUNT), 1)):
            places = [
                self._matrix(place, layout, batch) if place else None
                for place, layout in ((a, of_a), (b, of_b), (c, of_c), (d, of_d))
            ]
            self._multiply(what, factors, batch, places)

    def _matrix(self, address: int, layout: int, batch: int) -> Array:
        made = self._made[layout]
        code, *sizes = made["values"]
        dtype = np.dtype(_TYPES[code])
        step = made.get(int(_Layout.STRIDED_BATCH_OFFSET), 0) * dtype.itemsize
        return _columns(address + batch * step, dtype, *sizes)

    def _multiply(self, what: Any, factors: tuple[float, float], batch: int, places: list[Any]) -> None:
        get = {name: what.get(int(value), 0) for name, value in _Desc.__members__.items()}
        a, b, c, d = places
        wide = [one.astype(float) for one in (a, b)]
        left = wide[0].T if get["TRANSA"] else wide[0]
        right = wide[1].T if get["TRANSB"] else wide[1]
        with np.errstate(invalid="ignore"):
            x = factors[0] * (_scaled(get, "A", left) @ _scaled(get, "B", right.T).T)
        for name, axis in (("A", 1), ("B", 0)):
            place = get[f"{name}_SCALE_POINTER"]
            if place and get[f"{name}_SCALE_MODE"] == 3:
                x *= np.expand_dims(_columns(place, np.float32, x.shape[1 - axis], 1, 1)[:, 0], axis)
            elif place and not get[f"{name}_SCALE_MODE"]:
                x *= _number(place, np.float32)
        if factors[1]:
            x += factors[1] * c.astype(float)
        name = _Epilogue(get["EPILOGUE"]).name
        vector = self._vector(get, x.shape, batch)
        if name.endswith("BIAS"):
            x += vector.astype(float)
        x = self._activated(x, name, get, batch)
        if "BGRAD" in name:
            vector[:, 0] = {"BGRADA": left.sum(1), "BGRADB": right.sum(0)}.get(name, x.sum(1))
        if get["D_SCALE_POINTER"]:
            x *= _number(get["D_SCALE_POINTER"], np.float32)
        if d.dtype == np.int8:
            x = np.clip(np.rint(x), -128, 127)
        elif d.dtype.itemsize == 1:
            most = float(ml_dtypes.finfo(d.dtype).max)
            x = np.clip(x, -most, most)
        d[...] = x.astype(d.dtype)

    def _vector(self, get: Any, shape: tuple[int, ...], batch: int) -> Array:
        """The bias, or the gradient of one; nothing if there is none."""
        if not get["BIAS_POINTER"]:
            return np.empty((0, 1))
        dtype = np.dtype(_TYPES[get["BIAS_DATA_TYPE"]])
        count = shape[1 if get["EPILOGUE"] == _Epilogue.BGRADB else 0]
        place = get["BIAS_POINTER"] + batch * get["BIAS_BATCH_STRIDE"] * dtype.itemsize
        return _columns(place, dtype, count, 1, count)

    def _activated(self, x: Array, name: str, get: Any, batch: int) -> Array:
        rows, columns = x.shape
        leading, step = get["EPILOGUE_AUX_LD"], batch * get["EPILOGUE_AUX_BATCH_STRIDE"]
        root = np.sqrt(2 / np.pi)
        if "RELU" in name:
            if leading:
                assert leading % 128 == 0
                kept = _columns(
                    get["EPILOGUE_AUX_POINTER"] + step // 8, np.uint8, leading // 8, columns, leading // 8
                )
                if name.startswith("D"):
                    return x * np.unpackbits(kept, axis=0, count=rows, bitorder="little")
                bits = np.packbits(x > 0, axis=0, bitorder="little")
                kept[: len(bits)] = bits
            return np.maximum(x, 0)
        if "GELU" not in name:
            return x
        if leading:
            of_kept = np.dtype(_TYPES[get["EPILOGUE_AUX_DATA_TYPE"]])
            place = get["EPILOGUE_AUX_POINTER"] + step * of_kept.itemsize
            kept = _columns(place, of_kept, rows, columns, leading)
            if name.startswith("D"):
                z = kept.astype(float)
                t = np.tanh(root * (z + 0.044715 * z**3))
                return x * (0.5 * (1 + t) + 0.5 * z * (1 - t * t) * root * (1 + 3 * 0.044715 * z * z))
            kept[...] = x.astype(of_kept)
        return x * 0.5 * (1 + np.tanh(root * (x + 0.044715 * x**3)))

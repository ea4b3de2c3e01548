from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

from trio_accel.backends.base import DType

TABLE = {
    "float64": (8, "float"),
    "float32": (4, "float"),
    "float16": (2, "float"),
    "bfloat16": (2, "float"),
    "float8_e4m3fn": (1, "float"),
    "float8_e5m2": (1, "float"),
    "complex64": (8, "complex"),
    "complex128": (16, "complex"),
    "int8": (1, "int"),
    "int16": (2, "int"),
    "int32": (4, "int"),
    "int64": (8, "int"),
    "uint8": (1, "uint"),
    "uint16": (2, "uint"),
    "uint32": (4, "uint"),
    "uint64": (8, "uint"),
    "bool": (1, "bool"),
}


def test_the_table_is_complete():
    assert {str(dtype) for dtype in DType} == set(TABLE)


@pytest.mark.parametrize("dtype", list(DType))
def test_each_type_is_numpys(dtype):
    itemsize, kind = TABLE[str(dtype)]
    assert (dtype.itemsize, dtype.kind) == (itemsize, kind)
    assert dtype.is_inexact == (kind in ("float", "complex"))
    assert dtype.dtype.itemsize == itemsize
    assert np.zeros(2, dtype).dtype == dtype.dtype
    for same in (dtype, str(dtype), dtype.dtype, dtype.dtype.type):
        assert DType.of(same) is dtype
        assert dtype == same
    assert hash(dtype) == hash(dtype.dtype)
    assert {dtype.dtype: 1}[dtype] == 1
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert repr(dtype) == f"DType.{dtype}"


def test_low_precision_types_match_ml_dtypes():
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert DType(name).dtype == np.dtype(getattr(ml_dtypes, name))


@pytest.mark.parametrize("like", [float, "d", "f8", "<f8", np.float64])
def test_other_names_of_float64(like):
    assert DType.of(like) is DType.float64


@pytest.mark.parametrize("like", ["float128", "U5", object, "datetime64[s]", ">f8", "nonsense", 3, None])
def test_an_unsupported_type_is_refused_with_a_list_of_types(like):
    with pytest.raises(TypeError, match=r"dtype: .*allowed: float64, .*bool"):
        DType.of(like)


@pytest.mark.parametrize("code", ["f8", "i2", "c16", "u4"])
def test_the_other_byte_order_is_refused_with_the_way_out(code):
    other = np.dtype(code).newbyteorder("S")
    array = np.arange(3).astype(other)
    with pytest.raises(TypeError, match="other byte order; make it native: ") as caught:
        DType.of(array.dtype)
    way_out = str(caught.value).partition("make it native: ")[2]
    native = eval(way_out, {"array": array})  # the advice of the message, followed
    assert DType.of(native.dtype).dtype == np.dtype(code)
    assert native.tolist() == array.tolist()


def test_types_differ():
    assert len({dtype.dtype for dtype in DType}) == len(DType)
    assert DType.float32 != DType.float64
    assert DType.float32 != "float64"
    # NumPy takes a text with commas for the fields of a record, and refuses this one with another error.
    assert DType.float32 != "a report, of 3 lines"
    assert DType.float32 != 4

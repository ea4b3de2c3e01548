"""Memory of the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trio_accel.backends.base.kit.host import address_of


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
BFLOAT16: Any = ml_dtypes.bfloat16
ARRAYS = {
    "whole": WHOLE,
    "part": WHOLE[1:],
    "columns": WHOLE[:, 2:],
    "backwards": WHOLE[::-1],
    "transposed": WHOLE.T,
    "no axes": np.array(3.0),
    "empty": WHOLE[:0],
    "broadcast": np.broadcast_to(WHOLE[0], (3, 6)),
    "read-only": read_only(np.ones(3)),
    "bfloat16": np.ones(5, BFLOAT16),
    "complex": np.ones(5, np.complex64)[2:],
    "bool": np.ones(5, np.bool_),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_the_first_byte_of_an_array(array: Any) -> None:
    assert address_of(array) == array.ctypes.data


def test_reading_the_address_of_an_array_keeps_no_reference() -> None:
    array = np.ones(3)
    address_of(array)
    # NumPy refuses where anybody has a view of its buffer.
    array.resize(6)
    assert array.shape == (6,)

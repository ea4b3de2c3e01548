# What the CUDA backend uses of nvmath-python's cuBLASLt: handles, descriptors, pointers and streams are ints.

from enum import IntEnum
from typing import Any

import numpy as np

class Epilogue(IntEnum):
    DEFAULT = 1
    RELU_BIAS = 6
    BGRADB = 512

class MatmulDescAttribute(IntEnum):
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    BIAS_BATCH_STRIDE = 10
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12
    EPILOGUE_AUX_BATCH_STRIDE = 13
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    D_SCALE_POINTER = 20
    EPILOGUE_AUX_DATA_TYPE = 22
    FAST_ACCUM = 25
    BIAS_DATA_TYPE = 26
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32
    D_SCALE_MODE = 34

class MatmulMatrixScale(IntEnum):
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5

class MatmulPreferenceAttribute(IntEnum):
    MAX_WORKSPACE_BYTES = 1

class MatrixLayoutAttribute(IntEnum):
    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6

class cuBLASLtError(Exception):
    status: int

matmul_heuristic_result_dtype: np.dtype[Any]

def create() -> int: ...
def destroy(light_handle: int) -> None: ...
def get_matmul_desc_attribute_dtype(attr: int) -> type[np.generic]: ...
def get_matmul_preference_attribute_dtype(attr: int) -> type[np.generic]: ...
def get_matrix_layout_attribute_dtype(attr: int) -> type[np.generic]: ...
def matmul(
    light_handle: int,
    compute_desc: int,
    alpha: int,
    a: int,
    adesc: int,
    b: int,
    bdesc: int,
    beta: int,
    c: int,
    cdesc: int,
    d: int,
    ddesc: int,
    algo: int,
    workspace: int,
    workspace_size_in_bytes: int,
    stream: int,
) -> None: ...

# Its handle, a descriptor, four layouts and a preference; how many to find, where to, and where their number.
def matmul_algo_get_heuristic(*arguments: int) -> None: ...
def matmul_desc_create(compute_type: int, scale_type: int) -> int: ...
def matmul_desc_destroy(matmul_desc: int) -> None: ...
def matmul_desc_set_attribute(matmul_desc: int, attr: int, buf: int, size_in_bytes: int) -> None: ...
def matmul_preference_create() -> int: ...
def matmul_preference_destroy(pref: int) -> None: ...
def matmul_preference_set_attribute(pref: int, attr: int, buf: int, size_in_bytes: int) -> None: ...
def matrix_layout_create(type: int, rows: int, cols: int, ld: int) -> int: ...
def matrix_layout_destroy(mat_layout: int) -> None: ...
def matrix_layout_set_attribute(mat_layout: int, attr: int, buf: int, size_in_bytes: int) -> None: ...

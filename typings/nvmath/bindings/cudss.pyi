# What the CUDA backend uses of nvmath-python's cuDSS: handles, descriptors, pointers and streams are ints.

from enum import IntEnum
from typing import Any

import numpy as np

class ConfigParam(IntEnum):
    REORDERING_ALG = 0
    MATCHING_ALG = 3
    PIVOT_EPSILON = 9

class DataParam(IntEnum):
    INFO = 0
    NPIVOTS = 2

class DataType(IntEnum):
    R_32I = 10
    R_64I = 24

class IndexBase(IntEnum):
    ZERO = 0

class Layout(IntEnum):
    COL_MAJOR = 0

class MatchingAlg(IntEnum):
    MAX_DIAG_PRODUCT = 5

class MatrixType(IntEnum):
    GENERAL = 0

class MatrixViewType(IntEnum):
    FULL = 0

class Phase(IntEnum):
    ANALYSIS = 3
    FACTORIZATION = 4
    SOLVE = 1008

class ReorderingAlg(IntEnum):
    COLAMD = 2

class Status(IntEnum):
    SUCCESS = 0

class cuDSSError(Exception):
    status: Status

def config_create() -> int: ...
def config_destroy(solver_config: int) -> None: ...
def config_set(config: int, param: int, value: int, size_in_bytes: int) -> None: ...
def create() -> int: ...
def data_create(handle: int) -> int: ...
def data_destroy(handle: int, solver_data: int) -> None: ...
def data_get(
    handle: int, data: int, param: int, value: int, size_in_bytes: int, size_written: int
) -> None: ...
def destroy(handle: int) -> None: ...
def execute(
    handle: int, phase: int, solver_config: int, solver_data: int, input_matrix: int, solution: int, rhs: int
) -> None: ...
def get_config_param_dtype(attr: int) -> type[np.generic[Any]]: ...
def get_property(property_type: int) -> int: ...
def matrix_create_csr(
    nrows: int,
    ncols: int,
    nnz: int,
    row_start: int,
    row_end: int,
    col_indices: int,
    values: int,
    offset_type: int,
    index_type: int,
    value_type: int,
    mtype: int,
    mview: int,
    index_base: int,
) -> int: ...
def matrix_create_dn(nrows: int, ncols: int, ld: int, values: int, value_type: int, layout: int) -> int: ...
def matrix_destroy(matrix: int) -> None: ...
def set_device_mem_handler(handle: int, handler: int) -> None: ...
def set_stream(handle: int, stream: int) -> None: ...
def set_threading_layer(handle: int, thr_lib_file_name: str) -> None: ...

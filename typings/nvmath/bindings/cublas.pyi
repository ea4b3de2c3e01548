# What the CUDA backend uses of nvmath-python's cuBLAS: handles, pointers and streams are ints.

from enum import IntEnum

class ComputeType(IntEnum):
    COMPUTE_32F = 68
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_32F_FAST_16BF = 75
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32I = 72
    COMPUTE_64F = 70
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79

class GemmAlgo(IntEnum):
    DEFAULT = -1

class Math(IntEnum):
    DEFAULT_MATH = 0
    DISALLOW_REDUCED_PRECISION_REDUCTION = 16

class PointerMode(IntEnum):
    HOST = 0
    DEVICE = 1

class Status(IntEnum):
    SUCCESS = 0

class cuBLASError(Exception):
    status: Status

def axpy_ex_64(
    handle: int,
    n: int,
    alpha: int,
    alpha_type: int,
    x: int,
    x_type: int,
    incx: int,
    y: int,
    y_type: int,
    incy: int,
    executiontype: int,
) -> None: ...
def create() -> int: ...
def destroy(handle: int) -> None: ...
def dot_ex_64(
    handle: int,
    n: int,
    x: int,
    x_type: int,
    incx: int,
    y: int,
    y_type: int,
    incy: int,
    result: int,
    result_type: int,
    execution_type: int,
) -> None: ...
def gemm_ex_64(
    handle: int,
    transa: int,
    transb: int,
    m: int,
    n: int,
    k: int,
    alpha: int,
    a: int,
    atype: int,
    lda: int,
    b: int,
    btype: int,
    ldb: int,
    beta: int,
    c: int,
    ctype: int,
    ldc: int,
    compute_type: int,
    algo: int,
) -> None: ...
def gemm_strided_batched_ex_64(
    handle: int,
    transa: int,
    transb: int,
    m: int,
    n: int,
    k: int,
    alpha: int,
    a: int,
    atype: int,
    lda: int,
    stride_a: int,
    b: int,
    btype: int,
    ldb: int,
    stride_b: int,
    beta: int,
    c: int,
    ctype: int,
    ldc: int,
    stride_c: int,
    batch_count: int,
    compute_type: int,
    algo: int,
) -> None: ...
def nrm2ex_64(
    handle: int, n: int, x: int, x_type: int, incx: int, result: int, result_type: int, execution_type: int
) -> None: ...
def scal_ex_64(
    handle: int, n: int, alpha: int, alpha_type: int, x: int, x_type: int, incx: int, execution_type: int
) -> None: ...
def set_math_mode(handle: int, mode: int) -> None: ...
def set_pointer_mode(handle: int, mode: int) -> None: ...
def set_stream(handle: int, stream_id: int) -> None: ...
def set_workspace(handle: int, workspace: int, workspace_size_in_bytes: int) -> None: ...

# What the CUDA backend uses of nvmath-python's cuSPARSE: handles, pointers and streams are ints.

from enum import IntEnum

class IndexBase(IntEnum):
    ZERO = 0

class IndexType(IntEnum):
    INDEX_32I = 2
    INDEX_64I = 3

class Operation(IntEnum):
    NON_TRANSPOSE = 0
    TRANSPOSE = 1
    CONJUGATE_TRANSPOSE = 2

class Order(IntEnum):
    ROW = 2

class SDDMMAlg(IntEnum):
    DEFAULT = 0

class SpMMAlg(IntEnum):
    DEFAULT = 0

class SpMVAlg(IntEnum):
    DEFAULT = 0

class Status(IntEnum):
    SUCCESS = 0

class cuSPARSEError(Exception):
    status: Status

def create() -> int: ...
def create_csr(
    rows: int,
    cols: int,
    nnz: int,
    csr_row_offsets: int,
    csr_col_ind: int,
    csr_values: int,
    csr_row_offsets_type: int,
    csr_col_ind_type: int,
    idx_base: int,
    value_type: int,
) -> int: ...
def create_dn_mat(rows: int, cols: int, ld: int, values: int, value_type: int, order: int) -> int: ...
def create_dn_vec(size: int, values: int, value_type: int) -> int: ...
def csr_set_pointers(sp_mat_descr: int, csr_row_offsets: int, csr_col_ind: int, csr_values: int) -> None: ...
def destroy(handle: int) -> None: ...
def destroy_dn_mat(dn_mat_descr: int) -> None: ...
def destroy_dn_vec(dn_vec_descr: int) -> None: ...
def destroy_sp_mat(sp_mat_descr: int) -> None: ...
def dn_vec_set_values(dn_vec_descr: int, values: int) -> None: ...
def sddmm(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    beta: int,
    mat_c: int,
    compute_type: int,
    alg: int,
    external_buffer: int,
) -> None: ...
def sddmm_buffer_size(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    beta: int,
    mat_c: int,
    compute_type: int,
    alg: int,
    buffer_size: int,
) -> None: ...
def set_stream(handle: int, stream_id: int) -> None: ...
def sp_mm(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    beta: int,
    mat_c: int,
    compute_type: int,
    alg: int,
    external_buffer: int,
) -> None: ...
def sp_mm_buffer_size(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    beta: int,
    mat_c: int,
    compute_type: int,
    alg: int,
) -> int: ...
def sp_mv(
    handle: int,
    op_a: int,
    alpha: int,
    mat_a: int,
    vec_x: int,
    beta: int,
    vec_y: int,
    compute_type: int,
    alg: int,
    external_buffer: int,
) -> None: ...
def sp_mv_buffer_size(
    handle: int,
    op_a: int,
    alpha: int,
    mat_a: int,
    vec_x: int,
    beta: int,
    vec_y: int,
    compute_type: int,
    alg: int,
) -> int: ...

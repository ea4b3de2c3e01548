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

class DiagType(IntEnum):
    NON_UNIT = 0
    UNIT = 1

class FillMode(IntEnum):
    LOWER = 0
    UPPER = 1

class SolvePolicy(IntEnum):
    USE_LEVEL = 1

class SpGEMMAlg(IntEnum):
    DEFAULT = 0

class SpMatAttribute(IntEnum):
    FILL_MODE = 0
    DIAG_TYPE = 1

class SpSMAlg(IntEnum):
    DEFAULT = 0

class SpSVAlg(IntEnum):
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
def create_mat_descr() -> int: ...
def destroy_mat_descr(descr_a: int) -> None: ...
def sp_gemm_compute(
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
    spgemm_descr: int,
    buffer_size2: int,
    external_buffer2: int,
) -> None: ...
def sp_gemm_copy(
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
    spgemm_descr: int,
) -> None: ...
def sp_gemm_create_descr() -> int: ...
def sp_gemm_destroy_descr(descr: int) -> None: ...
def sp_gemm_work_estimation(
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
    spgemm_descr: int,
    external_buffer1: int,
) -> int: ...
def sp_mat_get_size(sp_mat_descr: int) -> tuple[int, int, int]: ...
def sp_mat_set_attribute(sp_mat_descr: int, attribute: int, data: int, data_size: int) -> None: ...
def sp_sm_analysis(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    mat_c: int,
    compute_type: int,
    alg: int,
    spsm_descr: int,
    external_buffer: int,
) -> None: ...
def sp_sm_buffer_size(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    mat_c: int,
    compute_type: int,
    alg: int,
    spsm_descr: int,
) -> int: ...
def sp_sm_create_descr() -> int: ...
def sp_sm_destroy_descr(descr: int) -> None: ...
def sp_sm_solve(
    handle: int,
    op_a: int,
    op_b: int,
    alpha: int,
    mat_a: int,
    mat_b: int,
    mat_c: int,
    compute_type: int,
    alg: int,
    spsm_descr: int,
) -> None: ...
def sp_sv_analysis(
    handle: int,
    op_a: int,
    alpha: int,
    mat_a: int,
    vec_x: int,
    vec_y: int,
    compute_type: int,
    alg: int,
    spsv_descr: int,
    external_buffer: int,
) -> None: ...
def sp_sv_buffer_size(
    handle: int,
    op_a: int,
    alpha: int,
    mat_a: int,
    vec_x: int,
    vec_y: int,
    compute_type: int,
    alg: int,
    spsv_descr: int,
) -> int: ...
def sp_sv_create_descr() -> int: ...
def sp_sv_destroy_descr(descr: int) -> None: ...
def sp_sv_solve(
    handle: int,
    op_a: int,
    alpha: int,
    mat_a: int,
    vec_x: int,
    vec_y: int,
    compute_type: int,
    alg: int,
    spsv_descr: int,
) -> None: ...

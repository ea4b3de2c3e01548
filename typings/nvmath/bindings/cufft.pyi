# What the CUDA backend uses of nvmath-python's cuFFT: handles, pointers and streams are ints.

from collections.abc import Sequence
from enum import IntEnum

class Result(IntEnum):
    SUCCESS = 0

class Type(IntEnum):
    C2C = 41
    R2C = 42
    C2R = 44
    Z2Z = 105
    D2Z = 106
    Z2D = 108

class XtCallbackType(IntEnum):
    LD_COMPLEX = 0
    ST_COMPLEX = 4

class cuFFTError(Exception):
    status: Result

def create() -> int: ...
def destroy(plan: int) -> None: ...
def exec_c2c(plan: int, idata: int, odata: int, direction: int) -> None: ...
def exec_c2r(plan: int, idata: int, odata: int) -> None: ...
def exec_d2z(plan: int, idata: int, odata: int) -> None: ...
def exec_r2c(plan: int, idata: int, odata: int) -> None: ...
def exec_z2d(plan: int, idata: int, odata: int) -> None: ...
def exec_z2z(plan: int, idata: int, odata: int, direction: int) -> None: ...
def get_version() -> int: ...
def make_plan_many64(
    plan: int,
    rank: int,
    n: Sequence[int] | int,
    inembed: Sequence[int] | int,
    istride: int,
    idist: int,
    onembed: Sequence[int] | int,
    ostride: int,
    odist: int,
    type: int,
    batch: int,
) -> int: ...
def set_auto_allocation(plan: int, auto_allocate: int) -> None: ...
def set_stream(plan: int, stream: int) -> None: ...
def set_work_area(plan: int, work_area: int) -> None: ...
def xt_set_jit_callback(
    plan: int,
    lto_callback_symbol_name: int,
    lto_callback_fatbin: bytes,
    lto_callback_fatbin_size: int,
    type: int,
    caller_info: Sequence[int],
) -> None: ...

# What the CUDA backend uses of cuTENSOR by nvmath-python: handles, descriptors, plans and pointers are ints.

from collections.abc import Sequence
from enum import IntEnum

class ComputeDesc:
    @staticmethod
    def COMPUTE_32F() -> int: ...
    @staticmethod
    def COMPUTE_64F() -> int: ...

class Algo(IntEnum):
    DEFAULT = -1

class JitMode(IntEnum):
    NONE = 0

class WorksizePreference(IntEnum):
    WORKSPACE_DEFAULT = 2

class Operator(IntEnum):
    OP_IDENTITY = 1

class PlanAttribute(IntEnum):
    REQUIRED_WORKSPACE = 0

class Status(IntEnum):
    SUCCESS = 0
    INTERNAL_ERROR = 14
    NOT_SUPPORTED = 15
    INSUFFICIENT_DRIVER = 20

class cuTENSORError(Exception):
    status: int

def create() -> int: ...
def destroy(handle: int) -> None: ...
def create_tensor_descriptor(
    handle: int,
    num_modes: int,
    extent: Sequence[int],
    stride: Sequence[int],
    data_type: int,
    alignment_requirement: int,
) -> int: ...
def destroy_tensor_descriptor(desc: int) -> None: ...
def create_contraction(
    handle: int,
    desc_a: int,
    mode_a: Sequence[int],
    op_a: int,
    desc_b: int,
    mode_b: Sequence[int],
    op_b: int,
    desc_c: int,
    mode_c: Sequence[int],
    op_c: int,
    desc_d: int,
    mode_d: Sequence[int],
    desc_compute: int,
) -> int: ...
def destroy_operation_descriptor(desc: int) -> None: ...
def create_plan_preference(handle: int, algo: int, jit_mode: int) -> int: ...
def destroy_plan_preference(pref: int) -> None: ...
def estimate_workspace_size(handle: int, desc: int, plan_pref: int, workspace_pref: int) -> int: ...
def create_plan(handle: int, desc: int, pref: int, workspace_size_limit: int) -> int: ...
def destroy_plan(plan: int) -> None: ...
def plan_get_attribute(handle: int, plan: int, attr: int, buf: int, size_in_bytes: int) -> None: ...
def contract(
    handle: int,
    plan: int,
    alpha: int,
    a: int,
    b: int,
    beta: int,
    c: int,
    d: int,
    workspace: int,
    workspace_size: int,
    stream: int,
) -> None: ...

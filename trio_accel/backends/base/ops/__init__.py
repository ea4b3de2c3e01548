"""Operation specifications: what crosses from an actor to a backend, or to a worker process."""

from ._host_use import HostUse
from ._shapes import product_shape, transformed_shape
from ._spec import (
    ArraySpec,
    NumberRole,
    OperationSpec,
    array_fields,
    contiguous_strides,
    exact,
    number,
    number_fields,
    reads,
    updates,
    writes,
)
from .fft import FftDirection, FftKind, FftNorm, FftSpec
from .linalg import AxpySpec, DotSpec, GemmSpec, MatmulSpec, Nrm2Spec, ScalSpec, Transpose
from .memory import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec
from .random import PHILOX_ROW, PhiloxSpec
from .sparse import SpmvCsrSpec

__all__ = [
    "PHILOX_ROW",
    "ArraySpec",
    "AxpySpec",
    "CopyFromHostSpec",
    "CopySpec",
    "CopyToHostSpec",
    "DotSpec",
    "FftDirection",
    "FftKind",
    "FftNorm",
    "FftSpec",
    "FillSpec",
    "GemmSpec",
    "HostUse",
    "MatmulSpec",
    "Nrm2Spec",
    "NumberRole",
    "OperationSpec",
    "PhiloxSpec",
    "ScalSpec",
    "SpmvCsrSpec",
    "Transpose",
    "array_fields",
    "contiguous_strides",
    "exact",
    "number",
    "number_fields",
    "product_shape",
    "reads",
    "transformed_shape",
    "updates",
    "writes",
]

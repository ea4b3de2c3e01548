"""Operation specifications: what crosses from an actor to a backend, or to a worker process."""

from ._array import ArraySpec, contiguous_strides
from ._descriptor import Descriptor, SpecField, array_key, map_arrays, value_key
from ._host_use import HostUse
from ._roles import NumberRole, Role, StatusArray, exact, number, reads, scalar, status, updates, writes
from ._shapes import product_shape, transformed_shape
from ._spec import OperationSpec, specification
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
    "Descriptor",
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
    "Role",
    "ScalSpec",
    "SpecField",
    "SpmvCsrSpec",
    "StatusArray",
    "Transpose",
    "array_key",
    "contiguous_strides",
    "exact",
    "map_arrays",
    "number",
    "product_shape",
    "reads",
    "scalar",
    "specification",
    "status",
    "transformed_shape",
    "updates",
    "value_key",
    "writes",
]

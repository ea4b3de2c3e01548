"""Operation specifications: what crosses from an actor to a backend, or to a worker process."""

from ._array import ArraySpec, contiguous_strides
from ._host_use import HostUse
from ._roles import NumberRole, Role, StatusArray, exact, number, reads, scalar, status, updates, writes
from ._shapes import product_shape, transformed_shape
from ._spec import (
    Descriptor,
    OperationSpec,
    SpecField,
    array_key,
    arrays_of,
    map_arrays,
    specification,
    value_key,
)
from .fft import SPECTRA, FftDirection, FftKind, FftNorm, FftSpec
from .linalg import AxpySpec, DotSpec, GemmSpec, MatmulSpec, Nrm2Spec, ScalSpec, Transpose
from .memory import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec
from .random import PHILOX_ROW, PhiloxSpec
from .solver import (
    CholeskySpec,
    EighSpec,
    LuSolveSpec,
    LuSpec,
    QrSpec,
    SolveSpec,
    SvdSpec,
    Triangle,
    real_of,
)
from .sparse import SpmvCsrSpec

__all__ = [
    "PHILOX_ROW",
    "SPECTRA",
    "ArraySpec",
    "AxpySpec",
    "CholeskySpec",
    "CopyFromHostSpec",
    "CopySpec",
    "CopyToHostSpec",
    "Descriptor",
    "DotSpec",
    "EighSpec",
    "FftDirection",
    "FftKind",
    "FftNorm",
    "FftSpec",
    "FillSpec",
    "GemmSpec",
    "HostUse",
    "LuSolveSpec",
    "LuSpec",
    "MatmulSpec",
    "Nrm2Spec",
    "NumberRole",
    "OperationSpec",
    "PhiloxSpec",
    "QrSpec",
    "Role",
    "ScalSpec",
    "SolveSpec",
    "SpecField",
    "SpmvCsrSpec",
    "StatusArray",
    "SvdSpec",
    "Transpose",
    "Triangle",
    "array_key",
    "arrays_of",
    "contiguous_strides",
    "exact",
    "map_arrays",
    "number",
    "product_shape",
    "reads",
    "real_of",
    "scalar",
    "specification",
    "status",
    "transformed_shape",
    "updates",
    "value_key",
    "writes",
]

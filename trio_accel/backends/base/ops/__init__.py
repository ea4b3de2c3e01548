"""Operation specifications: what crosses from an actor to a backend, or to a worker process."""

# fmt: off
# isort: off
from ._array import ArraySpec, contiguous_strides
from ._host_use import HostUse
from ._peers import PeerArray, Peers
from ._roles import (
    NumberRole, Role, StatusArray, exact, number, packed, peers, reads, scalar, status, updates, writes,
)
from ._shapes import common_shape, product_shape, transformed_shape
from ._signature import KINDS, Item, Shapes, check_index, column, complex_of, parse_shapes, real_of
from ._spec import (
    Descriptor, OperationSpec, SpecField, array_key, arrays_of, map_arrays, specification, value_key,
)
from .expression import ElementwiseSpec, ReductionSpec
from .fft import FFT_DTYPES, FftDirection, FftKind, FftNorm, FftSpec
from .graphs import BranchSpec, GraphNode, GraphRecipe, GraphSpec, LoopSpec, graph_recipe
from .jit import (
    CodeFormat, Dim3, KernelCode, KernelDefinition, KernelInfoSpec, KernelLayout, KernelParameter, KernelRole,
    KernelSpec, scalar_offsets,
)
from .linalg import MatmulSpec, Side, Transpose
from .memory import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, StackSpec
from .program import RESULT_WORDS, ProgramCall, ProgramFetch, ProgramResult, ProgramReturn
from .random import PHILOX_ROW, RANDOM_DTYPES, Distribution, PhiloxSpec

__all__ = [
    "FFT_DTYPES",
    "KINDS",
    "PHILOX_ROW",
    "RANDOM_DTYPES",
    "RESULT_WORDS",
    "ArraySpec",
    "BranchSpec",
    "CodeFormat",
    "CopyFromHostSpec",
    "CopySpec",
    "CopyToHostSpec",
    "Descriptor",
    "Dim3",
    "Distribution",
    "ElementwiseSpec",
    "FftDirection",
    "FftKind",
    "FftNorm",
    "FftSpec",
    "FillSpec",
    "GraphNode",
    "GraphRecipe",
    "GraphSpec",
    "HostUse",
    "Item",
    "KernelCode",
    "KernelDefinition",
    "KernelInfoSpec",
    "KernelLayout",
    "KernelParameter",
    "KernelRole",
    "KernelSpec",
    "LoopSpec",
    "MatmulSpec",
    "NumberRole",
    "OperationSpec",
    "PeerArray",
    "Peers",
    "PhiloxSpec",
    "ProgramCall",
    "ProgramFetch",
    "ProgramResult",
    "ProgramReturn",
    "ReductionSpec",
    "Role",
    "Shapes",
    "Side",
    "SpecField",
    "StackSpec",
    "StatusArray",
    "Transpose",
    "array_key",
    "arrays_of",
    "check_index",
    "column",
    "common_shape",
    "complex_of",
    "contiguous_strides",
    "exact",
    "graph_recipe",
    "map_arrays",
    "number",
    "packed",
    "parse_shapes",
    "peers",
    "product_shape",
    "reads",
    "real_of",
    "scalar",
    "scalar_offsets",
    "specification",
    "status",
    "transformed_shape",
    "updates",
    "value_key",
    "writes",
]

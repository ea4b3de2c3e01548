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
from ._spec import (
    Descriptor, OperationSpec, SpecField, array_key, arrays_of, map_arrays, specification, value_key,
)
from .expression import ElementwiseSpec, ReductionSpec
from .fft import FftDirection, FftKind, FftNorm, FftSpec
from .graphs import BranchSpec, GraphNode, GraphRecipe, GraphSpec, LoopSpec, graph_recipe
from .jit import (
    CodeFormat, Dim3, KernelCode, KernelDefinition, KernelInfoSpec, KernelLayout, KernelParameter, KernelRole,
    KernelSpec, scalar_offsets,
)
from .linalg import (
    AsumSpec, AxpySpec, DotSpec, GemmSpec, IamaxSpec, MatmulSpec, Nrm2Spec, RotSpec, ScalSpec, Side,
    SwapSpec, SymmSpec, SyrkSpec, Transpose, TriangularSpec,
)
from .memory import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, StackSpec
from .program import RESULT_WORDS, ProgramCall, ProgramFetch, ProgramResult, ProgramReturn
from .random import PHILOX_ROW, Distribution, PhiloxSpec
from .solver import (
    CheckDiagonalSpec, CholeskySpec, DetSpec, EighSpec, EigSpec, LuSolveSpec, LuSpec, QrSpec, SolveSpec,
    SvdSpec, Triangle, complex_of, real_of,
)
from .sparse import CsrToDenseSpec, SddmmCsrSpec, SpmmCsrSpec, SpmvCsrSpec

__all__ = [
    "PHILOX_ROW", "RESULT_WORDS", "ArraySpec", "AsumSpec", "AxpySpec", "BranchSpec", "CheckDiagonalSpec",
    "CholeskySpec", "CodeFormat", "CopyFromHostSpec", "CopySpec", "CopyToHostSpec", "CsrToDenseSpec",
    "Descriptor", "DetSpec", "Dim3", "Distribution", "DotSpec", "EigSpec", "EighSpec", "ElementwiseSpec",
    "FftDirection", "FftKind",
    "FftNorm", "FftSpec", "FillSpec", "GemmSpec", "GraphNode",
    "GraphRecipe", "GraphSpec", "HostUse", "IamaxSpec", "KernelCode", "KernelDefinition",
    "KernelInfoSpec", "KernelLayout", "KernelParameter", "KernelRole", "KernelSpec", "LoopSpec",
    "LuSolveSpec", "LuSpec",
    "MatmulSpec", "Nrm2Spec", "NumberRole", "OperationSpec", "PeerArray", "Peers", "PhiloxSpec",
    "ProgramCall", "ProgramFetch", "ProgramResult", "ProgramReturn", "QrSpec", "ReductionSpec", "Role",
    "RotSpec",
    "ScalSpec", "SddmmCsrSpec", "Side", "SolveSpec", "SpecField", "SpmmCsrSpec", "SpmvCsrSpec",
    "StackSpec", "StatusArray", "SvdSpec", "SwapSpec", "SymmSpec", "SyrkSpec", "Transpose", "Triangle",
    "TriangularSpec",
    "array_key", "arrays_of", "common_shape", "complex_of", "contiguous_strides", "exact", "graph_recipe",
    "map_arrays", "number", "packed", "peers", "product_shape", "reads", "real_of", "scalar",
    "scalar_offsets", "specification",
    "status", "transformed_shape", "updates", "value_key", "writes",
]

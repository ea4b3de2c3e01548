"""The libraries of the CUDA backend, and the NVIDIA libraries that they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from ..base import CollectiveLibrary, DType
from ..base.kit.library import LibraryEntry

STAND_IN = "TRIO_ACCEL_STAND_IN"
"""Environment variable with the folder of the stand-in driver, in a program that runs on it."""


@attrs.frozen
class SharedLibrary:
    """A shared library of CUDA.

    Attributes:
        title: NVIDIA's name of it.
        version: Function that returns its version.
        asked: Its signature: one part of the version at a time, both parts, or one number for all.
        major_offset: CUDA's major version minus its own; None if its number does not show that.
    """

    title: str
    version: str
    asked: Literal["part", "pair", "number"] = "part"
    major_offset: int | None = None


VENDOR: Mapping[str, SharedLibrary] = {
    # NVRTC compiles kernels: every device needs it.
    "nvrtc": SharedLibrary("NVRTC", "nvrtcVersion", asked="pair", major_offset=0),
    "cublas": SharedLibrary("cuBLAS", "cublasGetProperty", major_offset=0),
    "cufft": SharedLibrary("cuFFT", "cufftGetProperty", major_offset=1),
    "cusolver": SharedLibrary("cuSOLVER", "cusolverGetProperty", major_offset=1),
    "cusparse": SharedLibrary("cuSPARSE", "cusparseGetProperty"),
    "cudnn": SharedLibrary("cuDNN", "cudnnGetProperty"),
    "cutensor": SharedLibrary("cuTENSOR", "cutensorGetVersion", asked="number"),
}
"""By the names that cuda-pathfinder has for them."""

FRONT_END = (1, 22)
"""The version of nvidia-cudnn-frontend whose private methods are called, as in pyproject.toml."""

VERSIONS = {name: (vendor.version, vendor.asked) for name, vendor in VENDOR.items()}
"""How each tells its version, in plain values."""

LIBRARIES: Mapping[str, LibraryEntry] = {
    "arrays": LibraryEntry(".libraries.compiled", "ArraysLibrary"),
    "blas": LibraryEntry(".libraries.blas", "BlasLibrary", "cublas"),
    "blaslt": LibraryEntry(".libraries.blaslt", "BlasLtLibrary", "cublas"),
    "communicators": LibraryEntry(".libraries.nccl", "NcclLibrary", package="nccl"),
    "dnn": LibraryEntry(".libraries.dnn", "DnnLibrary", uses="cudnn"),
    "fft": LibraryEntry(".libraries.fft", "FftLibrary", "cufft"),
    "graphs": LibraryEntry(".libraries.graphs", "CudaGraphLibrary"),
    "jit": LibraryEntry(".libraries.compiled", "JitLibrary"),
    "memory": LibraryEntry(".libraries.memory", "CudaMemoryLibrary"),
    "program": LibraryEntry(".libraries.program", "CudaProgramLibrary"),
    "random": LibraryEntry(".libraries.compiled", "RandomLibrary"),
    "solver": LibraryEntry(".libraries.solver", "SolverLibrary", "cusolver"),
    "sparse": LibraryEntry(".libraries.sparse", "SparseLibrary", "cusparse"),
    "tensor": LibraryEntry(".libraries.tensor", "TensorLibrary", "cublas", uses="cutensor"),
}
"""By the names that library actors have for them."""

_INTEGER_DTYPES = frozenset(
    {DType.bool, DType.int8, DType.uint8, DType.int32, DType.uint32, DType.int64, DType.uint64}
)
_FLOATING = frozenset({DType.float16, DType.bfloat16, DType.float32, DType.float64})
_COMPLEX = frozenset({DType.complex64, DType.complex128})

NCCL = CollectiveLibrary(
    title="NCCL",
    package="nccl",
    missing="nccl4py is not installed, which the extras cuda13 and cuda12 have",
    reductions={
        "sum": _INTEGER_DTYPES | _FLOATING | _COMPLEX,
        "prod": _INTEGER_DTYPES | _FLOATING,
        # Extremes of floating numbers are left out: where one is NaN, NCCL takes the other, and NumPy NaN.
        "min": _INTEGER_DTYPES,
        "max": _INTEGER_DTYPES,
        "mean": _FLOATING | _COMPLEX,
    },
)
"""By which GPUs meet."""

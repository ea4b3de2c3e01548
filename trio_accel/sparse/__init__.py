"""Sparse linear algebra on a device: matrices, messages, functions, and the actor that serves them."""

from ._csr import CsrMatrix, csr
from ._operations import Sddmm, SparseActor, Spmm, Spmv, ToDense, sddmm, spmm, spmv, to_dense

__all__ = [
    "CsrMatrix", "Sddmm", "SparseActor", "Spmm", "Spmv", "ToDense",
    "csr", "sddmm", "spmm", "spmv", "to_dense",
]  # fmt: skip

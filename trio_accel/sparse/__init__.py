"""Sparse linear algebra on a device: matrices, messages, functions, and the actor that serves them."""

from ._actor import SparseActor
from ._csr import CsrMatrix, csr
from ._spmv import Spmv, spmv

__all__ = ["CsrMatrix", "SparseActor", "Spmv", "csr", "spmv"]

"""What solvers with several results reply with: named tuples with the names of NumPy's."""

from __future__ import annotations

from typing import NamedTuple

from ..devices import AccelRef

__all__ = ["EigResult", "EighResult", "LUResult", "LstsqResult", "QRResult", "SVDResult", "SlogdetResult"]


class LUResult(NamedTuple):
    """An LU factorization; see `lu`."""

    lu: AccelRef
    """Both triangular factors, of the shape of the matrices."""
    piv: AccelRef
    """Row exchanges: int32, from 0."""


class QRResult(NamedTuple):
    """A QR factorization; see `qr`."""

    Q: AccelRef
    """Orthonormal columns."""
    R: AccelRef
    """Upper triangular matrices."""


class SVDResult(NamedTuple):
    """A singular value decomposition; see `svd`."""

    U: AccelRef
    """Left singular vectors, as columns."""
    S: AccelRef
    """Singular values, the largest first."""
    Vh: AccelRef
    """Right singular vectors, conjugated, as rows."""


class EighResult(NamedTuple):
    """Eigenvalues and eigenvectors; see `eigh`."""

    eigenvalues: AccelRef
    """Real numbers, the smallest first."""
    eigenvectors: AccelRef
    """Vectors of length 1, as columns."""


class EigResult(NamedTuple):
    """Eigenvalues and eigenvectors of general matrices; see `eig`."""

    eigenvalues: AccelRef
    """Complex numbers, in no order."""
    eigenvectors: AccelRef
    """Complex vectors of length 1, as columns."""


class SlogdetResult(NamedTuple):
    """A determinant that may be too large for its dtype; see `slogdet`."""

    sign: AccelRef
    """0, or a number of absolute value 1."""
    logabsdet: AccelRef
    """The natural logarithm of the absolute value, a real number."""


class LstsqResult(NamedTuple):
    """A solution by least squares; see `lstsq`."""

    x: AccelRef
    """The solution."""
    residuals: AccelRef
    """Sums of squares, where the solution is the only one and not exact."""
    rank: int
    """How many singular values count."""
    s: AccelRef
    """The singular values, the largest first."""

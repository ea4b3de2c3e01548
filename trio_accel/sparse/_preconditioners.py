"""Preconditioners of iterative solvers."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base import LinAlgError
from ..devices import AccelRef
from ..devices.operations._calls import composed
from ..devices.operations._plan_source import refuse_value
from ..expressions import Out
from ._elements import check_csr, diagonal
from ._formats import CsrMatrix
from ._iterations import make
from ._structures import tril, triu
from ._systems import SpsolveTriangular, ic0, ilu0

__all__ = ["Preconditioner", "precondition"]

_Kind: TypeAlias = Literal["jacobi", "ilu0", "ic0"]

_DIVIDE = make("x / y", operation="sparse.precondition")


class Preconditioner:
    """Approximates the product of a vector with the inverse of a matrix. Made by `precondition`.

    Attributes:
        kind: ``"jacobi"``, ``"ilu0"`` or ``"ic0"``.
        shape: Rows and columns of the matrix.
    """

    __slots__ = ("_diagonal", "_lower", "_upper", "kind", "shape")

    def __init__(
        self,
        kind: _Kind,
        shape: tuple[int, int],
        diagonal: Out = None,
        lower: CsrMatrix | None = None,
        upper: CsrMatrix | None = None,
    ) -> None:
        self.kind: _Kind = kind
        self.shape: tuple[int, int] = shape
        self._diagonal, self._lower, self._upper = diagonal, lower, upper

    @property
    def is_recorded(self) -> bool:
        """Whether a graph can hold it: triangular solutions tell by status words whether they failed."""
        return self._diagonal is not None

    def __repr__(self) -> str:
        return f"<Preconditioner {self.kind} {self.shape}>"

    async def __call__(self, x: AccelRef) -> AccelRef:
        """Apply it to a vector of shape (n,)."""
        if self._diagonal is not None:
            return await x.device.ask(_DIVIDE.compute(x, self._diagonal))
        assert self._lower is not None
        assert self._upper is not None
        is_unit = self.kind == "ilu0"
        half = await x.device.ask(SpsolveTriangular(self._lower, x, True, unit_diagonal=is_unit))
        return await x.device.ask(SpsolveTriangular(self._upper, half, False))


@composed
async def precondition(matrix: CsrMatrix, kind: _Kind = "jacobi") -> Preconditioner:
    """Make a preconditioner, for the argument `M` of `cg` and the others.

    Args:
        matrix: Square matrix of shape (n, n).
        kind: ``"jacobi"``: division by the diagonal, which the host reads once; it runs on every backend.
            ``"ilu0"``: the triangular solves of `ilu0`. ``"ic0"``: those of `ic0`, of a Hermitian matrix.

    Returns:
        An async function of a vector.

    Raises:
        TypeError: The matrix has another format.
        ValueError: It is not square, or there is no such kind.
        LinAlgError: An element of the diagonal is zero or not stored, or what `ilu0` and `ic0` say.
        LibraryError: A wrong structure.
        NotSupportedError: The backend has no incomplete factors.
    """
    check_csr("precondition", matrix)
    if kind not in ("jacobi", "ilu0", "ic0"):
        refuse_value("sparse.precondition", "kind", ("jacobi", "ilu0", "ic0"), kind)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"sparse.precondition: matrix must be square, got shape {matrix.shape}")
    if kind != "jacobi":
        factors = await (ilu0 if kind == "ilu0" else ic0)(matrix)
        return Preconditioner(kind, matrix.shape, lower=await tril(factors), upper=await triu(factors))
    found = await diagonal(matrix)
    values: npt.NDArray[Any] = await found.to_host()
    bad = np.flatnonzero((values == 0) | ~np.isfinite(values))
    if bad.size:
        row = int(bad[0])
        raise LinAlgError(
            f"precondition: the diagonal is missing, zero or not finite in row {row}",
            library="sparse",
            code=row + 1,
        )
    return Preconditioner(kind, matrix.shape, diagonal=found)

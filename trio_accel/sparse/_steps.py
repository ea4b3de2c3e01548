"""Many steps of conjugate gradients as one operation, with the looks at the residual between them."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np

from ..backends.base import Ints, ops
from ..devices import AccelRef, Planned, Planner, operation
from ._formats import CsrMatrix
from ._products import SparseActor

__all__ = ["CgSteps"]

_BOUNDS = struct.Struct("=4d")
_STATE = 4


class Looks(NamedTuple):
    """The results of steps.

    Attributes:
        residuals: The norm of the residual at each look.
        state: The arrays after the last look.
        best: The arrays after the look with the least residual; None if the caller has seen a lower one.
    """

    residuals: list[float]
    state: list[AccelRef]
    best: list[AccelRef] | None


@ops.specification
class CgSpec(ops.OperationSpec):
    """Steps of conjugate gradients, and looks at the residual.

    The kernel stops at a look if the residual is small enough, unchanged since the previous look, or not
    finite.

    Attributes:
        matrix: Rows and columns of the matrix.
        kind: Kind of the preconditioner; empty for none.
        steps: The number of steps until each look.
        looks: The largest number of looks.
        is_first: Whether `p` and `rz` do not exist yet.
        bounds: As float64: the norm to reach, the norm at the last look and at the best one, and the smallest
            divisor.
        read: Row pointers, columns, values, `b`, `x`, `r`, `p`, `rz`, and the arrays of the preconditioner.
        written: `x`, `r`, `p` and `rz` after the last look, and, if there may be several, after the best one.
        residuals: As float64: the number of looks, the number of the best one, which is -1 for none, and then
            the norm at each look.
    """

    operation = "sparse.cg_steps"

    matrix: Ints = ops.exact()
    kind: str = ops.exact()
    steps: int = ops.exact()
    looks: int = ops.exact()
    is_first: bool = ops.exact()
    bounds: bytes = ops.packed()
    read: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    written: tuple[ops.ArraySpec, ...] = ops.writes(variadic=True)
    residuals: ops.StatusArray = ops.status()


def _plan(message: Any, planner: Planner) -> Planned[Looks]:
    matrix, state = message.matrix, message.state
    is_first = state[2] is None
    operands = {
        "matrix.indptr": matrix.indptr,
        "matrix.indices": matrix.indices,
        "matrix.data": matrix.data,
        "b": message.b,
        **dict(zip("xr", state, strict=False)),
        # A placeholder for arrays that the kernel makes first.
        "p": message.b if is_first else state[2],
        "rz": message.b if is_first else state[3],
        **{f"M.{number}": array for number, array in enumerate(message.preconditioner)},
    }
    read = tuple([planner.read(name, array) for name, array in operands.items()])
    dtype, looks = read[3].dtype, message.looks
    shapes = [array.shape for array in read[3:6]]
    outputs = [planner.output(shape, dtype) for _ in range(2 if looks > 1 else 1) for shape in (*shapes, ())]
    residuals = planner.status(2 * (looks + 2))
    spec = CgSpec(
        matrix.shape,
        message.kind,
        message.steps,
        looks,
        is_first,
        _BOUNDS.pack(*message.bounds),
        read,
        tuple([output.spec for output in outputs]),
        residuals,
    )

    def finish() -> Looks:
        count, best, *norms = residuals.view(np.float64).tolist()
        best_state = outputs[-_STATE:] if best >= 0 else None
        return Looks(norms[: int(count)], outputs[:_STATE], best_state)

    return Planned(spec, finish=finish)


@operation(actor=SparseActor, plan=_plan)
async def _cg_steps(
    matrix: CsrMatrix,
    b: AccelRef,
    state: tuple[AccelRef | None, ...],
    kind: str,
    preconditioner: tuple[AccelRef, ...],
    bounds: tuple[float, ...],
    *,
    steps: int,
    looks: int,
) -> Looks:
    """Make steps of conjugate gradients; see `CgSpec`.

    Only the CPU has it, because a step is shorter than a request.

    Args:
        matrix: Hermitian positive definite matrix of shape (n, n).
        b: The right-hand side.
        state: The solution, the residual, and then the direction and the product of the residual and its
            preconditioned form, which are None before the first step.
        kind: Kind of the preconditioner; empty for none.
        preconditioner: Its arrays.
        bounds: The norm to reach, the norm at the last look and at the best one, the smallest divisor.
        steps: Steps until each look.
        looks: The largest number of looks.

    Returns:
        The norms, and the arrays after the last look and after the best one.
    """
    ...


CgSteps: Final = _cg_steps.message

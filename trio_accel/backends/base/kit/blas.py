"""Translates matrix operations of `linalg` into BLAS calls; the same for all backends.

`plan_routine` returns a `BlasPlan`: the call, the operands to copy, and the steps through the stack.

A BLAS stores matrices by columns. An operation whose result is stored by rows is computed as its transpose:
sides (``"L"``, ``"R"``) and triangles change, and the letters of operands (``"N"``, ``"T"``, ``"C"``) stay.
If an operand is stored the other way than the result, its letter becomes the letter of the transpose. An
operand is copied only if no letter describes it, or if it has gaps within rows and columns (D109).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..contract.dtypes import Ints
from ..contract.ops import ArraySpec, OperationSpec, Side, contiguous_strides

_ACROSS = {"N": "T", "T": "N"}
_OPPOSITE: Mapping[Side, Side] = {"L": "R", "R": "L"}


def leading(count: int, length: int, step: int, within: int, itemsize: int) -> int | None:
    """Return the leading dimension of a matrix: the elements from one line (column or row) to the next.

    Args:
        count: The number of lines.
        length: The number of elements in a line.
        step: The bytes from one line to the next.
        within: The bytes from one element of a line to the next.
        itemsize: The bytes of an element.

    Returns:
        The leading dimension; None for a layout that a BLAS cannot take, because lines have gaps or overlap.
    """
    if length > 1 and within != itemsize:
        return None
    if count <= 1:
        return max(length, 1)
    return step // itemsize if step >= length * itemsize and step % itemsize == 0 else None


@attrs.frozen
class ScalarArgument:
    """A number that is passed with the call.

    Attributes:
        field: The field of the specification that holds it.
        is_conjugated: Whether to pass its conjugate.
    """

    field: str
    is_conjugated: bool = False

    def of(self, spec: OperationSpec) -> complex:
        """Return the number."""
        number: complex = getattr(spec, self.field)
        return number.conjugate() if self.is_conjugated else number


@attrs.frozen
class Matrix:
    """A matrix as a routine sees it; its address is passed with the call.

    Attributes:
        field: The field of the specification that holds it.
        shape: Rows and columns.
        strides: Bytes from one row to the next, and from one column to the next.
        itemsize: Bytes of an element.
        is_turned: Whether it is the transpose of the field's matrix.
    """

    field: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    itemsize: int
    is_turned: bool = False

    @property
    def turned(self) -> Matrix:
        """The transpose, in the same memory."""
        (rows, columns), (down, across) = self.shape, self.strides
        return Matrix(self.field, (columns, rows), (across, down), self.itemsize, not self.is_turned)

    @property
    def is_by_columns(self) -> bool:
        """Whether a BLAS can take it as it is."""
        return 0 in self.shape or self._leading() is not None

    @property
    def is_across(self) -> bool:
        """Whether a BLAS can take its transpose only."""
        return not self.is_by_columns and self.turned.is_by_columns

    @property
    def lead(self) -> int:
        """The leading dimension of a matrix by columns."""
        return max(self._leading() or 0, self.shape[0], 1)

    def _leading(self) -> int | None:
        (rows, columns), (down, across) = self.shape, self.strides
        return leading(columns, rows, across, down, self.itemsize)


@attrs.frozen
class BlasRoutine:
    """A call of the BLAS.

    Attributes:
        name: The routine's name, without the letter of the dtype.
        arguments: Letters, sizes, factors and matrices, in the order of the BLAS.
    """

    name: str
    arguments: tuple[str | int | ScalarArgument | Matrix, ...]


@attrs.define(eq=False)
class BlasPlan:
    """The way in which operations of one plan key are run.

    Attributes:
        is_complex: Whether elements have an imaginary part.
        stack: Extents of the result's stack.
        routine: The call for each matrix of the stack; None if the result is empty.
        plain: The call if alpha is 1, because some routines have no alpha; None to use `routine`.
        copies: Fields that are copied, by rows (``"C"``) or by columns (``"F"``); a result is copied back.
        steps: The bytes from one matrix to the next along each axis of the stack, for each field.
    """

    is_complex: bool
    stack: Ints = ()
    routine: BlasRoutine | None = None
    plain: BlasRoutine | None = None
    copies: dict[str, Literal["C", "F"]] = attrs.field(factory=dict[str, Literal["C", "F"]])
    steps: dict[str, Ints] = attrs.field(factory=dict[str, Ints])
    _shapes: dict[str, Ints] = attrs.field(factory=dict[str, Ints])

    def routine_for(self, spec: OperationSpec) -> BlasRoutine | None:
        """Return the call for an operation with this plan; None if the result is empty."""
        return self.plain if self.plain is not None and getattr(spec, "alpha", 0) == 1 else self.routine

    def calls(self, addresses: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
        """Yield the fields' addresses for each matrix of the stack, given the arrays' addresses."""
        lists = {field: self.addresses(field, addresses[field]).tolist() for field in self.steps}
        for call_addresses in zip(*lists.values(), strict=True):
            yield dict(zip(lists, call_addresses, strict=True))

    def addresses(self, field: str, first: int) -> npt.NDArray[np.uint64]:
        """Return the addresses of a field's matrices, in the order of the stack, given the first one."""
        steps = zip(self.stack, self.steps[field], strict=True)
        addresses = np.array(first, np.uint64)
        for extent, step in steps:
            addresses = np.add.outer(addresses, (np.arange(extent) * step).astype(np.uint64))
        return addresses.ravel()

    def operand(self, field: str, array: ArraySpec) -> Matrix:
        """Return the layout of a matrix, or of the first matrix in a stack, and record its steps."""
        self._shapes[field] = array.shape
        self._set_steps(field, array.strides)
        (rows, columns), (down, along) = array.shape[-2:], array.strides[-2:]
        return Matrix(field, (rows, columns), (down, along), array.dtype.itemsize)

    def result(self, field: str, array: ArraySpec) -> Matrix:
        """Return the layout of a matrix to change, or of its copy by rows if a BLAS cannot take it."""
        matrix = self.operand(field, array)
        if not matrix.is_by_columns and not matrix.is_across:
            return self._copied(matrix.turned).turned
        return matrix

    def column_operand(self, matrix: Matrix, op: str) -> tuple[Matrix, str, bool]:
        """Return an operand by columns, its letter in the call, and whether the operand was transposed."""
        if op == "C" and not self.is_complex:
            op = "T"
        if op == "C" or not matrix.is_across:
            return self.by_columns(matrix), op, False
        return matrix.turned, _ACROSS[op], True

    def by_columns(self, matrix: Matrix) -> Matrix:
        """Return the operand, or its copy by columns if it is stored otherwise."""
        return matrix if matrix.is_by_columns else self._copied(matrix)

    def _copied(self, matrix: Matrix) -> Matrix:
        field, size = matrix.field, matrix.itemsize
        self.copies[field] = "C" if matrix.is_turned else "F"
        self._set_steps(field, contiguous_strides(self._shapes[field], size))
        return attrs.evolve(matrix, strides=(size, matrix.shape[0] * size))

    def _set_steps(self, field: str, strides: Ints) -> None:
        shape = self._shapes[field][:-2]
        # One matrix of an operand may serve several results. Then its address does not change.
        steps = [0 if extent == 1 else step for extent, step in zip(shape, strides, strict=False)]
        self.steps[field] = (0,) * (len(self.stack) - len(steps)) + tuple(steps)


def plan_routine(spec: Any) -> BlasPlan:
    """Plan an operation of `linalg` in `_PLANNERS`, for its layouts and flags."""
    (result,) = spec.outputs()
    plan = BlasPlan(result.dtype.kind == "complex", result.shape[:-2])
    if result.size:
        _PLANNERS[spec.operation](plan, spec)
    return plan


def _plan_gemm(plan: BlasPlan, spec: Any) -> None:
    a, b, c = plan.operand("a", spec.a), plan.operand("b", spec.b), plan.result("c", spec.c)
    op_a, op_b = spec.trans_a, spec.trans_b
    if _is_by_rows(c, like=a):
        a, b, c, op_a, op_b = b.turned, a.turned, c.turned, op_b, op_a
    a, letter_a, _ = plan.column_operand(a, op_a)
    b, letter_b, _ = plan.column_operand(b, op_b)
    (m, n), k = c.shape, a.shape[1 if letter_a == "N" else 0]
    # `gemv` multiplies with a vector, but cannot conjugate the vector.
    if n == 1 and k and letter_b != "C":
        step = 1 if letter_b == "N" else b.lead
        plan.routine = BlasRoutine("gemv", (letter_a, *a.shape, _ALPHA, a, a.lead, b, step, _BETA, c, 1))
    elif m == 1 and k and "C" not in (letter_a, letter_b):
        step = 1 if letter_a == "T" else a.lead
        arguments = _ACROSS[letter_b], *b.shape, _ALPHA, b, b.lead, a, step, _BETA, c, c.lead
        plan.routine = BlasRoutine("gemv", arguments)
    else:
        sources = a, a.lead, b, b.lead
        plan.routine = BlasRoutine("gemm", (letter_a, letter_b, m, n, k, _ALPHA, *sources, _BETA, c, c.lead))


def _plan_symm(plan: BlasPlan, spec: Any) -> None:
    a, b, c = plan.operand("a", spec.a), plan.operand("b", spec.b), plan.result("c", spec.c)
    side, lower, kind = spec.side, spec.lower, _kind(plan, spec)
    if _is_by_rows(c, like=a):
        a, b, c, side, lower = a.turned, b.turned, c.turned, _OPPOSITE[side], not lower
    # The transpose of a Hermitian matrix is its conjugate. So the letter is C, for which `column_operand`
    # copies an operand instead of transposing it.
    a, _, is_turned = plan.column_operand(a, "N" if kind == "sy" else "C")
    b, uplo, (m, n) = plan.by_columns(b), _uplo(lower != is_turned), c.shape
    if side == "L" and n == 1:
        plan.routine = BlasRoutine(f"{kind}mv", (uplo, m, _ALPHA, a, a.lead, b, 1, _BETA, c, 1))
    elif side == "R" and m == 1 and kind == "sy":
        plan.routine = BlasRoutine("symv", (uplo, n, _ALPHA, a, a.lead, b, b.lead, _BETA, c, c.lead))
    else:
        arguments = side, uplo, m, n, _ALPHA, a, a.lead, b, b.lead, _BETA, c, c.lead
        plan.routine = BlasRoutine(f"{kind}mm", arguments)


def _plan_syrk(plan: BlasPlan, spec: Any) -> None:
    operands = [plan.operand(name, getattr(spec, name)) for name in ("a", "b") if hasattr(spec, name)]
    c, kind, is_plain, lower = plan.result("c", spec.c), _kind(plan, spec), spec.trans == "N", spec.lower
    is_by_rows = _is_by_rows(c, like=operands[0])
    if is_by_rows:
        c, operands = c.turned, [operand.turned for operand in operands]
        is_plain, lower = not is_plain, not lower
    if kind == "sy" and all(operand.is_across for operand in operands):
        is_plain, operands = not is_plain, [operand.turned for operand in operands]
    operands = [plan.by_columns(operand) for operand in operands]
    n, k = operands[0].shape if is_plain else operands[0].shape[::-1]
    trans = "N" if is_plain else "C" if kind == "he" else "T"
    # The result is computed as its transpose, which is its conjugate if it is Hermitian.
    alpha = ScalarArgument("alpha", is_conjugated=is_by_rows and kind == "he")
    sources = [argument for operand in operands for argument in (operand, operand.lead)]
    name = f"{kind}rk" if len(operands) == 1 else f"{kind}r2k"
    plan.routine = BlasRoutine(name, (_uplo(lower), trans, n, k, alpha, *sources, _BETA, c, c.lead))


def _plan_triangular(plan: BlasPlan, spec: Any) -> None:
    a, x = plan.operand("a", spec.a), plan.result("out", spec.out)
    side, lower, diagonal = spec.side, spec.lower, "U" if spec.unit_diagonal else "N"
    name = "trs" if spec.operation == "linalg.trsm" else "trm"
    if _is_by_rows(x, like=a):
        a, x, side, lower = a.turned, x.turned, _OPPOSITE[side], not lower
    a, op, is_turned = plan.column_operand(a, spec.trans)
    uplo, (m, n) = _uplo(lower != is_turned), x.shape
    plan.routine = BlasRoutine(f"{name}m", (side, uplo, op, diagonal, m, n, _ALPHA, a, a.lead, x, x.lead))
    if side == "L" and n == 1:
        plan.plain = BlasRoutine(f"{name}v", (uplo, op, diagonal, m, a, a.lead, x, 1))
    elif side == "R" and m == 1 and op != "C":
        plan.plain = BlasRoutine(f"{name}v", (uplo, _ACROSS[op], diagonal, n, a, a.lead, x, x.lead))


_ALPHA, _BETA = ScalarArgument("alpha"), ScalarArgument("beta")
_PLANNERS: Mapping[str, Callable[[BlasPlan, Any], None]] = {
    "linalg.gemm": _plan_gemm,
    "linalg.symm": _plan_symm,
    "linalg.syrk": _plan_syrk,
    "linalg.syr2k": _plan_syrk,
    "linalg.trmm": _plan_triangular,
    "linalg.trsm": _plan_triangular,
}


def _is_by_rows(matrix: Matrix, like: Matrix) -> bool:
    """Return whether to take a result by rows; if it is stored both ways, take it like an operand."""
    is_either = matrix.is_by_columns and matrix.turned.is_by_columns
    return not (like if is_either else matrix).is_by_columns


def _kind(plan: BlasPlan, spec: Any) -> str:
    return "he" if spec.hermitian and plan.is_complex else "sy"


def _uplo(lower: bool) -> str:
    return "L" if lower else "U"

"""Contractions of two and more tensors, and the actor that serves them."""

from __future__ import annotations

import functools

from ..backends.base import DType, factor
from ..backends.base.contract.ops import contraction_terms
from ..backends.base.contract.subscripts import ContractionPath, Optimize
from ..devices import AccelRef, LibraryActor, Operand, composed, device_of
from ..expressions import (
    Contract,
    Contracting,
    ContractionFactor,
    Elementwise,
    Groups,
    Out,
    Reduction,
    Track,
    check_operands,
    contraction_path,
    intermediates,
)

__all__ = ["Contract", "ContractionPath", "TensorActor", "contract", "contract_path", "einsum"]


class TensorActor(LibraryActor):
    """Serves contractions, on a stream of its own.

    CPU backend: NumPy. CUDA: cuTENSOR, or cuBLAS with transposes and products of stacked matrices.
    """

    library = "tensor"


@composed
async def contract(
    subscripts: str,
    a: Operand,
    b: Operand,
    c: Operand | None = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    out: Out = None,
) -> AccelRef:
    """Contraction of two tensors, as cuTENSOR's: ``alpha * einsum(subscripts, a, b) + beta * c``.

    It is one launch that multiplies stacks of matrices, whatever the order of the axes. On CUDA, cuTENSOR
    computes contractions that are not such a product in place, or they are transposed in workspace. Without
    inner axes, or without other axes, it is an expression, whose sum with `c` takes a second launch.

    float16 and bfloat16 are multiplied and added in float32 and rounded once; the other dtypes are computed
    in their own precision, float32 not in TF32.

    Args:
        subscripts: Letters of the axes of `a`, `b` and the result: ``"bik,bkj->bij"``. Each letter is in at
            least two of them, and never twice in one; ``...`` means axes that both have. See `numpy.einsum`.
        a: Tensor of a floating or complex dtype.
        b: Tensor of the same dtype.
        c: Tensor to add, with that dtype and the shape of the result.
        alpha: Factor of the product; real unless the tensors are complex.
        beta: Factor of `c`, likewise; if it is 0, `c` is not read.
        out: Array to write to, of any strides, which may be `c` itself; by default a new one.

    Returns:
        The result, with its axes in the order of the letters.

    Raises:
        ValueError: A letter is in one term only, or twice in one; lengths differ; or there is a `beta`
            without `c`.
    """
    named_operands = {"a": a, "b": b} if c is None else {"a": a, "b": b, "c": c}
    dtype = check_operands("contract", **named_operands)
    _check_dtype("contract", dtype)
    alpha, beta = factor("contract", "alpha", alpha, dtype), factor("contract", "beta", beta, dtype)
    a_term, b_term, output, shape = contraction_terms("contract", subscripts, a.shape, b.shape)
    inner = "".join(letter for letter in a_term if letter not in output)
    if inner and set(a_term) ^ set(b_term):
        return await device_of("contract", a, b, c).ask(Contract(subscripts, a, b, c, alpha, beta, out))
    if c is None and beta:
        raise ValueError(f"contract: beta must be 0 without c, got {beta!r}")
    if c is not None and c.shape != shape:
        raise ValueError(f"contract: c must have shape {shape}, got shape {c.shape}")
    x, y = (
        ContractionFactor(tuple(term), array).along(output + inner)
        for term, array in ((a_term, a), (b_term, b))
    )
    if not inner:
        if c is None or not beta:
            return await _expression("out = p * x * y")(alpha, x, y, out=out)
        return await _expression("out = p * x * y + q * z")(alpha, x, y, beta, c, out=out)
    add, axes = _sums("p * x * y", "sum", dtype=dtype.value), range(len(output), len(output + inner))
    if c is None or not beta:
        return await add(alpha, x, y, axis=axes, out=out)
    with intermediates() as track:
        product = track(await add(alpha, x, y, axis=axes))
        return await _expression("out = x + q * z")(product, beta, c, out=out)


_expression = functools.cache(
    functools.partial(Elementwise[AccelRef], precision="float32", operation="tensor.contract")
)
_sums = functools.cache(functools.partial(Reduction, operation="tensor.contract"))


def _check_dtype(name: str, dtype: DType) -> None:
    if not dtype.is_inexact:
        raise TypeError(
            f"{name}: operands must be of a floating or complex dtype, got {dtype}; ta.linalg.einsum takes "
            "integers"
        )


async def _by_contract(
    lhs: ContractionFactor, rhs: ContractionFactor, groups: Groups, track: Track
) -> AccelRef:
    """Contract two tensors in one launch."""
    message = Contract.of(lhs, rhs, groups)
    return await device_of("einsum", lhs.array, rhs.array).ask(message)


_CONTRACTING = Contracting("tensor.einsum", _by_contract)


@composed
async def einsum(
    subscripts: str, /, *operands: Operand, optimize: Optimize = "auto", memory_limit: int | None = None
) -> AccelRef:
    """Sum products of any number of tensors by Einstein's convention, as `numpy.einsum`.

    Two at a time are contracted, each pair in one launch, in the order that opt_einsum finds. An axis that no
    other tensor has is added along first. Intermediate tensors are released as soon as they are used.

    Args:
        subscripts: See `ta.linalg.einsum`: ``"ij,jk,kl->il"``.
        *operands: Tensors of one floating or complex dtype, one for each term. An axis of one element
            broadcasts.
        optimize: The search for the order, by opt_einsum's names: ``"auto"``, ``"optimal"``, ``"greedy"``,
            ``"dp"`` and others; or the order itself, as `ContractionPath.steps`. Searches that take too long
            are refused: ``"optimal"`` and ``"branch-all"`` of more than 6 operands, ``"branch-2"`` and
            ``"dp"`` of more than 14.
        memory_limit: The most bytes that intermediate tensors and the result may take at a time. If the order
            found takes more, the order with the smallest tensors is tried. Workspace is not included. None
            for the device's memory.

    Returns:
        The result; in general a view of new memory with any strides.

    Raises:
        ValueError: A term does not fit its operand, a letter after ``->`` is in no term or twice, lengths
            differ, a search takes too long, or the order is not valid.
        OutOfMemoryError: No order was found that fits into memory. Nothing was launched.
    """
    named_operands = {f"operands[{number}]": operand for number, operand in enumerate(operands)}
    _check_dtype("einsum", check_operands("einsum", **named_operands))
    return await _CONTRACTING.sum(subscripts, operands, optimize, memory_limit)


def contract_path(
    subscripts: str, /, *operands: Operand, optimize: Optimize = "auto", memory_limit: int | None = None
) -> ContractionPath:
    """Find the order in which `einsum` multiplies, and its costs; launch and refuse nothing.

    Args:
        subscripts: See `einsum`, also for the others. Only shapes and dtypes of the tensors count.
        *operands: Tensors, which may all be NumPy arrays.
        optimize: How the order is found.
        memory_limit: Bytes that it should not exceed.

    Returns:
        The order, its multiplications and additions, and the bytes of its arrays.
    """
    return contraction_path("contract_path", subscripts, operands, optimize, memory_limit)

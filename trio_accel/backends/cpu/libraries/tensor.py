"""Tensor contractions by NumPy's products of matrix stacks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ...base import INEXACT, HostArray, HostCall, kernel, scalar_of
from ...base.contract.ops import ContractionSpec
from ..runtime._memory import convert, to_float32
from ..runtime.blas_threads import matrix_product


@kernel(ContractionSpec, backend="cpu", dtypes=INEXACT)
def contract(spec: ContractionSpec, call: HostCall) -> None:
    """Transpose, multiply stacks of matrices, and transpose back.

    `numpy.einsum` calls BLAS for two arrays without an axis that all three have, and is a plain loop for
    others.
    """
    (of_a, of_b, of_out), dtype = spec.terms, spec.out.dtype
    a, b, out = call.array(spec.a, write=False), call.array(spec.b, write=False), call.array(spec.out)
    if dtype.is_half:
        a, b = to_float32(a), to_float32(b)
    batch = [letter for letter in of_out if letter in of_a and letter in of_b]
    rows = [letter for letter in of_out if letter not in of_b]
    columns = [letter for letter in of_out if letter not in of_a]
    inner = [letter for letter in of_a if letter not in of_out]
    extents = dict(zip(of_a + of_b, a.shape + b.shape, strict=True))
    product = matrix_product(
        _stack(a, of_a, extents, (batch, rows, inner)), _stack(b, of_b, extents, (batch, inner, columns))
    )
    letters = [*batch, *rows, *columns]
    result = product.reshape([extents[letter] for letter in letters])
    result = result.transpose([letters.index(letter) for letter in of_out])
    factors = [scalar_of("tensor", name, getattr(spec, name), dtype) for name in ("alpha", "beta")]
    alpha, beta = (np.array(factor, result.dtype) for factor in factors)
    if alpha != 1:
        result = result * alpha
    if beta != 0 and spec.c is not None:
        c = call.array(spec.c, write=False)
        result = result + (to_float32(c) if dtype.is_half else c) * beta
    convert(result, out)


def _stack(
    array: HostArray, term: str, extents: dict[str, int], order: tuple[Iterable[str], ...]
) -> HostArray:
    """Rearrange an array as a stack of matrices."""
    batch, first, second = (list(group) for group in order)
    view = array.transpose([term.index(letter) for letter in (*batch, *first, *second)])
    sides = (math.prod(extents[letter] for letter in side) for side in (first, second))
    return view.reshape([*(extents[letter] for letter in batch), *sides])

"""Contractions of tensors."""

from __future__ import annotations

from typing import Any

import torch

from trio_accel.backends.base import INEXACT, kernel, scalar_of
from trio_accel.backends.base.contract.ops import ContractionSpec

from .._views import read, write
from ..manifest import BACKEND


@kernel(ContractionSpec, backend=BACKEND, dtypes=INEXACT)
def contract(spec: ContractionSpec, call: Any) -> None:
    """Multiply and add up by the letters; halves are rounded once."""
    (of_a, of_b, of_out), dtype = spec.terms, spec.out.dtype
    letters = dict.fromkeys(of_a + of_b)
    known = {letter: number for number, letter in enumerate(letters)}
    a, b, *c = [read(call, one) for one in (spec.a, spec.b, spec.c) if one is not None]
    if dtype.is_half:
        a, b, *c = (one.float() for one in (a, b, *c))
    # Numbers in place of letters, as PyTorch takes only those of ASCII.
    lists = [[known[letter] for letter in term] for term in (of_a, of_b, of_out)]
    made = torch.einsum(a, lists[0], b, lists[1], lists[2])
    alpha, beta = (scalar_of("tensor", name, getattr(spec, name), dtype) for name in ("alpha", "beta"))
    made = made * alpha if alpha != 1 else made
    write(call, spec.out, made + beta * c[0] if c and beta else made)

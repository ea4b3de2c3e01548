"""Whether each public function has a gradient: one of four words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ..backends.base import AccelError, DType
from ..devices import Function
from ._backward import REASONS, RULES, STEP_NAMES
from ._derive import gradient
from ._elementwise import elementwise_of

__all__ = ["ROOMS", "word_of", "words"]

ROOMS = (
    "arrays", "linalg", "fft", "nn", "signal", "ndimage", "sparse", "spatial", "tables", "random", "tensor",
)  # fmt: skip
"""The packages whose functions have a word."""

# The results of these do not change with small changes of an argument, or are made of none.
_STEPS = {
    "arrays": (
        "all allclose any arange argmax argmin argsort argwhere array_equal bitwise_and bitwise_invert "
        "bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil count_nonzero digitize empty "
        "empty_like equal eye floor floor_divide full full_like gcd geomspace greater greater_equal isclose "
        "isfinite isin isinf isnan lcm less less_equal lexsort linspace logical_and logical_not logical_or "
        "logical_xor logspace nanargmax nanargmin nonzero not_equal one_hot ones ones_like round searchsorted "
        "sign signbit tri trunc unravel_index zeros zeros_like histogram"
    ),
    "linalg": "iamax matrix_rank",
    "fft": "fftfreq next_fast_len rfftfreq",
    "ndimage": "binary_dilation binary_erosion label distance_transform_edt",
    "sparse": "ic0 ilu0",
    "tensor": "contract_path",
}
_SEVERAL = "it has several results, and a call of a chain takes one"
_LENGTH = "elements decide the length of the result"
_IN_PLACE = "it works in place; use ta.linalg.matmul and operators"
_ITERATES = "it iterates until it converges"
_SPARSE = "a sparse matrix is no array of a chain; use ta.sparse.spmm of a dense product"
_UPDATES = "it changes parameters in place"
_GRADIENT = "it is a gradient itself, of several results or by places"
_NO_RULE = "nobody has written its rule"
_REASONS: Mapping[str, Mapping[str, str]] = {
    "arrays": {
        "broadcast_arrays meshgrid split unstack partition run_lengths top_k": _SEVERAL,
        "compress intersect1d setdiff1d setxor1d union1d unique_all unique_counts unique_inverse "
        "unique_values": _LENGTH,
        "put put_along_axis scatter scatter_nd": "it changes an array in place",
        "angle imag": "it takes complex numbers",
        "gradient interp linear_recurrence nanmedian nanpercentile nanquantile scan": _NO_RULE,
    },
    "linalg": {
        "axpy gemm gemv ger rot scal swap symm symv syr syr2 syr2k syrk trmm trmv trsm trsv": _IN_PLACE,
        "eig eigh hessenberg ldl lu lstsq polar qr schur slogdet svd": _SEVERAL,
        "fused_matmul fused_matmul_grad fused_matmul_sums": "it is a fused step; use ta.nn.linear or ta.linalg.matmul",
        "eigvals": "the eigenvalues are complex",
        "null_space orth": _LENGTH,
        "cho_solve cond lu_solve multi_dot solve_banded solve_toeplitz solveh_banded sqrtm": _NO_RULE,
    },
    "fft": {"czt hilbert zoom_fft hfft2 hfftn ihfft2 ihfftn fused": _NO_RULE},
    "nn": {
        "adadelta adagrad adam adamax adamw clip_grad_norm lion radam rmsprop sgd": _UPDATES,
        "batch_norm_training dropout": _SEVERAL,
    },
}


def _listed(table: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    for room, reasons in table.items():
        for names, reason in reasons.items():
            for name in names.split():
                yield f"{room}.{name}", reason


STEP_NAMES.update(f"{room}.{name}" for room, names in _STEPS.items() for name in names.split())
STEP_NAMES.add("stop_gradient")
REASONS.update(_listed(_REASONS))

"""Whether each public function has a gradient: one of four words."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from .._names import later
from ..devices import ArrayFunction
from ._backward import REASONS, RULES, STEP_NAMES
from ._bodies import BODIES
from ._elementwise import elementwise_of
from ._rows import is_of_rows

__all__ = ["ROOMS", "words"]

nn_slopes = later("trio_accel.nn._slopes")

ROOMS = (
    "arrays",
    "linalg",
    "fft",
    "nn",
    "signal",
    "ndimage",
    "sparse",
    "spatial",
    "tables",
    "random",
    "tensor",
)
"""The packages whose functions have a word."""

# The results of these do not change with small changes of an argument, or are made of none.
_STEPS = {
    "arrays": (
        "all allclose any arange asarray argmax argmin argsort argwhere array_equal bitwise_and "
        "bitwise_invert bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil "
        "count_nonzero digitize empty empty_like equal eye floor floor_divide full full_like gcd "
        "geomspace greater greater_equal isclose isfinite isin isinf isnan lcm less less_equal "
        "lexsort linspace logical_and logical_not logical_or logical_xor logspace nanargmax nanargmin "
        "nonzero not_equal one_hot ones ones_like round searchsorted sign signbit tri trunc "
        "unravel_index zeros zeros_like histogram"
    ),
    "linalg": "iamax matrix_rank",
    "fft": "fftfreq next_fast_len rfftfreq",
    "ndimage": "binary_dilation binary_erosion label distance_transform_edt",
    "sparse": "ic0 ilu0",
    "tensor": "contract_path",
}
_LENGTH = "elements decide the length of the result"
_IN_PLACE = "it works in place; use ta.linalg.matmul and operators"
_ITERATES = "it iterates until it converges"
_SPARSE = "the tape has arrays, and not sparse matrices; ta.sparse.spmm has a gradient by its dense factor"
_UPDATES = "it changes parameters in place"
_WRITES = "it changes an array in place, and x.at[key].set(v) updates a copy"
_REASONS: Mapping[str, Mapping[str, str]] = {
    "arrays": {
        "partition run_lengths": _LENGTH,
        "bincount compress intersect1d setdiff1d setxor1d union1d unique_all unique_counts "
        "unique_inverse unique_values": _LENGTH,
        "put put_along_axis scatter scatter_nd": _WRITES,
    },
    "AccelRef": {"assign fill": _WRITES},
    "linalg": {
        "axpy gemm gemv ger rot scal swap symm symv syr syr2 syr2k syrk trmm trmv trsm trsv": _IN_PLACE,
        "fused_matmul fused_matmul_grad fused_matmul_sums": "it is a fused step; use ta.nn.linear",
        "null_space orth": _LENGTH,
    },
    "fft": {"fused": "it is a fused step; use ta.fft and ta.arrays"},
    "nn": {
        "adadelta adagrad adam adamax adamw clip_grad_norm lion radam rmsprop sgd": _UPDATES,
        "paged_attention": "it reads a cache of a generation; use ta.nn.scaled_dot_product_attention",
    },
    "signal": {"cubic_spline": "it returns a spline, and not an array"},
    "sparse": {
        "add bsr coo csc csr diagonal eliminate_zeros max min multiply norm precondition rows spgemm "
        "sum sum_duplicates take_rows to_dense tobsr tocoo tocsc tocsr transpose tril triu": _SPARSE,
        "bicgstab cg eigsh gmres minres": _ITERATES,
        "factor spsolve": "its gradient solves with ta.sparse.transpose(matrix), to be awaited before",
        "sddmm": "its gradient is a product with a sparse matrix of values that are not known yet",
    },
    "spatial": {"cell_list neighbours": _LENGTH},
    "tensor": {"elementwise": "it names an operation of a library; use ta.arrays and operators"},
}


def _listed(table: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    for room, reasons in table.items():
        for names, reason in reasons.items():
            for name in names.split():
                yield f"{room}.{name}", reason


STEP_NAMES.update(f"{room}.{name}" for room, names in _STEPS.items() for name in names.split())
STEP_NAMES.update(("stop_gradient", "gradients.placed"))
REASONS.update(_listed(_REASONS))


def words() -> dict[str, tuple[str, str]]:
    """Return for each public function of arrays its word, and the reason of a refusal.

    The words are ``"derived"``, from the function's expression or body; ``"rule"``, from a rule by hand;
    ``"step"``, the gradient is 0; and ``"refused"``.
    """
    result: dict[str, tuple[str, str]] = {}
    for room in ROOMS:
        public: Any = import_module(f"trio_accel.{room}")
        for base in public.__all__:
            function = getattr(public, base)
            if inspect.isfunction(function):
                result[f"{room}.{base}"] = _word(f"{room}.{base}", function)
    return result


def _word(name: str, function: Any) -> tuple[str, str]:
    if name in STEP_NAMES:
        return "step", ""
    if name in REASONS:
        return "refused", REASONS[name]
    if name in RULES or name in BODIES:
        return ("derived" if name in nn_slopes.DERIVED or name in BODIES else "rule"), ""
    asked = getattr(function, "asked", None)
    if isinstance(asked, ArrayFunction) and is_of_rows(asked):
        return "derived", ""
    expression = elementwise_of(asked) if isinstance(asked, ArrayFunction) else None
    if expression is None:
        return "", ""
    return ("rule" if expression.elementwise.slopes else "derived"), ""

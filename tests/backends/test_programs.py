"""Programs: reductions, folds and stores as steps, computed by the one evaluator in passes and in pieces."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType, OutOfRangeError
from trio_accel.backends.base.expressions import (
    TypedExpression,
    TypedStep,
    _pieces,
    evaluate,
    parse,
    parse_reduction,
    scatter_program,
    typed,
)

pytestmark = pytest.mark.no_device

Numbers = npt.NDArray[Any]
SOFTMAX = "e = exp(x - max(x)); y = e / sum(e)"


def rows_of(text: str, *dtypes: DType) -> TypedExpression:
    names = "xyzw"[: len(dtypes)]
    return typed(parse(text, tuple(names), is_along=True), dtypes)


def functions(program: TypedExpression, numbers: Sequence[int]) -> list[str]:
    return [program.steps[number].function for number in numbers]


def test_equal_steps_of_a_row_are_made_once() -> None:
    program = rows_of(SOFTMAX, DType.float32)
    names = functions(program, range(len(program.steps)))
    assert names.count("exp") == names.count("argument") == 1
    largest, total = (number for number, step in enumerate(program.steps) if step.is_reduction)
    # The last pass reads exp(x - max(x)), so the sum has nothing to make but the conversion of it.
    assert functions(program, program.passes[largest].numbers) == []
    assert functions(program, program.passes[total].numbers) == ["cast"]
    assert functions(program, program.passes[None].operands[total]) == ["exp"]
    assert total not in program.passes[None].last_uses


def test_values_only_for_reductions_are_not_in_the_last_pass() -> None:
    program = rows_of("d = x - mean(x); y = x / sqrt(mean(d * d))", DType.float64)
    last = functions(program, program.passes[None].numbers)
    assert last.count("subtract") == last.count("multiply") == 0
    squares = [number for number, step in enumerate(program.steps) if step.is_reduction][1]
    assert functions(program, program.passes[squares].numbers) == ["subtract", "multiply"]


ROWS: dict[str, Callable[[Numbers, tuple[int, ...]], Any]] = {
    SOFTMAX: lambda x, axes: (e := np.exp(x - x.max(axes, keepdims=True))) / e.sum(axes, keepdims=True),
    "d = x - mean(x); y = x / sqrt(mean(d * d) + 1)": lambda x, axes: (
        x / np.sqrt(np.mean((x - x.mean(axes, keepdims=True)) ** 2, axes, keepdims=True) + 1)
    ),
    "sum(x * x) / n + max(x - 1)": lambda x, axes: (
        np.mean(x * x, axes, keepdims=True) + np.max(x - 1, axes, keepdims=True)
    ),
    "y = x - sum(x / sum(x * x)) * prod(cos(x))": lambda x, axes: (
        x
        - np.sum(x / np.sum(x * x, axes, keepdims=True), axes, keepdims=True)
        * np.prod(np.cos(x), axes, keepdims=True)
    ),
    "c = x + 1; y = where(any(c > 2.5), c, min(x))": lambda x, axes: np.where(
        (x + 1 > 2.5).any(axes, keepdims=True), x + 1, x.min(axes, keepdims=True)
    ),
    "p = sum(x * k for k in range(4)); y = p / max(p * p)": lambda x, axes: (
        6 * x / np.max(36 * x * x, axes, keepdims=True)
    ),
    "argmax(x) + 0.5": lambda x, axes: np.argmax(x, axes[0], keepdims=True) + 0.5,
}


@pytest.mark.parametrize("piece", [1 << 18, 40])
@pytest.mark.parametrize("text", ROWS)
def test_rows_match_numpy(text: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "_CHUNK_ELEMENTS", piece)
    x = np.random.default_rng(8).standard_normal((4, 7, 9))
    program = rows_of(text, DType.float64)
    for count in (1, 2, 3):
        for axes in itertools.combinations(range(3), count):
            if "argmax" in text and count > 1:
                continue
            for array in (x, np.asfortranarray(x), x[:, ::-1]):
                (got,) = evaluate(program, [array], shape=x.shape, axes=axes)
                np.testing.assert_allclose(got, ROWS[text](array, axes), 1e-13, 1e-13)


def test_pieces_of_rows_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "_CHUNK_ELEMENTS", 1000)
    sizes: list[int] = []
    real = _pieces._in_pieces

    def counted(part: Any, ufunc: Any, shape: Any) -> Any:
        def measured(rows: slice, elements: slice) -> Any:
            values = part(rows, elements)
            sizes.append(values.size)
            return values

        return real(measured, ufunc, shape)

    monkeypatch.setattr(_pieces, "_in_pieces", counted)
    x = np.random.default_rng(9).standard_normal((3, 5000))
    (got,) = evaluate(rows_of("sqrt(sum((x - mean(x)) ** 2))", DType.float64), [x], shape=x.shape, axes=(1,))
    np.testing.assert_allclose(got[:, 0], np.sqrt(((x - x.mean(1, keepdims=True)) ** 2).sum(1)), rtol=1e-13)
    assert sum(sizes) == x.size
    assert max(sizes) <= 1000


@given(st.integers(0, 40), st.sampled_from([(0,), (1,), (0, 1)]))
@settings(max_examples=40, deadline=None)
def test_a_fold_combines_all_elements_once(count: int, axes: tuple[int, ...]) -> None:
    reduction = parse_reduction("x + 1", "(a + b) % 7.0", identity=3, post="where(n > 0, a, -a)")
    program = typed(reduction, (DType.float64,))
    shape = [5, 5]
    shape[axes[0]] = count
    x = np.arange(25.0 * max(count, 1))[: count * 5].reshape(shape)
    (got,) = evaluate(program, [x], shape=x.shape, axes=axes)
    kept = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
    # A single element is not combined.
    elements = int(np.prod([shape[axis] for axis in axes]))
    want = np.full(kept, -3.0) if not elements else np.sum(x + 1, axes, keepdims=True)
    np.testing.assert_array_equal(got, want % 7 if elements > 1 else want)


def test_a_constant_of_a_fold_exists_after_it() -> None:
    reduction = parse_reduction("x", "maximum(a, b) + 0.5 - 0.5", post="a * 0.5")
    program = typed(reduction, (DType.float64,))
    (got,) = evaluate(program, [np.array([1.0, 3, 2])], shape=(3,), axes=(0,))
    assert got == 1.5


LOOP = "y = x\nfor k in range(5):\n    if y > 2: break\n    y = y + k"


@pytest.mark.parametrize("piece", [1 << 18, 40])
def test_a_loop_is_not_divided_among_passes(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "_CHUNK_ELEMENTS", piece)
    x = np.random.default_rng(4).standard_normal((3, 100))
    ended = x.copy()
    for k in range(5):
        ended += np.where((np.cumsum([0, *range(k)])[:, None, None] + x > 2).any(0), 0, k)
    program = typed(parse_reduction(LOOP, "sum"), (DType.float64,))
    (got,) = evaluate(program, [x], shape=x.shape, axes=(1,))
    np.testing.assert_allclose(got[:, 0], ended.sum(1), rtol=1e-13)


STORES: dict[str, Any] = {
    "set": lambda old, new: new,
    "add": operator.add,
    "multiply": operator.mul,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("reduce", STORES)
def test_stores_match_a_plain_loop(reduce: Any) -> None:
    parsed = parse("place = x[j, i(1)]; value = v * 2", ("x", "j", "v"), ("place", "value"))
    made = typed(parsed, (DType.float64, DType.int64, DType.float64), (), True)
    rng = np.random.default_rng(5)
    j, v = rng.integers(-3, 3, (4, 5)), rng.standard_normal((4, 5))
    got = rng.standard_normal((3, 5))
    want = got.copy()
    for row, column in np.ndindex(4, 5):
        at = int(j[row, column]), column
        want[at] = STORES[reduce](want[at], v[row, column] * 2)
    evaluate(
        scatter_program(made, reduce), [None, j, v], {1: np.arange(5).reshape(1, 5)}, {0: got}, shape=(4, 5)
    )
    np.testing.assert_array_equal(got, want)


def test_each_element_stores_even_if_all_share_index_and_value() -> None:
    parsed = parse("place = x[i(0)]; value = v", ("x", "v"), ("place", "value"))
    made = typed(parsed, (DType.float64, DType.float64), (), True)
    x = np.zeros(3)
    evaluate(scatter_program(made, "add"), [None, 1.5], {0: np.arange(3)[:, None]}, {0: x}, shape=(3, 4))
    np.testing.assert_array_equal(x, [6, 6, 6])


@pytest.mark.parametrize("reduce", ["add", "set", "max"])
def test_varying_values_at_a_constant_index_are_all_stored(reduce: Any) -> None:
    """Element (i, k) is stored at k, with the value of i."""
    parsed = parse("place = x[i(1)]; value = v", ("x", "v"), ("place", "value"))
    made = typed(parsed, (DType.float64, DType.float64), (), True)
    x, v = np.zeros(4), np.array([[1.0], [2.0], [3.0]])
    program = scatter_program(made, reduce)
    evaluate(program, [None, v], {1: np.arange(2)[None]}, {0: x}, shape=(3, 2))
    np.testing.assert_array_equal(x, [6, 6, 0, 0] if reduce == "add" else [3, 3, 0, 0])


def test_a_wrong_index_of_a_store_is_reported_by_its_name() -> None:
    parsed = parse("place = x[0, j]; value = v", ("x", "j", "v"), ("place", "value"))
    made = typed(parsed, (DType.float64, DType.int64, DType.float64), (), True)
    x, j = np.zeros((2, 3)), np.array([0, 5])
    with pytest.raises(OutOfRangeError, match="j: 5 is outside axis 1 of x, which has length 3"):
        evaluate(scatter_program(made, "add"), [None, j, np.ones(2)], {}, {0: x}, shape=(2,))
    assert not x.any()


@pytest.mark.parametrize("has_break", [False, True])
@pytest.mark.parametrize("varies", [False, True])
def test_stores_in_a_loop_match_a_plain_loop(has_break: bool, varies: bool) -> None:
    """For each element i, ``for k in range(m[i]): x[k] += v[i] * k``, which may end where ``k >= v[i]``."""
    f, w = DType.float64, DType.int64
    steps = [
        TypedStep("argument", w, (), 0),
        TypedStep("argument", f, (), 1),
        TypedStep("constant", w, (), 0),
        TypedStep("carried", w, (2,)),
        TypedStep("loop", w, (2, 0, 3), 8),
        TypedStep("cast", f, (4,)),
        TypedStep("multiply", f, (1, 5)),
        TypedStep("store_add", f, (6, 4), 2),
        TypedStep("end", w, (4, 3)),
    ]
    if has_break:
        steps[6:7] = [
            TypedStep("greater_equal", DType.bool, (5, 1)),
            TypedStep("break", DType.bool, (4, 6, 3)),
            TypedStep("multiply", f, (1, 5)),
        ]
        steps[-2:] = [TypedStep("store_add", f, (8, 4), 2), TypedStep("end", w, (4, 3))]
        steps[4] = TypedStep("loop", w, (2, 0, 3), 10)
    program = TypedExpression(tuple(steps), (), elements=(0, 1), loads=((2, 1),))
    many: Numbers = np.array([3, 0, 5, 1]) if varies else np.array(5)
    v: Numbers = np.array([1.5, 2, 2.5, 9]) if varies else np.array(2.5)
    got, want = np.zeros(5), np.zeros(5)
    for m, each in zip(*np.broadcast_arrays(many, v, np.zeros(4))[:2], strict=True):
        for k in range(int(m)):
            if has_break and k >= each:
                break
            want[k] += each * k
    evaluate(program, [many, v], {}, {2: got}, shape=(4,))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("text", [SOFTMAX, "a = sum(x); y = x * sum(abs(a - x))"])
def test_pieces_are_combined_in_the_order_of_the_whole(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(3).standard_normal((290, 7))
    program = rows_of(text, DType.float64)
    for array in (x, np.asfortranarray(x), x[::-1], np.ascontiguousarray(x.T).T[:, ::-1]):
        for axes in ((0,), (1,), (0, 1)):
            monkeypatch.setattr(_pieces, "_CHUNK_ELEMENTS", 1 << 18)
            (whole,) = evaluate(program, [array], shape=array.shape, axes=axes)
            monkeypatch.setattr(_pieces, "_CHUNK_ELEMENTS", 150)
            (pieces,) = evaluate(program, [array], shape=array.shape, axes=axes)
            np.testing.assert_array_equal(pieces, whole)

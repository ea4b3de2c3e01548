"""Contractions in the form of batched matrix products: NumPy executes the plans, column-major."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numpy.lib.stride_tricks import as_strided

from trio_accel.backends.base.kit.product_layouts import Contraction, plan_contraction

Array = npt.NDArray[np.float64]


def lying(draw: random.Random, extents: dict[str, int], letters: str, seed: int) -> Array:
    """An array in any order of its axes, perhaps with gaps, perhaps with an axis turned around."""
    shape = [extents[letter] for letter in letters]
    order = draw.sample(range(len(shape)), len(shape))
    gap = draw.choice([0, 0, 1])
    base = np.random.default_rng(seed).normal(size=[shape[axis] + gap for axis in order])
    index: Any = (*[slice(0, shape[axis]) for axis in order], ...)
    view: Array = base[index]
    if view.ndim and draw.random() < 0.2:
        view = view[::-1]
    return view.transpose(np.argsort(order))


def at(base: Array, offset: int, shape: tuple[int, int], leading: int) -> Array:
    """A column-major matrix, this many bytes after the first element of an array."""
    assert leading >= shape[0] > 0
    # NumPy checks no bounds of a stride here; the offsets are those for a library.
    place = base.__array_interface__["data"][0] + offset
    held: Any = type("Held", (), {})()
    held.__array_interface__ = {"data": (place, False), "shape": (1,), "typestr": "<f8", "version": 3}
    return as_strided(np.asarray(held), shape, (8, 8 * leading))


def multiply(plan: Contraction, arrays: tuple[Array, Array, Array]) -> None:
    """Do what cuBLAS is asked to do."""
    product = plan.product
    a, b, out = (array.transpose(axes) for array, axes in zip(arrays, plan.axes, strict=True))
    a = a.copy(order="C") if product.packing_a else a
    b = b.copy(order="C") if product.packing_b else b
    target = out.copy(order="C") if product.is_c_packed else out
    first, second = (b, a) if product.is_swapped else (a, b)
    op_a, op_b, m, n, k, lda, ldb, ldc = product.call
    for group in product.groups:
        of_first, of_second = (group.b, group.a) if product.is_swapped else (group.a, group.b)
        for number in range(product.batches):
            x, y, z = (8 * step * number for step in product.steps)
            left = at(first, of_first + x, (k, m) if op_a else (m, k), lda)
            right = at(second, of_second + y, (n, k) if op_b else (k, n), ldb)
            result = at(target, group.c + z, (m, n), ldc)
            result[...] = (left.T if op_a else left) @ (right.T if op_b else right)
    if target is not out:
        out[...] = target


@pytest.mark.parametrize("seed", range(10))
def test_plans_are_products(seed: int) -> None:
    """1000 contractions of up to seven letters, of arrays of any strides."""
    draw = random.Random(seed)
    packed = set[tuple[object, ...]]()
    for number in range(100):
        letters = "abcdefg"[: draw.randint(1, 7)]
        extents = {letter: draw.choice([1, 1, 2, 3, 4]) for letter in letters}
        places = [draw.choice([(0, 1), (0, 2), (1, 2), (0, 1, 2)]) for _ in letters]
        terms = [
            "".join(draw.sample(mine, len(mine)))
            for n in range(3)
            for mine in [[x for x, of in zip(letters, places, strict=True) if n in of]]
        ]
        a, b, out = (lying(draw, extents, term, 3 * number + n) for n, term in enumerate(terms))
        plan = plan_contraction(
            (terms[0], terms[1], terms[2]),
            (a.shape, b.shape, out.shape),
            (a.strides, b.strides, out.strides),
            8,
        )
        multiply(plan, (a, b, out))
        expected = np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", a, b)
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-10)
        packed.add((plan.product.packing_a, plan.product.packing_b, plan.product.is_c_packed))
    assert len(packed) > 4


def test_fitting_layouts_are_read_and_written_in_place() -> None:
    """A result with the batch in the middle has a longer leading dimension, and no copy."""
    for text in ("bik,bkj->ibj", "bki,bkj->bij", "abk,kc->abc", "kab,kc->cab", "bqhd,bkhd->bhqk"):
        terms = text.replace("->", ",").split(",")
        extents = {letter: 2 + number for number, letter in enumerate(sorted({*text} - {*",->"}))}
        shapes = [tuple(extents[letter] for letter in term) for term in terms]
        strides = [np.empty(shape).strides for shape in shapes]
        plan: Any = plan_contraction(tuple(terms), tuple(shapes), tuple(strides), 8)  # type: ignore[arg-type]
        product = plan.product
        assert (product.packing_a, product.packing_b, product.is_c_packed) == (None, None, False), text


def test_too_many_batches_are_packed() -> None:
    """Two axes of a batch that no array has in one run: cuBLAS would be called 5000 times."""
    shapes = (5000, 2, 3, 5001), (5001, 3, 4, 5000), (5001, 2, 4, 5000)
    strides = tuple(tuple(8 * int(np.prod(s[i + 1 :])) for i in range(4)) for s in shapes)
    plan = plan_contraction(("aikb", "bkja", "bija"), shapes, strides, 8)  # type: ignore[arg-type]
    assert len(plan.product.groups) == 1
    assert plan.product.batches == 5000 * 5001

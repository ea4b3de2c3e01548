"""Trees of values: an object made from a tree equals it, through text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel.backends.base.contract.program_definition import build, flatten, text_of, tree_of


class Leaf:
    """Stands for an array."""


PLAIN = st.recursive(
    st.none()
    | st.just(Leaf)
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=20,
)


def leaf_of(arrays: list[object]) -> Any:
    def leaf(where: str, value: object) -> int | None:
        if value is not Leaf:
            return None
        arrays.append(value)
        return len(arrays) - 1

    return leaf


@pytest.mark.slow
@given(PLAIN)
def test_a_value_comes_back_through_text(value: Any) -> None:
    arrays: list[object] = []
    tree = flatten("value", value, leaf_of(arrays))
    back = build(tree_of(text_of(tree)), arrays)
    assert back == value
    assert repr(back) == repr(value)
    assert text_of(flatten("value", back, leaf_of([]))) == text_of(tree)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2, 3}]}, r"x\['a'\]\[1\] must be an array, None, a number, .* got set"),
        ({"a": {1: 2}}, r"x\['a'\]: the keys of a dict must be strings, got 1"),
        ((object(),), r"x\[0\] must be an array, .* got object"),
        (np.datetime64("2020"), "x must be an array, .* got datetime64"),
    ],
)
def test_an_object_that_cannot_cross_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flatten("x", value, lambda where, value: None)


def test_deep_nesting_is_refused() -> None:
    value: Any = 1
    for _ in range(34):
        value = [value]
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        flatten("x", value, lambda where, value: None)
    own: list[Any] = []
    own.append(own)
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        flatten("x", own, lambda where, value: None)

"""Device errors: fields, text, and copies of them."""

from __future__ import annotations

import copy
import pickle

import pytest

from trio_accel.backends.base import (
    AccelError,
    LibraryError,
    NotSupportedError,
    OutOfMemoryError,
    StaleRefError,
)

ERRORS = [
    AccelError("something"),
    StaleRefError("a is gone", device="cpu:0", operation="linalg.Dot", generation=3),
    OutOfMemoryError("too much", requested=3, free=2, total=5, device="cpu:0"),
    LibraryError("singular", library="solver", code="info 3"),
    NotSupportedError("no such thing", backend="cpu"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_copying_and_pickling(error: AccelError, again) -> None:
    made = again(error)
    assert type(made) is type(error)
    assert vars(made) == vars(error)
    assert (str(made), made.args) == (str(error), error.args)


def test_the_text_gives_the_location() -> None:
    assert str(ERRORS[0]) == "something"
    assert str(ERRORS[1]) == "a is gone (device cpu:0, operation linalg.dot, generation 3)"

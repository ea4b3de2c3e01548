"""The error for a wrong option names the right one, by name, by meaning or by its unit."""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs
import pytest

import trio_accel as ta
from trio_accel import http, patterns
from trio_accel.http import Limits


def raised(make: Any, *values: Any, **options: Any) -> str:
    with pytest.raises(TypeError) as info:
        make(*values, **options)
    return str(info.value)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("timeout", "answer"),
        ("deadline", "answer"),
        ("request_timeout", "answer"),
        ("keep_alive", "wait"),
        ("read_timeout", "wait"),
        ("write_timeout", "stall"),
        ("shutdown_timeout", "grace"),
        ("max_body", "body"),
        ("size", "body"),
        ("memory", "bodies"),
        ("concurrency", "requests"),
        ("max_requests", "requests"),
        ("max_connections", "connections"),
    ],
)
def test_a_limit_by_another_name(name: str, field: str) -> None:
    assert raised(Limits, **{name: 5}) == f"Limits: there is no option {name!r}; did you mean {field!r}?"


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(Limits)])
def test_each_limit_is_found(field: str) -> None:
    for name in (f"max_{field}", f"{field}s", f"{field}_limit", field[:-1]):
        if name not in attrs.fields_dict(Limits):
            assert raised(Limits, **{name: 5}).endswith(f"did you mean {field!r}?")


def test_times_are_named() -> None:
    assert raised(Limits, connect_timeout=5).endswith("; its times are wait, stall, answer, grace")
    assert raised(ta.Backoff, timeout=5).endswith("; its times are initial, base, maximum, reset_after")
    assert raised(patterns.RetryBudget, timeout=5).endswith("; did you mean 'within'?")


CLASSES = [
    value
    for room in (http, patterns)
    for value in vars(room).values()
    if inspect.isclass(value) and value.__module__.startswith("trio_accel") and "__init__" in vars(value)
    # Errors and results are not made by a program.
    if not issubclass(value, BaseException)
]


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_an_unknown_option_is_named_by_each_class(make: Any) -> None:
    parameters = inspect.signature(make).parameters.values()
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if hasattr(make.__init__, "__wrapped__") and not passes_on:
        for name in ("timeout", "qqq"):
            said = raised(make, **{name: 3})
            assert re.match(
                rf"{make.__name__}(\.__init__)?: (there is no option '{name}'|no call takes)", said
            )


@pytest.mark.parametrize(
    ("make", "values", "expected"),
    [
        (ta.Backoff, (0.1, 0.5), "pass options by name, as in Backoff(initial=0.1, base=0.5)"),
        (Limits, (5,), "pass options by name, as in Limits(requests=5)"),
        (ta.Intensity, (1, 2, 3), "pass options by name, as in Intensity(1, 2, counts_progress=3)"),
        (patterns.Hedge, (1, 2, 3), "there are 2 options"),
    ],
)
def test_options_without_names(make: Any, values: tuple[Any, ...], expected: str) -> None:
    said = raised(make, *values)
    assert said.startswith(f"{make.__name__}: {expected}: ")
    assert said.endswith(" were given")

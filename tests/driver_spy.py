"""Counts calls of the driver, and answers in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import pytest

Spy: TypeAlias = "Callable[[str], Calls]"


@attrs.define(eq=False)
class Calls:
    """The number of calls to a driver's function, and a replacement for its answer."""

    count: int = 0
    answer: tuple[Any, ...] | None = None


def spy_on(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    """Watch a function of the driver in this process."""
    from cuda.bindings import driver

    calls, function = Calls(), getattr(driver, name)

    def counted(*arguments: object) -> tuple[Any, ...]:
        calls.count += 1
        answer: tuple[Any, ...] = calls.answer or function(*arguments)
        return answer

    monkeypatch.setattr(driver, name, counted)
    return calls

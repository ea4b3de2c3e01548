"""The policy of a loss as a table: requests that run again, requests that fail, and the suspects."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

import trio_accel as ta
from trio_accel.devices.dispatch._loss import LossPolicy

MEMORY = "trio_accel.devices:MemoryActor"
AT_ONCE = "; no other operation can have caused it, so it does not run again"


def policy(retry: int, *, retry_suspects: bool = False) -> LossPolicy:
    return LossPolicy(ta.DeviceOptions(retry=retry, retry_suspects=retry_suspects))


@pytest.mark.parametrize(
    ("retry", "losses", "is_repeatable", "is_again"),
    [
        # An innocent one, whose losses do not count, runs again only if operations do.
        (0, 0, True, False),
        (0, 1, True, False),
        (1, 0, True, True),
        (1, 1, True, True),
        (1, 2, True, False),
        (3, 3, True, True),
        (3, 4, True, False),
        (3, 1, False, False),
    ],
)
@pytest.mark.parametrize("retry_suspects", [False, True])
def test_without_guilt_it_runs_again_as_often_as_the_device_allows(
    retry: int, losses: int, is_repeatable: bool, is_again: bool, retry_suspects: bool
) -> None:
    why = policy(retry, retry_suspects=retry_suspects).why_it_fails(losses, is_repeatable=is_repeatable)
    assert why == (None if is_again else "")


@pytest.mark.parametrize(
    ("retry", "losses", "is_repeatable"), [*itertools.product((0, 1), (1, 2), (False, True))]
)
def test_the_suspect_fails_at_once_and_learns_how_to_have_it_run_again(
    retry: int, losses: int, is_repeatable: bool
) -> None:
    could = retry >= losses and is_repeatable
    told = policy(retry).why_it_fails(losses, is_repeatable=is_repeatable, is_to_blame=True)
    assert told is not None
    assert told.startswith(AT_ONCE if could else "; no other operation can have caused it")
    assert ("retry_suspects=True" in told) is could
    chosen = policy(retry, retry_suspects=True)
    told = chosen.why_it_fails(losses, is_repeatable=is_repeatable, is_to_blame=True)
    assert told == (None if could else "; no other operation can have caused it")


@pytest.mark.parametrize(("retry", "most"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_a_library_may_be_opened_again_once_under_any_policy(retry: int, most: int) -> None:
    assert [policy(retry).is_opened_too_often(n) for n in (most, most + 1)] == [False, True]


def test_the_first_request_of_each_library_is_suspect_and_copies_only_alone() -> None:
    def begun(*libraries: str) -> list[Any]:
        return [SimpleNamespace(library=library, number=n) for n, library in enumerate(libraries)]

    def suspects(*libraries: str, done: dict[str, int] | None = None) -> list[int]:
        return [one.number for one in rules.suspects(begun(*libraries), done or {})]

    rules = policy(1)
    assert suspects() == []
    assert suspects("a", "a", "a") == [0]
    assert suspects(MEMORY, MEMORY) == [0]
    assert suspects(MEMORY, "a", "a", MEMORY) == [1]
    # The likeliest is last: an operation of a library with an earlier fault, then the one that has completed
    # the least.
    assert suspects("a", "b", "c", done={"a": 1, "b": 9, "c": 5}) == [1, 2, 0]
    rules.guilty["b"] += 1
    assert suspects("a", "b", "c", done={"a": 1, "b": 9, "c": 5}) == [2, 0, 1]

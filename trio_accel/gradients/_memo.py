"""A cache of results in their first argument, so that no registry keeps a function of the program alive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

ResultT = TypeVar("ResultT")
OwnerT = TypeVar("OwnerT", bound="Owner")
KeyP = ParamSpec("KeyP")


class Owner(Protocol):
    """An object with room for results."""

    @property
    def memo(self) -> dict[Any, Any]:
        """The results, by function and further arguments."""
        ...


def memoized(
    function: Callable[Concatenate[OwnerT, KeyP], ResultT],
) -> Callable[Concatenate[OwnerT, KeyP], ResultT]:
    """Cache the results of a function of an `ArrayFunction` or an expression in this first argument.

    The further arguments are hashable, and given by position. Results must not depend on anything else.
    """

    @functools.wraps(function)
    def cached(owner: OwnerT, *key: KeyP.args, **named: KeyP.kwargs) -> ResultT:
        assert not named  # all callers are in this package
        memo = owner.memo
        entry = (function, *key)
        if entry not in memo:
            memo[entry] = function(owner, *key, **named)
        result: ResultT = memo[entry]
        return result

    return cast("Any", cached)  # type: ignore[no-any-return]  # the same parameters, but for the owner's name

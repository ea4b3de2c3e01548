"""Mixture of experts: a gate says which experts compute which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
import numpy as np
import outcome
import trio
from numpy.typing import NDArray

from ..devices import AccelRef
from ._experts import (
    ExpertOverflow,
    Part,
    Routed,
    RoutingStatistics,
    Shares,
    assign,
    capacity_of,
    combined,
    parts_of,
    statistics_of,
)
from ._numbers import must_be_count, must_be_one_of, must_be_positive
from ._outputs import ModelOutputError, host_array, real_rows, softmax
from ._servants import CallStatistics, Model, TaskServant, as_callable, outcome_of

__all__ = ["MoeRouter", "MoeStatistics"]


@attrs.frozen(kw_only=True)
class MoeStatistics(CallStatistics):
    """Counts of the calls of a `MoeRouter`.

    Attributes:
        routing: How the load was spread in all of them, but for those that were cancelled.
    """

    routing: RoutingStatistics


OnFailure: TypeAlias = Literal["renormalise", "raise"]
Tokens: TypeAlias = NDArray[Any]


class MoeRouter(TaskServant[Tokens | AccelRef, Routed]):
    """Sends each token to its experts and adds up their results, weighted: a `Servant` of arrays.

    The item is an array of shape (tokens, width), of NumPy or of a device, from where it is fetched. Gate and
    experts get rows of it as arrays of NumPy. Their results may be arrays of a device. The reply is a
    `Routed`.

    Experts work beside each other, each in a task. Each call is a task of its own, too. For cancellation and
    restarts see `TaskServant`. Its statistics are `MoeStatistics`.

    Args:
        gate: A `Model` that returns logits, of shape (tokens, experts). Where one is -inf, the token never
            goes to that expert.
        experts: A `Model` each. It gets some tokens, and returns as many rows; all return rows of one width.
        top_k: How many experts a token chooses.
        capacity_factor: An expert takes ``ceil(capacity_factor * tokens * top_k / experts)`` tokens at
            once. None: as many as choose it.
        overflow: Fate of a choice whose expert is full. ``"drop"``: no expert computes it, and its
            weight is missing in the sum. ``"next_best"``: it goes to the likeliest other expert that has
            room left when all choices are placed, and is dropped if there is none. ``"wait"``: the expert is
            called again.
        on_failure: Rule if an expert raises, or its result is refused. ``"renormalise"``: the
            weights of the token's other experts are raised, so that their sum stays the same. ``"raise"``:
            its error is the asker's.
        normalise: Whether the weights of a token have the sum 1, as in GShard and Mixtral. Otherwise they are
            the gate's probabilities, as in Switch Transformers.

    Raises:
        ValueError, TypeError: An option is out of its range, or of the wrong type.
    """

    def __init__(
        self,
        gate: Model[Tokens, object],
        experts: Sequence[Model[Tokens, object]],
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        overflow: ExpertOverflow = "drop",
        on_failure: OnFailure = "renormalise",
        normalise: bool = True,
    ) -> None:
        self._gate = as_callable(gate)
        self._experts = [as_callable(expert) for expert in experts]
        if must_be_count("MoeRouter: top_k", top_k) > len(self._experts):
            raise ValueError(f"MoeRouter: top_k is {top_k!r}, and there are {len(self._experts)} experts")
        if capacity_factor is not None:
            must_be_positive("MoeRouter: capacity_factor", capacity_factor)
        must_be_one_of("MoeRouter: overflow", overflow, get_args(ExpertOverflow))
        must_be_one_of("MoeRouter: on_failure", on_failure, get_args(OnFailure))
        self._top_k = top_k
        self._capacity_factor = capacity_factor
        self._overflow: ExpertOverflow = overflow
        self._on_failure: OnFailure = on_failure
        self._normalise = normalise
        self._routing = RoutingStatistics.none(len(self._experts))

    def statistics(self) -> MoeStatistics:
        """Return the counts of its calls, and the spread of the load so far."""
        return MoeStatistics(**attrs.asdict(self._tally), routing=self._routing)

    async def answer(self, item: Tokens | AccelRef) -> Routed:
        """Route the tokens of one array.

        Raises:
            ValueError: It is no array of shape (tokens, width), or has no token.
            ModelOutputError: The gate's logits have another shape, NaN or infinity, or fewer than `top_k`
                that are finite. The experts return rows of several widths.
            ExpertsFailedError: No expert has returned anything.
            Exception: The error of the gate failed with; or an expert, if its failure is to be.
        """
        tokens = await item.to_host() if isinstance(item, AccelRef) else np.asarray(item)
        if tokens.ndim != 2 or not len(tokens):
            raise ValueError(
                f"{self.context.path}: the item must be of shape (tokens, width), with a token, "
                f"got {tokens.shape}"
            )
        shares = await self._shares(tokens)
        capacity = capacity_of(len(tokens), self._top_k, len(self._experts), self._capacity_factor)
        assignment = assign(shares, self._top_k, capacity, self._overflow, normalise=self._normalise)
        parts = parts_of(assignment, capacity, len(self._experts))
        failed = await self._compute(tokens, parts)
        statistics = statistics_of(shares, assignment, parts)
        self._routing += statistics
        if failed is not None:
            raise failed
        return combined(assignment, parts, statistics)

    async def _shares(self, tokens: Tokens) -> Shares:
        """Return the gate's probabilities."""
        logits = await real_rows("the gate", await self._gate(tokens), (len(tokens), len(self._experts)))
        shares = softmax("the gate", logits)
        few = np.flatnonzero(np.count_nonzero(shares, axis=1) < self._top_k)
        if few.size:
            raise ModelOutputError(
                f"the gate leaves token {few[0]} fewer than {self._top_k} experts: "
                "the other logits are -inf, or too small beside the greatest"
            )
        return shares

    async def _compute(self, tokens: Tokens, parts: Sequence[Part]) -> Exception | None:
        """Have all experts compute their parts, each expert one after the other.

        Returns:
            Error of the first one, if that is to be raised.
        """
        failed: list[Exception] = []

        async def work(number: int) -> None:
            for part in parts:
                if part.expert != number:
                    continue
                part.error = await self._error_of_part(tokens, part)
                if part.error is not None and self._on_failure == "raise":
                    failed.append(part.error)
                    nursery.cancel_scope.cancel(reason="another expert has failed")
                    return

        async with trio.open_nursery() as nursery:
            for number in sorted({part.expert for part in parts}):
                nursery.start_soon(work, number)
        # An asker that has gone hears of its cancellation, whatever the experts have failed with over it.
        await trio.lowlevel.checkpoint_if_cancelled()
        return failed[0] if failed else None

    async def _error_of_part(self, tokens: Tokens, part: Part) -> Exception | None:
        """Have an expert compute some tokens; returns its error, if it failed."""
        computed = await outcome_of(self._compute_part(tokens, part))
        return cast("Exception", computed.error) if isinstance(computed, outcome.Error) else None

    async def _compute_part(self, tokens: Tokens, part: Part) -> None:
        """Have an expert compute some tokens.

        Raises:
            ModelOutputError: It returned something else than a row for each.
            Exception: Its error.
        """
        what = f"expert {part.expert}"
        result = await host_array(what, await self._experts[part.expert](tokens[part.tokens]))
        if result.ndim != 2 or len(result) != len(part.tokens):
            raise ModelOutputError(
                f"{what} must return an array of shape ({len(part.tokens)}, width), got {result.shape}"
            )
        part.result = result

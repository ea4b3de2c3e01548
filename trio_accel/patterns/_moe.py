"""Mixture of experts: a gate selects the experts for each token.

The assignment of tokens comes first in this module: it is pure arithmetic, and does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
import numpy as np
import outcome
import trio
from numpy.typing import NDArray

from ..actors import checked_options, must_be_count, must_be_one_of, must_be_positive
from ..backends.base.contract.values import check_plain
from ..devices import AccelRef
from ._checks import ModelOutputError, host_array, real_rows, softmax
from ._submit import CallStatistics, Model, TaskSubmitActor, as_callable, outcome_of

__all__ = ["ExpertsFailedError", "MoeRouter", "MoeStatistics", "Routed", "RoutingStatistics"]


ExpertOverflow: TypeAlias = Literal["drop", "wait"]
"""Fate of a token whose expert is full; see `MoeRouter`."""

Shares = NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class Assignment:
    """Tokens and their experts; all arrays have the shape (tokens, top_k).

    Attributes:
        experts: The experts chosen by each token, the likeliest first.
        weights: The weights of these experts.
        is_placed: Whether the expert had room for the token.
    """

    experts: NDArray[np.intp]
    weights: Shares
    is_placed: NDArray[np.bool]


def capacity_of(tokens: int, top_k: int, experts: int, factor: float | None) -> int:
    """Return an expert's capacity per call: `factor` times an equal share of the tokens, rounded up."""
    capacity = math.inf if factor is None else factor * tokens * top_k / experts
    # A token chooses an expert once at most.
    return tokens if capacity >= tokens else max(1, math.ceil(capacity))


def assign(
    shares: Shares, top_k: int, capacity: int, overflow: ExpertOverflow, *, normalise: bool
) -> Assignment:
    """Assign tokens to experts.

    First choices precede second ones, and earlier tokens precede later ones (Lepikhin et al. 2021). Equally
    likely experts are taken in their order.

    Args:
        shares: The gate's probabilities, of shape (tokens, experts), at least `top_k` above zero in each row.
        top_k: The number of experts that a token chooses.
        capacity: The maximum number of tokens per expert.
        overflow: The fate of a token with a full expert.
        normalise: Whether the weights of a token sum to 1; otherwise they are probabilities.
    """
    experts = np.argsort(-shares, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(shares, experts, axis=1)
    if normalise:
        weights /= weights.sum(axis=1, keepdims=True)
    is_placed = np.ones(experts.shape, dtype=np.bool)
    if overflow == "drop":
        for expert in range(shares.shape[1]):
            # First choices before second ones.
            choices, tokens = np.nonzero(np.equal(experts.T, expert))
            is_placed[tokens[capacity:], choices[capacity:]] = False
    return Assignment(experts=experts, weights=weights, is_placed=is_placed)


@attrs.frozen(kw_only=True)
class RoutingStatistics:
    """The spread of the load, in one call or in all calls of a router. Tuples have an item for each expert.

    Attributes:
        tokens: The number of routed tokens.
        counts: The number of tokens that chose the expert, even if it had no room.
        first_choices: The number of tokens that chose it first.
        probability: The sum of its gate probabilities over all tokens.
        importance: The sum of its weights over the tokens that chose it (Shazeer et al. 2017).
        served: The number of tokens that it was given.
        failures: The number of its failures.
        dropped: The number of choices that no expert had room for.
    """

    tokens: int
    counts: tuple[int, ...]
    first_choices: tuple[int, ...]
    probability: tuple[float, ...]
    importance: tuple[float, ...]
    served: tuple[int, ...]
    failures: tuple[int, ...]
    dropped: int = 0

    @property
    def auxiliary_loss(self) -> float:
        """The load-balancing loss of Switch Transformers (Fedus et al. 2022, equation 4) without its factor.

        For each expert, multiply the share of first choices by the mean probability. The loss is the sum of
        these products times the number of experts. It is 1 if both are even. The loss of GShard is this one
        divided by the square of the number of experts. NaN if nothing was routed.
        """
        if not self.tokens:
            return float("nan")
        products = np.array(self.first_choices) * np.array(self.probability)
        return float(len(self.counts) * products.sum() / self.tokens**2)

    @property
    def importance_loss(self) -> float:
        """The squared variation coefficient of `importance` (Shazeer et al. 2017) without its factor."""
        if not self.tokens:
            return float("nan")
        importance = np.array(self.importance)
        return float(importance.var() / importance.mean() ** 2)

    @classmethod
    def zeros(cls, experts: int) -> RoutingStatistics:
        """Return the statistics of a router before its first call."""
        zeros = {field.name: (0,) * experts for field in attrs.fields(cls) if field.default is attrs.NOTHING}
        return cls(**{**zeros, "tokens": 0})  # type: ignore[arg-type]

    def __add__(self, rhs: RoutingStatistics) -> RoutingStatistics:
        mine, addends = attrs.asdict(self, recurse=False), attrs.asdict(rhs, recurse=False)
        return RoutingStatistics(**{name: _added(mine[name], addends[name]) for name in mine})


@attrs.frozen(kw_only=True, eq=False)
class Routed:
    """The reply of a router.

    Attributes:
        output: The weighted sums of the experts' results, of shape (tokens, width). Rows of `is_lost` are
            zero. The dtype equals the dtype of the experts' results if all agree and it is floating;
            otherwise it is float64 or complex128.
        experts: The numbers of each token's experts, of shape (tokens, top_k).
        weights: The weights of these experts in the output; zero for a full or failed expert.
        is_lost: Whether no expert has computed the token, of shape (tokens,).
        errors: The errors of experts, by their number.
        statistics: The spread of the load.
    """

    output: NDArray[Any]
    experts: NDArray[np.intp]
    weights: Shares
    is_lost: NDArray[np.bool]
    errors: Mapping[int, Exception]
    statistics: RoutingStatistics


class ExpertsFailedError(Exception):
    """All experts that a call needed have failed; the error of the first one is the `__cause__`.

    Attributes:
        errors: Error of each, by its number.
    """

    def __init__(self, message: str, errors: Mapping[int, Exception]) -> None:
        super().__init__(message, errors)
        self.errors: Mapping[int, Exception] = errors

    def __str__(self) -> str:
        return str(self.args[0])


@attrs.define(eq=False)
class ExpertBatch:
    """An expert's part in a call: tokens, and the rank of the expert among their choices."""

    expert: int
    tokens: NDArray[np.intp]
    choices: NDArray[np.intp]
    result: NDArray[Any] | None = None
    error: Exception | None = None


def parts_of(assignment: Assignment, capacity: int, experts: int) -> list[ExpertBatch]:
    """Return the calls of experts: each has at most as many tokens as the capacity."""
    parts: list[ExpertBatch] = []
    for expert in range(experts):
        tokens, choices = np.nonzero((assignment.experts == expert) & assignment.is_placed)
        for begin in range(0, len(tokens), capacity):
            end = begin + capacity
            parts.append(ExpertBatch(expert, tokens[begin:end], choices[begin:end]))
    return parts


def combined(assignment: Assignment, parts: Sequence[ExpertBatch], statistics: RoutingStatistics) -> Routed:
    """Add up what the experts returned.

    Raises:
        ExpertsFailedError: It is nothing.
        ModelOutputError: They are rows of several widths.
    """
    errors = {part.expert: part.error for part in reversed(parts) if part.error is not None}
    results = [(part, part.result) for part in parts if part.result is not None]
    if not results:
        numbers = sorted(errors)
        reasons = "; ".join(
            f"{number}: {type(errors[number]).__name__}: {errors[number]}" for number in numbers
        )
        raise ExpertsFailedError(f"all experts have failed: {reasons}", errors) from errors[numbers[0]]
    weights = _weights_of_answers(assignment, parts)
    widths = {result.shape[1] for _, result in results}
    if len(widths) > 1:
        listing = ", ".join(
            dict.fromkeys(f"expert {part.expert} {result.shape[1]}" for part, result in results)
        )
        raise ModelOutputError(f"all experts must return rows of one width, got: {listing}")
    dtypes = {result.dtype for _, result in results}
    exact = np.result_type(np.float64, *("c16" for dtype in dtypes if dtype.kind == "c"))
    output = np.zeros((len(weights), widths.pop()), dtype=exact)
    for part, result in results:
        output[part.tokens] += weights[part.tokens, part.choices, np.newaxis] * result
    dtype = dtypes.pop() if len(dtypes) == 1 else exact
    return Routed(
        output=output if dtype.kind in "biu" else output.astype(dtype),
        experts=assignment.experts,
        weights=weights,
        is_lost=np.logical_not(weights.any(axis=1)),
        errors=MappingProxyType(errors),
        statistics=statistics,
    )


def _weights_of_answers(assignment: Assignment, parts: Sequence[ExpertBatch]) -> Shares:
    """Return the weights in the sum: weights of failed experts are moved to the experts that answered."""
    planned = np.where(assignment.is_placed, assignment.weights, 0.0)
    answered = planned.copy()
    for part in parts:
        if part.error is not None:
            answered[part.tokens, part.choices] = 0.0
    sums = answered.sum(axis=1, keepdims=True)
    result: Shares = answered * np.divide(
        planned.sum(axis=1, keepdims=True), sums, out=np.zeros_like(sums), where=sums > 0
    )
    return result


def statistics_of(shares: Shares, assignment: Assignment, parts: Sequence[ExpertBatch]) -> RoutingStatistics:
    """Return the spread of the load in one call."""
    experts = shares.shape[1]

    def counted(numbers: NDArray[np.intp], weights: Shares | None = None) -> tuple[Any, ...]:
        flat = None if weights is None else weights.ravel()
        return tuple(np.bincount(numbers.ravel(), flat, minlength=experts).tolist())

    placed = assignment.is_placed
    failed = np.array([part.expert for part in parts if part.error is not None], dtype=np.intp)
    return RoutingStatistics(
        tokens=len(shares),
        counts=counted(assignment.experts),
        first_choices=counted(assignment.experts[:, 0]),
        probability=tuple(shares.sum(axis=0).tolist()),
        importance=counted(assignment.experts, assignment.weights),
        served=counted(assignment.experts[placed]),
        failures=counted(failed),
        dropped=int(np.count_nonzero(~placed)),
    )


def _added(mine: Any, addend: Any) -> Any:
    """Return the sum of two numbers, or the itemwise sum of two tuples."""
    total = np.add(mine, addend)
    return tuple(total.tolist()) if total.ndim else total.item()


@attrs.frozen(kw_only=True)
class MoeStatistics(CallStatistics):
    """Counts of a `MoeRouter`'s calls.

    Attributes:
        routing: The spread of the load in all calls, except cancelled ones.
    """

    routing: RoutingStatistics


OnFailure: TypeAlias = Literal["renormalise", "raise"]
Tokens: TypeAlias = NDArray[Any]


class MoeRouter(TaskSubmitActor[Tokens | AccelRef, Routed]):
    """Sends each token to its experts and adds up their results, weighted: a `SubmitActor` of arrays.

    The item is an array of shape (tokens, width), of NumPy or of a device, from which it is fetched. Gate and
    experts get rows of it as NumPy arrays. Their results may be device arrays. The reply is a `Routed`.

    Experts work concurrently, each in a task. Each call also has its own task. For cancellation and restarts
    see `TaskSubmitActor`. Its statistics are `MoeStatistics`.

    Args:
        gate: A `Model` that returns logits, of shape (tokens, experts). A logit of -inf forbids the expert.
        experts: A `Model` for each expert. It gets some tokens, and returns as many rows; all return rows of
            one width.
        top_k: The number of experts that a token chooses.
        capacity_factor: An expert takes ``ceil(capacity_factor * tokens * top_k / experts)`` tokens at once.
            None for all tokens that choose it.
        overflow: The fate of a choice if the expert is full. ``"drop"``: no expert computes it, and its
            weight is missing in the sum. ``"wait"``: the expert is called again.
        on_failure: The reaction if an expert raises, or returns an invalid result. ``"renormalise"``: the
            weights of the token's other experts are raised, so that their sum stays the same. ``"raise"``:
            the caller gets the error.
        normalise: Whether the weights of a token sum to 1, as in GShard and Mixtral. Otherwise they are the
            gate's probabilities, as in Switch Transformers.

    Raises:
        ValueError, TypeError: An option is out of its range, or of the wrong type.
    """

    @checked_options
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
        self._routing = RoutingStatistics.zeros(len(self._experts))

    def statistics(self) -> MoeStatistics:
        """Return the counts of its calls, and the load so far."""
        return MoeStatistics(**self._tally, routing=self._routing)

    async def answer(self, item: Tokens | AccelRef) -> Routed:
        """Route the tokens of one array.

        Raises:
            ValueError: It is not an array of shape (tokens, width), or has zero tokens.
            ModelOutputError: The gate's logits have another shape, NaN or infinity, or fewer than `top_k`
                finite values; or the experts return rows of several widths.
            ExpertsFailedError: No expert has returned anything.
            Exception: The gate's error, or an expert's error if `on_failure` is ``"raise"``.
        """
        check_plain(f"{self.context.path}: the item", item)
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
        short_rows = np.flatnonzero(np.count_nonzero(shares, axis=1) < self._top_k)
        if short_rows.size:
            raise ModelOutputError(
                f"the gate leaves token {short_rows[0]} fewer than {self._top_k} experts: "
                "the other logits are -inf, or too small beside the greatest"
            )
        return shares

    async def _compute(self, tokens: Tokens, parts: Sequence[ExpertBatch]) -> Exception | None:
        """Have all experts compute their parts, each expert one part after the other.

        Returns:
            The first error, if `on_failure` is ``"raise"``.
        """
        failed: list[Exception] = []

        async def work(number: int) -> None:
            for part in parts:
                if part.expert != number:
                    continue
                computed = await outcome_of(self._compute_part(tokens, part))
                if not isinstance(computed, outcome.Error):
                    continue
                part.error = cast("Exception", computed.error)
                if self._on_failure == "raise":
                    failed.append(part.error)
                    nursery.cancel_scope.cancel(reason="another expert has failed")
                    return

        async with trio.open_nursery() as nursery:
            for number in sorted({part.expert for part in parts}):
                nursery.start_soon(work, number)
        # A cancelled caller gets its cancellation, whatever errors the experts have raised because of it.
        await trio.lowlevel.checkpoint_if_cancelled()
        return failed[0] if failed else None

    async def _compute_part(self, tokens: Tokens, part: ExpertBatch) -> None:
        """Have an expert compute some tokens.

        Raises:
            ModelOutputError: The expert did not return a row for each token.
            Exception: The expert's error.
        """
        label = f"expert {part.expert}"
        result = await host_array(label, await self._experts[part.expert](tokens[part.tokens]))
        if result.ndim != 2 or len(result) != len(part.tokens):
            raise ModelOutputError(
                f"{label} must return an array of shape ({len(part.tokens)}, width), got {result.shape}"
            )
        part.result = result

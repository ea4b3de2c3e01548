"""Checks of the arguments of patterns, and of results from models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ..actors import NotExecutedError, Validator, must_be_count, must_be_positive, validator
from ..backends.base.contract.values import check_plain
from ..devices import AccelRef

__all__ = ["ModelOutputError", "NoRoomError"]


class NoRoomError(NotExecutedError):
    """There is not enough room, such as pages of a cache; nothing was changed.

    A step of a `ContinuousBatcher` raises it, so that the batcher sets sequences aside.
    """


def positive_integer(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Check an integer attribute from 1."""
    must_be_count(_label_of(instance, attribute), value)


def positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Check a number attribute above 0."""
    must_be_positive(_label_of(instance, attribute), value)


called = validator("be a function", callable, TypeError)
"""Checks an attribute that is called."""


def of_class(*kinds: type[Any]) -> Validator:
    """Make the check of an attribute with one of some classes."""
    return validator(f"be a {kinds[0].__name__}", lambda value: isinstance(value, kinds), TypeError)


def _label_of(instance: object, attribute: attrs.Attribute[Any]) -> str:
    return f"{type(instance).__name__}: {attribute.name}"


class ModelOutputError(ValueError):
    """A model returned an invalid result, such as a wrong shape, NaN, or no distribution."""


async def host_array(label: str, result: object) -> NDArray[Any]:
    """Copy a model's result to the host, as an array of numbers.

    Args:
        label: The name of the model in the error.
        result: A device array, or anything that NumPy accepts.

    Raises:
        ModelOutputError: It is not an array of numbers.
    """
    try:
        check_plain("it", result)
        array = await result.to_host() if isinstance(result, AccelRef) else np.asarray(result)
        is_number = np.result_type(np.float64, array.dtype).kind in "fc"
    except (TypeError, ValueError) as error:  # such as rows of several lengths
        raise ModelOutputError(f"{label} returned no array of numbers: {error}") from error
    if not is_number:
        raise ModelOutputError(f"{label} must return an array of numbers, not of {array.dtype}")
    return array


async def real_rows(label: str, result: object, shape: tuple[int, int | None]) -> NDArray[np.float64]:
    """Copy rows of real numbers to the host, in float64.

    Args:
        label: Name of the model in the error.
        result: An array of a device, or anything that NumPy takes.
        shape: Rows, and columns if they are known.

    Raises:
        ModelOutputError: They are of another shape, or no real numbers.
    """
    array = await host_array(label, result)
    if array.dtype.kind == "c":
        raise ModelOutputError(f"{label} must return real numbers, not {array.dtype}")
    rows, columns = shape
    is_right = array.ndim == 2 and array.shape[0] == rows and array.shape[1] == (columns or array.shape[1])
    if not is_right or not array.shape[1]:
        expected = f"({rows}, {columns if columns is not None else 'size of the vocabulary'})"
        raise ModelOutputError(f"{label} must return an array of shape {expected}, got {array.shape}")
    return array.astype(np.float64, copy=False)


def check_logits(label: str, logits: NDArray[np.float64]) -> None:
    """Check rows of logits, where -inf forbids a choice.

    Raises:
        ModelOutputError: A row has NaN or infinity, or nothing but -inf.
    """
    bad = np.flatnonzero(~np.isfinite(logits.max(axis=1)))  # NaN if there is one in the row
    if bad.size:
        raise ModelOutputError(f"{label} returned NaN, infinity, or nothing but -inf in row {bad[0]}")


def softmax(label: str, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the softmax of each row; for the errors see `check_logits`."""
    check_logits(label, logits)
    with np.errstate(over="ignore"):  # a very unlikely choice gets the share 0
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
    return result


Rows = NDArray[np.float64]

# The tolerance for the sum of probabilities: a softmax in float16 is closer.
_SUM_TOLERANCE = 1e-2


async def scores_of(
    label: str, result: object, count: int, vocabulary: int | None, *, are_logits: bool
) -> Rows:
    """Copy the distributions that a model returned to the host, and check them.

    Args:
        label: The name of the model in the error.
        result: Its result.
        count: The number of distributions requested.
        vocabulary: The number of tokens in earlier results of this request; None for the first.
        are_logits: Whether they are logits, not probabilities.

    Raises:
        ModelOutputError: The result does not contain such distributions.
    """
    rows = await real_rows(label, result, (count, None))
    if vocabulary is not None and rows.shape[1] != vocabulary:
        raise ModelOutputError(
            f"{label} distinguishes {rows.shape[1]} tokens, and {vocabulary} were distinguished before: "
            "draft and verifier must share a vocabulary"
        )
    if are_logits:
        check_logits(label, rows)
        return rows
    with np.errstate(invalid="ignore", over="ignore"):  # of infinities, which are refused
        totals = rows.sum(axis=1)
    for number, (total, minimum) in enumerate(zip(totals, rows.min(axis=1), strict=True)):
        if not np.isfinite(total):
            raise ModelOutputError(f"{label} returned NaN or infinity in distribution {number}")
        if minimum < 0:
            raise ModelOutputError(f"{label} returned a negative probability in distribution {number}")
        if abs(total - 1) > _SUM_TOLERANCE:
            raise ModelOutputError(
                f"{label} returned probabilities in distribution {number} whose sum is {total:.6g}, not 1; "
                "if they are logits, say so by logits=True"
            )
    return rows


@attrs.frozen(kw_only=True)
class Sampler:
    """Chooses the tokens of one text, from checked rows of scores.

    Attributes:
        rng: The source of random numbers.
        temperature: The sampling temperature; 0 for greedy.
        are_logits: Whether scores are logits, not probabilities.
    """

    rng: np.random.Generator
    temperature: float
    are_logits: bool = False

    def distribution(self, scores: Rows) -> Rows:
        """Return the distribution that tokens are drawn from; at temperature 0 the scores themselves."""
        if self.temperature == 0:
            return scores
        # Divide by the maximum first, because otherwise all powers could be zero.
        if self.are_logits:
            with np.errstate(over="ignore"):  # a very unlikely choice gets the share 0
                shares = np.exp((scores - scores.max()) / self.temperature)
        elif self.temperature == 1:
            shares = scores
        else:
            shares = (scores / scores.max()) ** (1 / self.temperature)
        result: Rows = shares / shares.sum()
        return result

    def draw(self, distribution: Rows) -> int:
        """Draw a token from a distribution; at temperature 0 the likeliest, the first of equals."""
        if self.temperature == 0:
            return int(distribution.argmax())
        # `rng.choice` does the same, but would check the row again. The product is below the last sum, so a
        # token of probability 0 is never drawn.
        sums: Rows = np.cumsum(distribution)
        return int(np.searchsorted(sums, self.rng.random() * float(sums[-1]), side="right"))

    def accepted(self, proposed: Sequence[int], drafted: Sequence[Rows], verified: Rows) -> list[int]:
        """Return the tokens of one round: the accepted proposals, and one token of the verifier.

        A proposal is accepted with the probability ``min(1, p / q)``, where ``p`` is its probability by the
        verifier and ``q`` its probability by the draft. The first rejected proposal is replaced by a token of
        the residual distribution, the normalised ``max(0, p - q)``. If all are accepted, one more token is
        drawn from the verifier's last distribution. So each token has the distribution of the verifier
        (Leviathan et al. 2023, Chen et al. 2023). At temperature 0 a proposal is accepted if it is the
        verifier's choice.

        Args:
            proposed: The k tokens that the draft proposes.
            drafted: The distribution from which each was drawn.
            verified: The verifier's scores at the same positions and one more, of shape (k + 1, vocabulary).

        Returns:
            1 to k + 1 tokens; all but the last are proposals.
        """
        tokens: list[int] = []
        for token, q, scores in zip(proposed, drafted, verified[:-1], strict=True):
            p = self.distribution(scores)
            if self.temperature == 0:
                choice = self.draw(p)
            elif self.rng.random() * q[token] < p[token]:
                choice = token
            else:
                return [*tokens, self.draw(_residual(p, q))]
            tokens.append(choice)
            if choice != token:
                return tokens
        return [*tokens, self.draw(self.distribution(verified[-1]))]


def _residual(p: Rows, q: Rows) -> Rows:
    """Return the verifier's probabilities less the draft's, where positive; not normalised."""
    excess = p - q
    np.maximum(excess, 0, out=excess)
    # It is zero everywhere only if both are equal except for rounding.
    return excess if excess.any() else p

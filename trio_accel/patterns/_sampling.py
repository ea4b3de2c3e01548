"""The rules by which drafted tokens are accepted; nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._outputs import ModelOutputError, real_rows, softmax

__all__ = ["Rows", "accepted_tokens", "distributions", "sample", "tempered"]

Rows = NDArray[np.float64]

# What the probabilities of a model may be off by: a softmax in float16 is off by less.
_SUM_TOLERANCE = 1e-2


async def distributions(
    what: str, result: object, count: int, vocabulary: int | None, *, are_logits: bool
) -> Rows:
    """Bring the distributions that a model returned to the host; their sums are 1 in float64.

    Args:
        what: The model, for the error.
        result: What it returned.
        count: How many it was asked for.
        vocabulary: How many tokens other results of this request have distinguished; None for the first.
        are_logits: Whether they are logits, not probabilities.

    Raises:
        ModelOutputError: They are no such distributions.
    """
    rows = await real_rows(what, result, (count, None))
    if vocabulary is not None and rows.shape[1] != vocabulary:
        raise ModelOutputError(
            f"{what} distinguishes {rows.shape[1]} tokens, and {vocabulary} were distinguished before: "
            "draft and verifier must have one vocabulary"
        )
    if are_logits:
        return softmax(what, rows)
    sums = rows.sum(axis=1)
    for row, total in enumerate(sums):
        if not np.isfinite(total):
            raise ModelOutputError(f"{what} returned NaN or infinity in distribution {row}")
        if rows[row].min() < 0:
            raise ModelOutputError(f"{what} returned a negative probability in distribution {row}")
        if abs(total - 1) > _SUM_TOLERANCE:
            raise ModelOutputError(
                f"{what} returned probabilities in distribution {row} whose sum is {total:.6g}, not 1; "
                "if they are logits, say so by logits=True"
            )
    result_rows: Rows = rows / sums[:, np.newaxis]
    return result_rows


def tempered(rows: Rows, temperature: float) -> Rows:
    """The distributions at a temperature: powers of 1/temperature, normalised; at 0 as they are."""
    if temperature in {0, 1}:
        return rows
    with np.errstate(divide="ignore"):
        logits = np.log(rows)
    # Shifted first: a quotient could overflow otherwise.
    return softmax("temperature", (logits - logits.max(axis=1, keepdims=True)) / temperature)


def sample(rng: np.random.Generator, row: Rows, temperature: float) -> int:
    """Draw a token of a distribution; at temperature 0 the likeliest, the first of equals."""
    if temperature == 0:
        return int(row.argmax())
    return int(rng.choice(len(row), p=row))


def accepted_tokens(
    rng: np.random.Generator, proposed: Sequence[int], drafted: Rows, verified: Rows, temperature: float
) -> list[int]:
    """The tokens of one round: the proposals accepted, and one token of the verifier.

    A proposal is accepted with the probability ``min(1, p / q)``, where ``p`` is its probability by the
    verifier and ``q`` that by the draft. The first one that is not is replaced by a token of the residual
    distribution, the normalised ``max(0, p - q)``. If all are accepted, one more token is drawn from the
    verifier's last distribution. So each token has the distribution of the verifier (Leviathan et al. 2023,
    Chen et al. 2023). At temperature 0 a proposal is accepted if it is the verifier's choice.

    Args:
        rng: Where random numbers come from.
        proposed: The tokens that the draft proposes, k of them.
        drafted: What each was drawn from, of shape (k, vocabulary).
        verified: The verifier's distributions at the same places and one more, (k + 1, vocabulary).
        temperature: 0 for greedy.

    Returns:
        1 to k + 1 tokens; all but the last are proposals.
    """
    tokens: list[int] = []
    for token, q, p in zip(proposed, drafted, verified[:-1], strict=True):
        if temperature == 0:
            choice = sample(rng, p, temperature)
            is_accepted = choice == token
        else:
            is_accepted = rng.random() * q[token] < p[token]
            choice = token if is_accepted else sample(rng, _residual(p, q), temperature)
        tokens.append(choice)
        if not is_accepted:
            return tokens
    tokens.append(sample(rng, verified[-1], temperature))
    return tokens


def _residual(p: Rows, q: Rows) -> Rows:
    """What the verifier has more than the draft, normalised."""
    excess = np.maximum(p - q, 0)
    total = excess.sum()
    # It is zero only if the two are equal but for rounding.
    return p if total == 0 else excess / total

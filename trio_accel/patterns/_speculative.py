"""Speculative decoding: a small model proposes tokens, and a large one checks them all in one call."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import outcome
import trio
from attrs.validators import optional
from numpy.typing import NDArray

from ..actors import checked_options, must_be_count, must_be_positive, must_be_whole, named_options
from ._batcher import ModelOfBatches, split_results
from ._checks import ModelOutputError, Rows, Sampler, positive_integer, scores_of
from ._sequences import Last, RunningSequence, StepResult
from ._submit import as_callable

__all__ = ["DecodingStatistics", "Generate", "PromptLookup", "Score", "SpeculativeStep"]


@attrs.frozen
class Score:
    """Ask a language model for the distributions of the next tokens.

    The model returns an array of shape (count, vocabulary), of NumPy or of a device. Its last row is the
    distribution of the token after all of `tokens`, the row before it the distribution of the last token
    given the earlier ones, and so on. The rows are probabilities, or logits if the step has `logits`.

    Attributes:
        tokens: The text so far, as token numbers.
        count: The number of requested distributions, from 1 to ``len(tokens) + 1``.
    """

    tokens: tuple[int, ...]
    count: int = 1


def _tokens(field: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        tokens = tuple(map(operator.index, values))
    except TypeError as error:
        raise TypeError(f"Generate: {field} must be numbers of tokens, got {values!r}") from error
    if tokens and min(tokens) < 0:
        raise ValueError(f"Generate: {field}: tokens are numbers from 0, got {min(tokens)}")
    return tokens


def _prompt(values: Iterable[int]) -> tuple[int, ...]:
    return _tokens("prompt", values)


def _stops(values: Iterable[int]) -> frozenset[int]:
    return frozenset(_tokens("stop", values))


@named_options
@attrs.frozen
class Generate:
    """A text that a `SpeculativeStep` continues.

    Attributes:
        prompt: The text, as token numbers.
        max_tokens: The maximum number of tokens to generate, at least 1.
        stop: Tokens that end the text. The result includes the token that ended it.
        temperature: 1 keeps the verifier's distribution, less sharpens it, 0 is greedy: always the likeliest
            token.
        seed: The seed: the same seed gives the same tokens, if the models return the same. None for a random
            one.
    """

    prompt: tuple[int, ...] = attrs.field(converter=_prompt)
    max_tokens: int = attrs.field(default=128, kw_only=True, validator=positive_integer)
    stop: frozenset[int] = attrs.field(default=frozenset(), converter=_stops, kw_only=True)
    temperature: float = attrs.field(default=1.0, kw_only=True)
    seed: int | None = attrs.field(default=None, kw_only=True, validator=optional(must_be_whole(0)))

    def __attrs_post_init__(self) -> None:
        if self.temperature != 0:
            must_be_positive("Generate: temperature, if not 0,", self.temperature)


@attrs.frozen(kw_only=True)
class DecodingStatistics:
    """Counts of speculation in the rounds of all texts, without failed rounds.

    Attributes:
        tokens: The number of generated tokens.
        rounds: The number of verifier calls.
        proposed: The number of tokens proposed by the draft.
        accepted: The number of accepted proposals.
        draft_failures: The number of rounds in which the draft failed.
    """

    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    draft_failures: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share of accepted proposals; NaN without proposals."""
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def tokens_per_round(self) -> float:
        """Tokens per call of the verifier; it would be 1 without a draft. NaN before the first call."""
        return self.tokens / self.rounds if self.rounds else math.nan

    def __add__(self, rhs: DecodingStatistics) -> DecodingStatistics:
        mine, addends = attrs.asdict(self), attrs.asdict(rhs)
        return DecodingStatistics(**{name: mine[name] + addends[name] for name in mine})


class SpeculativeStep:
    """Continues texts in a `ContinuousBatcher`: a step for sequences of `Generate` items.

    In each step the draft proposes some tokens of each text, with a call for each token, and the verifier
    returns its distributions at all of these positions in one call. Tokens are accepted so that the text has
    the distribution of only the verifier, whatever the draft proposes (Leviathan, Kalman, Matias 2023; Chen
    et al. 2023). At temperature 0 it is the verifier's own greedy text. Without a draft, a step gives one
    token per text.

    A sequence gives its tokens; a `stop` token or the maximum number ends it. Other sequences in the batch do
    not affect it. The models work on all texts of a step at once: they take a list of `Score`, and return an
    array of rows for each. They do not see chunks of a prompt: they get each whole text, starting at the end
    of its prompt. If a step fails, nothing has changed, and it may be called again.

    Args:
        verifier: The large model: a batch model for `Score`.
        draft: The small model, with the same vocabulary, or a `PromptLookup`. It gets requests for one
            distribution per text at a time; None in its place means that it proposes nothing more.
        lookahead: The number of tokens that the draft proposes in a step, at least 1.
        logits: Whether the models return logits, not probabilities.
        draft_may_fail: Whether a step continues without the draft if the draft fails. A failure costs time,
            does not change the answer, and is counted.

    Raises:
        ValueError, TypeError: `lookahead` is not an integer from 1, or a model is not a model.
    """

    @checked_options
    def __init__(
        self,
        verifier: ModelOfBatches[Score, object],
        draft: ModelOfBatches[Score, object] | None = None,
        *,
        lookahead: int = 4,
        logits: bool = False,
        draft_may_fail: bool = False,
    ) -> None:
        self._verifier = as_callable(verifier)
        self._draft = None if draft is None else as_callable(draft)
        self._lookahead = must_be_count(f"{type(self).__name__}: lookahead", lookahead)
        self._are_logits = logits
        self._draft_may_fail = draft_may_fail
        self._statistics = DecodingStatistics()

    @property
    def statistics(self) -> DecodingStatistics:
        """Counts of speculation in all steps so far."""
        return self._statistics

    async def __call__(self, batch: list[RunningSequence[Generate, int]]) -> list[StepResult[int]]:
        """Return the next tokens of each text.

        Returns:
            For each text its tokens, `Last` of them, or an error of only this text: of its distributions, or
            of a prompt with a token outside the vocabulary.

        Raises:
            Exception: The error of the verifier; or of the draft, unless it may fail.
        """
        rounds = {sequence: self._begin(sequence) for sequence in batch if sequence.gives_part}
        await self._propose(list(rounds.values()))
        going = [
            text_round for text_round in rounds.values() if text_round.error is None or self._draft_may_fail
        ]
        asked = [text_round.score(len(text_round.proposed) + 1) for text_round in going]
        results = split_results(await self._verifier(asked), len(asked)) if asked else []
        for text_round, scores in zip(going, results, strict=True):
            try:
                await self._accept(text_round, scores)
            except ValueError as error:
                # Its distributions or its prompt are wrong. A loss would affect all texts.
                text_round.error = error
        # No checkpoint follows: all rounds count, or none.
        return [self._result(rounds[sequence]) if sequence in rounds else () for sequence in batch]

    def _begin(self, sequence: RunningSequence[Generate, int]) -> _Round:
        """Begin a round of a text; a failed round changes nothing."""
        request = sequence.item
        if sequence.state is None:
            sequence.state = _TextState(np.random.SeedSequence(request.seed).entropy)
        text: _TextState = sequence.state
        rng = np.random.default_rng([text.entropy, len(sequence.parts)])
        sampler = Sampler(rng=rng, temperature=request.temperature, are_logits=self._are_logits)
        return _Round(request, text, sampler, so_far=(*request.prompt, *sequence.parts))

    async def _propose(self, rounds: list[_Round]) -> None:
        """Have the draft propose tokens for each text, as many as may be needed."""
        if self._draft is None:
            return
        for number in range(self._lookahead):
            # The verifier adds one.
            asked = [
                text_round
                for text_round in rounds
                if not text_round.is_whole and number < text_round.missing - 1
            ]
            if not asked:
                return
            try:
                results = split_results(
                    await self._draft([text_round.score(1) for text_round in asked]), len(asked)
                )
                for text_round, rows in zip(asked, results, strict=True):
                    await self._draw(text_round, rows)
            except Exception as error:
                if not self._draft_may_fail:
                    raise
                for text_round in asked:
                    text_round.error, text_round.is_whole = error, True

    async def _draw(self, text_round: _Round, result: object) -> None:
        """Draw the next proposal of a text; None proposes nothing."""
        if result is None:
            text_round.is_whole = True
            return
        try:
            scores = await scores_of(
                "the draft", result, 1, text_round.vocabulary, are_logits=self._are_logits
            )
        except ModelOutputError as error:
            text_round.error, text_round.is_whole = error, True
            return
        distribution = text_round.sampler.distribution(scores[0])
        token = text_round.sampler.draw(distribution)
        text_round.proposed.append(token)
        text_round.rows.append(distribution)
        text_round.is_whole = token in text_round.request.stop

    async def _accept(self, text_round: _Round, result: object) -> None:
        """Take the verifier's distributions, and with them the tokens of a round.

        Raises:
            ValueError: They are not valid distributions, or the prompt has a token outside the vocabulary.
        """
        count = len(text_round.proposed) + 1
        scores = await scores_of(
            "the verifier", result, count, text_round.vocabulary, are_logits=self._are_logits
        )
        text_round.text.vocabulary = size = int(scores.shape[1])
        highest = max(text_round.request.prompt, default=0)
        if highest >= size:
            raise ValueError(f"the prompt has the token {highest}, and the vocabulary ends at {size - 1}")
        text_round.accepted = text_round.sampler.accepted(text_round.proposed, text_round.rows, scores)

    def _result(self, text_round: _Round) -> StepResult[int]:
        """Count a round, and return its tokens up to a stop token."""
        if not text_round.accepted:
            assert text_round.error is not None  # or the verifier's token would be there
            return outcome.Error(text_round.error)
        stops = [
            number for number, token in enumerate(text_round.accepted, 1) if token in text_round.request.stop
        ]
        tokens = text_round.accepted[: stops[0]] if stops else text_round.accepted
        self._statistics += DecodingStatistics(
            rounds=1,
            proposed=len(text_round.proposed),
            accepted=len(text_round.accepted) - 1,
            tokens=len(tokens),
            draft_failures=int(text_round.error is not None),
        )
        return Last(tokens) if stops or len(tokens) == text_round.missing else tokens


class PromptLookup:
    """A draft without a model: it proposes the token that followed an earlier occurrence of the last tokens.

    It suits texts that repeat parts of their prompt, as summaries and edits of code do (Saxena, "Prompt
    lookup decoding", 2023).

    Args:
        vocabulary: The number of the verifier's tokens.
        longest: The maximum number of last tokens to search for; then one less, down to 1.
        logits: Whether the verifier returns logits.

    Raises:
        ValueError, TypeError: A number is not an integer from 1.
    """

    @checked_options
    def __init__(self, vocabulary: int, *, longest: int = 3, logits: bool = False) -> None:
        self._vocabulary = must_be_count("PromptLookup: vocabulary", vocabulary)
        self._longest = must_be_count("PromptLookup: longest", longest)
        self._least, self._most = (-math.inf, 0.0) if logits else (0.0, 1.0)

    async def __call__(self, scores: list[Score]) -> list[Rows | None]:
        """Return for each text a row with only its proposal, or None."""
        await trio.lowlevel.checkpoint()
        return [self._row(score.tokens) for score in scores]

    def _row(self, tokens: tuple[int, ...]) -> Rows | None:
        token = self._following(np.array(tokens, dtype=np.int64))
        if token is None:
            return None
        row = np.full((1, self._vocabulary), self._least)
        row[0, token] = self._most
        return row

    def _following(self, tokens: NDArray[np.int64]) -> int | None:
        for length in range(min(self._longest, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            matches = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            # The last occurrence counts, because it is most similar to the current text.
            following = tokens[matches[-1:] + length]
            if following.size and following[0] < self._vocabulary:
                return int(following[0])
        return None


@attrs.define(eq=False)
class _TextState:
    """The state of a text in addition to its tokens.

    Attributes:
        entropy: The seed of the random numbers in its rounds.
        vocabulary: The number of tokens by the verifier; None before the first round.
    """

    entropy: Any
    vocabulary: int | None = None


@attrs.define(eq=False)
class _Round:
    """One text in one step.

    Attributes:
        request: The request.
        text: The state of its text.
        sampler: Draws the tokens of this round.
        so_far: The prompt, and the generated tokens.
        proposed: The tokens that the draft proposes.
        rows: The distribution from which each was drawn.
        is_whole: Whether no more are wanted.
        error: The reason why the draft gave no more, or why the verifier's distributions are invalid.
        accepted: The tokens of the round; empty before the verifier's reply, and if that is invalid.
    """

    request: Generate
    text: _TextState
    sampler: Sampler
    so_far: tuple[int, ...]
    proposed: list[int] = attrs.field(factory=list[int])
    rows: list[Rows] = attrs.field(factory=list[Rows])
    is_whole: bool = False
    error: Exception | None = None
    accepted: list[int] = attrs.field(factory=list[int])

    @property
    def missing(self) -> int:
        """The maximum number of tokens that may follow."""
        return len(self.request.prompt) + self.request.max_tokens - len(self.so_far)

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens: by the verifier, in the first round by the draft."""
        return self.text.vocabulary or (len(self.rows[0]) if self.rows else None)

    def score(self, count: int) -> Score:
        """Return a request for the last distributions of the text, including the proposals."""
        return Score((*self.so_far, *self.proposed), count)

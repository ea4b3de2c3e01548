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
from ._checks import ModelOutputError, Rows, Sampler, scores_of, whole
from ._sequences import Last, RunningSequence, StepResult
from ._submit import as_callable

__all__ = ["DecodingStatistics", "Generate", "PromptLookup", "Score", "SpeculativeStep"]


@attrs.frozen
class Score:
    """Ask a language model for the distributions of the next tokens.

    The model returns an array of shape (count, vocabulary), of NumPy or of a device. Its last row is the
    distribution of the token that follows all of `tokens`, the row before it that of the last token given
    those before it, and so on. They are probabilities, or logits if the step is told so.

    Attributes:
        tokens: The text so far, as numbers of tokens.
        count: How many distributions are asked for, at least 1 and at most ``len(tokens) + 1``.
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
        prompt: The text, as numbers of tokens.
        max_tokens: The most tokens that are generated, at least 1.
        stop: Tokens that end the text. The one that did is the last of the result.
        temperature: 1 keeps the verifier's distribution, less sharpens it, 0 is greedy: always the likeliest
            token.
        seed: The same seed gives the same tokens, if the models return the same. None: another one each time.
    """

    prompt: tuple[int, ...] = attrs.field(converter=_prompt)
    max_tokens: int = attrs.field(default=128, kw_only=True, validator=whole)
    stop: frozenset[int] = attrs.field(default=frozenset(), converter=_stops, kw_only=True)
    temperature: float = attrs.field(default=1.0, kw_only=True)
    seed: int | None = attrs.field(default=None, kw_only=True, validator=optional(must_be_whole(0)))

    def __attrs_post_init__(self) -> None:
        if self.temperature != 0:
            must_be_positive("Generate: temperature, if not 0,", self.temperature)


@attrs.frozen(kw_only=True)
class DecodingStatistics:
    """Counts of speculation in the rounds of all texts, without those that failed.

    Attributes:
        tokens: Tokens that were generated.
        rounds: Calls of the verifier.
        proposed: Tokens that the draft has proposed.
        accepted: Those of them that were accepted.
        draft_failures: Rounds in which the draft failed.
    """

    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    draft_failures: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share of proposals that were accepted; NaN if there were none."""
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def tokens_per_round(self) -> float:
        """Tokens for each call of the verifier: without a draft it would be 1. NaN if there was none."""
        return self.tokens / self.rounds if self.rounds else math.nan

    def __add__(self, other: DecodingStatistics) -> DecodingStatistics:
        mine, others = attrs.asdict(self), attrs.asdict(other)
        return DecodingStatistics(**{name: mine[name] + others[name] for name in mine})


class SpeculativeStep:
    """Continues texts in a `ContinuousBatcher`: a step for sequences whose item is a `Generate`.

    In each step the draft proposes some tokens of each text, one call each, and the verifier returns its
    distributions at all of these places in one call. Tokens are accepted so that the text has the
    distribution of the verifier alone, whatever the draft proposes (Leviathan, Kalman, Matias 2023; Chen et
    al. 2023). At temperature 0 it is the verifier's own greedy text. Without a draft, a step gives one token
    of each text.

    A sequence gives its tokens; a token of `stop`, or their number, ends it. What runs beside it changes
    nothing. The models work on all texts of a step at once: they take a list of `Score`, and return an array
    of rows for each. They have no part in chunks of a prompt: they see each text whole, from the end of its
    prompt on. If a step fails, nothing has changed, and it may be called again.

    Args:
        verifier: The large model: a model of batches of `Score`.
        draft: The small model, with the same vocabulary, or a `PromptLookup`. It is asked for one
            distribution of each text at a time; None in its place means that it proposes nothing more.
        lookahead: How many tokens the draft proposes in a step, at least 1.
        logits: Whether the models return logits, not probabilities.
        draft_may_fail: Whether a step goes on without the draft if that fails. It costs time and not the
            answer, and is counted.

    Raises:
        ValueError, TypeError: `lookahead` is no whole number from 1, or a model is no model.
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
        """Give the next tokens of each text.

        Returns:
            For each text its tokens, `Last` of them, or an error of this text alone: of its distributions,
            or a prompt with a token that is not in the vocabulary.

        Raises:
            Exception: Error of the verifier; or of the draft, unless it may fail.
        """
        rounds = {sequence: self._begin(sequence) for sequence in batch if sequence.gives_part}
        await self._propose(list(rounds.values()))
        going = [each for each in rounds.values() if each.error is None or self._draft_may_fail]
        asked = [each.score(len(each.proposed) + 1) for each in going]
        found = split_results(await self._verifier(asked), len(asked)) if asked else []
        for each, scores in zip(going, found, strict=True):
            try:
                await self._accept(each, scores)
            except ValueError as error:
                # Its distributions or its prompt are wrong. A loss would be that of all texts.
                each.error = error
        # No checkpoint follows: all rounds count, or none.
        return [self._result(rounds[sequence]) if sequence in rounds else () for sequence in batch]

    def _begin(self, sequence: RunningSequence[Generate, int]) -> _Round:
        """Begin a round of a text; one that fails leaves nothing behind."""
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
            asked = [each for each in rounds if not each.is_whole and number < each.missing - 1]
            if not asked:
                return
            try:
                found = split_results(await self._draft([each.score(1) for each in asked]), len(asked))
                for each, rows in zip(asked, found, strict=True):
                    await self._draw(each, rows)
            except Exception as error:
                if not self._draft_may_fail:
                    raise
                for each in asked:
                    each.error, each.is_whole = error, True

    async def _draw(self, each: _Round, found: object) -> None:
        """Draw the next proposal of a text; None proposes nothing."""
        if found is None:
            each.is_whole = True
            return
        try:
            scores = await scores_of("the draft", found, 1, each.vocabulary, are_logits=self._are_logits)
        except ModelOutputError as error:
            each.error, each.is_whole = error, True
            return
        distribution = each.sampler.distribution(scores[0])
        token = each.sampler.draw(distribution)
        each.proposed.append(token)
        each.rows.append(distribution)
        each.is_whole = token in each.request.stop

    async def _accept(self, each: _Round, found: object) -> None:
        """Take the verifier's distributions, and with them the tokens of a round.

        Raises:
            ValueError: They are none, or the prompt has a token that is not in the vocabulary.
        """
        count = len(each.proposed) + 1
        scores = await scores_of("the verifier", found, count, each.vocabulary, are_logits=self._are_logits)
        each.text.vocabulary = size = int(scores.shape[1])
        highest = max(each.request.prompt, default=0)
        if highest >= size:
            raise ValueError(f"the prompt has the token {highest}, and the vocabulary ends at {size - 1}")
        each.accepted = each.sampler.accepted(each.proposed, each.rows, scores)

    def _result(self, each: _Round) -> StepResult[int]:
        """Count a round, and return its tokens up to one that ends the text."""
        if not each.accepted:
            assert each.error is not None  # or the verifier's token would be there
            return outcome.Error(each.error)
        stops = [number for number, token in enumerate(each.accepted, 1) if token in each.request.stop]
        tokens = each.accepted[: stops[0]] if stops else each.accepted
        self._statistics += DecodingStatistics(
            rounds=1,
            proposed=len(each.proposed),
            accepted=len(each.accepted) - 1,
            tokens=len(tokens),
            draft_failures=int(each.error is not None),
        )
        return Last(tokens) if stops or len(tokens) == each.missing else tokens


class PromptLookup:
    """A draft without a model: it proposes what followed the last tokens when they came before.

    It suits texts that repeat parts of their prompt, as summaries and edits of code do (Saxena, "Prompt
    lookup decoding", 2023).

    Args:
        vocabulary: Number of tokens of the verifier.
        longest: How many of the last tokens are looked for, at most; then one less, down to 1.
        logits: Whether the verifier returns logits.

    Raises:
        ValueError, TypeError: A number is not a whole one from 1.
    """

    @checked_options
    def __init__(self, vocabulary: int, *, longest: int = 3, logits: bool = False) -> None:
        self._vocabulary = must_be_count("PromptLookup: vocabulary", vocabulary)
        self._longest = must_be_count("PromptLookup: longest", longest)
        self._least, self._most = (-math.inf, 0.0) if logits else (0.0, 1.0)

    async def __call__(self, scores: list[Score]) -> list[Rows | None]:
        """Return a row for each text that has only its proposal; None where there is none."""
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
            found = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            # The last time counts: it is the most like what is written now.
            following = tokens[found[-1:] + length]
            if following.size and following[0] < self._vocabulary:
                return int(following[0])
        return None


@attrs.define(eq=False)
class _TextState:
    """State of a text beside its tokens.

    Attributes:
        entropy: Random numbers of its rounds come from it.
        vocabulary: How many tokens the verifier distinguishes; None before the first round.
    """

    entropy: Any
    vocabulary: int | None = None


@attrs.define(eq=False)
class _Round:
    """One text in one step.

    Attributes:
        request: What was asked for.
        text: State of its text.
        sampler: Draws the tokens of this round.
        so_far: The prompt, and what was generated.
        proposed: The tokens that the draft proposes.
        rows: The distribution that each was drawn from.
        is_whole: Whether no more are wanted.
        error: Why the draft gave no more, or the verifier's distributions are of no use.
        accepted: The tokens of the round; none before the verifier has replied, or if that is of no use.
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
        """The most tokens that may follow."""
        return len(self.request.prompt) + self.request.max_tokens - len(self.so_far)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are: by the verifier, in the first round by the draft."""
        return self.text.vocabulary or (len(self.rows[0]) if self.rows else None)

    def score(self, count: int) -> Score:
        """Ask for the last distributions of the text with what is proposed."""
        return Score((*self.so_far, *self.proposed), count)

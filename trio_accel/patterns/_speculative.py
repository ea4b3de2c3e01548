"""Speculative decoding: a small model proposes tokens, and a large one checks them all in one call."""

from __future__ import annotations

import math
import operator
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import outcome
import trio
from attrs.validators import optional
from numpy.typing import NDArray

from ..actors import must_be_whole, named_options, running_beside
from ._batcher import BatchResults, ModelOfBatches, one_for_each
from ._checks import (
    ModelOutputError,
    Rows,
    Sampler,
    must_be_count,
    must_be_positive,
    of_class,
    scores_of,
    whole,
)
from ._continuous import Last, RunningSequence, StepResult
from ._servants import CallStatistics, Model, TaskServant, as_callable, outcome_of

__all__ = [
    "DecoderStatistics",
    "DecodingStatistics",
    "Generate",
    "Generation",
    "PromptLookup",
    "Score",
    "SpeculativeDecoder",
    "SpeculativeStep",
    "TokenStream",
    "open_token_stream",
]

Finish: TypeAlias = Literal["stop", "length"]


@attrs.frozen
class Score:
    """Ask a language model for the distributions of the next tokens.

    The model returns an array of shape (count, vocabulary), of NumPy or of a device. Its last row is the
    distribution of the token that follows all of `tokens`, the row before it that of the last token given
    those before it, and so on. They are probabilities, or logits if the decoder is told so.

    Attributes:
        tokens: The text so far, as numbers of tokens.
        count: How many distributions are asked for, at least 1 and at most ``len(tokens) + 1``.
    """

    tokens: tuple[int, ...]
    count: int = 1


def _tokens(values: Iterable[int]) -> tuple[int, ...]:
    tokens = tuple(map(operator.index, values))
    if tokens and min(tokens) < 0:
        raise ValueError(f"Generate: tokens are numbers from 0, got {min(tokens)}")
    return tokens


def _stops(values: Iterable[int]) -> frozenset[int]:
    return frozenset(_tokens(values))


@named_options
@attrs.frozen
class Generate:
    """Ask a decoder to continue a text.

    Attributes:
        prompt: The text, as numbers of tokens.
        max_tokens: The most tokens that are generated, at least 1.
        stop: Tokens that end the text. The one that did is the last of the result.
        temperature: 1 keeps the verifier's distribution, less sharpens it, 0 is greedy: always the likeliest
            token.
        seed: The same seed gives the same tokens, if the models return the same. None: another one each time.
        stream: Where each token is sent as soon as it is certain. The next ones are not computed before the
            channel has taken it. It stays open; `open_token_stream` closes the one that it makes.
    """

    prompt: tuple[int, ...] = attrs.field(converter=_tokens)
    max_tokens: int = attrs.field(default=128, kw_only=True, validator=whole)
    stop: frozenset[int] = attrs.field(default=frozenset(), converter=_stops, kw_only=True)
    temperature: float = attrs.field(default=1.0, kw_only=True)
    seed: int | None = attrs.field(default=None, kw_only=True, validator=optional(must_be_whole(0)))
    stream: trio.abc.SendChannel[int] | None = attrs.field(
        default=None, kw_only=True, validator=of_class(trio.abc.SendChannel, type(None))
    )

    def __attrs_post_init__(self) -> None:
        if self.temperature != 0:
            must_be_positive("Generate: temperature, if not 0,", self.temperature)


@attrs.frozen(kw_only=True)
class DecodingStatistics:
    """Counts of speculation, in one generation or in all of a decoder's, without rounds that failed.

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


@attrs.frozen(kw_only=True)
class DecoderStatistics(CallStatistics):
    """Counts of the requests of a decoder.

    Attributes:
        decoding: Counts of speculation in all of them, also in those that failed later.
    """

    decoding: DecodingStatistics


@attrs.frozen(kw_only=True)
class Generation:
    """The reply of a decoder.

    Attributes:
        tokens: The tokens that follow the prompt.
        finish: Why it ended: by a token of `stop`, or by its `length`.
        statistics: Counts of speculation.
    """

    tokens: tuple[int, ...]
    finish: Finish
    statistics: DecodingStatistics


class SpeculativeDecoder(TaskServant[Generate, Generation]):
    """Continues texts: a `Servant` of `Generate`, whose reply is a `Generation`.

    In each round the draft proposes some tokens, one call each, and the verifier returns its distributions at
    all of these places in one call. Tokens are accepted so that the text has the distribution of the verifier
    alone, whatever the draft proposes (Leviathan, Kalman, Matias 2023; Chen et al. 2023). At temperature 0 it
    is the verifier's own greedy text.

    Each call runs in a task of its own. For errors, cancellation and restarts see `TaskServant`. Its
    statistics are `DecoderStatistics`.

    Args:
        draft: The small model: a `Model` of `Score`. It is asked for one distribution at a time.
        verifier: The large model, with the same vocabulary.
        lookahead: How many tokens the draft proposes in a round, at least 1.
        logits: Whether the models return logits, not probabilities.
        draft_may_fail: Whether a round goes on without the draft if that fails. It costs time and not the
            answer, and is counted.

    Raises:
        ValueError, TypeError: `lookahead` is no whole number from 1.
    """

    def __init__(
        self,
        draft: Model[Score, object],
        verifier: Model[Score, object],
        *,
        lookahead: int = 4,
        logits: bool = False,
        draft_may_fail: bool = False,
    ) -> None:
        name = type(self).__name__
        self._rounds = _Rounds(
            _one_by_one(as_callable(draft)),
            _one_by_one(as_callable(verifier)),
            must_be_count(f"{name}: lookahead", lookahead),
            logits,
            draft_may_fail,
        )

    def statistics(self) -> DecoderStatistics:
        """Return the counts of its requests and of speculation so far."""
        return DecoderStatistics(**self._tally, decoding=self._rounds.statistics)

    async def answer(self, item: Generate) -> Generation:
        """Continue one text.

        Raises:
            ModelOutputError: A model returned no distributions, or the two have several vocabularies.
            ValueError: The prompt has a token that is not in the vocabulary.
            trio.BrokenResourceError, trio.ClosedResourceError: The `stream` was closed.
            Exception: Error of the verifier; or of the draft, unless it may fail.
        """
        text = self._rounds.begin(item)
        while text.finish is None:
            await trio.lowlevel.checkpoint()
            [result] = await self._rounds.go_on([text])
            tokens = result.unwrap()
            if item.stream is not None:
                for token in tokens:
                    await item.stream.send(token)
        return Generation(tokens=tuple(text.tokens), finish=text.finish, statistics=text.statistics)


class SpeculativeStep:
    """Continues texts in a `ContinuousBatcher`: a step for sequences whose item is a `Generate`.

    A sequence gives its tokens; a token of `stop`, or their number, ends it. They are those of a
    `SpeculativeDecoder` with the same models and seed, whatever runs beside them. Here the models work on all
    texts of a step at once: they take a list of `Score`, and return an array of rows for each. Without a
    draft, a step gives one token of each text.

    The models have no part in chunks of a prompt: they see each text whole, from the end of its prompt on. If
    a step fails, nothing has changed, and it may be called again. `Generate.stream` is refused: use
    `open_parts`.

    Args:
        verifier: The large model: a model of batches of `Score`.
        draft: The small model, with the same vocabulary, or a `PromptLookup`. It is asked for one
            distribution of each text at a time; None in its place means that it proposes nothing more.
        lookahead: How many tokens the draft proposes in a step, at least 1.
        logits: Whether the models return logits, not probabilities.
        draft_may_fail: Whether a step goes on without the draft if that fails.

    Raises:
        ValueError, TypeError: `lookahead` is no whole number from 1, or a model is no model.
    """

    def __init__(
        self,
        verifier: ModelOfBatches[Score, object],
        draft: ModelOfBatches[Score, object] | None = None,
        *,
        lookahead: int = 4,
        logits: bool = False,
        draft_may_fail: bool = False,
    ) -> None:
        proposer = None if draft is None else as_callable(draft)
        lookahead = must_be_count(f"{type(self).__name__}: lookahead", lookahead)
        self._rounds = _Rounds(proposer, as_callable(verifier), lookahead, logits, draft_may_fail)

    @property
    def statistics(self) -> DecodingStatistics:
        """Counts of speculation in all steps so far."""
        return self._rounds.statistics

    async def __call__(self, batch: list[RunningSequence[Generate, int]]) -> list[StepResult[int]]:
        """Give the next tokens of each text.

        Returns:
            For each text its tokens, `Last` of them, or an error of this text alone: of its distributions,
            or a prompt with a token that is not in the vocabulary.

        Raises:
            Exception: Error of the verifier; or of the draft, unless it may fail.
        """
        texts = [self._text_of(sequence) for sequence in batch if sequence.gives_part]
        going = [text for text in texts if text.request.stream is None]
        results = dict(zip(going, await self._rounds.go_on(going), strict=True))
        return [self._result(sequence.state, results) if sequence.gives_part else () for sequence in batch]

    def _text_of(self, sequence: RunningSequence[Generate, int]) -> _Text:
        if sequence.state is None:
            sequence.state = self._rounds.begin(sequence.item)
        text: _Text = sequence.state
        return text

    def _result(self, text: _Text, results: dict[_Text, outcome.Outcome[list[int]]]) -> StepResult[int]:
        result = results.get(text)
        if result is None:
            return outcome.Error(ValueError("Generate: stream is for a SpeculativeDecoder; use open_parts"))
        if isinstance(result, outcome.Error):
            return result
        tokens = result.unwrap()
        return tokens if text.finish is None else Last(tokens)


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


_Scorer: TypeAlias = Callable[[list[Score]], Awaitable[BatchResults[object]]]


def _one_by_one(model: Callable[[Score], Awaitable[object]]) -> _Scorer:
    """Have a model of one `Score` serve a list of one."""

    async def scorer(scores: list[Score]) -> list[object]:
        [score] = scores
        return [await model(score)]

    return scorer


@attrs.define(eq=False)
class _Draft:
    """What is proposed for a text in a round.

    Attributes:
        text: The text.
        sampler: Draws the tokens of this round.
        tokens: The tokens.
        rows: The distribution that each was drawn from.
        is_whole: Whether no more are wanted.
        error: Why the draft gave no more, or the verifier's distributions are of no use.
        accepted: The tokens of the round; None where there are none.
    """

    text: _Text
    sampler: Sampler
    tokens: list[int] = attrs.field(factory=list[int])
    rows: list[Rows] = attrs.field(factory=list[Rows])
    is_whole: bool = False
    error: Exception | None = None
    accepted: list[int] | None = None


class _Rounds:
    """Goes on with texts, some at a time, in rounds: the draft proposes, the verifier accepts."""

    def __init__(
        self, draft: _Scorer | None, verifier: _Scorer, lookahead: int, are_logits: bool, draft_may_fail: bool
    ) -> None:
        self._draft, self._verifier = draft, verifier
        self._lookahead = lookahead
        self._are_logits = are_logits
        self._draft_may_fail = draft_may_fail
        self.statistics = DecodingStatistics()

    def begin(self, request: Generate) -> _Text:
        """Begin a text."""
        return _Text(request, are_logits=self._are_logits)

    async def go_on(self, texts: list[_Text]) -> list[outcome.Outcome[list[int]]]:
        """Append the tokens of one round to each text.

        Returns:
            The tokens of each text, or why there are none for this one: then it is as it was before.

        Raises:
            Exception: A model failed. All texts are as they were before.
        """
        drafts = [_Draft(text, text.new_sampler()) for text in texts]
        await self._propose(drafts)
        going = [draft for draft in drafts if draft.error is None or self._draft_may_fail]
        asked = [Score(draft.text.so_far(draft.tokens), len(draft.tokens) + 1) for draft in going]
        found = one_for_each(await self._verifier(asked), len(asked)) if asked else []
        for draft, scores in zip(going, found, strict=True):
            try:
                draft.accepted = await self._accepted(draft, scores)
            except ValueError as error:
                # Its distributions or its prompt are wrong. A loss would be that of all texts.
                draft.error = error
        # No checkpoint follows: all texts go on, or none.
        return [self._append(draft) for draft in drafts]

    async def _accepted(self, draft: _Draft, found: object) -> list[int]:
        text, count = draft.text, len(draft.tokens) + 1
        vocabulary = text.vocabulary_after(draft.rows)
        scores = await scores_of("the verifier", found, count, vocabulary, are_logits=self._are_logits)
        text.know(scores)
        return draft.sampler.accepted(draft.tokens, draft.rows, scores)

    def _append(self, draft: _Draft) -> outcome.Outcome[list[int]]:
        tokens = draft.accepted
        if tokens is None:
            assert draft.error is not None  # or it would have gone on
            return outcome.Error(draft.error)
        counted = DecodingStatistics(
            rounds=1,
            proposed=len(draft.tokens),
            accepted=len(tokens) - 1,
            tokens=draft.text.append(tokens),
            draft_failures=int(draft.error is not None),
        )
        draft.text.statistics += counted
        self.statistics += counted
        return outcome.Value(tokens[: counted.tokens])

    async def _propose(self, drafts: list[_Draft]) -> None:
        """Have the draft propose tokens for each text, as many as may be needed."""
        if self._draft is None:
            return
        for number in range(self._lookahead):
            # The verifier adds one.
            asked = [draft for draft in drafts if not draft.is_whole and number < draft.text.missing - 1]
            if not asked:
                return
            scores = [Score(draft.text.so_far(draft.tokens)) for draft in asked]
            try:
                found = one_for_each(await self._draft(scores), len(asked))
                for draft, rows in zip(asked, found, strict=True):
                    await self._draw(draft, rows)
            except Exception as error:
                if not self._draft_may_fail:
                    raise
                for draft in asked:
                    draft.error, draft.is_whole = error, True

    async def _draw(self, draft: _Draft, found: object) -> None:
        """Draw the next proposal of a text; None proposes nothing."""
        if found is None:
            draft.is_whole = True
            return
        text, vocabulary = draft.text, draft.text.vocabulary_after(draft.rows)
        try:
            scores = await scores_of("the draft", found, 1, vocabulary, are_logits=self._are_logits)
        except ModelOutputError as error:
            draft.error, draft.is_whole = error, True
            return
        distribution = draft.sampler.distribution(scores[0])
        token = draft.sampler.draw(distribution)
        draft.tokens.append(token)
        draft.rows.append(distribution)
        draft.is_whole = token in text.request.stop


class _Text:
    """Tokens of one request so far."""

    def __init__(self, request: Generate, *, are_logits: bool) -> None:
        self.request = request
        self._are_logits = are_logits
        self._entropy: Any = np.random.SeedSequence(request.seed).entropy
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.statistics = DecodingStatistics()
        self._vocabulary: int | None = None

    def new_sampler(self) -> Sampler:
        """Make the sampler of a round, of which a round that failed leaves nothing."""
        rng = np.random.default_rng([self._entropy, len(self.tokens)])
        return Sampler(rng=rng, temperature=self.request.temperature, are_logits=self._are_logits)

    @property
    def missing(self) -> int:
        """The most tokens that may follow."""
        return self.request.max_tokens - len(self.tokens)

    def so_far(self, proposed: list[int]) -> tuple[int, ...]:
        """Return the prompt, what was generated, and what is proposed."""
        return (*self.request.prompt, *self.tokens, *proposed)

    def vocabulary_after(self, drafted: list[Rows]) -> int | None:
        """Tell how many tokens there are: by the verifier, in the first round by the draft."""
        return self._vocabulary or (len(drafted[0]) if drafted else None)

    def know(self, verified: Rows) -> None:
        """Take the vocabulary from the verifier.

        Raises:
            ValueError: The prompt has a token that is not in it.
        """
        self._vocabulary = size = int(verified.shape[1])
        highest = max(self.request.prompt, default=0)
        if highest >= size:
            raise ValueError(f"the prompt has the token {highest}, and the vocabulary ends at {size - 1}")

    def append(self, tokens: list[int]) -> int:
        """Append tokens up to one that ends the text; returns how many."""
        for number, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.request.stop:
                self.finish = "stop"
                return number
        if not self.missing:
            self.finish = "length"
        return len(tokens)


@attrs.define(eq=False, repr=False)
class TokenStream:
    """An async iterator over tokens, made by `open_token_stream`."""

    _tokens: trio.MemoryReceiveChannel[int]
    _replies: list[outcome.Outcome[Generation]]
    _generation: Generation | None = attrs.field(default=None, init=False)

    @property
    def generation(self) -> Generation:
        """The reply of the decoder.

        Raises:
            RuntimeError: The iteration has not come to its end.
        """
        if self._generation is None:
            raise RuntimeError("generation: the stream has not ended; iterate over it to its end")
        return self._generation

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> int:
        """Return the next token.

        Raises:
            Exception: Error of the decoder, after the tokens before it.
        """
        try:
            return await self._tokens.receive()
        except trio.EndOfChannel:
            pass
        if self._replies:
            self._generation = self._replies.pop().unwrap()
        raise StopAsyncIteration


@asynccontextmanager
async def open_token_stream(
    decoder: Model[Generate, Generation], request: Generate, /
) -> AsyncGenerator[TokenStream, None]:
    """Ask a decoder, and iterate over the tokens as they become certain.

    The decoder is as fast as the reader: it waits with each token until that is read. At the end of the block
    the request is cancelled, if it has not ended.

    Args:
        decoder: A `SpeculativeDecoder`, or a servant that leads to one. A request must not be sent to two of
            them.
        request: The request; its `stream` is replaced.
    """
    ask = as_callable(decoder)
    send, receive = trio.open_memory_channel[int](0)
    replies: list[outcome.Outcome[Generation]] = []

    async def decode() -> None:
        async with send:
            replies.append(await outcome_of(ask(attrs.evolve(request, stream=send))))

    async with running_beside(decode):
        yield TokenStream(receive, replies)

"""Speculative decoding: a small model proposes tokens, and a large one checks them all in one call."""

from __future__ import annotations

import math
import operator
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias

import attrs
import numpy as np
import outcome
import trio

from ..actors import named_options, running_beside
from ._checks import Rows, Sampler, must_be_count, must_be_positive, scores_of
from ._servants import CallStatistics, Model, TaskServant, as_callable, outcome_of

__all__ = [
    "DecoderStatistics",
    "DecodingStatistics",
    "Generate",
    "Generation",
    "Score",
    "SpeculativeDecoder",
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
    max_tokens: int = attrs.field(default=128, kw_only=True)
    stop: frozenset[int] = attrs.field(default=frozenset(), converter=_stops, kw_only=True)
    temperature: float = attrs.field(default=1.0, kw_only=True)
    seed: int | None = attrs.field(default=None, kw_only=True)
    stream: trio.abc.SendChannel[int] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        must_be_count("Generate: max_tokens", self.max_tokens)
        if self.temperature != 0:
            must_be_positive("Generate: temperature, if not 0,", self.temperature)
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"Generate: seed must be a whole number from 0, or None, got {self.seed!r}")
        if self.stream is not None and not isinstance(self.stream, trio.abc.SendChannel):
            raise TypeError(f"Generate: stream must be a SendChannel, got {self.stream!r}")


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
        self._draft = as_callable(draft)
        self._verifier = as_callable(verifier)
        self._lookahead = must_be_count("SpeculativeDecoder: lookahead", lookahead)
        self._are_logits = logits
        self._draft_may_fail = draft_may_fail
        self._decoding = DecodingStatistics()

    def statistics(self) -> DecoderStatistics:
        """Return the counts of its requests and of speculation so far."""
        return DecoderStatistics(**attrs.asdict(self._tally), decoding=self._decoding)

    async def answer(self, item: Generate) -> Generation:
        """Continue one text.

        Raises:
            ModelOutputError: A model returned no distributions, or the two have several vocabularies.
            ValueError: The prompt has a token that is not in the vocabulary.
            trio.BrokenResourceError, trio.ClosedResourceError: The `stream` was closed.
            Exception: Error of the verifier; or of the draft, unless it may fail.
        """
        text = _Text(item, are_logits=self._are_logits)
        while text.finish is None:
            await trio.lowlevel.checkpoint()
            counted = await self._round(text)
            text.statistics += counted
            self._decoding += counted
            if item.stream is not None:
                for token in text.tokens[-counted.tokens :]:
                    await item.stream.send(token)
        return Generation(tokens=tuple(text.tokens), finish=text.finish, statistics=text.statistics)

    async def _round(self, text: _Text) -> DecodingStatistics:
        """Append the tokens of one round to a text."""
        proposed: list[int] = []
        drafted: list[Rows] = []
        failures = 0
        try:
            await self._propose(text, proposed, drafted)
        except Exception:
            if not self._draft_may_fail:
                raise
            failures = 1
        count = len(proposed) + 1
        verified = await scores_of(
            "the verifier",
            await self._verifier(Score(text.so_far(proposed), count)),
            count,
            text.vocabulary_after(drafted),
            are_logits=self._are_logits,
        )
        text.know(verified)
        tokens = text.sampler.accepted(proposed, drafted, verified)
        return DecodingStatistics(
            rounds=1,
            proposed=len(proposed),
            accepted=len(tokens) - 1,
            tokens=text.append(tokens),
            draft_failures=failures,
        )

    async def _propose(self, text: _Text, proposed: list[int], drafted: list[Rows]) -> None:
        """Have the draft propose tokens, as many as may be needed."""
        # The verifier adds one.
        for _ in range(min(self._lookahead, text.missing - 1)):
            scores = await scores_of(
                "the draft",
                await self._draft(Score(text.so_far(proposed))),
                1,
                text.vocabulary_after(drafted),
                are_logits=self._are_logits,
            )
            distribution = text.sampler.distribution(scores[0])
            token = text.sampler.draw(distribution)
            proposed.append(token)
            drafted.append(distribution)
            if token in text.request.stop:
                return


class _Text:
    """Tokens of one request so far."""

    def __init__(self, request: Generate, *, are_logits: bool) -> None:
        self.request = request
        self.sampler = Sampler(
            rng=np.random.default_rng(request.seed), temperature=request.temperature, are_logits=are_logits
        )
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.statistics = DecodingStatistics()
        self._vocabulary: int | None = None

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

"""Speculative decoding: a small model proposes tokens, and a large one checks several of them in one call.

A large language model takes about as long for one token as for a few, because it reads all its weights once
in either case. A `SpeculativeStep` makes use of that. The draft proposes tokens. The verifier returns its
distributions at all of these positions in one call. Tokens are accepted by a rule that keeps the verifier's
distribution exactly (Leviathan et al. 2023, Chen et al. 2023). So a poor draft costs only time. Use the step
in a `ContinuousBatcher`, which continues many texts at once.

Here the draft predicts the next letter from one letter, and the verifier from two letters. The verifier's
table is a device array, and each call is a product on the device.

Models: Async callables, or addresses of actors for `Submit`. Both take a list of `Score`, one for each text.
    ``score.tokens`` is the text so far, and ``score.count`` the number of wanted distributions. The result
    has a NumPy array or a device array of shape (count, vocabulary) for each text. Its last row is the
    distribution of the token after all of ``tokens``, the row before it the distribution of the last token
    given the earlier ones, and so on. The step asks the draft for one row at a time, and the verifier for one
    row more than the number of proposals. A model with an attention cache must find the text by ``tokens``,
    because the next request does not contain rejected proposals. Rows are probabilities; if a sum deviates by
    at most 0.01, it is normalised to 1. With ``logits=True``, the step applies the softmax, and -inf forbids
    a token.

Requests: ``Generate(prompt, ...)`` takes ``max_tokens`` (128), tokens that end the text (``stop``), a
    ``temperature`` (1; 0 is greedy: the verifier's own text, token by token) and a ``seed``. The same seed
    gives the same text, whatever other texts are in the batch. The reply is a tuple of tokens. The step has
    counters in ``statistics``.

Streaming: `open_parts` is an async context manager around an async iterator. A slow reader delays only its
    own text. When the block ends early, the text leaves the batch. If a model fails, the iterator first
    yields the earlier tokens, and then raises the error. Do not send one streamed request to two batchers, as
    a hedged pool does, because the second one refuses it.

How many proposals: If a proposal is accepted with the probability a, a round of k proposals gives
(1 - a**(k + 1)) / (1 - a) tokens on average, for k calls of the draft and one call of the verifier. Choose
``lookahead`` by ``acceptance_rate`` and ``tokens_per_round``. The host computes the rules, in the event
loop's thread. On an AMD EPYC with 2 busy cores, a round with 4 proposals took 0.3 ms for a vocabulary of
1000; for one of 32000 it took 2 ms, 4 ms at a temperature of 0.8, and 0.2 ms more for the softmax of each
distribution. So let a model with a large vocabulary apply the softmax on its device.

Errors: Rows with NaN, infinity, negative numbers or a sum other than 1, another number of rows, and
vocabularies of different sizes raise a `ModelOutputError`, which names the model. A prompt with a token
outside the vocabulary raises a ValueError. The caller gets an error of the verifier. The caller also gets an
error of the draft, unless ``draft_may_fail=True``: then the round continues without the draft, and
``draft_failures`` counts the error.

Run it with: python speculative_decoding.py --tokens 60 --lookahead 4
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel.patterns import ContinuousBatcher, Generate, Score, SpeculativeStep, Submit, open_parts

TEXT = (
    "an actor has a mailbox and takes one message at a time. a device is an actor too, and a message is "
    "an operation. when the device is lost, the actor starts again, and the arrays are still there. "
)
LETTERS = sorted(set(TEXT))
NUMBERS = {letter: number for number, letter in enumerate(LETTERS)}
V = len(LETTERS)
Array = npt.NDArray[Any]


def tables() -> tuple[Array, Array]:
    """Return the probabilities of the next letter after one letter, and after two letters."""
    pairs, triples = np.full((V, V), 0.01), np.full((V * V, V), 0.01)
    numbers = [NUMBERS[letter] for letter in TEXT + TEXT[:2]]
    for one, two, three in zip(numbers, numbers[1:], numbers[2:], strict=False):
        pairs[one, two] += 1
        triples[one * V + two, three] += 1
    return pairs / pairs.sum(axis=1, keepdims=True), triples / triples.sum(axis=1, keepdims=True)


class Verifier:
    """The large model."""

    def __init__(self, table: ta.AccelRef) -> None:
        self.table = table
        self.calls = 0

    async def __call__(self, scores: list[Score]) -> list[ta.AccelRef]:
        """Return a distribution for each of a text's last positions."""
        self.calls += 1
        return [await (np.eye(V * V)[self.rows(score)] @ self.table) for score in scores]

    def rows(self, score: Score) -> list[int]:
        """Return the numbers of the letter pairs before these positions."""
        ends = range(len(score.tokens) - score.count + 1, len(score.tokens) + 1)
        return [score.tokens[end - 2] * V + score.tokens[end - 1] for end in ends]


async def run(tokens: int, lookahead: int, backend: str | None) -> None:
    """Generate a text, and then stream another text up to a full stop."""
    pairs, triples = tables()

    async def draft(scores: list[Score]) -> list[Array]:
        await trio.lowlevel.checkpoint()
        return [pairs[[score.tokens[-1]]] for score in scores]

    async with ta.open_system("demo") as system, system.open_device(backend) as device:
        verifier = Verifier(await device.put(triples))
        step = SpeculativeStep(verifier, draft, lookahead=lookahead)
        batcher = await system.spawn(ContinuousBatcher[Generate, int], step, name="texts")
        prompt = [NUMBERS[letter] for letter in "an"]
        request = Generate(prompt, max_tokens=tokens, seed=3, temperature=0.7)
        print("".join(LETTERS[token] for token in await batcher.ask(Submit(request))))
        print(step.statistics.tokens, "tokens,", verifier.calls, "calls of the verifier")
        print(f"{step.statistics.acceptance_rate:.0%} of the proposals were accepted")

        until = Generate(prompt, seed=3, temperature=0.7, stop={NUMBERS["."]})
        async with open_parts(batcher, until) as stream:
            async for token in stream:
                print(LETTERS[token], end="", flush=True)
        print(" (stop)" if stream.parts[-1] in until.stop else " (length)")


def main() -> None:
    """Read the command line, and generate texts."""
    parser = argparse.ArgumentParser(description="Speculative decoding.")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--lookahead", type=int, default=4, help="proposals in a round")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    trio.run(partial(run, **vars(parser.parse_args())))


if __name__ == "__main__":
    main()

"""Streams under faults: the context is lost again and again, and no token may be wrong.

An exact model generates the same tokens as in the undisturbed run. Another model may round a row of a product
differently next to other rows, so two tokens may swap if their likelihoods are equal up to rounding. The
clients' requests determine the other rows. So a stream that differs from the undisturbed run is compared with
a reference on the host, which decides whether rounding explains each token, given the tokens before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt
import trio
from generation import Generation, Prompt
from llama import Config, Llama
from model import Batch, Run, Sampling

import trio_accel as ta

__all__ = ["Faults", "Reference", "is_possible"]

STREAMS, MOST = 30, 12
# How far rounding may move a logit. The implementations differ by 1e-4 in float32. The bounds of half
# precision are estimates, not measured on a device yet.
ROUNDING = {"float32": 5e-4, "float16": 0.1, "bfloat16": 0.5}


@attrs.define(eq=False)
class Faults:
    """Streams under faults, which run concurrently with the streams of clients.

    Attributes:
        generation: The source of the streams.
        weights: Returns its weights on the host, for the reference. Blocking.
        seconds: The time between two faults, which alternately kill the worker and poison the context.
        dtype: The dtype of weights and cache.
        is_exact: Whether a stream that differs from the undisturbed run is wrong, whatever the reason.
        wrong: The number of streams that broke, or had a token that rounding cannot explain.
        gap: The longest time between two tokens of a stream, in seconds.
    """

    generation: Generation
    weights: Callable[[], Mapping[str, npt.NDArray[np.float32]]]
    seconds: float
    dtype: str = "float32"
    is_exact: bool = False
    wrong: int = 0
    gap: float = 0.0

    async def run(self) -> None:
        """Run rounds until cancelled, and print the results of each round."""
        loaded, device = self.generation.loaded, self.generation.model.caches[0].device
        expected = await self._round()
        weights = await trio.to_thread.run_sync(self.weights)
        reference = await trio.to_thread.run_sync(Reference, loaded.config, weights, self.dtype)
        self.wrong = await self._count_wrong(reference, range(STREAMS), expected)
        self.gap = 0.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._break, device)
            while True:
                generation = device.generation
                found = await self._round()
                unlike = [number for number in range(STREAMS) if found[number] != expected[number]]
                wrong = len(unlike)
                if not self.is_exact:
                    wrong = await self._count_wrong(reference, unlike, found)
                self.wrong += wrong
                print(
                    f"{STREAMS} streams, {sum(map(len, found))} tokens, {wrong} wrong, {len(unlike) - wrong} "
                    f"unlike the undisturbed run by rounding alone, "
                    f"{device.generation - generation} contexts lost, longest gap {self.gap:.2f} s",
                    flush=True,
                )

    async def _round(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(STREAMS)]
        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(self._stream, number, found[number])
        return found

    async def _count_wrong(
        self, reference: Reference, numbers: Sequence[int], found: Sequence[list[int]]
    ) -> int:
        ends, wrong = self.generation.loaded.text.ends, 0
        for number in numbers:
            check = partial(reference.allows, self._prompt(number), found[number], ends)
            wrong += not await trio.to_thread.run_sync(check, abandon_on_cancel=True)
        return wrong

    def _prompt(self, number: int) -> Prompt:
        tokens = self.generation.loaded.text.chat([{"role": "user", "content": f"Tell me about {number}."}])
        sampling = Sampling(temperature=0.5 * (number % 3), top_p=0.9, seed=number)
        return Prompt(tokens=tokens, most=MOST, sampling=sampling)

    async def _stream(self, number: int, found: list[int]) -> None:
        prompt = self._prompt(number)
        last = trio.current_time()
        try:
            async with ta.patterns.open_parts(self.generation.batcher, prompt) as stream:
                async for token in stream:
                    self.gap, last = max(self.gap, trio.current_time() - last), trio.current_time()
                    found.append(token)
        except (ta.AccelError, ta.ActorError) as error:
            print(f"stream {number} broke: {error!r}", flush=True)

    async def _break(self, device: ta.Device) -> None:
        while True:
            await trio.sleep(self.seconds)
            ta.testing.inject_fault(device, self.generation.model.operation, kill=True)
            await trio.sleep(self.seconds)
            ta.testing.inject_fault(device, self.generation.model.operation, poison=True)


class Reference:
    """The model on the host, in float32, with one sequence at a time.

    Args:
        config: The configuration of the model.
        weights: Its weights, by the names of `weights_of`.
        dtype: The dtype of weights and cache in the checked model.
    """

    def __init__(
        self, config: Config, weights: Mapping[str, npt.NDArray[np.float32]], dtype: str = "float32"
    ) -> None:
        rounded = {name: array.astype(dtype).astype(np.float32) for name, array in weights.items()}
        self._model, self._config = Llama(rounded, (), config=attrs.asdict(config)), config
        self._rounding = ROUNDING[dtype]

    def allows(self, prompt: Prompt, made: Sequence[int], ends: frozenset[int]) -> bool:
        """Return whether a stream may be the answer to a prompt: each of its tokens, and its end. Blocking.

        Args:
            prompt: The prompt.
            made: The tokens of the stream, without the token that ended it.
            ends: The tokens that end an answer.
        """
        allowed = [{token} for token in made] + [set(ends)] * (len(made) < prompt.most)
        logits = self._logits([*prompt.tokens, *made])[len(prompt.tokens) - 1 :]
        return len(made) <= prompt.most and all(
            any(is_possible(row, token, prompt.sampling, position, self._rounding) for token in tokens)
            for position, (row, tokens) in enumerate(zip(logits, allowed, strict=False), len(prompt.tokens))
        )

    def _logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        # The cache is a single page, for only this sequence.
        config, size = self._config, len(tokens)
        shape = config.cache_shape(1, size)
        self._model.caches = [np.zeros(shape, np.float32) for _ in range(config.layers)]
        batch = Batch.of([Run(tokens=tokens, start=0, pages=[0])], config, 1, size)
        found: npt.NDArray[np.float32] = self._model.forward(
            batch.rows, batch.tables, np.arange(len(tokens)), batch.counts
        )
        return found


def is_possible(
    logits: npt.NDArray[np.float32], token: int, sampling: Sampling, position: int, rounding: float
) -> bool:
    """Return whether a token may be chosen if each logit may move by at most `rounding`."""
    near, rows = 2 * rounding, logits.astype(np.float64)
    if sampling.temperature == 0:
        return bool(rows[token] >= rows.max() - near)
    shares: npt.NDArray[np.float64] = np.exp((rows - rows.max()) / sampling.temperature)
    # The ratio of two sums changes by at most this factor.
    loose = np.exp(2 * near / sampling.temperature) * (1 + 1e-6)
    first = shares[rows > rows[token] + near].sum()
    last = shares[rows >= rows[token] - near].sum()
    sums: list[float] = np.cumsum(np.sort(shares)[::-1]).tolist()

    def sum_at(factor: float) -> float:
        return sums[min(bisect_left(sums, sampling.top_p * sums[-1] * factor), len(sums) - 1)]

    least, most = sum_at(1 / loose), sum_at(loose)
    draw = sampling.draw(position)
    is_kept = first <= sampling.top_p * sums[-1] * loose
    return bool(is_kept and first <= draw * most * loose and draw * least <= last * loose)

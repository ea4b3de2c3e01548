"""Streams under faults: the context is lost again and again, and no token may change."""

from __future__ import annotations

import attrs
import trio
from generation import Generation, Prompt
from model import Sampling

import trio_accel as ta

__all__ = ["Faults"]

STREAMS, MOST = 30, 12


@attrs.define(eq=False)
class Faults:
    """Runs streams of its own beside those of clients.

    Attributes:
        generation: What makes the streams.
        seconds: Time between two faults: a kill of the worker, and a poisoned context, in turns.
        wrong: Streams that broke, or had another token than the undisturbed run.
        gap: The longest time between two tokens of a stream, in seconds.
    """

    generation: Generation
    seconds: float
    wrong: int = 0
    gap: float = 0.0

    async def run(self) -> None:
        """Run rounds until it is cancelled, and print what came of each."""
        expected, device = await self._round(), self.generation.model.caches[0].device
        self.gap = 0.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._break, device)
            while True:
                generation = device.generation
                found = await self._round()
                wrong = sum(one != other for one, other in zip(found, expected, strict=True))
                self.wrong += wrong
                print(
                    f"{STREAMS} streams, {sum(map(len, found))} tokens, {wrong} unlike the undisturbed run, "
                    f"{device.generation - generation} contexts lost, longest gap {self.gap:.2f} s",
                    flush=True,
                )

    async def _round(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(STREAMS)]
        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(self._stream, number, found[number])
        return found

    async def _stream(self, number: int, found: list[int]) -> None:
        tokens = self.generation.loaded.text.chat([{"role": "user", "content": f"Tell me about {number}."}])
        sampling = Sampling(temperature=0.5 * (number % 3), top_p=0.9, seed=number)
        prompt = Prompt(tokens=tokens, most=MOST, sampling=sampling)
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

"""A plain actor under supervision: it crashes, starts again with fresh state, and keeps its address.

Run it with: python counter.py --count 3
"""

from __future__ import annotations

import argparse
from functools import partial

import attrs
import trio

import trio_accel as ta


@attrs.frozen
class Add(ta.Request["Counter", int]):
    """Add to the counter; the reply is the new value."""

    amount: int


@attrs.frozen
class Crash(ta.Request["Counter", None]):
    """Make the handler raise an error."""


class Counter(ta.Actor):
    """A counter that handles one message at a time."""

    def __init__(self, start: int) -> None:
        self.value = start

    @ta.handles(Add)
    async def add(self, request: Add) -> int:
        """Add an amount. This needs no lock, because an actor handles one message at a time."""
        self.value += request.amount
        return self.value

    @ta.handles(Crash)
    async def crash(self, request: Crash) -> None:
        """Raise an error, so that the supervisor starts a new incarnation."""
        raise RuntimeError(f"lost at {self.value}")


async def run(count: int) -> list[int]:
    """Return the values before and after the crash."""
    async with ta.open_system("counter") as system:
        counter = await system.spawn(Counter, 0, name="counter")
        values = [await counter.ask(Add(1)) for _ in range(count)]
        try:
            await counter.ask(Crash())
        except ta.ActorFailedError as error:
            print(f"crashed: {error.__cause__}")
        values.append(await counter.ask(Add(1)))
        print(system.tree())
    return values


def main() -> int:
    """Return the exit code: 0 if the counter restarted from its first value after the crash."""
    parser = argparse.ArgumentParser(description="A supervised actor that counts, crashes and restarts.")
    parser.add_argument("--count", type=int, default=3, help="how many times to count before the crash")
    arguments = parser.parse_args()
    values = trio.run(partial(run, arguments.count))
    print(" ".join(str(value) for value in values))
    is_right = values == [*range(1, arguments.count + 1), 1]
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())

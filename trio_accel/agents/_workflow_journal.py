"""The journal of a run: finished steps in a `cluster.Store`, found by name.

A run is one entity of the store. Its first entry has the inputs. Each finished step, each item of a fan-out,
each call by `RunningStep.once` and each later input adds an entry, with its name as the id. The order of
entries has no meaning (D225), so steps may finish in another order after a restart, and steps may be added or
removed.

The last entry has a number so high that the store drops all entries before it, because `Store` keeps
replies of its last `ids` numbers only. The results are in the save of this entry. So a finished run is
three rows: the owner, the save and the last entry.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs
import trio

from ..cluster import Entry, Store

__all__ = ["StepState"]

StepState: TypeAlias = Literal["waiting", "running", "finished", "failed", "skipped"]
"""The state of a step or an input."""

# No step has such a name, because names of steps are identifiers.
_INPUTS = "(inputs)"


@attrs.frozen
class Kept:
    """The outcome of a step, an item, a call or an input, as stored in the journal.

    Attributes:
        state: ``"finished"``, ``"failed"`` or ``"skipped"``.
        value: The result, or the reason.
        seconds: The duration in seconds.
        attempts: The number of attempts.
        is_list: Whether the result is a list of items that are already stored, so only their number is
            stored.
    """

    state: StepState
    value: Any
    seconds: float = 0.0
    attempts: int = 1
    is_list: bool = False


@attrs.define(eq=False)
class RunJournal:
    """The entries of one run. Without a store they stay in memory.

    Attributes:
        label: The workflow and the run, for errors.
        entity: The name of the run in the store.
        store: The store, which is open; None for none.
        is_finished: Whether the run has ended.
    """

    label: str
    entity: str
    store: Store | None
    is_finished: bool = attrs.field(default=False, init=False)
    _epoch: int = attrs.field(default=0, init=False)
    _number: int = attrs.field(default=0, init=False)
    _replies: dict[str, bytes] = attrs.field(factory=dict[str, bytes], init=False)
    _outcomes: dict[str, Kept] = attrs.field(factory=dict[str, Kept], init=False)
    # Numbers of entries have an order, and no gaps.
    _lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def begin(self, inputs: Mapping[str, object]) -> None:
        """Take the run over from its last owner, and read what is kept.

        Raises:
            ValueError: The run was begun with other inputs.
            TypeError: An input cannot be kept.
            FencedError, StoreError: See `Store.take`.
        """
        if self.store is None:
            return
        self._epoch = await self.store.next_epoch()
        journal = await self.store.take(self.entity, self._epoch)
        self._number, self._replies = journal.number, dict(journal.replies)
        if journal.saved is not None:
            self.is_finished, self._replies = True, pickle.loads(journal.saved[1])  # noqa: S301  # our own bytes
        if (outcome := self.find(_INPUTS)) is None:
            await self.keep(_INPUTS, outcome := Kept("finished", dict(inputs)))
        for name in sorted(outcome.value.keys() | inputs.keys()):
            previous, current = outcome.value.get(name, "nothing"), inputs.get(name, "nothing")
            # Arrays do not have a single truth value. Bytes of equal values differ until they have been read
            # once.
            if (previous == current) is not True and pickle.dumps(previous) != pickle.dumps(
                pickle.loads(pickle.dumps(current))  # noqa: S301  # our own bytes
            ):
                difference = f"{name} was {previous!r:.100}, and is {current!r:.100}"
                raise ValueError(f"{self.label}: the run was begun with other inputs: {difference}")

    def find(self, name: str) -> Kept | None:
        """Return what is kept under a name. Names of removed steps are never read."""
        if name not in self._outcomes and name in self._replies:
            try:
                outcome = Kept(*pickle.loads(self._replies[name]))  # noqa: S301  # our own bytes
                if outcome.is_list:
                    items = [self.find(f"{name}[{number}]") for number in range(outcome.value)]
                    outcome = attrs.evolve(outcome, value=[item.value for item in items if item])
                self._outcomes[name] = outcome
            except Exception as error:
                error.add_note(f"{self.label}: the result of {name} in the store cannot be read")
                raise
        return self._outcomes.get(name)

    async def keep(self, name: str, outcome: Kept) -> None:
        """Keep an outcome.

        Raises:
            TypeError: It cannot be kept, such as an array of a device.
            FencedError, StoreError: See `Store.write`.
        """
        if self.store is not None:
            try:
                value = len(outcome.value) if outcome.is_list else outcome.value
                data = pickle.dumps(
                    (outcome.state, value, outcome.seconds, outcome.attempts, outcome.is_list)
                )
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise TypeError(f"{self.label}: {name} cannot be kept in the store: {error}") from error
            await self._write(name, data)
        self._outcomes[name] = outcome

    async def finish(self) -> None:
        """Put all results into one save, and have the store drop the entries."""
        if self.store is not None:
            await self._write("(finished)", b"", self.store.ids, pickle.dumps(self._replies))

    async def _write(self, name: str, reply: bytes, step: int = 1, saved: bytes | None = None) -> None:
        assert self.store is not None  # its callers have looked
        async with self._lock:
            entry = Entry(self._number + step, name, b"", reply)
            await self.store.write(self.entity, self._epoch, entry, saved)
            self._number, self._replies[name] = entry.number, reply

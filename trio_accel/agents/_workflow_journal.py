"""The journal of a run: finished steps in a `cluster.Store`, found by name.

A run is one entity of the store. Its first entry has the inputs. Each finished step, each item of a fan-out,
each call by `RunningStep.once` and each later input adds an entry, with its name as the id. The order of
entries has no meaning (D225), so steps may finish in another order after a restart, and steps may be added or
removed.

The last entry has a number so high that the store drops all entries before it, because `Store` keeps
replies of its last `ids` numbers only. The results are in the save of this entry. So a finished run is
three rows, the owner, the save and the last entry, and in SQLite also a record of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs

from ..actors import TaskLock, describe
from ..cluster import Entry, Store, StoreError

__all__ = ["StepState"]

T = TypeVar("T")

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
    # Without a store: the outcomes, which all steps share.
    _outcomes: dict[str, Kept] = attrs.field(factory=dict[str, Kept], init=False)
    # Numbers of entries have an order, and no gaps.
    _lock: TaskLock = attrs.field(factory=TaskLock, init=False)

    async def begin(self, inputs: Mapping[str, object]) -> Mapping[str, Callable[[], Any]]:
        """Take the run over from its last owner, and read what is kept.

        Returns:
            Functions that return the inputs; with a store, each time a new copy of what it has.

        Raises:
            ValueError: The run was begun with other inputs.
            TypeError: An input cannot be kept.
            FencedError, StoreError: See `Store.take`.
        """
        if self.store is None:
            return {name: self.copies(name, value) for name, value in inputs.items()}
        self._epoch = await self.store.next_epoch()
        journal = await self.store.take(self.entity, self._epoch)
        self._number, self._replies = journal.number, dict(journal.replies)
        if journal.saved is not None:
            self.is_finished, self._replies = True, self._read(journal.saved[1], "its end", _as_replies)
        if (outcome := self.find(_INPUTS)) is None:
            outcome = await self.keep(_INPUTS, Kept("finished", dict(inputs)))
        for name in sorted(outcome.value.keys() | inputs.keys()):
            previous, current = outcome.value.get(name, "nothing"), inputs.get(name, "nothing")
            if not self._is_same(name, previous, current):
                difference = f"{name} was {previous!r:.100}, and is {current!r:.100}"
                raise ValueError(f"{self.label}: the run was begun with other inputs: {difference}")
        return {name: self.copies(name, value) for name, value in outcome.value.items()}

    def _is_same(self, name: str, previous: object, current: object) -> bool:
        # Arrays, also in a list, do not have a single truth value.
        with suppress(Exception):
            if (previous == current) is True:
                return True
        # Bytes of equal values differ until they have been read once.
        _, copy = self._pickled(name, current)
        return self._pickled(name, previous)[0] == self._pickled(name, copy)[0]

    def copies(self, name: str, value: Any) -> Callable[[], Any]:
        """Return a function that returns a value; with a store, each time a new copy.

        A step may change its arguments. After a restart, a later step gets what the store has, so it gets the
        same without a restart.

        Raises:
            TypeError: The value cannot be kept.
        """
        if self.store is None:
            return lambda: value
        data, _ = self._pickled(name, value)
        return lambda: pickle.loads(data)  # noqa: S301  # our own bytes

    def find(self, name: str) -> Kept | None:
        """Return what is kept under a name; with a store, each time a new copy.

        Names of removed steps are never read.

        Raises:
            StoreError: It cannot be read.
        """
        if self.store is None or name not in self._replies:
            return self._outcomes.get(name)
        outcome = self._read(self._replies[name], f"the result of {name}", _as_kept)
        if outcome.is_list:
            items = [self.find(f"{name}[{number}]") for number in range(outcome.value)]
            if None in items:
                text = f"{self.label}: item {items.index(None)} of {name} is missing in the store"
                raise StoreError(text, is_damaged=True)
            outcome = attrs.evolve(outcome, value=[item.value for item in items if item])
        return outcome

    def _read(self, data: bytes, label: str, convert: Callable[[Any], T]) -> T:
        try:
            return convert(pickle.loads(data))  # noqa: S301  # our own bytes
        except Exception as error:
            text = f"{self.label}: {label} in the store cannot be read: {describe(error)}"
            raise StoreError(text, is_damaged=True) from error

    def _pickled(self, name: str, value: object) -> tuple[bytes, Any]:
        """Return the pickle of a value, and the value as the pickle has it.

        Raises:
            TypeError: There is none, or nobody can read it.
        """
        try:
            data = pickle.dumps(value)
            return data, pickle.loads(data)  # noqa: S301  # our own bytes
        except Exception as error:
            raise TypeError(f"{self.label}: {name} cannot be kept in the store: {error}") from error

    async def keep(self, name: str, outcome: Kept) -> Kept:
        """Keep an outcome, and return what is kept.

        Raises:
            TypeError: It cannot be kept, such as an array of a device.
            FencedError, StoreError: See `Store.write`.
        """
        if self.store is None:
            self._outcomes[name] = outcome
            return outcome
        value = len(outcome.value) if outcome.is_list else outcome.value
        fields = (outcome.state, value, outcome.seconds, outcome.attempts, outcome.is_list)
        data, copy = self._pickled(name, fields)
        await self._write(name, data)
        # Items are read on their own.
        return (outcome.is_list and self.find(name)) or Kept(*copy)

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


def _as_kept(fields: Any) -> Kept:
    outcome = Kept(*fields)
    if not isinstance(outcome.state, str) or (outcome.is_list and type(outcome.value) is not int):
        raise ValueError(f"it is {fields!r:.100}")
    return outcome


def _as_replies(replies: Any) -> dict[str, bytes]:
    if not isinstance(replies, dict) or not all(
        isinstance(name, str) and isinstance(data, bytes)
        for name, data in cast("dict[object, object]", replies).items()
    ):
        raise ValueError(f"it is {replies!r:.100}")
    return cast("dict[str, bytes]", replies)

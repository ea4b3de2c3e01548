"""Records of a store in SQLite: what its other tables must have of an entity.

Damage of a B-tree can hide rows from SQLite without an error, or show older ones. So each entity has a record
of its rows in another table, which is written in the same transaction and compared at each reading. A single
damage changes either the record or the rows, so it is found without reading the rest of the file.

Older versions write no records. They get larger epochs than the record's, so that their entities are not
mistaken for damaged ones.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs

from ._errors import StoreError
from ._seals import NO_SEAL, SEAL_BYTES

__all__ = ["Record"]

_MODULUS = 2**63
_FORMAT = struct.Struct(f"<qqq{SEAL_BYTES}sqq")


@attrs.frozen
class Record:
    """The rows of an entity.

    Attributes:
        epoch: The epoch of its owner.
        number: The number of its last message.
        saved_number: The number of the last message in its save.
        seal: The seal of its save; zeros without any.
        message_count: The number of its messages in the store.
        total: The sum of their numbers, modulo 2**63.
    """

    epoch: int
    number: int = 0
    saved_number: int = 0
    seal: bytes = NO_SEAL
    message_count: int = 0
    total: int = 0

    def with_message(self, number: int) -> Record:
        """Return the record after a message was added."""
        return attrs.evolve(
            self, number=number, message_count=self.message_count + 1, total=(self.total + number) % _MODULUS
        )

    def with_save(self, number: int, seal: bytes, forgotten: Sequence[int]) -> Record:
        """Return the record after a save, which has forgotten messages with these numbers."""
        message_count, total = self.message_count - len(forgotten), (self.total - sum(forgotten)) % _MODULUS
        return attrs.evolve(
            self,
            number=max(number, self.number),
            saved_number=number,
            seal=seal,
            message_count=message_count,
            total=total,
        )

    def described(self) -> str:
        """Return it for an error."""
        return f"{self.message_count} messages up to {self.number}, and a save of {self.saved_number}"

    def encoded(self) -> bytes:
        """Return it as bytes."""
        return _FORMAT.pack(*attrs.astuple(self))

    @classmethod
    def of_rows(cls, epoch: int, numbers: Sequence[int], saved_number: int, seal: bytes) -> Record:
        """Return the record of the rows that an entity has; without a save, 0 and `NO_SEAL`."""
        number = max(numbers, default=saved_number)
        total = sum(numbers) % _MODULUS
        return cls(epoch, max(number, saved_number), saved_number, seal, len(numbers), total)

    @classmethod
    def decoded(cls, entity: str, data: object) -> Record:
        """Return the record in bytes.

        Raises:
            StoreError: It is damaged.
        """
        if not isinstance(data, bytes) or len(data) != _FORMAT.size:
            text = f"the store is damaged at {entity}: its record cannot be read; restore a backup"
            raise StoreError(text, is_damaged=True)
        return cls(*_FORMAT.unpack(data))

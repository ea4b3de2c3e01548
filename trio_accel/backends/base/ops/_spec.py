"""What an operation specification is made of."""

from __future__ import annotations

from typing import TypeVar, dataclass_transform

import attrs

from ._array import ArraySpec
from ._descriptor import Descriptor, descriptor_of
from ._roles import exact, number, reads, scalar, status, updates, writes

__all__ = ["OperationSpec", "specification"]

SpecT = TypeVar("SpecT")


@dataclass_transform(field_specifiers=(attrs.field, exact, number, reads, scalar, status, updates, writes))
def specification(cls: type[SpecT]) -> type[SpecT]:
    """Make a specification of a class whose fields have roles; it is a subclass of `OperationSpec`.

    An attrs class with slots. It is not frozen: one is made for each operation, and to have that enforced
    would take twice as long as to make it.
    """
    return attrs.define(on_setattr=None, unsafe_hash=True)(cls)


class OperationSpec:
    """Base of operation specifications, made by `specification`: codes, sizes and `ArraySpec` fields.

    Nothing of one is changed once it is made.

    A specification holds no actor and no reference, so it means the same in another process.
    The role of each field is declared: arrays by `reads`, `writes` and `updates`, values by `exact`, `scalar`
    and `number`, status words by `status`. The `Descriptor` of the class is made from the roles.
    """

    __slots__ = ()

    @classmethod
    def descriptor(cls) -> Descriptor:
        """What follows from the roles of the fields; the same object at each call."""
        return descriptor_of(cls)

    def inputs(self) -> tuple[ArraySpec, ...]:
        """Arrays that the operation reads (updated ones too)."""
        return descriptor_of(type(self)).arrays(self, "read")

    def outputs(self) -> tuple[ArraySpec, ...]:
        """Arrays that the operation changes (updated ones too)."""
        return descriptor_of(type(self)).arrays(self, "write")

    def blocks(self) -> tuple[frozenset[int], frozenset[int]]:
        """Blocks that the operation reads, and blocks that it changes (updated ones are both)."""
        return descriptor_of(type(self)).blocks(self)

    def check_shapes(self, name: str) -> None:
        """Refuse arrays whose shapes or dtypes do not fit each other, before anything is launched.

        Here nothing is refused. A class whose arrays can disagree overrides it.

        Args:
            name: Name of the operation, for the message.

        Raises:
            ValueError: Shapes that do not fit.
            TypeError: Dtypes that do not fit.
        """

    def check_status(self) -> None:
        """Look at the status words of a complete operation, and refuse its outcome if they say so.

        Here nothing is refused. Called where the operation ran, once its `status` fields are filled. What it
        raises is the outcome of the operation: its outputs count as never made.

        Raises:
            AccelError: The library could not finish the operation, with the reason.
        """

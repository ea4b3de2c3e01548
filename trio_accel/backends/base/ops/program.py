"""Specifications of the calls of programs: classes and functions of the user's."""

from __future__ import annotations

from ._array import ArraySpec
from ._roles import StatusArray, exact, reads, scalar, status, updates, writes
from ._spec import OperationSpec, specification

__all__ = ["RESULT_WORDS", "ProgramCall", "ProgramFetch", "ProgramResult", "ProgramReturn"]

RESULT_WORDS = 128
"""Words in which a call describes its results: its length in bytes, then the text where it fits."""


@specification
class ProgramCall(OperationSpec):
    """A call of a method that returns nothing, or what was declared.

    Attributes:
        method: Name of the method; empty for a function, and with `arguments` empty for no call at all.
        arguments: Text of the tree of its arguments, a tuple and a dict. Its arrays are numbered through
            `read`, then `updated`. Empty for no call: the program is there, and its arrays are complete.
        results: Text of the tree of `written`; empty where nothing was declared.
        state: Arrays that the program was opened with, and the call does not change: one of each block.
        read: Arrays that the method reads.
        updated: Arrays that it changes in place: arguments first, then those of `state` that it declares.
        written: Arrays that are declared as its result.
    """

    method: str = exact()
    arguments: str = exact()
    results: str = exact()
    state: tuple[ArraySpec, ...] = reads(many=True)
    read: tuple[ArraySpec, ...] = reads(many=True)
    updated: tuple[ArraySpec, ...] = updates(many=True)
    written: tuple[ArraySpec, ...] = writes(many=True)


@specification
class ProgramReturn(ProgramCall):
    """A call of a method whose results are known when it has returned: they are kept until they are fetched.

    If their arrays have the dtypes and shapes of `written`, they are copied there, and are not kept.

    Attributes:
        slot: Number under which they are kept, if there are any arrays, or `words` do not hold the text.
        forget: Slots whose results are not wanted any more.
        words: Description of the results; see `RESULT_WORDS`.
    """

    slot: int = scalar()
    forget: tuple[int, ...] = scalar()
    words: StatusArray = status()


@specification
class ProgramResult(OperationSpec):
    """The text of a kept result, which did not fit into the words of the call.

    Attributes:
        slot: Its number.
        words: Filled with the text.
    """

    slot: int = scalar()
    words: StatusArray = status()


@specification
class ProgramFetch(OperationSpec):
    """Copies of the arrays of a kept result, which is forgotten then.

    Attributes:
        slot: Its number.
        written: Where they are copied to.
    """

    slot: int = scalar()
    written: tuple[ArraySpec, ...] = writes(many=True)

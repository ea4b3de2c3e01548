"""Calls of the user's own code: kernels, with their definitions, and classes and functions of programs."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias, cast

import attrs

from ..dtypes import DType, Ints
from ._array import ArraySpec, StatusArray, exact, packed, reads, scalar, status, updates, writes
from ._asker import Asker
from ._spec import OperationSpec, specification
from .tensor_maps import TensorMap

__all__ = [
    "RESULT_WORDS",
    "CodeFormat",
    "Dim3",
    "KernelCode",
    "KernelDefinition",
    "KernelInfoSpec",
    "KernelLayout",
    "KernelParameter",
    "KernelRole",
    "KernelSpec",
    "ProgramCall",
    "ProgramFetch",
    "ProgramNext",
    "ProgramResult",
    "ProgramReturn",
    "scalar_offsets",
]

CodeFormat: TypeAlias = Literal["c++", "ptx", "cubin", "fatbin", "ltoir"]
"""Format of code, by the names of `cuda.core`."""

_TEXTS = ("c++", "ptx")

KernelRole: TypeAlias = Literal["read", "update", "write", "scalar"]
"""Use of a parameter by a kernel; a scalar is passed by value."""

KernelLayout: TypeAlias = Literal["contiguous", "packed", "any"] | TensorMap
"""Arrays that a kernel takes: only those in C order without gaps; others as packed copies; with any
strides; by a tensor map."""

Dim3: TypeAlias = tuple[int, int, int]
"""Extents along x, y and z."""


@attrs.frozen(kw_only=True)
class KernelParameter:
    """One parameter of a kernel.

    Attributes:
        name: Its name.
        role: Use by the kernel.
        dtype: Element type; of a scalar, its type.
        ndim: How many axes the array has; None for any number.
        layout: Arrays that it takes.
    """

    name: str
    role: KernelRole
    dtype: DType
    ndim: int | None = None
    layout: KernelLayout = "contiguous"


@attrs.frozen
class KernelCode:
    """One piece of code.

    Attributes:
        format: Its format.
        data: The text of C++ and PTX, the bytes of everything else.
        name: Its name in the compiler's log.
    """

    format: CodeFormat
    data: str | bytes
    name: str


@attrs.frozen(kw_only=True)
class KernelDefinition:
    """Everything that a kernel is made of, in any process: a specification holds it as one text.

    Attributes:
        name: Its name, or the name expression of a template's instance.
        parameters: Its parameters, in order.
        code: Its source or compiled code; several pieces are linked.
        options: Options of the compiler, by the names of `cuda.core.ProgramOptions`.
        cluster: Blocks of a cluster; None for none.
        is_cooperative: Whether its blocks wait for one another.
        shared: Whether it may use dynamic shared memory.
        cpu: Import path of the function that computes it on the CPU, ``"module:function"``; None for none.
    """

    name: str
    parameters: tuple[KernelParameter, ...]
    code: tuple[KernelCode, ...]
    options: Mapping[str, object] = attrs.field(factory=dict[str, object], eq=False)
    cluster: Dim3 | None = None
    is_cooperative: bool = False
    shared: bool = False
    cpu: str | None = None

    def encode(self) -> str:
        """Write it as a text; equal definitions have equal texts."""
        return json.dumps(attrs.asdict(self), default=_plain, separators=(",", ":"), sort_keys=True)

    @property
    def scalars(self) -> tuple[DType, ...]:
        """Types of the scalars, in order."""
        return tuple(parameter.dtype for parameter in self.parameters if parameter.role == "scalar")

    def arrays(self, role: KernelRole) -> tuple[KernelParameter, ...]:
        """Return the arrays of one role, in order."""
        return tuple(parameter for parameter in self.parameters if parameter.role == role)

    @staticmethod
    @functools.lru_cache(256)
    def decode(text: str) -> KernelDefinition:
        """Decode a text of `encode`; return the same object for a recently decoded text."""
        plain = cast("dict[str, Any]", json.loads(text))
        for item in plain["parameters"]:
            item["dtype"] = DType(item["dtype"])
            item["layout"] = (
                TensorMap(**item["layout"]) if isinstance(item["layout"], dict) else item["layout"]
            )
        for item in plain["code"]:
            if item["format"] not in _TEXTS:
                item["data"] = base64.b85decode(item["data"])
        plain["parameters"] = tuple(KernelParameter(**parameter) for parameter in plain["parameters"])
        plain["code"] = tuple(KernelCode(**code) for code in plain["code"])
        plain["cluster"] = plain["cluster"] and tuple(plain["cluster"])
        return KernelDefinition(**plain)


def _plain(value: DType | bytes) -> str:
    return value.value if isinstance(value, DType) else base64.b85encode(value).decode("ascii")


@specification
class KernelSpec(OperationSpec):
    """A launch of the user's own kernel. A grid with an extent of 0 runs nothing.

    Attributes:
        definition: The kernel, encoded by `KernelDefinition.encode`.
        grid: Blocks along x, y and z.
        block: Threads of a block along x, y and z.
        shared: Bytes of dynamic shared memory for each block.
        read: Arrays that are read, in the order of the parameters.
        updated: Arrays that are changed in place, likewise.
        written: Arrays that are written, likewise.
        scalars: Scalars, likewise: each aligned to its size, as in a C structure.
    """

    runs_code: ClassVar[bool] = True

    definition: str = exact()
    grid: Dim3 = exact()
    block: Dim3 = exact()
    shared: int = exact()
    read: tuple[ArraySpec, ...] = reads(variadic=True)
    updated: tuple[ArraySpec, ...] = updates(variadic=True)
    written: tuple[ArraySpec, ...] = writes(variadic=True)
    scalars: bytes = packed()


@specification
class KernelInfoSpec(OperationSpec):
    """A question for the needs of a compiled kernel, and how many of its blocks run at once.

    Attributes:
        definition: The kernel.
        block: Threads of a block along x, y and z.
        shared: Bytes of dynamic shared memory for each block.
        words: Filled in the order of `WORDS`.
    """

    runs_code: ClassVar[bool] = True

    WORDS = (
        "max_active_blocks",
        "suggested_block",
        "suggested_grid",
        "max_active_clusters",
        "max_threads",
        "registers",
        "static_shared",
        "max_dynamic_shared",
        "local_bytes",
        "multiprocessors",
    )

    definition: str = exact()
    block: Dim3 = exact()
    shared: int = exact()
    words: StatusArray = status()


@functools.lru_cache(256)
def scalar_offsets(dtypes: tuple[DType, ...]) -> tuple[Ints, int]:
    """Return offsets of scalars, aligned to their sizes as in a C structure, and the bytes of all."""
    offsets: list[int] = []
    end = 0
    for dtype in dtypes:
        start = -(-end // dtype.itemsize) * dtype.itemsize
        offsets.append(start)
        end = start + dtype.itemsize
    return tuple(offsets), end


RESULT_WORDS = 128
"""Words in which a call describes its results: its length in bytes, then the text where it fits."""


@specification
class ProgramCall(OperationSpec):
    """A call of a method that returns nothing, or a declared result.

    Attributes:
        method: Name of the method; empty for a function, and, if `arguments` is empty, for no call at all.
        arguments: Text for the tree of its arguments, a tuple and a dict. Its arrays are numbered through
            `read`, then `updated`. Empty for no call, which only shows that the program exists, and that its
            arrays are complete.
        packed: Arguments that are long lists and the like, written by `packed_of`.
        results: Text for the tree of `written`; empty without a declared result.
        is_idempotent: Whether its method declares that it may run again.
        state: Arrays that the program was opened with, and the call does not change: one of each block.
        read: Arrays that the method reads.
        updated: Arrays that it changes in place: arguments first, then the declared arrays of `state`.
        written: Arrays for its declared result.
        asker: Its caller. It is never sent, because each process has one of its own.
    """

    runs_code: ClassVar[bool] = True

    method: str = exact()
    arguments: str = exact()
    packed: bytes = exact()
    results: str = exact()
    is_idempotent: bool = exact()
    state: tuple[ArraySpec, ...] = reads(variadic=True)
    read: tuple[ArraySpec, ...] = reads(variadic=True)
    updated: tuple[ArraySpec, ...] = updates(variadic=True)
    written: tuple[ArraySpec, ...] = writes(variadic=True)
    asker: Asker | None = attrs.field(factory=Asker, init=False, eq=False, repr=False)

    @property
    def waits_for_others(self) -> bool:
        """See `OperationSpec.waits_for_others`."""
        asker = self.asker
        if asker is None:
            return False
        # After its caller has left, the ranks no longer wait for each other, so an endless call is stuck.
        return asker.waits_for_others or (asker.waits_on_stream() and not asker.has_left)


@specification
class ProgramReturn(ProgramCall):
    """A call of a method with undeclared results, which are kept until they are fetched.

    If their arrays have the dtypes and shapes of `written`, they are copied there, and are not kept.

    Attributes:
        slot: Number under which they are kept, if there are any arrays, or `words` do not hold the text.
        forget: Slots with results that are no longer needed.
        words: Description of the results; see `RESULT_WORDS`.
    """

    runs_code: ClassVar[bool] = True

    slot: int = scalar()
    forget: Ints = scalar()
    words: StatusArray = status()


@specification
class ProgramNext(ProgramReturn):
    """The next item of a method that yields. It is returned as a result is; `words` begin with 0 at the end.

    Attributes:
        stream: Number of the stream; its generator is kept under it.
        item: Number of the item; 0 begins, and only this one has the arguments. -1 closes the generator.
    """

    runs_code: ClassVar[bool] = True

    stream: int = scalar()
    item: int = scalar()


@specification
class ProgramResult(OperationSpec):
    """The text of a kept result, which did not fit into the words of the call.

    Attributes:
        slot: Its number.
        words: Filled with the text.
    """

    runs_code: ClassVar[bool] = True

    slot: int = scalar()
    words: StatusArray = status()


@specification
class ProgramFetch(OperationSpec):
    """Copies of a kept result's arrays. The result is then dropped.

    Attributes:
        slot: Its number.
        written: The arrays to copy to.
    """

    runs_code: ClassVar[bool] = True

    slot: int = scalar()
    written: tuple[ArraySpec, ...] = writes(variadic=True)

"""Operations of a replay that journals lack: blocks, their contents, and single steps of chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..backends.base import DType, HostArray
from ..backends.base.contract.ops import ArraySpec, CopyFromHostSpec, CopyToHostSpec, OperationSpec
from ..devices import Operation, Planned, Planner
from ..devices.operations._blocks import Block

MEMORY = "trio_accel.devices:MemoryActor"
T = TypeVar("T")


class Bare(Operation[Any, T]):
    """A specification that is launched unchanged.

    Args:
        library: The import path of its library actor.
        spec: The specification.
        blocks: The blocks of its arrays, by their ids.
        reply: The reply to the caller.
        keep: Host arrays that it uses.
        name: The name of the operation.
    """

    library = ""

    def __init__(
        self,
        library: str,
        spec: OperationSpec,
        blocks: Mapping[int, Block],
        reply: T,
        *,
        keep: Sequence[HostArray] = (),
        name: str = "replay",
    ) -> None:
        vars(self)["library"] = library
        self._spec, self._blocks, self._reply, self._keep, self._name = spec, blocks, reply, keep, name

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._name

    def plan(self, planner: Planner) -> Planned[T]:
        """See `Operation.plan`."""
        read, written = self._spec.blocks()
        uses = [("array", self._blocks[number]) for number in read | written]
        planner.take([self._blocks[number] for number in written], uses, keep=self._keep)
        return Planned(self._spec, self._reply)


class NewBlock(Operation[Any, Block]):
    """Make a block without writing to it."""

    library = MEMORY

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def plan(self, planner: Planner) -> Planned[Block]:
        """See `Operation.plan`."""
        block, nothing = planner.memory(self._nbytes), np.empty(0, np.uint8)
        planner.take((block,), (), keep=(nothing,))
        return Planned(CopyFromHostSpec(nothing, ArraySpec(block.id, 0, DType.uint8, (0,), (1,))), block)


def read_block(block: Block) -> Bare[HostArray]:
    """Return an operation that reads a whole block."""
    host = np.empty(block.nbytes, np.uint8)
    spec = CopyToHostSpec(host, ArraySpec(block.id, 0, DType.uint8, host.shape, (1,)))
    return Bare(MEMORY, spec, {block.id: block}, host, keep=(host,))


def write_block(block: Block, content: HostArray, offset: int = 0) -> Bare[None]:
    """Return an operation that writes bytes to a block."""
    spec = CopyFromHostSpec(content, ArraySpec(block.id, offset, DType.uint8, content.shape, (1,)))
    return Bare(MEMORY, spec, {block.id: block}, None, keep=(content,))

"""Specifications of graphs: chains of operations that are launched as one, optionally on a condition."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence

import attrs

from ..dtypes import DType, Ints
from ._array import ArraySpec, StatusArray, exact, packed, reads, status, updates, writes
from ._spec import OperationSpec, map_arrays, specification

__all__ = ["BranchSpec", "ChainSpec", "GraphNode", "GraphRecipe", "GraphSpec", "LoopSpec", "graph_recipe"]


@specification
class GraphSpec(OperationSpec):
    """Run the operations of a recipe in order.

    Attributes:
        recipe: The chain, by `GraphRecipe.encode`.
        is_idempotent: Whether its capture declares that it may run again.
        read: Arrays that it only reads.
        updated: Arrays that it reads and changes.
        written: Arrays that it overwrites, or that hold intermediate results.
    """

    recipe: bytes = exact()
    is_idempotent: bool = exact()
    read: tuple[ArraySpec, ...] = reads(variadic=True)
    updated: tuple[ArraySpec, ...] = updates(variadic=True)
    written: tuple[ArraySpec, ...] = writes(variadic=True)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays, in the order in which a recipe numbers them."""
        return self.read + self.updated + self.written


@specification
class ChainSpec(OperationSpec):
    """Run a chain of operations as `GraphSpec` does, with small host arrays in and a small one out.

    Attributes:
        recipe: The chain, by `GraphRecipe.encode`.
        result: Position, offset and bytes of the array that is copied to the host, without gaps; empty for
            none.
        host_data: Contents of host arrays: the first bytes of the last written array, before anything runs.
        read: Arrays that it only reads.
        updated: Arrays that it reads and changes.
        written: Arrays that it makes; the last one holds intermediate results.
        words: Status words for the result, as many as it fills; None for none.
    """

    recipe: bytes = exact()
    result: Ints = exact()
    host_data: bytes = packed()
    read: tuple[ArraySpec, ...] = reads(variadic=True)
    updated: tuple[ArraySpec, ...] = updates(variadic=True)
    written: tuple[ArraySpec, ...] = writes(variadic=True)
    words: StatusArray | None = status(optional=True)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays, in the order in which a recipe numbers them."""
        return self.read + self.updated + self.written

    def result_at(self) -> ArraySpec:
        """Return the bytes that go to the host."""
        position, offset, nbytes = self.result
        base = self.arrays[position]
        return ArraySpec(base.block, base.offset + offset, DType.uint8, (nbytes,), (1,))


@specification
class BranchSpec(OperationSpec):
    """Run one operation of a recipe, or none, selected by an array on the device.

    Attributes:
        condition: One integer or truth value. It is read once, before anything runs.
        is_test: Whether operation 0 is run for a nonzero condition, and operation 1 for zero. Otherwise the
            condition is the number of the operation. If there is no operation with the number, none is run.
        recipe: The operations, by `GraphRecipe.encode`.
        read: Arrays that they only read.
        updated: Arrays that they change, and that keep their contents if nothing is run.
    """

    condition: ArraySpec = reads()
    is_test: bool = exact()
    recipe: bytes = exact()
    read: tuple[ArraySpec, ...] = reads(variadic=True)
    updated: tuple[ArraySpec, ...] = updates(variadic=True)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays, in the order of their numbers in the recipe; arrays without a number come last."""
        return (*self.read, *self.updated, self.condition)

    def chosen(self, condition: int) -> int:
        """Return the number of the operation to run."""
        return int(not condition) if self.is_test else int(condition)


@specification
class LoopSpec(OperationSpec):
    """Run the operations of a recipe again and again, as long as an array on the device is not zero.

    Attributes:
        condition: One integer or truth value. It is read before each turn.
        limit: The most turns.
        recipe: The operations, by `GraphRecipe.encode`.
        read: Arrays that they only read.
        updated: Arrays that they change.
        count: The number of turns: one int64.
    """

    condition: ArraySpec = reads()
    limit: int = exact()
    recipe: bytes = exact()
    read: tuple[ArraySpec, ...] = reads(variadic=True)
    updated: tuple[ArraySpec, ...] = updates(variadic=True)
    count: ArraySpec = writes()

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays, in the order of their numbers in the recipe; arrays without a number come last."""
        return (*self.read, *self.updated, self.condition, self.count)


@attrs.frozen
class GraphNode:
    """One operation of a chain.

    Attributes:
        operation: Name of the operation, such as ``"linalg.Matmul"``.
        library: Name of the backend's library that runs it.
        spec: Its specification. The arrays have the positions of a graph's arrays in place of blocks, and
            offsets from the beginning of these.
    """

    operation: str
    library: str
    spec: OperationSpec


class GraphRecipe:
    """A chain of operations, apart from the arrays that it works on. Made by `graph_recipe`.

    Attributes:
        nodes: The operations, in their order.
    """

    def __init__(self, nodes: Iterable[GraphNode]) -> None:
        self.nodes: tuple[GraphNode, ...] = tuple(nodes)

    def encode(self) -> bytes:
        """Encode it, for a `GraphSpec` in this process or in a process that trusts this one."""
        return pickle.dumps(self.nodes, protocol=5)

    def bind(self, arrays: Sequence[ArraySpec]) -> tuple[OperationSpec, ...]:
        """Return the specifications of its nodes for the arrays of a graph.

        They have no status words, because operations in flight must not share them.
        """
        return tuple([_placed(node.spec, arrays) for node in self.nodes])


def _placed(spec: OperationSpec, arrays: Sequence[ArraySpec]) -> OperationSpec:
    """Return a specification of a recipe with arrays in place of their positions, without status words."""

    def resolve(array: ArraySpec) -> ArraySpec:
        base = arrays[array.block]
        return ArraySpec(base.block, base.offset + array.offset, array.dtype, array.shape, array.strides)

    described = spec.descriptor()
    values = [map_arrays(value, resolve) for value in described.values(spec)]
    for index in described.status:
        values[index] = None
    result: OperationSpec = described.make(values)
    return result


def graph_recipe(encoded: bytes) -> GraphRecipe:
    """Decode the bytes of `GraphRecipe.encode`.

    Raises:
        ImportError: This process does not have the module of a specification's class.
    """
    nodes: tuple[GraphNode, ...] = pickle.loads(encoded)  # noqa: S301  # the application's own
    return GraphRecipe(nodes)

"""Chains of one context: decoded recipes, bound to blocks for a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import ref

import attrs
import numpy as np

from ..contract.ops import (
    ArraySpec,
    GraphNode,
    GraphRecipe,
    OperationSpec,
    StatusArray,
    graph_recipe,
)
from ..contract.protocols import KeptCounts
from .kept_plans import KeptPlan, KeptPlans


class _ChainSpec(Protocol):
    """A specification that holds a recipe."""

    @property
    def recipe(self) -> bytes: ...
    @property
    def arrays(self) -> tuple[ArraySpec, ...]: ...


class _DeviceBlocks(Protocol):
    """The blocks of a device; see `BlockMemory`."""

    @property
    def blocks(self) -> Mapping[int, tuple[Any, int, object]]: ...
    @property
    def freed(self) -> int: ...


@attrs.define(eq=False, on_setattr=None)
class BoundChain:
    """A chain for certain blocks. It holds no host arrays or status words, because each run has its own.

    Attributes:
        nodes: The operations, each with its specification for the blocks, without status words.
        locations: The places of the blocks. The id of a dropped block is used again, but a place is not.
        freed: Value of the memory's `freed` when the places were compared last.
        works: Functions that run the operations of an armed chain.
    """

    nodes: Sequence[tuple[GraphNode, OperationSpec]]
    locations: tuple[object, ...]
    freed: int
    works: Any = None


class KeptChains:
    """Recipes of one context, and their bindings.

    Args:
        memory: The memory of the device.
        counts: Counts the plans.
    """

    def __init__(self, memory: _DeviceBlocks, counts: KeptCounts) -> None:
        self._memory = memory
        self.plans: KeptPlans[GraphRecipe] = KeptPlans(counts=counts)

    def recipe(self, encoded: bytes) -> GraphRecipe:
        """Return a recipe, decoded.

        Raises:
            ImportError: This process does not have the module of a specification's class.
        """
        plan = self.plans.plans.get((encoded,))
        if plan is None:
            plan = self.plans.record((encoded,), graph_recipe(encoded))
        plan.is_used = True
        assert plan.value is not None  # it was recorded with it
        return plan.value

    def find(self, spec: _ChainSpec, stream: object) -> KeptPlan[GraphRecipe]:
        """Return the plan of a chain, bound to the arrays of this run.

        Args:
            spec: The chain.
            stream: The stream that runs it, one run after the other.
        """
        plans, memory, arrays = self.plans, self._memory, spec.arrays
        key = spec.recipe, ref(stream), *[(array.block, array.offset) for array in arrays]
        plan = plans.plans.get(key)
        if plan is None:
            plan = plans.record(key, self.recipe(spec.recipe))
        else:
            plan.is_used = True
            plans.counts.hits += 1
            bound: BoundChain | None = plan.binding
            if bound is not None and bound.freed != memory.freed:
                bound.freed = memory.freed
                if bound.locations != self._locations(arrays):
                    plan.move("unbind")
        if plan.binding is None:
            # Read the count first, so that the places are compared again if a block is freed meanwhile.
            freed, nodes = memory.freed, bound_nodes(plan.value, arrays)
            plan.binding = BoundChain(nodes, self._locations(arrays), freed)
            plan.move("bind")
        return plan

    def _locations(self, arrays: Sequence[ArraySpec]) -> tuple[object, ...]:
        blocks = [self._memory.blocks.get(array.block) for array in arrays]
        # The run makes some blocks, which have no memory yet.
        return tuple([None if block is None else block[2] for block in blocks])


def bound_nodes(
    recipe: GraphRecipe | None, arrays: Sequence[ArraySpec]
) -> Sequence[tuple[GraphNode, OperationSpec]]:
    """Return the operations of a recipe, each with its specification for some arrays."""
    assert recipe is not None  # a plan is recorded with it
    return list(zip(recipe.nodes, recipe.bind(arrays), strict=True))


def with_words(node: GraphNode, spec: OperationSpec) -> OperationSpec:
    """Return a bound specification with status words of its own, if the operation has any."""
    described = spec.described
    if not described.status:
        return spec
    values, of_recipe = list(described.values(spec)), list(described.values(node.spec))
    for index in described.status:
        words: StatusArray | None = of_recipe[index]
        values[index] = None if words is None else np.zeros_like(words)
    result: OperationSpec = described.make(values)
    return result

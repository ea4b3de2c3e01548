"""Parts of a graph that run on a condition: branches and loops."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs

from ..backends.base import DType, name_function
from ..backends.base.contract.ops import ArraySpec, BranchSpec, GraphNode, GraphRecipe, GraphSpec, LoopSpec
from ..devices import AccelRef, Operand, Operation, Planned, Planner
from ._graph import Graph, GraphsActor, capture

__all__ = ["Body", "If", "Switch", "While", "if_", "switch", "while_"]

Body: TypeAlias = Graph[Any] | Callable[..., Awaitable[Any]]
"""Body of a condition: a graph, or a step that is captured for it."""

_BODY = "graphs.Body"
_LIBRARY = "graphs"
_ACTOR = "trio_accel.graphs:GraphsActor"
_KINDS = ("int", "uint", "bool")
_MAX_INT64 = 2**63 - 1


@attrs.define(eq=False, on_setattr=None)
class If(Operation[GraphsActor, None]):
    """Run a graph if an array is not zero; see `if_`.

    Attributes:
        condition: An array of one integer or boolean.
        body: The graph that runs if it is not zero.
        arrays: The arguments of the graph that runs.
        orelse: The graph that runs if it is zero.
    """

    condition: AccelRef
    body: Graph[Any]
    arrays: Sequence[Operand] = ()
    orelse: Graph[Any] | None = None
    library: ClassVar[str] = _ACTOR

    def plan(self, planner: Planner) -> Planned[None]:
        """Check the condition and the arguments of both."""
        bodies = [self.body] if self.orelse is None else [self.body, self.orelse]
        return _planned_branch(planner, self.condition, bodies, self.arrays, is_test=True)


@attrs.define(eq=False, on_setattr=None)
class Switch(Operation[GraphsActor, None]):
    """Run one of several graphs, selected by the number in an array; see `switch`.

    Attributes:
        number: An array of one integer.
        bodies: The graphs.
        arrays: The arguments of the selected graph.
    """

    number: AccelRef
    bodies: Sequence[Graph[Any]]
    arrays: Sequence[Operand] = ()
    library: ClassVar[str] = _ACTOR

    def plan(self, planner: Planner) -> Planned[None]:
        """Check the number's array and the arguments of all."""
        return _planned_branch(planner, self.number, self.bodies, self.arrays, is_test=False)


@attrs.define(eq=False, on_setattr=None)
class While(Operation[GraphsActor, AccelRef]):
    """Run a graph while an array is not zero; see `while_`.

    Attributes:
        condition: An array of one integer or boolean.
        body: The body of the loop.
        arrays: The arguments of the body.
        limit: The maximum number of iterations; None for no limit.
    """

    condition: AccelRef
    body: Graph[Any]
    arrays: Sequence[Operand] = ()
    limit: int | None = None
    library: ClassVar[str] = _ACTOR

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the condition, the limit and the arguments."""
        condition = _condition(planner, "condition", self.condition)
        limit = _limit(planner, self.limit)
        body = _body(planner, "body", self.body).plan_body(planner, self.arrays)
        changed = {array.block for array in body.updated + body.written}
        if self.limit is None and condition.block not in changed:
            raise ValueError(
                f"{planner.name}: the body does not change the condition, so that it would never end; "
                "give a limit of turns"
            )
        count = planner.output((), DType.int64)
        recipe, read, updated = _merged([body])
        return Planned(LoopSpec(condition, limit, recipe, read, updated, count.spec), count)


name_function("graphs.If", "graphs.if_")
name_function("graphs.Switch", "graphs.switch")
name_function("graphs.While", "graphs.while_")


async def if_(condition: AccelRef, body: Body, *arrays: AccelRef, orelse: Body | None = None) -> None:
    """Run something on the device if an array there is not zero.

    In the step of a graph it becomes a part of the graph, and each replay reads the condition again.

    Args:
        condition: An array of one integer or boolean. It is read before the body runs.
        body: A graph, or a step to capture for it: see `capture`. It changes arrays in place: its arguments,
            and others that it uses. Its result is ignored.
        arrays: The arguments of the body that runs.
        orelse: The body that runs if the condition is zero.

    Raises:
        TypeError: The condition is not an array of the device, or has floating or complex elements.
        ValueError: The condition does not have exactly one element. Or a body returns arrays that it makes.
        NotSupportedError: A step uses an operation that graphs do not support.

    See `Graph.__call__` for the rules of the arrays, and `Device.ask` for the errors of any operation.
    """
    _check_ref("graphs.If: condition", condition)
    first = await _graph(condition, body, arrays)
    else_graph = None if orelse is None else await _graph(condition, orelse, arrays)
    await condition.device.ask(If(condition, first, arrays, else_graph))


async def switch(number: AccelRef, bodies: Sequence[Body], *arrays: AccelRef) -> None:
    """Run one of several bodies on the device, selected by the number in an array there.

    Args:
        number: An array of one integer, from 0. If it is not the index of a body, nothing runs.
        bodies: Graphs, or steps to capture for them: see `if_`.
        arrays: The arguments of the selected body.

    Raises:
        TypeError, ValueError, NotSupportedError: As for `if_`; or `bodies` is empty.
    """
    _check_ref("graphs.Switch: number", number)
    graphs = [await _graph(number, body, arrays) for body in bodies]
    await number.device.ask(Switch(number, graphs, arrays))


async def while_(condition: AccelRef, body: Body, *arrays: AccelRef, limit: int | None = None) -> AccelRef:
    """Run something on the device again and again, while an array there is not zero.

    In the step of a graph it becomes a part of the graph: the device runs all iterations on its own.

    Args:
        condition: An array of one integer or boolean. It is read before each iteration, and the body changes
            it.
        body: See `if_`. Each iteration sees the arrays as the previous one has left them.
        arrays: The arguments of the body.
        limit: The maximum number of iterations. If the condition is still not zero then, the loop ends
            anyway, and the condition shows that. Without a limit, an infinite loop is an operation that never
            ends: see `DeviceOptions.stuck_after`.

    Returns:
        The number of iterations, an int64 of shape ``()``.

    Raises:
        TypeError, NotSupportedError: As for `if_`; or the limit is not an integer.
        ValueError: See `if_`; or the limit is below 1; or there is no limit, and the body does not change the
            condition.
    """
    _check_ref("graphs.While: condition", condition)
    graph = await _graph(condition, body, arrays)
    return await condition.device.ask(While(condition, graph, arrays, limit))


async def _graph(condition: AccelRef, body: Body, arrays: Sequence[AccelRef]) -> Graph[Any]:
    if isinstance(body, Graph):
        return body  # pyright: ignore[reportUnknownVariableType]  # of whatever it returns
    return await capture(condition.device, body, *arrays)


def _check_ref(label: str, value: object) -> None:
    if not isinstance(value, AccelRef):
        raise TypeError(f"{label} must be an AccelRef, got {type(value).__name__}")


def _condition(planner: Planner, argument: str, ref: AccelRef) -> ArraySpec:
    """Take an array of one integer.

    Raises:
        TypeError, ValueError: See `if_`.
    """
    _check_ref(f"{planner.name}: {argument}", ref)
    spec = planner.read(argument, ref)
    if spec.dtype.kind not in _KINDS:
        raise TypeError(f"{planner.name}: {argument} must hold an integer or a truth value, got {spec.dtype}")
    if spec.size != 1:
        raise ValueError(f"{planner.name}: {argument} must be a single element, got shape {spec.shape}")
    return spec


def _limit(planner: Planner, limit: object) -> int:
    if limit is None:
        return _MAX_INT64
    if isinstance(limit, bool):
        raise TypeError(f"{planner.name}: limit must be an integer, got {limit!r}")
    try:
        number = operator.index(limit)  # type: ignore[arg-type]  # refused there
    except TypeError:
        raise TypeError(f"{planner.name}: limit must be an integer, got {type(limit).__name__}") from None
    if not 1 <= number <= _MAX_INT64:
        raise ValueError(f"{planner.name}: limit must be from 1 to 2**63 - 1, got {number}")
    return number


def _body(planner: Planner, argument: str, body: object) -> Graph[Any]:
    if not isinstance(body, Graph):
        raise TypeError(f"{planner.name}: {argument} must be a Graph, got {type(body).__name__}")
    return body  # pyright: ignore[reportUnknownVariableType]  # of whatever it returns


def _planned_branch(
    planner: Planner,
    condition: AccelRef,
    bodies: Sequence[object],
    arrays: Sequence[Operand],
    *,
    is_test: bool,
) -> Planned[None]:
    tested = _condition(planner, "condition" if is_test else "number", condition)
    if not bodies:
        raise ValueError(f"{planner.name}: bodies must be one at least")
    specs: list[GraphSpec] = []
    for number, body in enumerate(bodies):
        specs.append(_body(planner, f"body {number}", body).plan_body(planner, arrays))
    recipe, read, updated = _merged(specs)
    return Planned(BranchSpec(tested, is_test, recipe, read, updated))


def _merged(
    bodies: Sequence[GraphSpec],
) -> tuple[bytes, tuple[ArraySpec, ...], tuple[ArraySpec, ...]]:
    """Return a recipe with a graph for each body, the arrays that are only read, and the changed ones.

    It is not known in advance whether a body runs, so arrays that it would overwrite keep their contents if
    it does not (D129).
    """
    read = [array for body in bodies for array in body.read]
    updated = [array for body in bodies for array in body.updated + body.written]
    nodes: list[GraphNode] = []
    reads, updates = iter(range(len(read))), iter(range(len(read), len(read) + len(updated)))

    def placed(arrays: Sequence[ArraySpec], positions: Any) -> tuple[ArraySpec, ...]:
        return tuple([attrs.evolve(array, block=next(positions), offset=0) for array in arrays])

    for body in bodies:
        spec = GraphSpec(
            body.recipe,
            body.is_idempotent,
            placed(body.read, reads),
            placed(body.updated, updates),
            placed(body.written, updates),
        )
        nodes.append(GraphNode(_BODY, _LIBRARY, spec))
    return GraphRecipe(nodes).encode(), tuple(read), tuple(updated)

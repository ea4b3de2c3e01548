"""A chain's results for the host: in its status words, or, if large, by separate operations."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ...backends.base import HostArray, Ints, NotSupportedError
from ..base._host_pool import MAX_INLINE_BYTES
from ..engine._device_state import DeviceState
from ..operations._chain import METHODS, ArrayFunction
from ..operations._ref import AccelRef
from ._layout import GraphLayout, aligned, leaves_of, map_tree
from ._memory import Copy
from ._recorder import OperationRecorder


@attrs.frozen(eq=False)
class HostResult:
    """A result for the host.

    Attributes:
        ref: The array, in the recording.
        is_item: Whether it becomes a Python number.
        nodes: The number of recorded operations before it is read.
        start: The offset of its bytes in the status words; None if a separate operation fetches it.
    """

    ref: AccelRef
    is_item: bool
    nodes: int
    start: int | None = None

    def of(self, words: npt.NDArray[np.uint8]) -> HostArray:
        """Return its part of the status words."""
        assert self.start is not None  # it is in the status words
        spec = self.ref.spec
        part = words[self.start : self.start + self.ref.nbytes]
        return part.view(spec.dtype.dtype).reshape(spec.shape)


def recorded_functions(recorder: OperationRecorder) -> dict[int, ArrayFunction]:
    """Return functions that note results for the host, by the `id` of the functions that copy them."""

    def note(value: Any) -> HostResult:
        if not isinstance(value, AccelRef):
            raise NotSupportedError(f"{type(value).__name__} is in no graph")
        return HostResult(value, False, len(recorder.nodes))

    def note_item(value: Any) -> HostResult:
        result: HostResult = value if isinstance(value, HostResult) else note(value)
        if result.ref.size != 1:
            raise NotSupportedError("the step refuses it in its own words")
        return attrs.evolve(result, is_item=True)

    def note_all(value: Any) -> Any:
        return map_tree(value, note)

    item = ArrayFunction("AccelRef.item", note_item, "value")
    return {
        id(METHODS["to_host"]): ArrayFunction("AccelRef.to_host", note_all, "value"),
        id(METHODS["item"]): item,
        id(METHODS["item of ref"]): item,
    }


async def settle_results(recorder: OperationRecorder, state: DeviceState, reply: Any) -> Any:
    """Choose the results to return in status words; return the reply with these at offset 0.

    A result is copied after the last operation if its memory is also returned, or has gaps.

    Raises:
        NotSupportedError: A later operation changes a result.
    """
    results: dict[int, HostResult] = {}
    stays: set[int] = set()

    for leaf in leaves_of(reply):
        if isinstance(leaf, HostResult):
            results[id(leaf)] = leaf
        elif isinstance(leaf, AccelRef):
            stays.add(leaf.block.id)
    if not results:
        return reply
    written = {block: index for index, node in enumerate(recorder.nodes) for block in node.spec.blocks()[1]}
    used, inline_keys = 0, list[int]()
    for key, result in results.items():
        if written.get(result.ref.block.id, -1) >= result.nodes:
            raise NotSupportedError("a later operation changes a result that goes to the host")
        if used + result.ref.nbytes <= MAX_INLINE_BYTES:
            used += aligned(result.ref.nbytes)
            inline_keys.append(key)
        else:
            stays.add(result.ref.block.id)
    for key in inline_keys:
        result, ref = results[key], results[key].ref
        is_own = (
            ref.spec.is_contiguous and ref.block.id in recorder.output_sizes and ref.block.id not in stays
        )
        # Neighbouring results must not have other bytes between them.
        if not is_own or (len(inline_keys) > 1 and ref.nbytes != recorder.output_sizes[ref.block.id]):
            ref = await recorder.ask(state, Copy(ref))
        stays.add(ref.block.id)
        results[key] = attrs.evolve(result, ref=ref, start=0)
    return map_tree(reply, lambda leaf: results.get(id(leaf), leaf))


def place_results(reply: Any, layout: GraphLayout) -> tuple[Any, Ints]:
    """Determine the bytes for the host.

    Returns:
        The reply with the offsets of its results, and `ChainSpec.result`.
    """
    starts: dict[int, int] = {}
    position, end = 0, 0
    for leaf in leaves_of(reply):
        if isinstance(leaf, HostResult) and leaf.start is not None:
            position, offset = layout.positions[leaf.ref.block.id]
            starts[id(leaf)] = offset + leaf.ref.spec.offset
            end = max(end, starts[id(leaf)] + leaf.ref.nbytes)
    if not starts:
        return reply, ()
    first = min(starts.values())
    placed: dict[int, HostResult] = {}

    def set_start(leaf: Any) -> Any:
        if id(leaf) not in starts:
            return leaf
        if id(leaf) not in placed:
            placed[id(leaf)] = attrs.evolve(leaf, start=starts[id(leaf)] - first)
        return placed[id(leaf)]

    return map_tree(reply, set_start), (position, first, end - first)


def is_finished(reply: Any) -> bool:
    """Return whether a reply needs no further work once its operation is done."""
    hosts = [leaf for leaf in leaves_of(reply) if isinstance(leaf, HostResult)]
    return all(leaf.start is not None and not leaf.is_item for leaf in hosts)


async def finish_results(template: Any, reply: Any) -> Any:
    """Fetch the large results of a reply, and convert items to numbers.

    Args:
        template: The reply, in the recording.
        reply: The reply of one run.
    """
    pairs = list(zip(leaves_of(template), leaves_of(reply), strict=True))
    fetched: dict[int, Any] = {}
    for leaf, value in pairs:
        if isinstance(leaf, HostResult) and id(leaf) not in fetched:
            host = await value.to_host() if leaf.start is None else value
            fetched[id(leaf)] = host.item() if leaf.is_item else host
    replies = iter([fetched.get(id(leaf), value) for leaf, value in pairs])
    return map_tree(reply, lambda _: next(replies))

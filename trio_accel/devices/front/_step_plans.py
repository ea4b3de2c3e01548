"""The plan that a step caches for one structure of its arguments, and its launch without a planner."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any

import attrs
import numpy as np

from ...backends.base import DType, HostArray
from ...backends.base.contract.ops import ArraySpec, ChainSpec
from ...backends.base.kit.kept_plans import KeptPlan
from ..engine._device_state import DeviceState
from ..engine._in_place import LIMIT_NS, BoundWork, InPlace
from ..operations._blocks import Block
from ..operations._operation import Launch, Planned, Planner
from ..operations._ref import AccelRef
from ._chains import Chains, RunChain, Template
from ._results import HostResult
from ._slots import Slot

_WORD = {DType.float32: Struct("=f"), DType.float64: Struct("=d")}
_UINT8 = DType.uint8
# The number of quick runs in the stream's thread before a run in place. And the maximum number of launches
# between two looks for a place, which doubles each time that a place is given up because it was slow.
_QUICK, _MOST_PAUSE = 8, 1 << 14
# The number of successive misses after which runs in place are given up for a while.
_MISSES = 32
_MOST_BOUND = 4
_STRIKES, _FORGIVEN = 3.0, 0.0625
_NUMBER, _INDEX, _NAME = attrgetter("id"), itemgetter(0), itemgetter(1)
NOT_HERE: Any = object()


@attrs.define(eq=False)
class StepPlan:
    """The plan that a step has cached for one structure.

    Its launch has the same fields as a launch by `Planner`. The fields that depend only on the blocks of the
    arguments are cached until a call has other blocks.

    Attributes:
        chains: The chains of the device.
        template: The recorded operations.
        constants: Host arrays that the function uses besides its arguments, as they were when it was traced.
        slots: The numbers that are passed: offset, byte format, dtype, and slot.
        nesting: The nesting of the results, if there are several.
        entry: The plan in the table of the device. It is bound once its launch is, and armed while it runs in
            place.
        run: The class of its runs, which determines their stream.
        room: The bytes of all passed data.
    """

    chains: Chains
    template: Template
    constants: Sequence[HostArray]
    slots: Sequence[tuple[int, Struct, DType, Slot]]
    nesting: Any
    entry: KeptPlan[Any]
    run: type[RunChain]
    room: int = 0
    # The block ids of the last call. A plan must not keep a block, because that would keep its memory.
    _numbers: tuple[int, ...] = attrs.field(default=(), init=False)
    _read: tuple[ArraySpec, ...] = attrs.field(default=(), init=False)
    _updated: tuple[ArraySpec, ...] = attrs.field(default=(), init=False)
    _reads: frozenset[int] = attrs.field(default=frozenset(), init=False)
    _writes: frozenset[int] = attrs.field(default=frozenset(), init=False)
    # The place where it is computed, if it may be; below, its bindings there by block ids.
    in_place: InPlace | None = attrs.field(default=None, init=False)
    _bound: dict[tuple[int, ...], BoundWork] = attrs.field(
        factory=dict[tuple[int, ...], BoundWork], init=False
    )
    # The number of launches, and the number at which to look for a place again.
    _runs: int = attrs.field(default=0, init=False)
    _retry_at: int = attrs.field(default=_QUICK, init=False)
    _misses: int = attrs.field(default=0, init=False)
    # The number of slow runs in place, reduced by each quick run.
    _strikes: float = attrs.field(default=0.0, init=False)
    # The nanoseconds of the last run in place.
    _cost: int = attrs.field(default=0, init=False)
    _pause: int = attrs.field(default=_QUICK, init=False)

    @classmethod
    def of(
        cls,
        chains: Chains,
        template: Template,
        constants: Sequence[HostArray],
        slots: Sequence[Slot],
        nesting: Any,
        entry: KeptPlan[Any],
        run: type[RunChain],
    ) -> StepPlan:
        """Make the plan of a template with the numbers as its last host arrays."""
        offsets = template.offsets[len(template.offsets) - len(slots) :]
        words = [
            (offset, _WORD[dtype], dtype, slot)
            for offset, dtype, slot in zip(offsets, template.numbers, slots, strict=True)
        ]
        return cls(chains, template, constants, words, nesting, entry, run)

    def pack(self, hosts: Sequence[HostArray], numbers: Sequence[float]) -> bytes:
        """Copy the passed data: host arrays and numbers."""
        template = self.template
        if not self.slots and not self.constants:
            if not hosts:
                return b""
            if len(hosts) == 1:
                return hosts[0].tobytes()
        hosts = (*hosts, *self.constants)
        room = self.room
        if not room:
            numbers_end = self.slots[-1][0] + self.slots[-1][1].size if self.slots else 0
            ends = [offset + host.nbytes for offset, host in zip(template.offsets, hosts, strict=False)]
            self.room = room = max(numbers_end, *ends, 0)
        payload = bytearray(room)
        for offset, host in zip(template.offsets, hosts, strict=False):
            payload[offset : offset + host.nbytes] = host.tobytes()
        for offset, form, dtype, slot in self.slots:
            number = slot.compute(numbers)
            try:
                form.pack_into(payload, offset, number)
            except OverflowError:
                # An expression also converts it to infinity.
                with np.errstate(over="ignore"):
                    payload[offset : offset + form.size] = np.array(number, dtype.dtype).tobytes()
        return bytes(payload)

    def launch(self, message: RunChain, state: DeviceState) -> tuple[Launch, Planned[Any]] | None:
        """Make the launch of a call; return None if a planner has to check and perhaps refuse it."""
        template, table = self.template, self.chains.blocks
        if state.faults.waiting:
            return None
        for block in message.blocks:
            if (
                block.is_released
                or block.damaged_by is not None
                or block.generation < table.valid_since
                or block.frozen_by
            ):
                return None
        blocks = message.blocks
        numbers = tuple(map(_NUMBER, blocks))
        if self._numbers != numbers:
            self._take(numbers)
        reads, updates = template.reads, template.updates
        uses = list(zip(map(_NAME, reads), map(blocks.__getitem__, map(_INDEX, reads)), strict=True))
        planner: Planner | None = None
        scratch, output_refs = table.spares.get(self.run.stream) if self.run.stream else table.spare, None
        allocations: tuple[tuple[int, int], ...] = ()
        outputs: list[Block] = []
        keep: list[object] = []
        written: tuple[ArraySpec, ...] = ()
        writes = self._writes
        is_whole = not template.layout.scratch or (
            scratch is not None
            and scratch.block.nbytes >= template.layout.scratch
            and not scratch.block.is_released
            and scratch.block.damaged_by is None
            and scratch.block.generation >= table.valid_since
        )
        if template.layout.output_sizes or not is_whole:
            planner = Planner(state, message)
            output_refs, written = message.outputs(planner)
            allocations, outputs, keep = planner.planned_memory()
            writes |= {array.block for array in written}
        elif scratch is not None and template.layout.scratch:
            block = scratch.block
            allocations, outputs, keep = ((block.id, block.nbytes),), [block], [block]
            written, writes = (scratch.spec,), writes | {block.id}
        if updates:
            changed = [(name, blocks[index]) for index, name, _ in updates]
            uses += changed
            outputs = [*[block for _, block in changed], *outputs]
        result = template.result
        words = np.zeros(-(-result[2] // 4), np.int32) if result else None
        reply = message.reply_of(output_refs or {}, words)
        spec = ChainSpec(
            template.recipe,
            template.result,
            message.payload or b"",
            self._read,
            self._updated,
            written,
            words,
        )
        launch = Launch(
            template.name,
            spec,
            self._reads,
            writes,
            allocations,
            (),
            (),
            outputs,
            uses,
            keep,
            self.run.library,
        )
        launch.frame = template.frame
        return launch, Planned(spec, reply, None, is_checked=True)

    def launched(self, dispatch: Any) -> None:
        """Record a launch; look for a place from time to time."""
        self._runs += 1
        if self._runs < self._retry_at:
            return
        in_place: InPlace | None = None if self.template.updates else dispatch.in_place(self.run.library)
        if in_place is not None and in_place.is_quick(self.template.recipe, _QUICK):
            self.in_place, self._misses = in_place, 0
            while self._bound:
                self._bound.popitem()[1].drop()
            if self.entry.state == "bound":
                self.entry.move("arm")
        self._retry_at = self._runs + self._pause

    def compute(  # noqa: C901, PLR0911, PLR0912  # a call for each part would take as long as the part
        self, blocks: list[Block], refs: Sequence[AccelRef], payload: bytes
    ) -> Any:
        """Compute the step in place now; return the reply, or `NOT_HERE` if it must be launched.

        A failed run has changed only its own memory. The launch that follows raises its error.
        """
        in_place, template, chains = self.in_place, self.template, self.chains
        table, state = chains.blocks, chains.state
        if in_place is None:
            # The call of another task gave up the place during the checkpoint.
            return NOT_HERE
        if state.hooks or state.validators or state.faults.waiting or not in_place.admits(self._cost * 1e-9):
            return self._missed()
        for block in blocks:
            if block.is_released or block.damaged_by is not None or block.generation < table.valid_since:
                return self._missed()
        numbers = tuple(map(_NUMBER, blocks))
        if self._numbers != numbers:
            self._take(numbers)
        layout, outputs = template.layout, dict[int, AccelRef]()
        spare: AccelRef | None = table.spares.get(self.run.stream) if self.run.stream else table.spare
        number = 0 if spare is None else spare.block.id
        if layout.scratch and (
            spare is None or spare.block.nbytes < layout.scratch or spare.block.generation < table.valid_since
        ):
            return self._missed()
        try:
            if layout.output_sizes:
                message = self.run(chains, template, refs, (), template.name)
                planner = Planner(state, message)
                outputs, written = message.outputs(planner)
                in_place.allocate(planner.planned_memory()[0])
                key = (number, *self._numbers, *[array.block for array in written])
            else:
                written = (spare.spec,) if spare is not None and layout.scratch else ()
                key = (number, *self._numbers)
            bound = self._bound.get(key)
            if bound is None or bound.is_dropped or not bound.remaining_runs:
                bound = self._bind(in_place, key, written, payload)
                if bound is None:
                    return NOT_HERE
            used = in_place.compute(bound, payload)
        except Exception:  # noqa: BLE001  # the launch that follows raises it again
            return self._gave_up()
        if used < 0:
            return self._missed()
        self._misses, self._cost = 0, used
        if used > LIMIT_NS or self._strikes:
            self._judge(used)
        result, reply = bound.result, template.reply
        if type(reply) is HostResult and result is not None:
            layout_of = reply.ref.spec
            return result.copy().view(layout_of.dtype.dtype).reshape(layout_of.shape)
        return None if reply is None else self._reply(result, outputs, refs)

    def _reply(
        self, result: HostArray | None, outputs: Mapping[int, AccelRef], refs: Sequence[AccelRef]
    ) -> Any:
        """Make the reply of a run in place: device arrays, or several results."""
        template, words = self.template, None
        if result is not None:
            words = np.zeros(-(-template.result[2] // 4), np.int32)
            words.view(np.uint8)[: len(result)] = result
        return self.run(self.chains, template, refs, (), template.name).reply_of(outputs, words)

    def _bind(
        self, in_place: InPlace, key: tuple[int, ...], written: tuple[ArraySpec, ...], payload: bytes
    ) -> BoundWork | None:
        """Bind the step to blocks, and cache the binding."""
        template = self.template
        spec = ChainSpec(template.recipe, template.result, payload, self._read, self._updated, written, None)
        bound = in_place.bind(spec)
        if bound is None:
            self._leave()
            self._retry_at = sys.maxsize
            return None
        bindings = self._bound
        if key in bindings:
            # The second binding to these blocks stays.
            bound.remaining_runs = sys.maxsize
        over = [block_ids for block_ids, work in bindings.items() if work.is_dropped or block_ids == key]
        if not over and len(bindings) >= _MOST_BOUND:
            over = [next(iter(bindings))]
        for block_ids in over:
            # Its blocks also refer to it.
            bindings.pop(block_ids).drop()
        bindings[key] = bound
        return bound

    def _missed(self) -> Any:
        self._misses += 1
        if self._misses >= _MISSES:
            self._leave()
            self._retry_at = self._runs + _MISSES
        return NOT_HERE

    def _judge(self, used: int) -> None:
        """Launch the step again if it is slow repeatedly, because every machine has slow moments."""
        self._strikes = self._strikes + 1.0 if used > LIMIT_NS else max(self._strikes - _FORGIVEN, 0.0)
        if self._strikes >= _STRIKES:
            self._gave_up()

    def _leave(self) -> None:
        """Stop computing in place."""
        self.in_place, self._strikes = None, 0.0
        self._bound.clear()
        if self.entry.state == "armed":
            self.entry.move("disarm")

    def _gave_up(self) -> Any:
        self._leave()
        self._pause = min(2 * self._pause, _MOST_PAUSE)
        self._retry_at = self._runs + self._pause
        return NOT_HERE

    def _take(self, numbers: tuple[int, ...]) -> None:
        """Cache the data that depends on the blocks of the arguments."""
        template = self.template

        def full_block(index: int, nbytes: int) -> ArraySpec:
            return ArraySpec(numbers[index], 0, _UINT8, (nbytes,), (1,))

        self._read = tuple([full_block(index, nbytes) for index, _, nbytes in template.reads])
        self._updated = tuple([full_block(index, nbytes) for index, _, nbytes in template.updates])
        self._writes = frozenset([array.block for array in self._updated])
        self._reads = frozenset([array.block for array in self._read]) | self._writes
        self._numbers = numbers
        if self.entry.state == "recorded":
            self.entry.move("bind")

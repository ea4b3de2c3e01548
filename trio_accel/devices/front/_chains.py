"""Chains of calls as one request: recorded when one of a structure comes, and kept.

The actor of graphs runs the recipe that is kept, with small arrays of the host in the same message, and a
small result in the answer. So a chain has one admission, one submission and one outcome: it is one operation.
A chain without a recipe is asked step by step: one whose steps look at results in between, or that a graph
cannot hold. So is the first call of a function that makes several operations by itself: to record it would
take longer than to ask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, cast

import attrs
import numpy as np
import numpy.typing as npt

from ...backends.base import AccelError, DType, HostArray, Ints, KeptCounts, NotSupportedError
from ...backends.base.contract.ops import ArraySpec, ChainSpec, StatusArray, contiguous_strides
from ...backends.base.kit.kept_plans import KeptPlan, KeptPlans
from ..base._errors import FailureClass, classify
from ..base._host_pool import MAX_INLINE_BYTES
from ..base._waits import run_together
from ..engine._device_state import DeviceState
from ..operations._blocks import Block, BlockTable
from ..operations._calls import Call, SpentCall, evaluate, run_by_steps, run_steps
from ..operations._chain import (
    GATHER,
    METHODS,
    ArrayFunction,
    Chain,
    ChainStep,
    Layouts,
    arguments_of,
    replaced,
    takes_number,
)
from ..operations._gather import by_device, tables_of
from ..operations._operation import RECORDING, Armed, LaunchFrame, Operation, Planned, Planner, recording_now
from ..operations._ref import AccelRef, Device
from ._layout import GraphLayout, aligned, lay_out, map_tree
from ._neighbours import has_neighbours, joined
from ._recorder import ChainRecorder, LookingAhead, OperationRecorder
from ._results import (
    HostResult,
    finish_results,
    is_finished,
    place_results,
    recorded_functions,
    settle_results,
)
from ._slots import Slot

_logger = logging.getLogger("trio_accel.devices")
_UINT8 = DType.uint8
_CALLS = (Call, SpentCall)
# The numbers of most chains never change: the third chain that differs by its numbers alone hands them over.
_MAX_SAME_NUMBERS = 2
# The plan of chains that are asked step by step.
_BY_STEPS: KeptPlan[Any] = KeptPlan((), 0, KeptCounts())
TOLD_BY_STEPS = (FailureClass.REFUSED, FailureClass.RESOURCE)
# An expression computes in these without more precision: a number has one rounding, whatever it comes as.
_NUMBER_DTYPES = DType.float32, DType.float64
# A chain that comes so often gets neighbours that are one launch, which a GPU has to compile.
_FUSE_AFTER_RUNS = 4
# Memory for results in between that is kept for the next chain.
_SPARE_BYTES = 64 << 20


@attrs.define(eq=False)
class Template:
    """All chains of one structure, but for their arrays.

    Attributes:
        name: Names of the functions.
        layout: Its arrays, and the recipe.
        recipe: The recipe as bytes.
        reads: Arrays on the device that it reads: place among the chain's, use, and bytes of their blocks.
        updates: Those that it changes.
        offsets: Where each host array begins in the scratch memory.
        result: See `ChainSpec`.
        reply: The result, with arrays of the recording: those that stay, and each `HostResult`.
        is_finished: Whether the result needs no further work once the chain is done.
        leaves: Places of arrays of the chain that the reply has, by what stands for them, and whether
            they are returned as they are.
        numbers: Dtypes of the numbers that are handed over.
        until_joined: How many runs there are yet until neighbours become one; 0 where there are none.
        frame: The template of its messages to a worker.
    """

    name: str
    layout: GraphLayout
    recipe: bytes
    reads: Sequence[tuple[int, str, int]]
    updates: Sequence[tuple[int, str, int]]
    offsets: Sequence[int]
    result: Ints
    reply: Any
    is_finished: bool
    leaves: Mapping[int, tuple[int, bool]]
    numbers: Sequence[DType]
    until_joined: int
    frame: LaunchFrame = attrs.field(factory=LaunchFrame, init=False)


@attrs.define(eq=False, on_setattr=None)
class RunChain(Operation[Any, Any]):
    """One run of a template.

    Attributes:
        chains: The templates of the device.
        template: The template.
        refs: The arrays on the device, in the order of the key.
        hosts: The host arrays.
        operation: Names of the functions.
        frame: That of the template.
    """

    chains: Chains
    template: Template
    refs: Sequence[AccelRef]
    hosts: Sequence[HostArray]
    # A property would be a call for each chain.
    operation: str  # pyright: ignore[reportIncompatibleMethodOverride]
    # The contents of the host arrays when it was planned first: the program may change them then.
    given: bytes | None = attrs.field(default=None, init=False)
    # The plan of a step, and the blocks of its arguments; for a chain nothing.
    armed: Armed | None = attrs.field(default=None, init=False)
    frame: LaunchFrame | None = attrs.field(default=None, init=False)
    blocks: list[Block] = attrs.field(factory=list[Block], init=False)
    library: ClassVar[str] = "trio_accel.graphs:GraphsActor"
    stream: ClassVar[str] = ""

    def plan(self, planner: Planner) -> Planned[Any]:
        """Take the arrays, whose layouts are those of the template."""
        template, refs = self.template, self.refs
        read: list[ArraySpec] = []
        for place, name, nbytes in template.reads:
            ref = refs[place]
            planner.read(name, ref)
            read.append(ArraySpec(ref.block.id, 0, _UINT8, (nbytes,), (1,)))
        updated: list[ArraySpec] = []
        for place, name, nbytes in template.updates:
            block = planner.update(name, refs[place]).block
            updated.append(ArraySpec(block, 0, _UINT8, (nbytes,), (1,)))
        made, written = self.outputs(planner)
        hosts = self.hosts
        given = self.given
        if given is None:
            given = b"" if not hosts else hosts[0].tobytes() if len(hosts) == 1 else self._joined()
            self.given = given
        result = template.result
        words = np.zeros(-(-result[2] // 4), np.int32) if result else None
        spec = ChainSpec(
            template.recipe,
            template.result,
            given,
            tuple(read),
            tuple(updated),
            written,
            words,
        )
        return Planned(spec, self.reply_of(made, words), None, is_checked=True)

    def outputs(self, planner: Planner) -> tuple[dict[int, AccelRef], tuple[ArraySpec, ...]]:
        """Name the arrays that are made; returns these by their blocks in the template, and all written."""
        made: dict[int, AccelRef] = {}
        written: list[ArraySpec] = []
        layout = self.template.layout
        for number, nbytes in layout.made.items():
            made[number] = new = planner.output((nbytes,), _UINT8)
            written.append(new.spec)
        if layout.scratch:
            blocks, nbytes = self.chains.blocks, layout.scratch
            # Memory for results in between is the same for all chains of a stream, which follow one another.
            kept: AccelRef | None = blocks.spares.get(self.stream) if self.stream else blocks.spare
            block = None if kept is None else kept.block
            if (
                kept is not None
                and block is not None
                and block.nbytes >= nbytes
                and not block.is_released
                and block.damaged_by is None
                and block.generation >= block.table.valid_since
            ):
                written.append(planner.again(kept).spec)
            else:
                kept = planner.output((nbytes,), _UINT8)
                written.append(kept.spec)
                if nbytes <= _SPARE_BYTES and self.stream:
                    blocks.spares[self.stream] = kept
                elif nbytes <= _SPARE_BYTES:
                    blocks.spare = kept
        return made, tuple(written)

    def reply_of(self, made: Mapping[int, AccelRef], words: StatusArray | None) -> Any:
        """Make the reply of a run, with host arrays in these status words."""
        template = self.template
        reply, whole = template.reply, None if words is None else words.view(np.uint8)
        if whole is not None and type(reply) is HostResult:
            # `HostResult.of` says the same, with more calls.
            layout = reply.ref.spec
            reply = whole[: template.result[2]].view(layout.dtype.dtype).reshape(layout.shape)
        elif type(reply) is AccelRef and reply.block.id in made:
            reply = _on(made[reply.block.id].block, reply)
        elif reply is not None:
            reply = self._reply(made, whole)
        return reply

    def sent(self, chain: Chain) -> dict[int, Any]:
        """Return the host arrays of a chain as they were sent, by the identities of the arrays."""
        if self.given is None or _writes_to_host(chain):
            return {}
        return {
            id(host): np.frombuffer(self.given, host.dtype, host.size, offset).reshape(host.shape)
            for host, offset in zip(chain.hosts, self.template.offsets, strict=False)
        }

    def _joined(self) -> bytes:
        """Join the contents of several host arrays."""
        hosts, offsets = self.hosts, self.template.offsets
        given = bytearray(offsets[-1] + hosts[-1].nbytes)
        for offset, host in zip(offsets, hosts, strict=True):
            given[offset : offset + host.nbytes] = host.tobytes()
        return bytes(given)

    def _reply(self, made: Mapping[int, AccelRef], words: npt.NDArray[np.uint8] | None) -> Any:
        """Return the reply with the arrays of this run, the same one wherever the template has one."""
        seen: dict[int, Any] = {}

        def see(leaf: Any) -> Any:
            if id(leaf) not in seen:
                is_host = isinstance(leaf, HostResult)
                if is_host and leaf.start is not None and words is not None:
                    seen[id(leaf)] = leaf.of(words)
                else:
                    seen[id(leaf)] = self._seen(leaf.ref if is_host else leaf, made)
            return seen[id(leaf)]

        return map_tree(self.template.reply, see)

    def _seen(self, ref: AccelRef, made: Mapping[int, AccelRef]) -> AccelRef:
        number = ref.block.id
        place, is_same = self.template.leaves.get(number, (0, False))
        if is_same:
            return self.refs[place]
        return _on(made[number].block if number in made else self.refs[place].block, ref)


def _on(block: Block, ref: AccelRef) -> AccelRef:
    """Return an array with the layout of another one, in a block."""
    spec = ref.spec
    return AccelRef(block, ArraySpec(block.id, spec.offset, spec.dtype, spec.shape, spec.strides))


@lru_cache
def run_on(stream: str) -> type[RunChain]:
    """Return the class of runs on a stream of this name, which has an actor of its own."""
    if not stream:
        return RunChain
    return type("RunChain", (RunChain,), {"library": f"{RunChain.library}?{stream}", "stream": stream})


class Chains:
    """The chains of one device.

    Args:
        device: The device.
        state: What it shares with its dispatch.

    Attributes:
        device: The argument.
        state: The argument.
        blocks: The blocks of the device.
        kept: The templates by the keys of their structures.
    """

    def __init__(self, device: Device, state: DeviceState) -> None:
        self.device: Device = device
        self.state: DeviceState = state
        self.blocks: BlockTable = state.blocks
        self.kept: KeptPlans[Any] = KeptPlans()

    async def ask(  # noqa: C901  # calls that would make it shorter take as long as what they do
        self, chain: Chain, /
    ) -> Any:
        """See `Device.ask_chain`."""
        if chain.steps[-1].function is GATHER and len(tables_of(chain)) > 1 and (parts := by_device(chain)):
            return await _ask_all(parts)
        plan, hosts, given = self._find(chain), chain.hosts, dict[int, Any]()
        template = plan.value
        if (template is None or template.until_joined == 1) and chain.has_expansions:
            whole = self._expanded(chain, plan)
            if whole is not chain:
                return await self.ask(whole)
        plan.in_flight += 1
        if hosts and (template is None or template.until_joined == 1):
            # It takes several turns of the loop, and the program may change an array meanwhile.
            given = _copied(chain)
            hosts = [given.get(id(host), host) for host in hosts]
        try:
            if plan is not _BY_STEPS and (template is None or template.until_joined):
                template = await self._due(chain, plan)
            if template is not None:
                if template.numbers:
                    hosts = [*hosts, *_as_arrays(chain, template.numbers)]
                message = RunChain(self, template, chain.refs, hosts, template.name)
                message.frame = template.frame
                try:
                    reply = await self.device.ask(message)
                    if not template.is_finished:
                        reply = await finish_results(template.reply, reply)
                except AccelError as error:
                    if template.updates or classify(error) not in TOLD_BY_STEPS:
                        raise
                    # Nothing was changed. The step that is refused, or has no memory, tells so in its own
                    # words, and not as what came while this error was handled.
                    given = message.sent(chain)
                else:
                    return reply
            return await run_by_steps(chain, given)
        finally:
            plan.in_flight -= 1
            chain.let_go()

    def _expanded(self, chain: Chain, plan: KeptPlan[Template]) -> Chain:
        """Expand a chain that is to be recorded, or is asked step by step.

        Returns:
            The chain with other steps, or another chain if it has no template under its own key, because its
            structure does not determine the steps, or because they use arrays that are not in the key.
        """
        expanded, key = chain.expanded(), chain.key
        blocks, hosts = {ref.block for ref in chain.refs}, set(map(id, chain.hosts))
        is_known = blocks.issuperset([ref.block for ref in expanded.refs])
        is_known = is_known and hosts.issuperset(map(id, expanded.hosts))
        if plan is _BY_STEPS or key is None or not is_known:
            if plan is not _BY_STEPS and key is not None:
                self.kept.keep(plan, None)
            return expanded
        chain.take_steps(expanded)
        return chain

    async def _due(self, chain: Chain, plan: KeptPlan[Template]) -> Template | None:
        """Make the template of a chain, or the one in which its neighbours are one launch."""
        counts, template = self.kept.counts, plan.value
        if template is not None:
            template.until_joined -= 1
            if template.until_joined:
                return template
            counts.found -= 1
        try:
            return await self._template(chain, plan)
        finally:
            if plan.state == "seen" or (template is not None and plan.value is template):
                # It was cancelled, or its arrays went: the next one makes it.
                counts.seen += 1
                if template is not None:
                    template.until_joined = 1

    def look_ahead(self, chain: Chain, /) -> Layouts:
        """See `Device.look_ahead`."""
        for step in chain.steps:
            if step.ahead is None:
                step.ahead = self._ahead_of(step)
        found = chain.steps[-1].ahead
        assert found is not None  # it was found now
        return found

    def _find(self, chain: Chain) -> KeptPlan[Template]:
        """Find the plan of a chain, or one to be recorded, which has no template; `_BY_STEPS` for none."""
        key, recording = chain.key, RECORDING.get()
        if chain.has_expansions and not chain.is_fixed:
            return _BY_STEPS
        if key is None or self.state.faults.waiting or not (recording is None or recording.is_over):
            return _BY_STEPS
        for ref in chain.refs:
            block = ref.block
            # An array that is damaged elsewhere can be used, and a chain takes whole blocks. What cannot be
            # used is refused by its step. `Block.is_usable` would be a call for each array.
            is_whole = block.damaged_by is None and not block.is_released
            if not is_whole or block.generation < block.table.valid_since:
                return _BY_STEPS
        counts, plan = self.kept.counts, self.kept.plans.get(key)
        if plan is None:
            # A single call is recorded the second time. Before, recording takes longer than asking.
            plan = self._without_numbers(chain, key) if len(chain.steps) > 1 else self._seen_before(key)
            if plan is None:
                counts.seen += 1
                return _BY_STEPS
        plan.is_used = True
        if plan.state == "refused":
            counts.refused += 1
            return _BY_STEPS
        counts.found += plan.value is not None
        return plan

    def _seen_before(self, key: tuple[object, ...]) -> KeptPlan[Template] | None:
        """Return a plan to record if a key was seen before."""
        return self.kept.new(key) if self.kept.see(key) else None

    def _without_numbers(self, chain: Chain, whole: tuple[object, ...]) -> KeptPlan[Template] | None:
        """Find the plan of a chain that differs by its numbers alone from others, or one to record."""
        kept = self.kept
        key, numbers = chain.without_numbers()
        if key is None or not numbers:
            return kept.new(whole)
        plan = kept.plans.get(key)
        if plan is not None and plan.state == "refused":
            # It is in its key. Record it only if it comes again, because each other number has another plan.
            return self._seen_before(whole)
        if plan is not None or kept.see(key) >= _MAX_SAME_NUMBERS:
            if chain.has_expansions:
                # Its expanded steps may have the numbers, too, so the expanded chain hands them over.
                return None
            chain.numbers = numbers
            return plan or kept.new(key)
        return kept.new(whole)

    async def _template(self, chain: Chain, plan: KeptPlan[Template]) -> Template | None:
        """Make the template of a structure, or join the one that it has; None if it has none."""
        is_joined = plan.value is not None
        has_own_arrays = all(type(ref.block) is Block for ref in chain.refs)
        if not self.state.availability.is_ready or not has_own_arrays:
            # It goes by steps, which wait for the next context. A borrowed array is no part of the structure.
            return None
        may_be_one = "graphs" in self.device.libraries and _is_small(chain)
        template = await self._recorded(chain, is_joined) if may_be_one else None
        if template is None and not all(ref.block.is_usable for ref in chain.refs):
            # An array went meanwhile, and others of this structure are there: the next one is recorded.
            return None
        if template is not None and is_joined:
            plan.value = template
            plan.move("join")
        elif is_joined:
            plan.value = None
            plan.move("refuse")
        else:
            self.kept.keep(plan, template)
        if template is None:
            _logger.debug("%s goes step by step", _name_of(chain))
        return template

    async def record(
        self, chain: Chain, recorder: ChainRecorder, hosts: Sequence[AccelRef]
    ) -> Template | None:
        """Make the template of a step, whose neighbours are one launch; None if it has none now.

        Args:
            chain: Its calls, with the arrays of the step as its own.
            recorder: Has made stand-ins of the step's host arrays.
            hosts: These, which the template takes ahead of the host arrays of the chain.
        """
        has_own_arrays = all(type(ref.block) is Block for ref in chain.refs)
        if not (self.state.availability.is_ready and has_own_arrays and "graphs" in self.device.libraries):
            return None
        nbytes = [*[ref.nbytes for ref in hosts], *[host.nbytes for host in chain.hosts]]
        if sum(map(aligned, nbytes)) > MAX_INLINE_BYTES:
            return None
        return await self._recorded(chain, True, recorder, hosts)

    async def _recorded(
        self,
        chain: Chain,
        is_joined: bool,
        recorder: ChainRecorder | None = None,
        ahead: Sequence[AccelRef] = (),
    ) -> Template | None:
        """Record a chain; None where a graph cannot hold it."""
        recorder = recorder or ChainRecorder(self.device, self.state, None)
        token = RECORDING.set(recorder)
        try:
            hosts = [recorder.stand_in_for(host.shape, DType.of(host.dtype)) for host in chain.hosts]
            given: dict[int, Any] = {id(host): ref for host, ref in zip(chain.hosts, hosts, strict=True)}
            numbers = _NumbersAsArguments(recorder)
            reply = await _run_recorded(chain, recorder, numbers, given)
            reply = await settle_results(recorder, self.state, reply)
            hosts = [*ahead, *hosts, *numbers.stand_ins]
            unjoined = self.state.backend.unjoined
            return await _made(
                chain, recorder, hosts, numbers.stand_ins, reply, is_joined=is_joined, unjoined=unjoined
            )
        except Exception:  # it comes again, or does not, as the chain is asked step by step
            _logger.debug("%s is in no graph", _name_of(chain), exc_info=True)
            return None
        finally:
            RECORDING.reset(token)
            recorder.end()

    def _ahead_of(self, step: ChainStep) -> Layouts:
        if step.function.expand is not None:
            call = step.function.expand(*step.args, **step.named or {})
            try:
                return self.look_ahead(Chain(call, is_spent=False))
            finally:
                call.close()
        if step.function is GATHER:
            return tuple([each.ahead if type(each) in _CALLS else each.spec for each in step.args])
        # The calls of a step that is traced have stand-ins of its recording.
        outer = recording_now()
        recorder = LookingAhead(
            self.device, self.state, outer if isinstance(outer, OperationRecorder) else None
        )
        operands: list[Any] = [each for each in arguments_of(step) if type(each) in _CALLS]
        given: dict[int, Any] = {
            id(each): map_tree(each.ahead, lambda one: recorder.stand_in_for(one.shape, one.dtype))
            for each in operands
        }
        slots = [each for each in arguments_of(step) if isinstance(each, Slot)]
        # The layout of `x * scale` is the same for each scale, and that of `linspace` is not.
        is_free = takes_number(step)
        given.update({id(each): 1.0 if is_free else each.value_for_layout() for each in slots})
        args, named = replaced(step, given)
        asked = evaluate(step.function, args, named)
        token = RECORDING.set(recorder)
        try:
            asked.send(None)
        except StopIteration as done:
            return _layout_of(step, done.value)
        finally:
            asked.close()
            RECORDING.reset(token)
            recorder.end()
        raise NotSupportedError(
            f"{step.function.name}: its result is known once it has run; await the call",
            operation=step.function.name,
        )


class _NumbersAsArguments:
    """Has the numbers of a chain that are handed over recorded as arrays without axes.

    Args:
        recorder: Records the chain.

    Attributes:
        stand_ins: What stands for them, in their order.
    """

    def __init__(self, recorder: OperationRecorder) -> None:
        self.stand_ins: list[AccelRef] = []
        self._recorder = recorder

    def function(self, function: ArrayFunction) -> ArrayFunction:
        """Return a function that takes its number as an array."""
        return attrs.evolve(function, make=partial(self._make, function.make))

    def _make(self, make: Callable[..., Any], *args: Any) -> Any:
        (dtype,) = {arg.dtype for arg in args if isinstance(arg, AccelRef)}
        if dtype not in _NUMBER_DTYPES:
            raise NotSupportedError(f"numbers beside {dtype} are not handed over")
        stand_in = self._recorder.stand_in_for((), dtype)
        self.stand_ins.append(stand_in)
        return make(*[arg if isinstance(arg, AccelRef) else stand_in for arg in args])


async def _run_recorded(
    chain: Chain, recorder: OperationRecorder, numbers: _NumbersAsArguments, given: Mapping[int, Any]
) -> Any:
    """Run the steps of a chain with functions that a recording needs in place of some."""
    functions, others = [step.function for step in chain.steps], recorded_functions(recorder)
    try:
        for step in chain.steps:
            step.function = others.get(id(step.function), step.function)
        for place, _ in chain.numbers:
            chain.steps[place].function = numbers.function(functions[place])
        return await run_steps(chain.steps, given)
    finally:
        for step, function in zip(chain.steps, functions, strict=True):
            step.function = function


async def _ask_all(parts: Sequence[tuple[Sequence[int], Call[Any]]]) -> tuple[Any, ...]:
    """Run calls at the same time, and return their results by their places."""
    results: dict[int, Any] = {}

    async def ask(places: Sequence[int], call: Call[Any]) -> None:
        results.update(zip(places, await call, strict=True))

    try:
        await run_together(partial(ask, places, call) for places, call in parts)
        return tuple([results[place] for place in sorted(results)])
    finally:
        results.clear()
        for _, call in parts:
            call.close()


def _as_arrays(chain: Chain, dtypes: Sequence[DType]) -> list[HostArray]:
    """Make arrays of the numbers of a chain, as an expression converts them."""
    with np.errstate(over="ignore"):
        return [
            np.array(number, dtype.dtype) for (_, number), dtype in zip(chain.numbers, dtypes, strict=True)
        ]


def _is_small(chain: Chain) -> bool:
    """Tell whether a chain takes little of the host."""
    return sum(aligned(host.nbytes) for host in chain.hosts) <= MAX_INLINE_BYTES


def _writes_to_host(chain: Chain) -> bool:
    return any(step.function is METHODS["to_host out"] for step in chain.steps)


def _copied(chain: Chain) -> dict[int, Any]:
    """Copy the small host arrays that a chain reads; returns the copies by the identities of the arrays."""
    if _writes_to_host(chain):
        return {}
    return {id(host): host.copy() for host in chain.hosts if host.nbytes <= MAX_INLINE_BYTES}


class _Results:
    """Collects the arrays that a recorded chain returns.

    Args:
        chain: The chain.
        recorder: Has recorded it.

    Attributes:
        places: The first place of each block among the arrays of the chain.
        returned: Blocks of arrays that stay on the device.
        kept: Blocks of arrays that go to the host.
        leaves: See `Template.leaves`.
    """

    def __init__(self, chain: Chain, recorder: OperationRecorder) -> None:
        self.places = {ref.block.id: place for place, ref in reversed(list(enumerate(chain.refs)))}
        self.returned: list[int] = []
        self.kept: list[int] = []
        self.leaves: dict[int, tuple[int, bool]] = {}
        self._refs = chain.refs
        self._recorder = recorder
        self._noted: dict[int, Any] = {}

    def note(self, leaf: Any) -> Any:
        """Note a result; returns what stands for it in the template, the same each time."""
        if id(leaf) not in self._noted:
            self._noted[id(leaf)] = self._stand_in(leaf)
        return self._noted[id(leaf)]

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, HostResult) and leaf.start is not None:
            self.kept.append(leaf.ref.block.id)
            return leaf
        if isinstance(leaf, HostResult):
            return attrs.evolve(leaf, ref=self.note(leaf.ref))
        if not isinstance(leaf, AccelRef):
            raise NotSupportedError(f"{type(leaf).__name__} is in no graph")
        self.returned.append(leaf.block.id)
        if leaf.block.id in self._recorder.made:
            return leaf
        # A template keeps no array of the program's.
        stand_in = self._recorder.stand_in_for((), leaf.dtype)
        same = [place for place, one in enumerate(self._refs) if one is leaf]
        # Written arguments come last.
        self.leaves[stand_in.block.id] = (same or [self.places[leaf.block.id]])[-1], bool(same)
        return _on(stand_in.block, leaf)


async def _made(
    chain: Chain,
    recorder: OperationRecorder,
    hosts: Sequence[AccelRef],
    numbers: Sequence[AccelRef],
    reply: Any,
    *,
    is_joined: bool,
    unjoined: frozenset[str],
) -> Template | None:
    """Make the template of a chain that was recorded; None if it would not be the same as the steps."""
    recorded = recorder.recorded()
    results = _Results(chain, recorder)
    reply, places = map_tree(reply, results.note), results.places
    if not (recorded.nodes and recorded.constants.keys() <= places.keys()):
        return None
    given = {ref.block.id: ref.block.nbytes for ref in hosts}
    between = recorded.made.keys() - {*results.returned, *results.kept}
    may_join = not is_joined and has_neighbours(recorded.nodes, between, unjoined)
    if is_joined:
        recorded = attrs.evolve(recorded, nodes=await joined(recorded.nodes, between, unjoined))
    layout = lay_out(recorded, (), results.returned, given, results.kept)
    uses: dict[str, list[tuple[int, str, int]]] = {"read": [], "update": []}
    for constant in layout.constants:
        ref = chain.refs[places[constant.ref.block.id]]
        if constant.use == "update" and ref.nbytes != ref.block.nbytes:
            # All of the block would count as damaged after a failure.
            return None
        uses[constant.use].append((places[ref.block.id], constant.name, ref.block.nbytes))
    reply, result = place_results(reply, layout)
    return Template(
        name=_name_of(chain),
        layout=attrs.evolve(layout, constants=(), inputs=()),
        recipe=layout.recipe.encode(),
        reads=uses["read"],
        updates=uses["update"],
        offsets=[layout.places[ref.block.id][1] for ref in hosts],
        result=result,
        reply=reply,
        is_finished=is_finished(reply),
        leaves=results.leaves,
        numbers=[ref.dtype for ref in numbers],
        until_joined=_FUSE_AFTER_RUNS if may_join else 0,
    )


def _name_of(chain: Chain) -> str:
    """Name a chain by its functions: the first few, and how many more."""
    steps = [step for step in chain.steps if step.function.how != "value" and step.function is not GATHER]
    names = [step.function.name for step in steps]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _layout_of(step: ChainStep, value: object) -> Layouts:
    def see(one: object) -> ArraySpec | None:
        if isinstance(one, AccelRef):
            return one.spec
        if isinstance(one, np.ndarray):
            host: HostArray = cast("Any", one)
            dtype = DType.of(host.dtype)
            return ArraySpec(0, 0, dtype, host.shape, contiguous_strides(host.shape, dtype.itemsize))
        if one is not value and isinstance(one, (int, float)):
            # Arrays next to a number are operands.
            return None
        raise _no_operand(step, type(one).__name__)

    layouts: Layouts | None = map_tree(value, see)
    if layouts is None:
        raise _no_operand(step, "a number")
    return layouts


def _no_operand(step: ChainStep, what: str) -> NotSupportedError:
    name = step.function.name
    return NotSupportedError(
        f"{name} returns {what}, which cannot be an operand; await it first", operation=name
    )

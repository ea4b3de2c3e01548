"""Run a chain of calls as one request.

When a program awaits a call, `operations._chain.Chain` collects the calls that it depends on, in execution
order. `Chains` decides how to run them:

* **As one operation.** The chain is recorded once into a `Template`: a graph recipe plus the positions of its
  arrays. Later chains with the same key reuse the template. Each run is one `RunChain` message to the graphs
  actor, which takes small host arrays along and can return small results in its reply. So a chain needs one
  admission, one submission and one outcome.
* **Step by step** (`_BY_STEPS`), as if each call were awaited separately. That happens without a key, if a
  graph cannot hold the chain, if a step inspects a result, if an array is damaged, and while an injected
  fault waits or another recording is active.

`Chains.kept` maps keys to plans (`backends.base.kit.kept_plans` explains their states). `_find` looks a plan
up, and `_due` records it:

* A chain of several steps is recorded at its first run. A single function is recorded at its second,
  because recording takes longer than running.
* Numbers are part of the key, because most programs use the same ones every time. But a loop with a changing
  number would record a chain per value. So the third variant switches to the key without numbers, and passes
  them as 0-d arrays (`_without_numbers`).
* A chain with expansions (`ArrayFunction.expand`) keeps the key of its unexpanded steps. `_expanded` expands
  it only before it is recorded, or runs step by step.

Three orders matter:

* Host arrays are copied before the first checkpoint, because the program may change them while a template is
  made, or while the steps run.
* A template runs unfused at first. The fifth run fuses its neighbours: a GPU has to compile the fused launch,
  so it pays only for chains that repeat.
* If a run fails without a change to any array, the chain runs again step by step, so that the failing step
  raises its own error. That happens outside the handler, so that the first error does not become the context
  of the second.

A template must never keep an array of the program alive, so placeholders replace them in its reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt
import trio

from ...backends.base import AccelError, DType, HostArray, Ints, KeptCounts, NotSupportedError
from ...backends.base.contract.ops import ArraySpec, ChainSpec, StatusArray
from ...backends.base.kit.kept_plans import KeptPlan, KeptPlans
from ..base._errors import FailureClass, classify
from ..base._host_pool import MAX_INLINE_BYTES
from ..base._waits import run_together
from ..engine._device_state import DeviceState
from ..operations._blocks import Block, BlockTable
from ..operations._calls import Call, SpentCall, run_by_steps, run_steps
from ..operations._chain import (
    GATHER,
    METHODS,
    ArrayFunction,
    Chain,
    ChainStep,
    Layouts,
    arguments_of,
    unplanned,
)
from ..operations._gather import by_device, tables_of
from ..operations._operation import RECORDING, Armed, LaunchFrame, Operation, Planned, Planner, recording_now
from ..operations._ref import AccelRef, Device
from ._ahead import Body, BodyRecorder, evaluated, layout_of, outer_recorder
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

_logger = logging.getLogger("trio_accel.devices")
_UINT8 = DType.uint8
_CALLS = (Call, SpentCall)
# The numbers of most chains never change. The third chain that differs only in its numbers passes them.
_MAX_SAME_NUMBERS = 2
# The plan of chains that run step by step.
_BY_STEPS: KeptPlan[Any] = KeptPlan((), 0, KeptCounts())
TOLD_BY_STEPS = (FailureClass.REFUSED, FailureClass.RESOURCE)
# Expressions compute in these dtypes without extra precision, so a number is rounded once: both as a literal
# in the expression and as an argument.
_NUMBER_DTYPES = DType.float32, DType.float64
# The number of runs until neighbours are fused. A fused launch has to be compiled on a GPU, so only repeated
# chains get one.
_FUSE_AFTER_RUNS = 4
# The time in seconds that an expansion may hold the Trio loop.
_SLICE = 0.005
# Larger scratch memory is freed after each chain, in bytes.
_SPARE_BYTES = 64 << 20


@attrs.define(eq=False)
class Template:
    """A recorded chain, without its arrays: all chains with the same key share it.

    Attributes:
        name: The names of its functions.
        layout: The positions of its arrays, and the recipe.
        recipe: The encoded recipe.
        reads: The device arrays that it reads: index into `Chain.refs`, argument name, block size in bytes.
        updates: The device arrays that it changes, in the same form.
        offsets: The offset of each host array in the scratch memory.
        result: See `ChainSpec`.
        reply: The result, made of the recording's placeholder arrays and of a `HostResult` for each array
            on the host.
        is_finished: Whether the result needs no further work once the chain has run.
        leaves: For each placeholder of an argument in `reply`: the index into `Chain.refs`, and whether the
            argument is returned unchanged.
        new_hosts: The host arrays that follow from the key; see `Chain.new_hosts`.
        numbers: The dtypes of the numbers that are passed as arguments.
        until_joined: The number of runs until neighbours are fused; 0 if there is nothing to fuse.
        frame: The encoded template of its messages to a worker.
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
    new_hosts: Sequence[HostArray]
    numbers: Sequence[DType]
    until_joined: int
    frame: LaunchFrame = attrs.field(factory=LaunchFrame, init=False)


@attrs.define(eq=False, on_setattr=None)
class RunChain(Operation[Any, Any]):
    """One run of a template.

    Attributes:
        chains: The device's cache of templates.
        template: The template.
        refs: The device arrays, in the order of the key.
        hosts: The host arrays.
        operation: The names of the functions.
        frame: The template's frame.
    """

    chains: Chains
    template: Template
    refs: Sequence[AccelRef]
    hosts: Sequence[HostArray]
    # This is a field because a property would cost one more call for each chain.
    operation: str  # pyright: ignore[reportIncompatibleMethodOverride]
    # The contents of the host arrays. The first `plan` copies them, because the program may change the arrays
    # afterwards.
    payload: bytes | None = attrs.field(default=None, init=False)
    # The plan of a step, and the blocks of its arguments; unused by chains.
    armed: Armed | None = attrs.field(default=None, init=False)
    frame: LaunchFrame | None = attrs.field(default=None, init=False)
    blocks: list[Block] = attrs.field(factory=list[Block], init=False)
    library: ClassVar[str] = "trio_accel.graphs:GraphsActor"
    stream: ClassVar[str] = ""

    def plan(self, planner: Planner) -> Planned[Any]:
        """Fill in this run's arrays. Their layouts match the template, because layouts are in the key."""
        template, refs = self.template, self.refs
        read: list[ArraySpec] = []
        for index, name, nbytes in template.reads:
            ref = refs[index]
            planner.read(name, ref)
            read.append(ArraySpec(ref.block.id, 0, _UINT8, (nbytes,), (1,)))
        updated: list[ArraySpec] = []
        for index, name, nbytes in template.updates:
            block = planner.update(name, refs[index]).block
            updated.append(ArraySpec(block, 0, _UINT8, (nbytes,), (1,)))
        outputs, written = self.outputs(planner)
        hosts = self.hosts
        payload = self.payload
        if payload is None:
            payload = b"" if not hosts else hosts[0].tobytes() if len(hosts) == 1 else self._joined()
            self.payload = payload
        result = template.result
        words = np.zeros(-(-result[2] // 4), np.int32) if result else None
        spec = ChainSpec(
            template.recipe,
            template.result,
            payload,
            tuple(read),
            tuple(updated),
            written,
            words,
        )
        return Planned(spec, self.reply_of(outputs, words), None, is_checked=True)

    def outputs(self, planner: Planner) -> tuple[dict[int, AccelRef], tuple[ArraySpec, ...]]:
        """Make the output arrays; returns them by their blocks in the template, and all written arrays."""
        outputs: dict[int, AccelRef] = {}
        written: list[ArraySpec] = []
        layout = self.template.layout
        for number, nbytes in layout.output_sizes.items():
            outputs[number] = new = planner.output((nbytes,), _UINT8)
            written.append(new.spec)
        if layout.scratch:
            blocks, nbytes = self.chains.blocks, layout.scratch
            # Chains of a stream run one after another, so they share the memory for intermediate results.
            scratch: AccelRef | None = blocks.spares.get(self.stream) if self.stream else blocks.spare
            block = None if scratch is None else scratch.block
            if (
                scratch is not None
                and block is not None
                and block.nbytes >= nbytes
                and not block.is_released
                and block.damaged_by is None
                and block.generation >= block.table.valid_since
            ):
                written.append(planner.reuse(scratch).spec)
            else:
                scratch = planner.output((nbytes,), _UINT8)
                written.append(scratch.spec)
                if nbytes <= _SPARE_BYTES and self.stream:
                    blocks.spares[self.stream] = scratch
                elif nbytes <= _SPARE_BYTES:
                    blocks.spare = scratch
        return outputs, tuple(written)

    def reply_of(self, outputs: Mapping[int, AccelRef], words: StatusArray | None) -> Any:
        """Make the reply of a run, with host arrays in the given status words."""
        template = self.template
        reply, host_bytes = template.reply, None if words is None else words.view(np.uint8)
        if host_bytes is not None and type(reply) is HostResult:
            # `HostResult.of` does the same, with more calls.
            layout = reply.ref.spec
            reply = host_bytes[: template.result[2]].view(layout.dtype.dtype).reshape(layout.shape)
        elif type(reply) is AccelRef and reply.block.id in outputs:
            reply = _on(outputs[reply.block.id].block, reply)
        elif reply is not None:
            reply = self._reply(outputs, host_bytes)
        return reply

    def sent(self, chain: Chain) -> dict[int, Any]:
        """Return the host arrays as they were sent, keyed by the `id` of the program's array."""
        if self.payload is None or _writes_to_host(chain):
            return {}
        return {
            id(host): np.frombuffer(self.payload, host.dtype, host.size, offset).reshape(host.shape)
            for host, offset in zip(chain.hosts, self.template.offsets, strict=False)
        }

    def _joined(self) -> bytes:
        """Concatenate the host arrays at their offsets."""
        hosts, offsets = self.hosts, self.template.offsets
        buffer = bytearray(offsets[-1] + hosts[-1].nbytes)
        for offset, host in zip(offsets, hosts, strict=True):
            buffer[offset : offset + host.nbytes] = host.tobytes()
        return bytes(buffer)

    def _reply(self, outputs: Mapping[int, AccelRef], words: npt.NDArray[np.uint8] | None) -> Any:
        """Return the reply with the arrays of this run; a repeated placeholder becomes the same array."""
        results: dict[int, Any] = {}

        def see(leaf: Any) -> Any:
            if id(leaf) not in results:
                is_host = isinstance(leaf, HostResult)
                if is_host and leaf.start is not None and words is not None:
                    results[id(leaf)] = leaf.of(words)
                else:
                    results[id(leaf)] = self._array_of(leaf.ref if is_host else leaf, outputs)
            return results[id(leaf)]

        return map_tree(self.template.reply, see)

    def _array_of(self, ref: AccelRef, outputs: Mapping[int, AccelRef]) -> AccelRef:
        number = ref.block.id
        index, is_same = self.template.leaves.get(number, (0, False))
        if is_same:
            return self.refs[index]
        return _on(outputs[number].block if number in outputs else self.refs[index].block, ref)


def _on(block: Block, ref: AccelRef) -> AccelRef:
    """Return an array with the layout of `ref` in another block."""
    spec = ref.spec
    return AccelRef(block, ArraySpec(block.id, spec.offset, spec.dtype, spec.shape, spec.strides))


@lru_cache
def run_on(stream: str) -> type[RunChain]:
    """Return the class of runs on the stream of this name, which has its own actor."""
    if not stream:
        return RunChain
    return type("RunChain", (RunChain,), {"library": f"{RunChain.library}?{stream}", "stream": stream})


class Chains:
    """Runs the chains of one device, and caches their templates.

    Args:
        device: The device.
        state: The state that the device shares with its dispatch.

    Attributes:
        device: The argument.
        state: The argument.
        blocks: The blocks of the device.
        kept: The templates by key.
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
        plan, copies = self._find(chain), dict[int, Any]()
        template = plan.value
        is_planned = template is not None and template.until_joined != 1
        # It must not be evicted while it is recorded.
        plan.in_flight += 1
        try:
            if not is_planned and chain.has_expansions:
                # The program may change a host array while the expansion pauses.
                chain.replace_hosts(_copied(chain))
                expanded = await self._expanded(chain, plan)
                if expanded is not chain:
                    return await self.ask(expanded)
            hosts = chain.hosts
            if hosts and not is_planned:
                # Recording and running step by step take several turns of the loop. The program may change a
                # host array in that time.
                copies = _copied(chain)
                hosts = [copies.get(id(host), host) for host in hosts]
            if plan is not _BY_STEPS and (template is None or template.until_joined):
                template = await self._due(chain, plan)
            if template is not None:
                if template.new_hosts or template.numbers:
                    hosts = [*hosts, *template.new_hosts, *_as_arrays(chain, template.numbers)]
                message = RunChain(self, template, chain.refs, hosts, template.name)
                message.frame = template.frame
                try:
                    reply = await self.device.ask(message)
                    if not template.is_finished:
                        reply = await finish_results(template.reply, reply)
                except AccelError as error:
                    if template.updates or classify(error) not in TOLD_BY_STEPS:
                        raise
                    # No array was changed, so the chain can run again step by step. That happens below,
                    # outside of this handler: the step's error must not have this one as its context.
                    copies = message.sent(chain)
                else:
                    return reply
            return await _by_steps(chain, copies)
        finally:
            plan.in_flight -= 1
            chain.let_go()

    async def _expanded(self, chain: Chain, plan: KeptPlan[Template]) -> Chain:
        """Expand a chain before it is recorded, or runs step by step.

        Returns:
            `chain` itself with the expanded steps. Or another chain with its own key, because the structure
            of `chain` does not determine the steps, or because they use arrays outside its key.
        """
        expanded, key = await expanded_in_slices(chain), chain.key
        blocks, hosts = {ref.block for ref in chain.refs}, set(map(id, chain.hosts))
        is_known = blocks.issuperset([ref.block for ref in expanded.refs])
        # These follow from the key, because `_find` has left out other chains.
        new_hosts = [host for host in expanded.hosts if id(host) not in hosts]
        is_known = is_known and _fit_inline([*chain.hosts, *new_hosts])
        if plan is _BY_STEPS or key is None or not is_known:
            if plan is not _BY_STEPS and key is not None:
                self.kept.keep(plan, None)
            return expanded
        chain.take_steps(expanded, new_hosts)
        return chain

    async def _due(self, chain: Chain, plan: KeptPlan[Template]) -> Template | None:
        """Record a chain without a template, or replace its template by the fused one when it is due."""
        counts, template = self.kept.counts, plan.value
        if template is not None:
            if not template.until_joined:
                # Another chain has fused it while this one was expanded.
                return template
            template.until_joined -= 1
            if template.until_joined:
                return template
            counts.hits -= 1
        try:
            return await self._template(chain, plan)
        finally:
            if plan.state == "seen" or (template is not None and plan.value is template):
                # The chain was cancelled, or lost an array. The next chain makes the template instead.
                counts.unplanned += 1
                if template is not None:
                    template.until_joined = 1

    def look_ahead(self, step: ChainStep, /) -> Layouts:
        """See `Device.look_ahead`."""
        if step.layouts is None:
            for operand in unplanned(step):
                operand.layouts, operand.planned_by = self._ahead_of(operand), self.device
        assert step.layouts is not None  # the loop has set it
        return step.layouts

    def _find(self, chain: Chain) -> KeptPlan[Template]:
        """Return the plan of a chain, a new one to be recorded, or `_BY_STEPS`."""
        key, recording = chain.key, RECORDING.get()
        if chain.has_expansions and not chain.follows_from_key:
            return _BY_STEPS
        if key is None or self.state.faults.waiting or not (recording is None or recording.is_over):
            return _BY_STEPS
        for ref in chain.refs:
            block = ref.block
            # A chain uses whole blocks, but a step may use the undamaged part of one. So if any block is
            # damaged or stale, the chain runs step by step, and the step that needs it is refused.
            # `Block.is_usable` would cost a call for each array.
            is_whole = block.damaged_by is None and not block.is_released
            if not is_whole or block.generation < block.table.valid_since:
                return _BY_STEPS
        counts, plan = self.kept.counts, self.kept.plans.get(key)
        if plan is None:
            # A single call is recorded the second time, because recording takes longer than one run.
            plan = self._without_numbers(chain, key) if len(chain.steps) > 1 else self._seen_before(key)
            if plan is None:
                counts.unplanned += 1
                return _BY_STEPS
        plan.is_used = True
        if plan.state == "refused":
            counts.refused += 1
            return _BY_STEPS
        counts.hits += plan.value is not None
        return plan

    def _seen_before(self, key: tuple[object, ...]) -> KeptPlan[Template] | None:
        """Return a plan to record if the key was seen before."""
        return self.kept.new(key) if self.kept.see(key) else None

    def _without_numbers(self, chain: Chain, full_key: tuple[object, ...]) -> KeptPlan[Template] | None:
        """Return the plan of chains with other numbers, or a new one to be recorded."""
        cache = self.kept
        key, numbers = chain.without_numbers()
        if key is None or not numbers:
            return cache.new(full_key)
        plan = cache.plans.get(key)
        if plan is not None and plan.state == "refused":
            # The number must stay in the key. Record it only if it repeats, because each value has a plan.
            return self._seen_before(full_key)
        if plan is not None or cache.see(key) >= _MAX_SAME_NUMBERS:
            if chain.has_expansions:
                # Expanded steps may contain the numbers as well, so the expanded chain passes them.
                return None
            chain.numbers = numbers
            return plan or cache.new(key)
        return cache.new(full_key)

    async def _template(self, chain: Chain, plan: KeptPlan[Template]) -> Template | None:
        """Record a chain, or fuse its template; None to run step by step."""
        is_joined = plan.value is not None
        has_own_arrays = all(type(ref.block) is Block for ref in chain.refs)
        if not self.state.availability.is_ready or not has_own_arrays:
            # Steps wait for the next context; a recording does not. A borrowed array is not part of the key,
            # so it must not be part of a template either.
            return None
        may_be_one = "graphs" in self.device.libraries and _fit_inline([*chain.hosts, *chain.new_hosts])
        template = await self._recorded(chain, is_joined) if may_be_one else None
        if template is None and not all(ref.block.is_usable for ref in chain.refs):
            # An array was lost while the chain was recorded. The next chain with this key is recorded.
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
        """Make the fused template of a step; None if it cannot be made now.

        Args:
            chain: The step's calls, with its device arrays as `Chain.refs`.
            recorder: The recorder that made the placeholders of the step's host arrays.
            hosts: These placeholders, which precede the host arrays of the chain in the template.
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
        step_hosts: Sequence[AccelRef] = (),
    ) -> Template | None:
        """Record a chain; return None if a graph cannot hold it."""
        recorder = recorder or ChainRecorder(self.device, self.state, None)
        token = RECORDING.set(recorder)
        try:
            arrays = [*chain.hosts, *chain.new_hosts]
            hosts = [recorder.stand_in_for(host.shape, DType.of(host.dtype)) for host in arrays]
            placeholders: dict[int, Any] = {id(host): ref for host, ref in zip(arrays, hosts, strict=True)}
            numbers = _NumbersAsArguments(recorder)
            reply = await _run_recorded(chain, recorder, numbers, placeholders)
            reply = await settle_results(recorder, self.state, reply)
            hosts = [*step_hosts, *hosts, *numbers.stand_ins]
            unjoined = self.state.backend.unjoined
            return await _make_template(
                chain, recorder, hosts, numbers.stand_ins, reply, is_joined=is_joined, unjoined=unjoined
            )
        except Exception:  # the chain runs step by step next, and raises the error if it is a real one
            _logger.debug("%s is in no graph", _name_of(chain), exc_info=True)
            return None
        finally:
            RECORDING.reset(token)
            recorder.end()

    def _ahead_of(self, step: ChainStep) -> Layouts:
        if step.function.expand is not None:
            call = step.function.expand(*step.args, **step.named or {})
            try:
                return self.look_ahead(call)
            finally:
                call.close()
        if step.function is GATHER:
            return tuple(
                [argument.layouts if type(argument) in _CALLS else argument.spec for argument in step.args]
            )
        try:
            return self._layout_of(step, has_hosts=False)
        except TypeError:
            # A function of host arrays alone runs in a chain, where placeholders replace them.
            if np.ndarray not in map(type, arguments_of(step)):
                raise
        return self._layout_of(step, has_hosts=True)

    def _layout_of(self, step: ChainStep, *, has_hosts: bool) -> Layouts:
        recorder = LookingAhead(self.device, self.state, outer_recorder())
        return layout_of(step, evaluated(step, recorder, has_hosts=has_hosts)[0])

    def body_of(self, step: ChainStep, is_whole: Callable[[ArrayFunction], bool]) -> Body:
        """See `OpenDevice.body_of`."""
        self.look_ahead(step)
        recorder = BodyRecorder(self.device, self.state, outer_recorder(), is_whole)
        result, placeholders = evaluated(step, recorder, has_hosts=False)
        operands = [
            (argument, placeholders[id(argument)])
            for argument in arguments_of(step)
            if type(argument) in _CALLS
        ]
        return Body(recorder.steps, operands, result)


class _NumbersAsArguments:
    """Records the numbers of a chain as 0-d arrays instead of literals.

    Args:
        recorder: The recorder of the chain.

    Attributes:
        stand_ins: The placeholders of the numbers, in order.
    """

    def __init__(self, recorder: OperationRecorder) -> None:
        self.stand_ins: list[AccelRef] = []
        self._recorder = recorder

    def function(self, function: ArrayFunction) -> ArrayFunction:
        """Return the function with its number replaced by a placeholder."""
        return attrs.evolve(function, make=partial(self._make, function.make))

    def _make(self, make: Callable[..., Any], *args: Any) -> Any:
        (dtype,) = {arg.dtype for arg in args if isinstance(arg, AccelRef)}
        if dtype not in _NUMBER_DTYPES:
            raise NotSupportedError(f"numbers beside {dtype} are not handed over")
        stand_in = self._recorder.stand_in_for((), dtype)
        self.stand_ins.append(stand_in)
        return make(*[arg if isinstance(arg, AccelRef) else stand_in for arg in args])


async def _by_steps(chain: Chain, copies: Mapping[int, Any]) -> Any:
    """Run a chain step by step, which is the way of all chains in a recording."""
    recording = recording_now()
    if isinstance(recording, BodyRecorder):
        recording.keep_calls(chain)
    return await run_by_steps(chain, copies)


async def _run_recorded(
    chain: Chain, recorder: OperationRecorder, numbers: _NumbersAsArguments, placeholders: Mapping[int, Any]
) -> Any:
    """Run the steps of a chain, with the functions that record in place of the usual ones."""
    functions, replacements = [step.function for step in chain.steps], recorded_functions(recorder)
    try:
        for step in chain.steps:
            step.function = replacements.get(id(step.function), step.function)
        for index, _ in chain.numbers:
            chain.steps[index].function = numbers.function(functions[index])
        return await run_steps(chain.steps, placeholders)
    finally:
        for step, function in zip(chain.steps, functions, strict=True):
            step.function = function


async def _ask_all(parts: Sequence[tuple[Sequence[int], Call[Any]]]) -> tuple[Any, ...]:
    """Run calls concurrently, and return their results by position."""
    results: dict[int, Any] = {}

    async def ask(positions: Sequence[int], call: Call[Any]) -> None:
        results.update(zip(positions, await call, strict=True))

    try:
        await run_together(partial(ask, positions, call) for positions, call in parts)
        return tuple([results[position] for position in sorted(results)])
    finally:
        results.clear()
        for _, call in parts:
            call.close()


def _as_arrays(chain: Chain, dtypes: Sequence[DType]) -> list[HostArray]:
    """Convert the numbers of a chain to arrays, with the same rounding as a literal in an expression."""
    with np.errstate(over="ignore"):
        return [
            np.array(number, dtype.dtype) for (_, number), dtype in zip(chain.numbers, dtypes, strict=True)
        ]


def _fit_inline(hosts: Sequence[HostArray]) -> bool:
    """Return whether host arrays are small enough to be sent with the request."""
    return sum(aligned(host.nbytes) for host in hosts) <= MAX_INLINE_BYTES


def _writes_to_host(chain: Chain) -> bool:
    return any(step.function is METHODS["to_host out"] for step in chain.steps)


async def expanded_in_slices(chain: Chain) -> Chain:
    """Expand a chain, with a checkpoint after each slice of time, because deriving gradients takes long."""
    slices, end = chain.expansion(), perf_counter() + _SLICE
    try:
        while True:
            next(slices)
            if perf_counter() >= end:
                chain.let_use(is_spent=True)
                await trio.lowlevel.checkpoint()
                chain.let_use(is_spent=False)
                end = perf_counter() + _SLICE
    except StopIteration as done:
        expanded: Chain = done.value
        return expanded
    finally:
        slices.close()


def _copied(chain: Chain) -> dict[int, Any]:
    """Copy the small host arrays that a chain reads, keyed by the `id` of the program's array."""
    if _writes_to_host(chain):
        return {}
    return {id(host): host.copy() for host in chain.hosts if host.nbytes <= MAX_INLINE_BYTES}


class _Results:
    """Collects the arrays that a recorded chain returns.

    Args:
        chain: The chain.
        recorder: The recorder of the chain.

    Attributes:
        places: The first position of each block in `Chain.refs`.
        returned: The blocks of results that stay on the device.
        kept: The blocks of results that are copied to the host.
        leaves: See `Template.leaves`.
    """

    def __init__(self, chain: Chain, recorder: OperationRecorder) -> None:
        self.places = {ref.block.id: index for index, ref in reversed(list(enumerate(chain.refs)))}
        self.returned: list[int] = []
        self.kept: list[int] = []
        self.leaves: dict[int, tuple[int, bool]] = {}
        self._refs = chain.refs
        self._recorder = recorder
        self._noted: dict[int, Any] = {}

    def note(self, leaf: Any) -> Any:
        """Return the placeholder of a result, the same one for the same result."""
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
        if leaf.block.id in self._recorder.output_sizes:
            return leaf
        # A template must not keep the program's arrays alive.
        stand_in = self._recorder.stand_in_for((), leaf.dtype)
        same = [index for index, ref in enumerate(self._refs) if ref is leaf]
        # If an array is passed twice, take the last position, because written arguments come last.
        self.leaves[stand_in.block.id] = (same or [self.places[leaf.block.id]])[-1], bool(same)
        return _on(stand_in.block, leaf)


async def _make_template(
    chain: Chain,
    recorder: OperationRecorder,
    hosts: Sequence[AccelRef],
    numbers: Sequence[AccelRef],
    reply: Any,
    *,
    is_joined: bool,
    unjoined: frozenset[str],
) -> Template | None:
    """Make the template of a recorded chain; return None if it would not behave like the single steps."""
    recorded = recorder.recorded()
    results = _Results(chain, recorder)
    reply, positions = map_tree(reply, results.note), results.places
    if not (recorded.nodes and recorded.constants.keys() <= positions.keys()):
        return None
    host_sizes = {ref.block.id: ref.block.nbytes for ref in hosts}
    intermediates = recorded.output_sizes.keys() - {*results.returned, *results.kept}
    may_join = not is_joined and has_neighbours(recorded.nodes, intermediates, unjoined)
    if is_joined:
        recorded = attrs.evolve(recorded, nodes=await joined(recorded.nodes, intermediates, unjoined))
    layout = lay_out(recorded, (), results.returned, host_sizes, results.kept)
    uses: dict[str, list[tuple[int, str, int]]] = {"read": [], "update": []}
    for constant in layout.constants:
        ref = chain.refs[positions[constant.ref.block.id]]
        if constant.use == "update" and ref.nbytes != ref.block.nbytes:
            # If this run failed, the whole block would count as damaged, and not only the view.
            return None
        uses[constant.use].append((positions[ref.block.id], constant.name, ref.block.nbytes))
    reply, result = place_results(reply, layout)
    return Template(
        name=_name_of(chain),
        layout=attrs.evolve(layout, constants=(), inputs=()),
        recipe=layout.recipe.encode(),
        reads=uses["read"],
        updates=uses["update"],
        offsets=[layout.positions[ref.block.id][1] for ref in hosts],
        result=result,
        reply=reply,
        is_finished=is_finished(reply),
        leaves=results.leaves,
        new_hosts=chain.new_hosts,
        numbers=[ref.dtype for ref in numbers],
        until_joined=_FUSE_AFTER_RUNS if may_join else 0,
    )


def _name_of(chain: Chain) -> str:
    """Name a chain after its first six functions, with the number of the others."""
    steps = [step for step in chain.steps if step.function.how != "value" and step.function is not GATHER]
    names = [step.function.name for step in steps]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

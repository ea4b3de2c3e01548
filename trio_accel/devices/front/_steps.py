"""Steps: functions of arrays, traced once for each structure of their arguments (D214).

A chain is built for each request: its calls, its key, the lookup of its template. A step does this only at
its first call. From then on, a call compares its arguments, fills in the differences, and launches the cached
template.

The structure determines which operations run: dtypes, shapes, strides and offsets of arrays, sizes of their
blocks, which arrays share a block, and the values of integers, strings and the like. Floats are not part of
it. While a function is traced, a `Slot` replaces each float, and the recorded operation reads the number as a
0-d array. That is possible for the operators + - * / with arrays of float32 and float64. Everywhere else the
value of the number is part of the structure as well.

These orders matter:

* Host arrays and numbers are copied before the first checkpoint of a call, because the program may change
  them as soon as other tasks run.
* The blocks are checked after the last checkpoint before the launch.
* A function is called without a checkpoint in between, so `_TRACING` contains only the steps of one call.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter
from struct import error as struct_error
from struct import pack
from typing import Any, Generic, NoReturn, ParamSpec, TypeAlias, TypeVar, cast, overload

import attrs
import numpy as np
from trio.lowlevel import checkpoint, current_trio_token, enable_ki_protection

from ...actors import named_arguments, silence
from ...backends.base import AccelError, HostArray
from ...backends.base.kit.kept_plans import KeptPlan, KeptPlans
from ..base._errors import classify
from ..base._refusals import shown, what_to_do
from ..base._views import reach
from ..engine._library import APART
from ..operations._blocks import Block
from ..operations._calls import Call, SpentCall
from ..operations._chain import GATHER, Chain, arguments_of, takes_number, told_by
from ..operations._operation import RECORDING
from ..operations._ref import AccelRef
from ._chains import TOLD_BY_STEPS, Chains, expanded_in_slices, run_on
from ._layout import leaves_of, map_tree
from ._recorder import ChainRecorder
from ._results import finish_results
from ._slots import Slot, StandIns
from ._static_keys import static_key
from ._step_plans import NOT_HERE, StepPlan

__all__ = ["is_traced", "step"]

ParametersP = ParamSpec("ParametersP")
ResultT = TypeVar("ResultT")
_Key: TypeAlias = "tuple[object, ...]"

_logger = logging.getLogger("trio_accel.devices")
# The number of one step's traces that causes a warning.
_WARN_AFTER_TRACES = 32
# Values of these types are part of the structure as they are.
_PLAIN = frozenset({type(None), bool, int, str, bytes, type(...)})
_NESTED = frozenset({tuple, list, dict})
_STRINGS = frozenset({str})
_OF_SEVERAL = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
_CALLS = frozenset({Call, SpentCall})
# The cached value for a structure in which the values of numbers count.
_BY_VALUE: Any = object()
_TABLE = attrgetter("table")


# The steps with a running function, the innermost last.
_TRACING: ContextVar[tuple[TracedStep[Any, Any], ...]] = ContextVar("trio_accel.steps", default=())


@attrs.define(eq=False)
class _Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        key: Their structure.
        refs: The device arrays.
        blocks: Their blocks.
        hosts: The host arrays.
        numbers: The numbers outside of the structure.
        is_damaged: Whether another part of a block must not be used.
    """

    key: list[object] = attrs.field(factory=list[object])
    refs: list[AccelRef] = attrs.field(factory=list[AccelRef])
    blocks: list[Block] = attrs.field(factory=list[Block])
    hosts: list[HostArray] = attrs.field(factory=list["HostArray"])
    numbers: list[float] = attrs.field(factory=list[float])
    is_damaged: bool = False


class TracedStep(Generic[ParametersP, ResultT]):
    """A function of arrays, traced once for each structure of its arguments. Made by `step`.

    Args:
        function: The function.
        static: The names of parameters with values in the structure.
        stream: The name of its stream; empty for the stream of all recorded work.

    Attributes:
        function: The argument.
    """

    def __init__(
        self, function: Callable[ParametersP, Call[ResultT]], static: Sequence[str], stream: str
    ) -> None:
        functools.update_wrapper(self, function)
        self.function: Callable[ParametersP, Call[ResultT]] = function
        self._name: str = getattr(function, "__qualname__", type(function).__name__)
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
        except (TypeError, ValueError):
            self._parameters = {}
        unknown = [name for name in static if name not in self._parameters]
        if unknown:
            raise ValueError(f"step: {self._name} does not take the parameter {unknown[0]!r} of static")
        several = [name for name in static if self._parameters[name].kind in _OF_SEVERAL]
        if several:
            raise ValueError(
                f"step: static must name single parameters, and {several[0]!r} of {self._name} takes several "
                "arguments"
            )
        self._static: frozenset[int | str] = frozenset(
            [
                *static,
                *[
                    index
                    for index, (name, parameter) in enumerate(self._parameters.items())
                    if name in static and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
                ],
            ]
        )
        self._structures = 0
        self._stream = stream
        # The tables of plans are the devices', and must not keep the function and its closure. The plans end
        # with the step, because they have copies of the host arrays in the closure.
        self._plans: list[tuple[weakref.ref[KeptPlans[Any]], KeptPlan[Any]]] = []
        self._key: weakref.ref[object] = weakref.ref(self)
        weakref.finalize(self, _end_plans, self._plans).atexit = False

    def __repr__(self) -> str:
        return f"<step {self._name}, traced {self._structures} times>"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise TypeError(
            f"step {self._name}: a method cannot be a step, because its object is not an array; make a step "
            "of a function, or ta.step(object.method)"
        )

    def __call__(self, *args: ParametersP.args, **named: ParametersP.kwargs) -> Coroutine[Any, Any, ResultT]:
        """Run the step; see `step`."""
        if _TRACING.get():
            # The call is part of another step.
            return cast("Coroutine[Any, Any, ResultT]", self._call(args, named))
        if not (_CALLS.isdisjoint(map(type, args)) and _CALLS.isdisjoint(map(type, named.values()))):
            # The call joins the request of its argument, which is also a call.
            return cast("Coroutine[Any, Any, ResultT]", self._calls(args, named)[0])
        return self._ask(args, named)

    @enable_ki_protection
    async def _ask(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> ResultT:
        recording = RECORDING.get()
        if recording is not None and not recording.is_over:
            return await self._by_calls(args, named)
        arguments = self._arguments(args, named)
        key = tuple(arguments.key)
        device: Any = arguments.blocks[0].table.device
        cache: KeptPlans[Any] = device.chains.kept
        plan = cache.plans.get(key)
        if plan is None:
            args, named, arguments = self._copied(args, named)
            plan = await self._trace(key, args, named, arguments)
        if plan is not None and plan.value is _BY_VALUE:
            # A number cannot be a slot, so the values are part of the structure.
            plan.is_used = True
            key += tuple([pack("=d", number) for number in arguments.numbers])
            plan = cache.plans.get(key)
            if plan is None:
                args, named, arguments = self._copied(args, named)
                plan = await self._trace(key, args, named, arguments, by_value=True)
        if plan is None or plan.value is None or arguments.is_damaged:
            return await self._by_calls(args, named)
        plan.is_used = True
        return await self._run(plan.value, arguments, args, named)

    def _copied(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any], _Arguments]:
        """Copy the host arrays, because the program may change them during the turns of tracing."""

        def copied(leaf: Any) -> Any:
            return cast("Any", leaf).copy() if isinstance(leaf, np.ndarray) else leaf

        args, named = map_tree(args, copied), map_tree(dict(named), copied)
        return args, named, self._arguments(args, named)

    async def _run(
        self, plan: StepPlan, arguments: _Arguments, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> ResultT:
        """Run the cached plan, in place or by a launch."""
        template, chains, hosts = plan.template, plan.chains, arguments.hosts
        try:
            data = plan.pack(hosts, arguments.numbers)
        except struct_error:
            # A power of a negative number is complex, and so makes an array of another dtype.
            return await self._by_calls(args, named)
        reply: Any = NOT_HERE
        try:
            if plan.in_place is not None:
                # Cancellation and other tasks come first.
                await checkpoint()
                reply = plan.compute(arguments.blocks, arguments.refs, data)
            if reply is NOT_HERE:
                message = plan.run(chains, template, arguments.refs, hosts, template.name)
                message.payload, message.armed, message.blocks = data, plan, arguments.blocks
                chains.kept.counts.hits += 1
                device: Any = chains.device
                reply = await device.ask(message)
                plan.launched(device.dispatch)
            if not template.is_finished:
                reply = await finish_results(template.reply, reply)
        except AccelError as error:
            if template.updates or classify(error) not in TOLD_BY_STEPS:
                raise
        else:
            result: ResultT = reply if plan.nesting is None else _nested(plan.nesting, reply)
            return result
        # Nothing was changed. Run step by step, so that the failing call raises its own error.
        copies = {
            id(host): np.frombuffer(data, host.dtype, host.size, offset).reshape(host.shape)
            for host, offset in zip(hosts, template.offsets, strict=False)
        }

        def sent(leaf: Any) -> Any:
            return copies.get(id(leaf), leaf)

        return await self._by_calls(map_tree(args, sent), map_tree(dict(named), sent))

    def _arguments(  # noqa: C901, PLR0912  # calls that would make it shorter take as long as what they do
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> _Arguments:
        """Take the arguments of a call apart.

        Raises:
            TypeError: An argument cannot be part of a structure, or none is a device array.
            StaleRefError: An array is no longer valid.
        """
        arguments = _Arguments([self._key])
        key, refs, blocks = arguments.key, arguments.refs, arguments.blocks
        hosts, numbers = arguments.hosts, arguments.numbers
        values = (*args, *named.values()) if named else args
        if named:
            key.append(tuple(named))
        if self._static:
            names: list[int | str] = [*range(len(args)), *named]
            for name, argument in zip(names, values, strict=True):
                self._add(arguments, argument, name, is_static=name in self._static)
            values = ()
        # `_add` does the same for each argument, with one more Python call.
        for argument in values:
            kind = type(argument)  # pyright: ignore[reportUnknownVariableType]  # of anything
            if kind is AccelRef:
                spec, block = argument.spec, argument.block
                if block.is_released or block.damaged_by or block.generation < block.table.valid_since:
                    self._add(arguments, argument, 0, is_static=False)
                    continue
                key += id(spec.dtype), spec.shape, spec.strides, spec.offset, block.nbytes
                refs.append(argument)
                blocks.append(block)
            elif kind is np.ndarray:
                key += argument.dtype, argument.shape
                hosts.append(argument)
            elif kind is float:
                key.append(float)
                numbers.append(argument)
            elif kind in _PLAIN:
                key += kind, argument
            else:
                self._add(
                    arguments, argument, [value is argument for value in values].index(True), is_static=False
                )
        if not refs:
            self._refuse_hosts()
        if len(set(blocks)) < len(blocks):
            key.append(tuple(map(blocks.index, blocks)))
        if len(set(map(_TABLE, blocks))) > 1:
            # No plan has this key, so the function is traced, and the arrays are refused.
            key.append(_BY_VALUE)
        return arguments

    def _add(self, arguments: _Arguments, argument: Any, name: int | str, *, is_static: bool) -> None:
        """Add one argument: nested, static, or of a usual kind."""
        kind = type(argument)  # pyright: ignore[reportUnknownVariableType]  # of anything
        key = arguments.key
        if is_static and kind is not AccelRef and kind is not np.ndarray and kind not in _NESTED:
            try:
                hash(argument)
            except TypeError:
                self._refuse(argument, name)
            value = _bits_of(argument)
            key += (kind, value) if value is not NotImplemented else static_key(argument)
        elif kind in _NESTED:
            members = (
                cast("dict[str, Any]", argument).values() if kind is dict else cast("list[Any]", argument)
            )
            names = tuple(argument) if kind is dict else ()
            key += kind, len(argument), names if _STRINGS.issuperset(map(type, names)) else static_key(names)
            for member in members:
                self._add(arguments, member, name, is_static=is_static)
        elif isinstance(argument, AccelRef):
            spec, block = argument.spec, argument.block
            block.check(f"step {self._name}", spec)
            # An array in a block with damage elsewhere is usable, but a chain uses whole blocks.
            arguments.is_damaged = arguments.is_damaged or block.damaged_by is not None
            key += id(spec.dtype), spec.shape, spec.strides, spec.offset, block.nbytes
            arguments.refs.append(argument)
            arguments.blocks.append(block)
        elif kind is np.ndarray:
            key += argument.dtype, argument.shape
            arguments.hosts.append(argument)
        elif kind is float:
            key.append(float)
            arguments.numbers.append(argument)
        else:
            value = argument if kind in _PLAIN else _bits_of(argument)
            if value is NotImplemented:
                self._refuse(argument, name)
            key += kind, value

    def _refuse(self, argument: object, name: int | str) -> NoReturn:
        names = list(self._parameters)
        shown = names[name] if isinstance(name, int) and name < len(names) else name
        raise TypeError(
            f"step {self._name}: an argument{f' ({shown})' if shown != '' else ''} is of type "
            f"{type(argument).__name__}{what_to_do(argument)}; give arrays, numbers, strings, tuples, lists "
            "and dictionaries of these, or a hashable value whose parameter ta.step(static=...) names"
        )

    def _refuse_hosts(self) -> NoReturn:
        raise TypeError(
            f"step {self._name}: no argument is an array on a device, which says where it runs; put one "
            "there: await device.put(x)"
        )

    async def _by_calls(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> ResultT:
        """Call the function, and run its calls like any others."""
        call, nesting = self._calls(args, named)
        return cast("ResultT", _nested(nesting, await call))

    def _call(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the function, and return its result."""
        steps = _TRACING.get()
        if any(traced is self for traced in steps):
            raise RecursionError(f"step {self._name} calls itself while it is traced; write a loop in it")
        token = _TRACING.set((*steps, self))
        try:
            function: Callable[..., Any] = self.function
            return function(*args, **named)
        finally:
            _TRACING.reset(token)

    def _calls(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Call[Any], Any]:
        """Call the function; return its calls as one, and the nesting of its results if there are several.

        Raises:
            TypeError: It does not return a call.
        """
        result = self._call(args, named)
        if type(result) is Call:
            call: Call[Any] = result  # pyright: ignore[reportUnknownVariableType]  # `type` tells no parameter
            return call, None
        several = leaves_of(result) if type(result) in _NESTED else []
        if several and all(type(leaf) in (Call, AccelRef) for leaf in several):
            return Call[Any](GATHER, tuple(several)), map_tree(result, lambda _: 0)
        if inspect.iscoroutine(result):
            result.close()
        # The error suffices, so calls next to a wrong result are not reported as well.
        silence(*several)
        wrong = [leaf for leaf in several if type(leaf) not in (Call, AccelRef)]
        raise TypeError(
            f"step {self._name}: the function must return a call, or several in tuples, lists and "
            f"dictionaries, got {type(result).__name__}{f' with {shown(wrong[0])}' if wrong else ''}"
            + (
                "; a step awaits nothing, so it cannot use async functions"
                if inspect.isawaitable(result)
                else ""
            )
        )

    async def _trace(
        self,
        key: _Key,
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        arguments: _Arguments,
        *,
        by_value: bool = False,
    ) -> KeptPlan[Any] | None:
        """Record the operations of a structure, and cache them.

        Returns:
            The cached plan: a `StepPlan`, or `_BY_VALUE`; None if nothing is cached for now.
        """
        table = arguments.blocks[0].table
        device: Any = table.device
        for ref in arguments.refs:
            if ref.block.table is not table:
                raise ValueError(
                    f"step {self._name}: an argument is on {ref.device.path}, this runs on {device.path}; "
                    "copy it there: await x.copy_to(device)"
                )
        chains: Chains = device.chains
        if current_trio_token() is not chains.state.token:
            chains.state.check_run("step")
        recorder = ChainRecorder(device, chains.state, None)
        stand_ins = StandIns(self._name, self._static, recorder, has_slots=not by_value)
        cache = chains.kept
        try:
            traced = await self._traced(stand_ins, recorder, args, named)
            if traced is None:
                return self._keep(cache, key, _BY_VALUE)
            chain, nesting = traced
            try:
                self._check_arrays(chain, arguments, recorder)
                uses = _uses_of_slots(chain)
                if stand_ins.numbers.is_by_value or not all(
                    takes_number(chain.steps[index]) for index, _ in uses
                ):
                    return self._keep(cache, key, _BY_VALUE)
                constants = [np.array(host) for host in chain.hosts]
                chain.refs, chain.numbers = list(arguments.refs), cast("Any", uses)
                template = await chains.record(chain, recorder, stand_ins.hosts)
            finally:
                chain.let_go()
        finally:
            recorder.end()
        if template is None:
            # If the context is being replaced, the calls wait for the next one. Whether an array is borrowed
            # is not part of the structure.
            if not (
                chains.state.availability.is_ready and all(type(block) is Block for block in arguments.blocks)
            ):
                return None
            return self._keep(cache, key, _BY_VALUE if uses else None)
        self._tell_structures()
        new = cache.new(key)
        slots = [slot for _, slot in uses]
        plan = StepPlan.of(chains, template, constants, slots, nesting, new, run_on(self._stream))
        return self._keep(cache, key, plan, new)

    def _keep(
        self, cache: KeptPlans[Any], key: _Key, value: Any, new: KeptPlan[Any] | None = None
    ) -> KeptPlan[Any]:
        """Cache a plan until the end of the step."""
        plan = cache.keep(cache.new(key) if new is None else new, value)
        self._plans[:] = [(table, entry) for table, entry in self._plans if entry.state != "over"]
        self._plans.append((weakref.ref(cache), plan))
        return plan

    async def _traced(
        self, stand_ins: StandIns, recorder: ChainRecorder, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Chain, Any] | None:
        """Call the function with placeholders; return its chain and nesting, or None if it needs values."""
        token = RECORDING.set(recorder)
        try:
            call, nesting = self._calls(*stand_ins.of(args, named, self._parameters))
            chain = Chain(call)
            return await expanded_in_slices(chain) if chain.has_expansions else chain, nesting
        except Exception:
            if not stand_ins.numbers.values or stand_ins.numbers.is_refused:
                raise
            # A slot may be the reason. If not, the function fails with the values as well.
            return None
        finally:
            RECORDING.reset(token)

    def _check_arrays(self, chain: Chain, arguments: _Arguments, recorder: ChainRecorder) -> None:
        """Refuse device arrays other than arguments.

        Raises:
            ValueError: The function uses such an array.
        """
        spans: dict[int, list[tuple[int, int]]] = {}
        for ref in arguments.refs:
            spans.setdefault(id(ref.block), []).append(reach(ref.spec))
        for ref in chain.refs:
            start, end = reach(ref.spec)
            is_own = any(first <= start and end <= stop for first, stop in spans.get(id(ref.block), ()))
            if ref.block.table is not recorder.blocks and not is_own:
                raise ValueError(
                    f"step {self._name}: the function uses an array on {ref.device.path} that is not among "
                    "its arguments; pass it as an argument, because the step would keep this array when "
                    "your program makes a new one"
                )

    def _tell_structures(self) -> None:
        """Warn once about many structures, because a program that traces each time gains nothing."""
        self._structures += 1
        if self._structures == _WARN_AFTER_TRACES:
            _logger.warning(
                "step %s was traced for %d structures of its arguments: each dtype, shape and layout of an "
                "array, and each value of an integer, is one; pass what changes as a float or as an "
                "array",
                self._name,
                _WARN_AFTER_TRACES,
            )


def _end_plans(plans: list[tuple[weakref.ref[KeptPlans[Any]], KeptPlan[Any]]]) -> None:
    """End the plans of a step that the program has dropped."""
    for table, plan in plans:
        cache = table()
        if cache is not None:
            cache.end_dropped(plan)


def _bits_of(value: Any) -> object:
    """Return the bits of a number, because 0.0 equals -0.0; `told_by` of any other value."""
    if type(value) is float:
        return pack("=d", value)
    return pack("=2d", value.real, value.imag) if type(value) is complex else told_by(value)


def _uses_of_slots(chain: Chain) -> list[tuple[int, Slot]]:
    """List the slots among the arguments of a chain's steps, with the indexes of the steps."""
    return [
        (index, argument)
        for index, chain_step in enumerate(chain.steps)
        for argument in arguments_of(chain_step)
        if isinstance(argument, Slot)
    ]


def _nested(nesting: Any, results: Any) -> Any:
    """Nest several results as the function nested their calls."""
    if nesting is None:
        return results
    values = iter(results)
    return map_tree(nesting, lambda _: next(values))


def is_traced() -> bool:
    """Return whether the function of a step is running here, which cannot await."""
    return bool(_TRACING.get())


@overload
def step(
    function: Callable[ParametersP, Call[ResultT]], *, static: str | Sequence[str] = (), stream: str = ""
) -> Callable[ParametersP, Coroutine[Any, Any, ResultT]]: ...
@overload
def step(
    function: Callable[ParametersP, tuple[Any, ...]],
    *,
    static: str | Sequence[str] = (),
    stream: str = "",
) -> Callable[ParametersP, Coroutine[Any, Any, tuple[Any, ...]]]: ...
@overload
def step(
    *, static: str | Sequence[str] = (), stream: str = ""
) -> Callable[
    [Callable[ParametersP, Call[ResultT]]], Callable[ParametersP, Coroutine[Any, Any, ResultT]]
]: ...
@named_arguments
def step(function: Any = None, *, static: str | Sequence[str] = (), stream: str = "") -> Any:
    """Make an async function from a function of arrays, tracing it once for each structure of arguments.

    The first call with arguments of a structure calls the function and records the operations of the returned
    call. All later calls launch the recorded operations, as one request with one outcome, without calling the
    function again. The results have the same bits as if you awaited the same calls one by one.

    >>> import trio_accel as ta
    >>> @ta.step
    ... def layer(x, weights, scale):
    ...     return (ta.nn.relu(ta.linalg.matmul(x, weights)) * scale).to_host()

    The structure consists of the dtypes, shapes, strides and offsets of arrays, the sizes of their blocks,
    the arrays that share memory, and the values of all other arguments except floats. A float may differ at
    each call. While the function is traced, its value is not known, so a branch like ``if scale > 1`` is
    refused. If a float is not an operand of ``+ - * /`` with arrays of float32 or float64, each of its values
    is a separate structure, and so is each value of a NumPy scalar.

    Effects of the Python code, such as a print, happen only when it is traced. Host arrays other than the
    arguments are read at that time.

    Args:
        function: A plain function. It returns a call, or several in tuples, lists and dictionaries, and
            cannot await. Its arguments are arrays of one device, at least one, NumPy arrays, which are sent
            with the request, numbers, strings, and tuples, lists and dictionaries of these. Every device
            array that it uses must be an argument.
        static: The names of parameters with values in the structure: floats that decide, and hashable objects
            of other types. Objects are compared by the types and bits of their state, so 0.0 and -0.0, or 1
            and True, are two values. Fields that a dataclass excludes from equality do not count.
        stream: The name of a separate stream, which steps of the same name share; empty for the stream of all
            recorded work. On a GPU, steps of two streams run at the same time if neither waits for an array
            of the other. Each stream has an actor in the tree, and handles of the libraries that it uses.

    Returns:
        The async function. If an argument is a call, it returns a call: the function becomes a part of that
        request.

    Raises:
        TypeError: The function is async or does not return a call, an argument has a type that cannot be part
            of a structure, or a number decides.
        ValueError: The function uses another array of a device, or arrays of two devices.

    Calls raise the errors of the operations. See `Device.ask` for cancellation: a call cancelled before its
    launch never begins. A device keeps at most 1024 structures of steps and chains, the most recently used
    ones.
    """
    if not isinstance(static, Iterable):
        raise TypeError(f"step: static must be names of parameters, got {shown(static)}")
    names = (static,) if isinstance(static, str) else tuple(static)
    if function is None:
        return functools.partial(step, static=names, stream=stream)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"step: {function.__qualname__} is async; a step is a plain function that returns a call and "
            "awaits nothing"
        )
    if not (stream == "" or (isinstance(stream, str) and stream.isidentifier() and stream != APART[1:])):
        raise ValueError(f"step: stream must be a name of letters, digits and underscores, got {stream!r}")
    if not callable(function):
        raise TypeError(f"step: {function!r} is not a function")
    return TracedStep[Any, Any](cast("Any", function), names, stream)

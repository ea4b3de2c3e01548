"""Opening programs; and a function as one operation, without opening it first."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

import attrs
import numpy.typing as npt
import trio

from ..actors import Backoff, Intensity, NotAwaited, TaskEvent, bind_arguments
from ..backends.base.contract.program_definition import ProgramDefinition, build
from ..devices import AccelRef, Device, check_device, opened, shown
from ..devices.base._library_paths import why_not_found
from ._messages import PATH, ProgramActor, Ready, arrays_in, call_tree, message_class
from ._method import PlainT, ProgramMethod, describe_function, state_of
from ._opened import Anew, Opened, StateArray
from ._program import FunctionProgram, OpenProgram, Program

__all__ = ["ProgramOpening", "open_program", "run"]

P = ParamSpec("P")
T = TypeVar("T")
ProgramT_co = TypeVar("ProgramT_co", bound=OpenProgram, covariant=True)

_numbers = itertools.count(1)
_names: WeakKeyDictionary[Device, set[str]] = WeakKeyDictionary()


class ProgramOpening(NotAwaited, Generic[ProgramT_co]):
    """Opens a program by ``await``, or by ``async with``, which closes it. Made by `open_program`."""

    what_to_do = "the program is not open yet: async with ta.open_program(...) as program"

    def __init__(self, plan: ProgramPlan, make: Callable[[Opened], ProgramT_co]) -> None:
        self._plan = plan
        self._make = make
        self._program: OpenProgram | None = None

    def __await__(self) -> Generator[Any, Any, ProgramT_co]:
        return self._open().__await__()

    async def __aenter__(self) -> ProgramT_co:
        program = await self._open()
        self._program = program
        return program

    async def __aexit__(self, *_: object) -> None:
        if self._program is not None:
            await self._program.aclose()  # noqa: ASYNC102  # what it does when it is cancelled is bounded

    async def _open(self) -> ProgramT_co:
        return self._make(await self._plan.open())


class _FunctionOptions(TypedDict, total=False):
    """The options of a function, without the arguments of a constructor."""

    name: str | None
    intensity: Intensity | None
    backoff: Backoff | None


@overload
def open_program(  # type: ignore[overload-overlap]  # a class is also a callable, and comes first
    device: Device,
    program: type[T],
    /,
    *args: object,
    name: str | None = None,
    intensity: Intensity | None = None,
    backoff: Backoff | None = None,
    **kwargs: object,
) -> ProgramOpening[Program[T]]: ...
@overload
def open_program(
    device: Device, program: Callable[P, PlainT], /, **options: Unpack[_FunctionOptions]
) -> ProgramOpening[FunctionProgram[P, PlainT]]: ...
@overload
def open_program(
    device: Device, program: Callable[P, npt.NDArray[Any]], /, **options: Unpack[_FunctionOptions]
) -> ProgramOpening[FunctionProgram[P, AccelRef]]: ...
@overload
def open_program(
    device: Device, program: Callable[P, Any], /, **options: Unpack[_FunctionOptions]
) -> ProgramOpening[FunctionProgram[P, Any]]: ...
def open_program(
    device: Device,
    program: Callable[..., Any],
    /,
    *args: object,
    name: str | None = None,
    intensity: Intensity | None = None,
    backoff: Backoff | None = None,
    **kwargs: object,
) -> ProgramOpening[Any]:
    """Open a class of your own as a program on a device: ``await``, or ``async with``, which closes it.

    The class is instantiated in the process with the device's context, a worker process if there is one, and
    again after each loss of that context. Its device arrays survive; its constructor makes everything else
    again, and so does its method `warm_up` if it exists. `Program.ask` calls its other methods. A function is
    a program without state.

    Args:
        device: The device.
        program: A class or function at the top level of a module that the worker can import.
        args: Arguments of the constructor: device arrays, NumPy arrays, which are copied to the device first,
            None, numbers, strings, bytes, and dicts, lists and tuples of these.
        name: The name in the tree, unique on the device; by default the name of the class with a number.
        intensity: The restarts that it allows; one more, and only this program ends. None: as the device's
            libraries.
        backoff: The wait before a restart. None: as the device's libraries.
        kwargs: Keyword arguments of the constructor.

    Returns:
        A `Program`, or a `FunctionProgram` for a function.

    Raises:
        TypeError, ValueError: Arguments that the constructor does not take, that cannot be transferred, or
            belong to another device; a class of ``__main__`` or inside a function; a name in use.
        StaleRefError: An array was released or lost.
        ImportError: The worker cannot import the module.
        NotSupportedError: The backend does not run programs.
        Exception: The error of the constructor or `warm_up`, with a note that names it.
    """
    plan = ProgramPlan(device, program, args, kwargs, name, intensity, backoff)
    make: Any = Program if isinstance(program, type) else FunctionProgram
    return ProgramOpening(plan, make)


@attrs.define(eq=False, repr=False)
class ProgramPlan:
    """A program to open; see `open_program` for its arguments."""

    _device: Device
    _target: Callable[..., Any]
    _args: tuple[object, ...]
    _kwargs: dict[str, object]
    _name: str | None
    _intensity: Intensity | None
    _backoff: Backoff | None
    _asked_by: str = attrs.field(default="open_program", kw_only=True, alias="asked_by")
    _refuses_all: bool = attrs.field(default=False, kw_only=True, alias="refuses_all")
    # The arguments of a class.
    _bound: inspect.BoundArguments | None = None
    _path: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        check_device("open_program", self._device)
        options = ("intensity", self._intensity, Intensity), ("backoff", self._backoff, Backoff)
        for option, value, cls in options:
            if value is not None and not isinstance(cast("object", value), cls):
                raise TypeError(f"open_program: {option} must be {cls.__name__} or None, got {value!r}")
        self._path = _import_path(self._target, self._asked_by)
        if isinstance(self._target, type):
            label, signature = f"open_program: {self._target.__qualname__}", inspect.signature(self._target)
            option_names = "name", "intensity", "backoff"
            self._bound = bind_arguments(label, signature, self._args, self._kwargs, *option_names)
        else:
            describe_function(self._target)
            if self._args or self._kwargs:
                raise TypeError(
                    f"open_program: {self._path} is a function, whose arguments are those of ask()"
                )
        name: object = self._name
        if name is not None and (not isinstance(name, str) or not name or set(name) & set("/ ?:\n\t")):
            raise ValueError(
                "open_program: name must be a string without spaces and without '/', ':' and '?', got "
                f"{name!r}"
            )

    async def open(self) -> Opened:
        """Have the device make the program; a failure leaves no trace."""
        device = self._device
        names = _names.setdefault(device, set())
        name = self._name or self._free_name(names)
        if name in names:
            raise ValueError(f"open_program: {device.path} has a program named {name!r} already")
        names.add(name)
        try:
            prepared = await self._prepare(name, None if self._bound is None else self._bound.arguments)
            return await prepared.start()
        except BaseException:
            names.discard(name)
            raise

    async def _prepare(self, name: str, arguments: Mapping[str, object] | None) -> Anew:
        """Prepare an instance with these arguments of the constructor; None for a function."""
        trees, arrays = await self._arguments(arguments)
        updated = frozenset[str]() if self._bound is None else state_of(cast("type[object]", self._target))
        definition = ProgramDefinition(
            name=name,
            number=next(_numbers),
            target=self._path,
            arguments=None if self._bound is None else call_tree(self._bound.signature, trees),
            arrays=tuple(array.ref.spec for array in arrays),
            updated=frozenset(number for number, array in enumerate(arrays) if array.parameter in updated),
            intensity=self._intensity,
            backoff=self._backoff,
            refuses_all=self._refuses_all,
        )
        text = definition.encode()
        changed = {array.ref.block for array in arrays if array.parameter in updated}
        refs = [array.ref for array in arrays]
        # The trees get the arrays of the device in place of NumPy's: a reset that keeps them means these.
        device_arguments = {parameter: build(tree, refs) for parameter, tree in trees.items()}

        async def start() -> Opened:
            with ExitStack() as held:
                recoveries = opened(self._device).state.recoveries
                kernels = ProgramActor.library_of(text)
                recoveries.expect(kernels, name, self._path.partition(":")[0])
                held.callback(recoveries.forget, kernels)
                frozen = tuple([array for array in arrays if array.ref.block not in changed])
                for array in frozen:
                    held.enter_context(_frozen(array.ref.block, name))
                await self._start(f"{PATH}?{text}", arrays)
                return Opened(
                    device=self._device,
                    name=name,
                    target=self._target,
                    library=f"{PATH}?{text}",
                    frozen=frozen,
                    state=[array for array in arrays if array.ref.block in changed],
                    prepare_again=lambda args, kwargs: self._prepare_again(
                        name, device_arguments, arrays, args, kwargs
                    ),
                    thaw=held.pop_all().close,
                    on_close=partial(_names[self._device].discard, name),
                )

        return Anew(arrays, start)

    async def _prepare_again(
        self,
        name: str,
        previous_arguments: Mapping[str, object],
        arrays: Sequence[StateArray],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Anew:
        """Prepare the same program, with some of its arguments replaced."""
        if self._bound is None:
            return await self._prepare(name, None)
        merged = _merged(self._target, self._bound.signature, previous_arguments, args, kwargs)
        anew = await self._prepare(name, merged)
        _check_alike(f"reset: {self._full_name}", arrays, anew.arrays)
        return anew

    async def _start(self, library: str, arrays: list[StateArray]) -> None:
        """Have it made in the current context; a failure leaves no trace."""
        device = self._device
        message = message_class(Ready, self._full_name)
        try:
            await device.ask(message(library, arrays))
        except BaseException:
            with trio.move_on_after(device.options.close_grace, shield=True):
                await device.close_library(library)
            raise

    @property
    def _full_name(self) -> str:
        module, _, qualname = self._path.partition(":")
        return f"{module.rpartition('.')[2]}.{qualname}"

    async def _arguments(
        self, arguments: Mapping[str, object] | None
    ) -> tuple[dict[str, Any], list[StateArray]]:
        """Return the trees of the constructor's arguments, and the arrays among them."""
        state: list[StateArray] = []
        trees: dict[str, Any] = {}
        if arguments is None:
            await trio.lowlevel.checkpoint()
            return trees, state
        hosts: dict[int, AccelRef] = {}
        for parameter, value in arguments.items():
            trees[parameter], arrays = arrays_in(f"{self._full_name}: {parameter}", value, len(state))
            for position, array in arrays:
                ref: AccelRef | None = array if isinstance(array, AccelRef) else hosts.get(id(array))
                if ref is None:
                    host: Any = array
                    ref = hosts[id(array)] = await self._device.put(host)
                state.append(StateArray(parameter, position.partition(": ")[2], ref))
        return trees, state

    def _free_name(self, names: set[str]) -> str:
        stem = self._path.rpartition(":")[2].rpartition(".")[2].lower()
        return next(name for number in itertools.count(1) if (name := f"{stem}-{number}") not in names)


@contextmanager
def _frozen(block: Any, name: str) -> Generator[None]:
    """Refuse writes to a block, and its release, during the body."""
    block.frozen_by += (name,)
    try:
        yield
    finally:
        # One entry only: during a reset the next instance has frozen the same arrays under the same name.
        names = list(block.frozen_by)
        names.remove(name)
        block.frozen_by = tuple(names)


def _merged(
    target: Callable[..., Any],
    signature: inspect.Signature,
    previous_arguments: Mapping[str, object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> dict[str, object]:
    """Return the previous arguments of a constructor, updated with the given ones."""
    try:
        updates = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"reset: {target.__qualname__}{signature}: {error}") from None
    merged = {**previous_arguments, **updates}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and name in previous_arguments and name in updates:
            merged[name] = {**cast("dict[str, object]", previous_arguments[name]), **updates[name]}
    return merged


def _check_alike(label: str, opened_arrays: Sequence[StateArray], arrays: Sequence[StateArray]) -> None:
    """Refuse arrays with other dtypes and shapes, because users of the program rely on these.

    Raises:
        ValueError: There is one.
    """
    expected = {array.position: array.ref for array in opened_arrays}
    replacements = {array.position: array.ref for array in arrays}
    for position in expected.keys() ^ replacements.keys():
        verb = "needs" if position in expected else "was opened without"
        raise ValueError(f"{label}: it {verb} an array {position}; for other arrays open another program")
    for position, ref in expected.items():
        if (replacements[position].dtype, replacements[position].shape) != (ref.dtype, ref.shape):
            raise ValueError(
                f"{label}: {position} must be {ref.dtype} of shape {ref.shape}, as it was opened with, got "
                f"{replacements[position].dtype} of shape {replacements[position].shape}"
            )


def _import_path(target: Any, asked_by: str) -> str:
    """Return the import path of a class or function.

    Raises:
        TypeError: It is neither.
        ValueError: Another process would not find it.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not (callable(target) and isinstance(module, str) and isinstance(name, str)):
        advice = f"; pass the class and its arguments: {type(target).__name__}, ..." if module else ""
        raise TypeError(f"{asked_by}: program must be a class or a function, got {shown(target)}{advice}")
    reason = why_not_found(target)
    if reason is not None:
        raise ValueError(f"{asked_by}: {module}.{name} {reason}")
    return f"{module}:{name}"


_MOST_KEPT = 32
"""The maximum number of open functions on a device; each costs a stream, and is made again after a loss."""

# Only functions that declare updates can fail. Restarts are free, because functions are stateless.
_ALWAYS = Intensity(1_000_000, 1.0)
_AT_ONCE = Backoff(base=0.0)


@overload
async def run(function: Callable[P, PlainT], /, *args: P.args, **kwargs: P.kwargs) -> PlainT: ...
@overload
async def run(function: Callable[P, npt.NDArray[Any]], /, *args: P.args, **kwargs: P.kwargs) -> AccelRef: ...
@overload
async def run(function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any: ...
async def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a function where its arrays are, as one supervised operation.

    The function gets NumPy arrays on the CPU backend; on CUDA, objects that CuPy, PyTorch and JAX accept
    without a copy. Its arrays determine its order with other operations. Like them, it is timed, cancelled
    and run again after a loss (`DeviceOptions.retry`). It runs on the device of its arrays.

    Its first run on a device opens it there, as by `open_program`. The 32 most recently used functions stay
    open. With `programs.method` it may declare its result (``out=``), which saves an operation, and the
    arguments that it changes (``updates=``).

    Args:
        function: A function at the top level of a module that the worker can import.
        args: Its arguments: arrays of one device, at least one; NumPy arrays, which are copied there first;
            None, numbers, strings, bytes, and dicts, lists and tuples of these.
        kwargs: Its keyword arguments.

    Returns:
        The function's result, with references in place of arrays. They share no memory with its arguments.

    Raises:
        TypeError, ValueError: No device array, arrays of several devices, or arguments that the function does
            not take; a function that another process cannot import (a lambda, a closure, a function of
            ``__main__``), an async function, or a generator.
        StaleRefError: An array was released or lost.
        ImportError: The worker cannot import the module.
        NotSupportedError: The backend does not run programs.
        Exception: The function's own error, with a note that names the function. Nothing restarts. From a
            worker, a class of your own arrives unchanged if the function declares it (``refuses=``), and
            otherwise as an error with its text.
        ActorFailedError: The function declares `updates` and raised; its arrays are damaged.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    if isinstance(function, type):
        raise TypeError(f"run: {function.__qualname__} is a class, and must be a function; see open_program")
    device = _device_of(function, (args, kwargs))
    # The device holds the functions, because their values would keep the keys of a weak dictionary alive.
    functions: _Functions | None = vars(device).get("_functions")
    if functions is None:
        functions = vars(device)["_functions"] = _Functions(device)
    program = functions.programs.get(function) or await functions.open(function)
    functions.use(function)
    return await program.ask(*args, **kwargs)


class _Run(FunctionProgram[..., Any]):
    """A function opened by `run`: the caller gets all its errors."""

    def _find(self, method_or_name: object) -> ProgramMethod:
        method = super()._find(method_or_name)
        return attrs.evolve(method, refuses=(*method.refuses, Exception))


class _Functions:
    """The open functions of a device, the most recently used last."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._opening: dict[Callable[..., Any], TaskEvent] = {}
        self.programs: dict[Callable[..., Any], _Run] = {}

    def use(self, function: Callable[..., Any]) -> None:
        self.programs[function] = self.programs.pop(function)

    async def open(self, function: Callable[..., Any]) -> _Run:
        """Open a function; concurrent callers for the same function open it once."""
        while (event := self._opening.get(function)) is not None:
            await event.wait()
            if function in self.programs:
                return self.programs[function]
        plan = ProgramPlan(
            self._device, function, (), {}, None, _ALWAYS, _AT_ONCE, asked_by="run", refuses_all=True
        )
        event = self._opening[function] = TaskEvent()
        try:
            idle = [candidate for candidate, program in self.programs.items() if not program.is_asking]
            for evicted in idle[: max(0, len(self.programs) + len(self._opening) - _MOST_KEPT)]:
                await self.programs.pop(evicted).aclose()
            program = self.programs[function] = _Run(await plan.open())
            return program
        finally:
            del self._opening[function]
            event.set()


def _device_of(function: object, values: object) -> Device:
    """Return the device of the first array among the arguments; the operation checks the others."""
    for value in _leaves(values):
        if isinstance(value, AccelRef):
            return value.device
    name = getattr(function, "__qualname__", repr(function))
    raise TypeError(
        f"run: {name} must get an array of a device, as it runs where its arrays are; put one there first: "
        "x = await device.put(array)"
    )


def _leaves(value: object) -> Iterable[object]:
    """Yield the values in nested collections, which may be nested deeper than calls may."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            waiting += reversed(list(cast("Mapping[object, object]", node).values()))
        elif isinstance(node, (list, tuple)):
            waiting += reversed(list(cast("Sequence[object]", node)))
        else:
            yield node

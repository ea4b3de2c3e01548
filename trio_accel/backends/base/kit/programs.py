"""A program in the process that runs it: an instance of the user's class, and calls of its methods.

All backends share this part. A backend's adapter makes the arrays and decides where the calls run.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast, runtime_checkable
from weakref import ref

import attrs
import numpy as np

from ....actors import ActorError, describe
from ..contract import ops
from ..contract.dtypes import DType, HostArray, Ints
from ..contract.errors import AccelError, LibraryError, Refused
from ..contract.program_definition import (
    MOST_TEXT,
    ProgramDefinition,
    build,
    flatten,
    text_of,
    tree_of,
    values_of,
)
from .lent import Keepers, Lent
from .library import ComputingDevice
from .program_values import check_written, leaves_of, shortened
from .ranks import ProgramRank, RoomRank, as_rank

INSTANCE_LOST = "gone"
"""Code of the `LibraryError` of a result or stream that is not kept: the program was made again since."""

_logger = logging.getLogger("trio_accel.backends")

REFUSES = "_trio_accel_refuses"
"""Attribute of a method: classes of the errors that are its asker's own."""

ENQUEUES = "_trio_accel_enqueues"
"""Attribute of a method: whether it only enqueues work, and never waits."""

UPDATES = "_trio_accel_updates"
"""Attribute of a method: what it changes, parameters of its own and with ``"self."`` of the constructor."""


_ASKER: ContextVar[ops.Asker | None] = ContextVar("trio_accel.asker", default=None)


def is_cancelled() -> bool:
    """Return, in a method of a program or a function, whether the caller has left.

    The caller has left as soon as it is cancelled, for example by a deadline, before its grace is over; or
    when an inline context was lost. Then nobody gets the result, and the method may return or raise early. An
    error counts as usual: it restarts the program unless it is declared. Threads that the method starts get
    the same result if they run in a copy of its context (`contextvars.copy_context`).

    Returns:
        Whether the caller has left. False outside of a call, so that a program also works without a device.
    """
    asker = _ASKER.get()
    return asker is not None and asker.has_left


def report_progress(value: object) -> None:
    """Report from a method of a program, or a function, to the caller's `on_progress` callback.

    It never waits. If reports arrive faster than the caller's loop takes them, the last one stays. Without
    such a callback, or outside of a call, the value is checked and dropped.

    Args:
        value: None, a number, a string, bytes, or a dict, list or tuple of these. It is copied.

    Raises:
        TypeError: It is of another type, or contains another type.
        ValueError: It is nested more than 32 deep, or longer than 1 MiB as text.
    """
    text = text_of(flatten("report_progress: value", value, lambda _label, _value: None))
    if len(text) > MOST_TEXT:
        raise ValueError(
            f"report_progress: the value is {len(text)} characters as text, at most {MOST_TEXT} are allowed"
        )
    asker = _ASKER.get()
    if asker is not None:
        asker.report(text)


@runtime_checkable
class ImportsCode(Protocol):
    """A library that imports a module of the user's when it is opened.

    Attributes:
        import_seconds: The duration of that import.
    """

    import_seconds: float


class ProgramArrays(Protocol):
    """The arrays of a backend, as programs see them."""

    def view(self, array: ops.ArraySpec, *, write: bool) -> object:
        """Make the object by which a program uses an array.

        Raises:
            KeyError: No block has this id.
        """
        ...

    def dtype_and_shape(self, value: object) -> tuple[str, Ints] | None:
        """Return the dtype and shape of an array that a method has returned; None if it is not an array.

        Raises:
            TypeError: Devices do not support such an array.
        """
        ...

    def keep(self, value: object) -> object:
        """Return a copy of a returned array: the program may go on changing its own."""
        ...

    def copy(self, source: object, out: object) -> None:
        """Copy an array to one of the same dtype and shape that `view` has made."""

    def protect(self, views: Sequence[object], *, write: bool) -> None:
        """Let the program write to its arrays from now on, or not, as far as its libraries know the mark."""

    def end(self, views: Sequence[object]) -> Sequence[Lent]:
        """End the call of these arrays: from now on they are read-only.

        Returns:
            References to the arrays, which show whether the call has kept them.
        """
        ...

    def rank(self, meeting: Mapping[str, Any], asker: ops.Asker) -> ProgramRank:
        """Make the rank for a call of all ranks, from the application's description of the meeting."""
        ...

    def when_done(self, check: Callable[[], None]) -> None:
        """Check which arguments a call has kept, when all its work that may use them is done."""


class HostProgramArrays:
    """Arrays of a device in the host's memory, which programs have as NumPy's; see `ProgramArrays`."""

    def __init__(self, device: ComputingDevice) -> None:
        self._device = device

    def view(self, array: ops.ArraySpec, *, write: bool) -> HostArray:
        """Make an array over the memory."""
        return self._device.host_view(array, write=write)

    def dtype_and_shape(self, value: object) -> tuple[str, Ints] | None:
        """Return dtype and shape of an array."""
        if not (isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")):
            return None
        array = _host(value)
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("a masked array; fill it first: array.filled(value)")
        return DType.of(array.dtype).value, array.shape

    def keep(self, value: object) -> HostArray:
        """Copy an array."""
        return np.array(_host(value))

    def copy(self, source: object, out: object) -> None:
        """Copy an array to another."""
        np.copyto(cast("HostArray", out), _host(source))

    def protect(self, views: Sequence[object], *, write: bool) -> None:
        """Mark arrays as writable or read-only."""
        for view in cast("Sequence[HostArray]", views):
            # A view of an argument lent for reading stays as it is.
            with suppress(ValueError):
                view.flags.writeable = write

    def end(self, views: Sequence[object]) -> Sequence[Lent]:
        """Make the arrays of a call read-only."""
        # A program may keep them, and their memory is another array's when this one is released.
        self.protect(views, write=False)
        return [ref(view.base) for view in cast("Sequence[HostArray]", views)]

    def rank(self, meeting: Mapping[str, Any], asker: ops.Asker) -> ProgramRank:
        """Make a rank, which meets others in shared memory."""
        return RoomRank(meeting, asker)

    def when_done(self, check: Callable[[], None]) -> None:
        """Look at once: a call computes before it returns."""
        check()


def _host(value: Any) -> HostArray:
    return cast("HostArray", value if isinstance(value, np.ndarray) else np.from_dlpack(value))


@attrs.frozen
class _PendingResult:
    """Result of a method, until it is fetched."""

    text: bytes
    arrays: list[object]


@attrs.frozen(eq=False)
class _ItemSource:
    """A method that yields, from its first item to its end.

    Attributes:
        generator: The method, between two items.
        views: Its arrays, which are lent until it ends.
        updated: Those that it changes; it may write to them while it makes an item.
    """

    generator: Generator[object, None, object]
    views: Sequence[object]
    updated: Sequence[object]


class ProgramHost:
    """One instance of a program. Made in a thread, because constructor and `warm_up` may take long.

    Args:
        argument: Text of the `ProgramDefinition`.
        arrays: The arrays of the backend.
        within: Makes the context manager that constructor and `warm_up` run in. It is called when the module
            is imported.

    Attributes:
        definition: Its definition.
        import_seconds: How long the import of its module has taken.

    Raises:
        ImportError: This process does not have the module.
        Exception: The error of constructor or `warm_up`, with a note that names them.
    """

    def __init__(
        self,
        argument: str,
        arrays: ProgramArrays,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.definition: ProgramDefinition = ProgramDefinition.decode(argument)
        self._arrays = arrays
        self._kept: dict[int, _PendingResult] = {}
        # Whether a method takes arrays for its result, by its name.
        self._takes_out: dict[str, bool] = {}
        self._streams: dict[int, _ItemSource] = {}
        self._keepers = Keepers()
        definition = self.definition
        label = f"program {definition.name!r}: {definition.target}"
        began = time.perf_counter()
        target = load_target(definition.target, label)
        self.import_seconds: float = time.perf_counter() - began
        self._module: str = definition.target.partition(":")[0]
        self._program: Any = target
        # Arrays of the constructor's parameters, under the names that methods declare.
        self._state: dict[str, list[object]] = {}
        if definition.arguments is not None:
            with within():
                self._program = self._construct(target, label)

    def _construct(self, target: Any, label: str) -> Any:
        definition, arrays = self.definition, self._arrays
        updated = definition.updated
        views = [
            arrays.view(array, write=number in updated) for number, array in enumerate(definition.arrays)
        ]
        args, kwargs = build(definition.arguments, views)
        with _UserCode(f"{label}()"):
            program = target(*args, **kwargs)
        warm_up = getattr(program, "warm_up", None)
        if callable(warm_up):
            with _UserCode(f"{label}.warm_up()"):
                warm_up()
        self._program, view_ids = program, set(map(id, views))
        for name, value in inspect.signature(target).bind(*args, **kwargs).arguments.items():
            leaves = [leaf for leaf in leaves_of(value) if id(leaf) in view_ids]
            if leaves:
                self._state[f"self.{name}"] = leaves
        self._protect([views[number] for number in updated], write=False)
        return program

    def _protect(self, views: Sequence[object], *, write: bool) -> None:
        """Let the methods write to arrays of the constructor and to views of them, or not."""
        states: list[Any] = [view for view in views if isinstance(view, np.ndarray)]
        leaves = leaves_of(self._program, self._module)
        # NumPy cannot view arrays on a GPU, and a search for some would take long.
        arrays: list[Any] = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)] if states else []
        aliases = [array for array in arrays if any(np.may_share_memory(array, state) for state in states)]
        self._arrays.protect([*views, *aliases], write=write)

    def call(self, spec: ops.ProgramCall) -> None:
        """Call a method, where the backend runs calls; only `ProgramReturn` has a result.

        Of a method that yields, only the next item is made: `ProgramNext`.

        Raises:
            KeyError: An array's block does not exist.
            Refused: The method refuses the request; of a declared class, the error is the cause.
            Exception: The error of the method, with a note that names it.
            RuntimeError: The method keeps an array lent for writing.
            TypeError: The result differs from the declaration, or no device supports it.
        """
        if isinstance(spec, ops.ProgramReturn):
            for number in spec.forget:
                self._forget(number)
        if isinstance(spec, ops.ProgramNext):
            self._next(spec)
            return
        if not spec.arguments:
            return
        lent = self._call(spec)
        for reference in lent:
            if reference() is not None:
                self._report_kept(spec, lent)
                return

    def _report_kept(self, spec: ops.ProgramCall, lent: Sequence[Lent]) -> None:
        """Report arrays that a call has kept."""
        label, function, _ = self._method(spec.method)

        def named(kept_ids: set[int]) -> str:
            args, kwargs, *_ = build(tree_of(spec.arguments), lent, values_of(spec.packed))
            arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments.items()
            names = [
                name for name, value in arguments if any(id(leaf) in kept_ids for leaf in leaves_of(value))
            ]
            return ", ".join(names or ["out"])

        reads = len(spec.read)
        check = partial(self._keepers.report_kept, label, lent[:reads], lent[reads:], named)
        if any(reference() is not None for reference in lent[reads:]):
            check()
        else:
            self._arrays.when_done(check)

    def _call(self, spec: ops.ProgramCall) -> Sequence[Lent]:
        """Call a method; return the arrays that it was lent, to which nothing refers here any longer."""
        label, function, takes_out = self._method(spec.method)
        inputs = [self._arrays.view(array, write=False) for array in spec.read]
        updated, outputs = self._views(spec.updated), self._views(spec.written)
        try:
            views = [*inputs, *updated]
            args, kwargs, *meeting = build(tree_of(spec.arguments), views, values_of(spec.packed))
            out = build(tree_of(spec.results), outputs) if spec.results else None
            if takes_out and spec.results:
                kwargs["out"] = out
            with self._code(spec, label, function):
                with as_rank(self._arrays.rank(meeting[0], spec.asker or ops.Asker()) if meeting else None):
                    returned = function(*args, **kwargs)
                if isinstance(spec, ops.ProgramReturn):
                    if inspect.isfunction(returned):
                        self._arrays.when_done(partial(self._keep_plain, label, spec, returned))
                    else:
                        self._keep(label, spec, returned, outputs)
                elif takes_out:
                    check_written(label, returned, out, outputs)
                else:
                    self._copy(label, spec, returned, outputs)
        finally:
            lent = self._arrays.end([*inputs, *updated, *outputs])
        return lent

    @contextmanager
    def _code(
        self, spec: ops.ProgramCall, label: str, function: Callable[..., Any], updated: Sequence[object] = ()
    ) -> Generator[None]:
        """Run code of a method, which may refuse, and may write to its declared arrays and to `updated`."""
        declared = getattr(function, UPDATES, ())
        changed = [*updated, *[view for name in declared for view in self._state.get(name, ())]]
        undeclared = partial(self._undeclared, function)
        refused: Refused | None = None
        token = _ASKER.set(spec.asker)
        try:
            if changed:
                self._protect(changed, write=True)
            with _UserCode(label, undeclared):
                try:
                    yield
                except Exception as error:
                    refused = self._refusal(function, error, label, undeclared)
                    # Half of an update may be done. Only the code that raised the error can know better.
                    if refused is None or (spec.updated and not (refused.is_unchanged or spec.is_idempotent)):
                        raise
            if refused is not None:
                # The refusal is raised here, as an error of the engine's own class does not get past
                # `Named`.
                raise refused
        finally:
            _ASKER.reset(token)
            if changed:
                self._protect(changed, write=False)

    def _next(self, spec: ops.ProgramNext) -> None:
        """Make the next item of a method that yields, or close it."""
        label, function, _ = self._method(spec.method)
        spec.words[0] = 0
        stream, outputs = self._streams.get(spec.stream), self._views(spec.written)
        if spec.item == 0:
            views = [self._arrays.view(array, write=False) for array in spec.read]
            updated = self._views(spec.updated)
            args, kwargs = build(tree_of(spec.arguments), [*views, *updated], values_of(spec.packed))
            # Its code runs from the first item on.
            generator = function(*args, **kwargs)
            stream = self._streams[spec.stream] = _ItemSource(generator, [*views, *updated], updated)
        elif stream is None:
            if spec.item > 0:
                raise Refused(f"{label} was lost between two items", code=INSTANCE_LOST, unchanged=True)
            return
        is_over = True
        try:
            with self._code(spec, label, function, stream.updated):
                if spec.item < 0:
                    stream.generator.close()
                # A closed generator does not continue.
                for returned in stream.generator:
                    self._keep(label, spec, returned, outputs)
                    is_over = False
                    break
        finally:
            if is_over:
                del self._streams[spec.stream]
            self._arrays.end([*outputs, *(stream.views if is_over else ())])

    def _forget(self, number: int) -> None:
        """Drop an unwanted result or stream."""
        self._kept.pop(number, None)
        stream = self._streams.pop(number, None)
        if stream is not None:
            try:
                stream.generator.close()
            except Exception:
                _logger.exception("program %r: a stream failed while it was closed", self.definition.name)
            self._arrays.end(stream.views)

    def _undeclared(self, function: Callable[..., Any]) -> str:
        """Return the declaration that is missing if a method has written to a read-only array."""
        names = [*self._state, *inspect.signature(function).parameters]
        listed = ", ".join([f'"{name}"' for name in names if name != "out"])
        return (
            "it writes to an array that it does not declare; put those that it changes into "
            f"@programs.method(updates=[{listed}])"
        )

    def enqueues(self, method: str) -> bool:
        """Return whether a method declares that it never waits."""
        return bool(getattr(self._method(method)[1], ENQUEUES, False))

    def tell(self, spec: ops.ProgramResult) -> None:
        """Fill words with the text of a kept result."""
        text = self._kept_in(spec.slot).text
        spec.words.view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)

    def _views(self, arrays: Sequence[ops.ArraySpec]) -> list[object]:
        return [self._arrays.view(array, write=True) for array in arrays]

    def fetch(self, spec: ops.ProgramFetch) -> None:
        """Copy the arrays of a kept result, and forget it."""
        pending = self._kept_in(spec.slot)
        for source, out in zip(pending.arrays, self._views(spec.written), strict=True):
            self._arrays.copy(source, out)
        del self._kept[spec.slot]

    def close(self) -> None:
        """Drop the instance and its results."""
        for number in tuple(self._streams):
            self._forget(number)
        self._program = None
        self._kept.clear()

    def _method(self, name: str) -> tuple[str, Callable[..., Any], bool]:
        definition = self.definition
        module, _, qualname = definition.target.partition(":")
        label = ".".join(filter(None, (module.rpartition(".")[2], qualname, name)))
        function = getattr(self._program, name) if name else self._program
        takes_out = self._takes_out.get(name)
        if takes_out is None:
            takes_out = self._takes_out[name] = "out" in inspect.signature(function).parameters
        return label, function, takes_out

    def _keep(
        self, label: str, spec: ops.ProgramReturn, returned: object, expected: Sequence[object]
    ) -> None:
        """Report the result of a method, and keep it, unless its arrays are as expected."""
        tree, arrays, array_types = self._flattened(label, returned)
        is_expected = bool(array_types) and array_types == [
            (array.dtype.value, array.shape) for array in spec.written
        ]
        if is_expected:
            for source, out in zip(arrays, expected, strict=True):
                self._arrays.copy(source, out)
            arrays = []
        text = text_of([tree, None if is_expected else array_types]).encode(errors="surrogatepass")
        if len(text) > MOST_TEXT:
            raise ValueError(
                f"{label}: its result is {len(text)} bytes as text, at most {MOST_TEXT} are allowed; return "
                "large values as arrays"
            )
        words = spec.words
        words[0] = len(text)
        room = words[1:].view(np.uint8)
        if fits := len(text) <= room.size:
            room[: len(text)] = np.frombuffer(text, np.uint8)
        if arrays or not fits:
            self._kept[spec.slot] = _PendingResult(text, [self._arrays.keep(array) for array in arrays])

    def _keep_plain(self, label: str, spec: ops.ProgramReturn, read: Callable[[], object]) -> None:
        """Report the result of a method that has only enqueued its work, now that the work is done."""
        with _UserCode(label):
            returned = read()
            if self._flattened(label, returned)[1]:
                raise TypeError(f"{label}: the function that it returned must return no arrays")
            self._keep(label, spec, returned, ())

    def _copy(self, label: str, spec: ops.ProgramCall, returned: object, outputs: Sequence[object]) -> None:
        """Copy the result of a method to the declared arrays."""
        tree, arrays, array_types = self._flattened(label, returned)
        if tree != tree_of(spec.results):
            raise TypeError(f"{label}: its result is not nested as it was declared: {shortened(returned)}")
        for (dtype, shape), output in zip(array_types, spec.written, strict=True):
            if (dtype, shape) != (output.dtype.value, output.shape):
                raise TypeError(
                    f"{label}: its result must be {output.dtype} of shape {output.shape}, as was declared, "
                    f"got {dtype} of shape {shape}"
                )
        for source, out in zip(arrays, outputs, strict=True):
            self._arrays.copy(source, out)

    def _flattened(self, label: str, returned: object) -> tuple[object, list[object], list[tuple[str, Ints]]]:
        """Return how a result is nested, its arrays, and their types and shapes."""
        arrays: list[object] = []
        array_types: list[tuple[str, Ints]] = []

        def leaf(label: str, value: object) -> int | None:
            try:
                array = self._arrays.dtype_and_shape(value)
            except TypeError as error:
                raise TypeError(f"{label}: {error}") from None
            if array is None:
                return None
            arrays.append(value)
            array_types.append(array)
            return len(arrays) - 1

        return flatten(f"{label}: its result", returned, leaf), arrays, array_types

    def _refusal(
        self, function: Callable[..., Any], error: Exception, label: str, undeclared: Callable[[], str]
    ) -> Refused | None:
        """Return the refusal for a method's error; None if it is not a refusal."""
        if isinstance(error, Refused):
            _note(error, label, undeclared)
            return error
        classes = getattr(function, REFUSES, ())
        if self.definition.refuses_all:
            classes = (*classes, Exception)
        for number, cls in enumerate(classes):
            # The backend reports memory errors, with the available memory.
            if isinstance(error, cls) and not isinstance(error, (AccelError, ActorError, MemoryError)):
                _note(error, label, undeclared)
                refused = Refused(f"{label} refuses the request: {describe(error)}", code=number)
                refused.__cause__ = error
                return refused
        return None

    def _kept_in(self, slot: int) -> _PendingResult:
        pending = self._kept.get(slot)
        if pending is None:
            raise LibraryError(
                f"program {self.definition.name!r} was made again before its result was fetched; ask again",
                library="program",
                code=INSTANCE_LOST,
            )
        return pending


def load_target(path: str, label: str) -> Any:
    """Find the class or function of a program; blocks while its module is imported.

    Args:
        path: Import path, ``"package.module:Class"``.
        label: The program's name in errors.

    Raises:
        ImportError: The module does not exist here, or it lacks the name.
        Exception: The error of the module.
    """
    module, _, qualname = path.partition(":")
    with _UserCode(f"{label}, at the import of {module}"):
        try:
            target: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            text = f"{label}: module {module!r} cannot be imported here: {error}"
            raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
    for part in qualname.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        text = f"{label}: module {module!r} has no {qualname}"
        raise ImportError(text, name=module)  # noqa: TRY004  # as if it were imported from there
    return target


def _note(error: Exception, label: str, undeclared: Callable[[], str]) -> None:
    """Name the origin of an error; a class of the user's may refuse notes."""
    with suppress(Exception):
        error.add_note(f"in {label}")
        if "read-only" in str(error) and (advice := undeclared()):
            error.add_note(advice)


@attrs.frozen
class _UserCode:
    """Names the user's code in errors that it raises.

    `undeclared` returns advice about a write to a read-only array.

    Errors that the engine would take for its own, or that would end a task or the process, are wrapped.
    """

    label: str
    undeclared: Callable[[], str] = str

    def __enter__(self) -> None: ...

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        # The backend reports memory errors, with the available memory.
        if error is None or isinstance(error, MemoryError):
            return
        if isinstance(error, (AccelError, ActorError)) or not isinstance(error, Exception):
            text = f"{self.label} raised {type(error).__name__}: {error}"
            raise RuntimeError(text) from error  # noqa: TRY004  # it is not about a type
        _note(error, self.label, self.undeclared)

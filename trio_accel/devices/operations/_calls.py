"""Calls: what functions of arrays return. Nothing happens until one is awaited, then all that it is made of.

References to arrays and calls have the same operators, which make calls by functions of the layers above.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import numpy as np

from ...actors import named_arguments, silence
from ...backends.base import ArraySpec, DType, DTypeLike, HostArray, Ints, NotSupportedError
from ..base._refusals import OnDevice
from ..base._views import Index
from ._chain import (
    GATHER,
    METHODS,
    ArrayFunction,
    Asked,
    Chain,
    ChainStep,
    Layouts,
    arguments_of,
    asked,
    refuse_results,
    replaced,
    spent_error,
)
from ._operators import NAMESPACE, OF_TWO, OF_UFUNCS, VERSIONS, give_operators
from ._pending import Pending

__all__ = ["Call", "called", "composed"]

T_co = TypeVar("T_co", covariant=True)
ParametersP = ParamSpec("ParametersP")
ResultT = TypeVar("ResultT")
RefT = TypeVar("RefT", bound="Operators[Any]")
T = TypeVar("T")


class Operators(OnDevice, Generic[T_co]):
    """Base of references to arrays, and of calls: operators make calls."""

    __slots__ = ()

    __hash__ = object.__hash__

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """Return the namespace of the array API standard, whose functions make calls.

        Raises:
            ValueError: A version of the standard that is not there.
        """
        if api_version not in (None, *VERSIONS):
            raise ValueError(f"api_version must be one of {', '.join(VERSIONS)}, got {api_version!r}")
        return NAMESPACE[0]

    if not TYPE_CHECKING:  # a type checker would have NumPy's operators return anything

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
            name = OF_UFUNCS.get(ufunc.__name__, ufunc.__name__)
            is_operator = method == "__call__" and name in OF_TWO.values() and not named
            if is_operator and not isinstance(inputs[0], OnDevice):
                # NumPy comes here for ``array + self``, too.
                return getattr(NAMESPACE[0], name)(*inputs)
            path = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            return self.refuse_numpy("", path)

    if TYPE_CHECKING:
        # A reference has it as an attribute, and a call finds it.
        @property
        def spec(self: Operators[Operators[RefT]]) -> ArraySpec: ...
        def __add__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __radd__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __sub__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rsub__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __mul__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rmul__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __truediv__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rtruediv__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __floordiv__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rfloordiv__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __mod__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rmod__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __pow__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rpow__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __matmul__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rmatmul__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __and__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rand__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __or__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __ror__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __xor__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rxor__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __lshift__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rlshift__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rshift__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __rrshift__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __lt__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __le__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __gt__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __ge__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...
        def __eq__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...  # type: ignore[override]
        def __ne__(self: Operators[Operators[RefT]], other: Other) -> Call[RefT]: ...  # type: ignore[override]
        def __neg__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...
        def __pos__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...
        def __abs__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...
        def __invert__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...

    @property
    def dtype(self: Operators[Operators[RefT]]) -> DType:
        """Element type; of a call, as all that follows, that of its result (see `Call.spec` for errors)."""
        return self.spec.dtype

    @property
    def shape(self: Operators[Operators[RefT]]) -> Ints:
        """Elements along each axis."""
        return self.spec.shape

    @property
    def strides(self: Operators[Operators[RefT]]) -> Ints:
        """Bytes from one element to the next along each axis."""
        return self.spec.strides

    @property
    def ndim(self: Operators[Operators[RefT]]) -> int:
        """Number of axes."""
        return self.spec.ndim

    @property
    def size(self: Operators[Operators[RefT]]) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def nbytes(self: Operators[Operators[RefT]]) -> int:
        """Bytes that the elements take."""
        return self.spec.size * self.spec.dtype.itemsize

    def __len__(self: Operators[Operators[RefT]]) -> int:
        if not self.shape:
            self.refuse(f"len() of {self.noun} without axes; await {self.first}.item() gives its element")
        return self.shape[0]

    @overload
    def to_host(self: Operators[Operators[RefT]], *, out: HostArray | None = None) -> Call[HostArray]: ...
    @overload
    def to_host(self: Operators[tuple[Any, ...]]) -> Call[tuple[Any, ...]]: ...
    @named_arguments
    def to_host(self: Operators[Any], *, out: HostArray | None = None) -> Call[Any]:
        """Copy the array to host memory, after everything that writes it.

        Args:
            out: Array of the same shape and dtype to fill; by default a new one.

        Returns:
            `out`, or a new C-contiguous array that belongs to the caller. For a call with several results,
            such as `gather` or `qr`, a tuple with the arrays on the host.

        Raises:
            ValueError: `out` has another shape or dtype, is read-only, or has elements that share memory.
            StaleRefError: The array must not be used any more.
        """
        if out is None:
            return Call(METHODS["to_host"], (self,))
        return Call(METHODS["to_host out"], (self, out))

    @named_arguments
    def item(self: Operators[Operators[RefT]]) -> Call[Any]:
        """Copy the only element to the host, as a Python scalar.

        Raises:
            ValueError: There is not exactly one element.
        """
        if isinstance(self, SpentCall):
            return Call(METHODS["item"], (self.to_host(),))
        return Call(METHODS["item of ref"], (self,))

    @named_arguments
    def copy(self: Operators[Operators[RefT]]) -> Call[RefT]:
        """Copy the array to new memory of its device."""
        return Call(METHODS["copy"], (self,))

    @named_arguments
    def cast(self: Operators[Operators[RefT]], dtype: DTypeLike) -> Call[RefT]:
        """Copy the array to new memory with another element type, as `numpy.ndarray.astype` does.

        C does not define the result of a floating number that an integer type does not hold, such as NaN, and
        NumPy's depends on the layout. On the CPU the result is the same in each call, layout and chain. On
        x86-64 it is the least integer of int32 or int64; smaller types keep its low bits, and uint32 keeps
        the low bits of int64. CUDA takes the nearest integer, and 0 or the least one for NaN.

        Raises:
            TypeError: Not an element type, or complex to real.
        """
        return Call(METHODS["copy"], (self, DType.of(dtype)))

    @named_arguments
    def fill(self: Operators[Operators[RefT]], value: complex) -> Call[RefT]:
        """Set every element to one value; returns this reference.

        Raises:
            TypeError, ValueError: The dtype cannot hold the value.
        """
        return Call(METHODS["fill"], (self, value))

    @named_arguments
    def assign(self: Operators[Operators[RefT]], value: Other) -> Call[RefT]:
        """Write an array or a number into this one, as ``x[...] = value`` does in NumPy.

        On a view, it writes to that part of the array: ``await x[1:4, 2:6].assign(y)``. An array on the host
        of this shape and dtype is copied straight there. One of another shape or dtype is copied to the
        device first. A `value` that shares memory with this array is read as it was before.

        Args:
            value: An array of this device or of the host, which broadcasts to this shape, or a number. It is
                converted to this dtype as NumPy does with ``"same_kind"``.

        Returns:
            This reference.

        Raises:
            TypeError: A dtype of a wider kind: complex to real, floating to whole numbers, or signed to
                unsigned ones.
            ValueError: The shapes do not broadcast, the dtype cannot hold the number, `value` is on another
                device, or elements of this view share memory.
            StaleRefError: An array must not be used any more.
        """
        return Call(METHODS["assign"], (self, value))


Other: TypeAlias = "Operators[Any] | HostArray | complex | np.generic"
"""The other operand of an operator."""


class SpentCall(Operators[T_co], ChainStep, Coroutine[Any, Any, T_co]):
    """A call that was awaited, or that was an operand of one that was."""

    __slots__ = ("_is_silent", "_running")
    noun = "a Call"
    first = "call"

    def __init__(
        self, function: ArrayFunction, args: tuple[Any, ...], named: Mapping[str, Any] | None = None
    ) -> None:
        self.function = function
        self.args = args
        self.named = named
        self.ahead: Layouts | None = None
        self._is_silent: bool

    def __repr__(self) -> str:
        return f"<Call {self.function.name}>"

    if not TYPE_CHECKING:  # a checker takes it for the name of a coroutine, which can be set

        @property
        def __name__(self) -> str:
            # Trio names it where a call is given in place of a function.
            return self.function.name

    def __await__(self) -> Generator[Any, Any, T_co]:
        running: Generator[Any, Any, T_co] = self._run().__await__()
        return running

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine().send(value)

    def throw(self, *error: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine().throw(*error)

    def silence(self) -> None:
        """Let it, and the calls that it is made of, end without a warning."""
        stack: list[SpentCall[Any]] = [self]
        while stack:
            step = stack.pop()
            if not getattr(step, "_is_silent", False):
                step._is_silent = True  # noqa: SLF001
                stack += [each for each in arguments_of(step) if type(each) is Call]

    def __iter__(  # type: ignore[override]  # references have no parts
        self: SpentCall[tuple[T, ...]],
    ) -> Iterator[Call[T]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a call for each of several results, which are operands of further calls.

        Raises:
            TypeError: It has one result, or the device decides how many.
        """
        try:
            layouts = self._look_ahead()
        except NotSupportedError as error:
            told = f"the number of results of {self!r} is not known ({error.message}); use a, b = await call"
            self.refuse(told)
        if isinstance(layouts, ArraySpec):
            self.refuse("a Call is not iterable: it was not awaited; await call.to_host() has its elements")
        return iter([self._part(number, layout) for number, layout in enumerate(layouts)])

    def _part(self, number: int, layout: Any) -> Call[Any]:
        part = Call[Any](METHODS["__getitem__"], (self, number))
        # Parts may be left out: the call itself warns where none is awaited.
        part.ahead, part._is_silent = layout, False  # noqa: SLF001
        return part

    def __len__(self: SpentCall[Any]) -> int:
        layouts = self._look_ahead()
        if not isinstance(layouts, ArraySpec):
            return len(layouts)
        return Operators.__len__(self)  # pyright: ignore[reportUnknownMemberType]

    if not TYPE_CHECKING:  # a type checker reports it where there is none

        def __call__(self, *args: object, **named: object) -> NoReturn:
            self.refuse(
                f"{self!r} is not an async function; await it, or pass the function and its arguments: "
                f"nursery.start_soon(ta.{self.function.name}, ...)"
            )

    def close(self) -> None:
        """Let it end without being run."""
        self.__class__ = SpentCall  # pyright: ignore[reportAttributeAccessIssue]  # no warning at its end
        self.silence()
        if hasattr(self, "_running"):
            self._running.close()

    def _coroutine(self) -> Coroutine[Any, Any, T_co]:
        if not hasattr(self, "_running"):
            self._running: Coroutine[Any, Any, T_co] = self._run()
        return self._running

    def _run(self) -> Any:
        """Begin all calls that it is made of as one request; returns what is awaited."""
        if type(self) is not Call:
            raise spent_error(self)
        args, named, is_direct = self.args, self.named, self.function.is_direct
        if (
            is_direct
            and _COMPOSED.isdisjoint(map(type, args))
            and (named is None or _COMPOSED.isdisjoint(map(type, named.values())))
        ):
            # The usual call has no other in it, and no array of the host's.
            used: Any = self  # pyright: ignore[reportUnknownVariableType]
            # No warning at its end.
            used.__class__ = SpentCall
            # A kept call keeps no arrays.
            self.args, self.named = (), None
            return evaluate(self.function, args, named or {})
        try:
            chain = Chain(self)
        except Exception:
            self.silence()
            raise
        if not chain.refs or (len(chain.steps) == 1 and (is_direct or chain.key is None)):
            return _run_alone(chain)
        # `Chain.device` says the same, with two calls.
        device: Asked = chain.refs[0].block.table.device
        return device.ask_chain(chain)

    def start(self) -> Pending[T_co]:
        """Hand it over without waiting, as `Device.submit` hands a message over.

        Returns:
            The operation. Arrays in its ``value`` can be given to further calls at once.

        Raises:
            NotSupportedError: It waits in between.
        """
        return start(self)

    @property
    def spec(self: SpentCall[Operators[RefT]]) -> ArraySpec:
        """Layout of the array that it will make. It is found by a plan that is not launched.

        Raises:
            TypeError, ValueError: A wrong argument.
            NotSupportedError: It depends on what the device computes; await the call.
        """
        layouts = self.ahead or self._look_ahead()
        if not isinstance(layouts, ArraySpec):
            self.silence()
            name = self.function.name
            raise NotSupportedError(
                f"{name} has several results, and each is an operand: a, b = call, or call[0]", operation=name
            )
        return layouts

    def _look_ahead(self) -> Layouts:
        """Return the layout of its result, or those of several, by a plan that is not launched."""
        if self.ahead is None:
            if type(self) is not Call:
                raise spent_error(self)
            try:
                chain = Chain(self, is_spent=False)
                self.ahead = chain.device.look_ahead(chain)
            except Exception:
                self.silence()
                raise
        return self.ahead

    @overload
    def __getitem__(self: SpentCall[Operators[RefT]], index: Index) -> Call[RefT]: ...
    @overload
    def __getitem__(self: SpentCall[tuple[T, ...]], index: int) -> Call[T]: ...
    def __getitem__(self: SpentCall[Any], index: Index) -> Call[Any]:
        """View a part, see `AccelRef.__getitem__`; or take one of several results."""
        return Call(METHODS["__getitem__"], (self, index))

    def reshape(self: SpentCall[Operators[RefT]], shape: int | Sequence[int], *sizes: int) -> Call[RefT]:
        """View the elements under another shape; see `AccelRef.reshape`."""
        return Call(METHODS["reshape"], (self, shape, *sizes))

    @property
    def T(self: SpentCall[Operators[RefT]]) -> Call[RefT]:  # noqa: N802  # NumPy's name
        """A view with the axes in the opposite order."""
        return Call(METHODS["T"], (self,))

    @property
    def mT(self: SpentCall[Operators[RefT]]) -> Call[RefT]:  # noqa: N802  # NumPy's name
        """A view of a stack of matrices, each transposed."""
        return Call(METHODS["mT"], (self,))

    def transpose(self: SpentCall[Operators[RefT]], axes: int | Sequence[int], *more_axes: int) -> Call[RefT]:
        """View it with the axes in another order; see `AccelRef.transpose`."""
        return Call(METHODS["transpose"], (self, axes, *more_axes))


class Call(SpentCall[T_co]):
    """A call of a function of arrays. Nothing happens until it is awaited.

    It is an operand of further calls. Awaiting the last of them runs all as one request: one that is used
    twice runs once. Each can be awaited, or be part of one that is, a single time.

    See `Device.ask` for cancellation, and the errors that any operation can end with.

    Attributes:
        function: The function.
        args: Its arguments, by their places.
        named: Its arguments by name; None for none.
        ahead: Layout of its result, or layouts of several, if they were found.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Call {self.function.name}, not run>"

    def __del__(self) -> None:
        # Once for a chain; and not where it was refused to await it, or to make it.
        if hasattr(self, "ahead") and not hasattr(self, "_is_silent"):
            self.silence()
            told = f"{super().__repr__()} was never awaited: nothing of it has run"
            warnings.warn(told, RuntimeWarning, stacklevel=2)


_COMPOSED = frozenset({Call, SpentCall, np.ndarray, list, tuple})
ChainStep.spent, ChainStep.fresh = SpentCall, Call


async def evaluate(function: ArrayFunction, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Run one call, among whose arguments is no other."""
    try:
        made = function.make(*args, **named)
        if function.how == "value":
            return made
        if function.how == "message":
            if function.ask is not None:
                made = function.ask(made)
            else:
                for each in args:
                    # `asked` finds the same one, with five calls.
                    if isinstance(each, Operators):
                        array: Any = each  # pyright: ignore[reportUnknownVariableType]
                        made = array.block.table.device.ask(made)
                        break
                else:
                    made = asked(function.name, args, named).ask(made)
        return await made
    except Exception as error:
        silence(*args, *named.values())
        if function.refuse is not None:
            function.refuse(error, args, named)
        if isinstance(error, AttributeError):
            refuse_results(function.name, args)
        raise


async def run_steps(steps: Sequence[ChainStep], given: Mapping[int, Any]) -> Any:
    """Run calls one after the other, and return the result of the last.

    Args:
        steps: The calls; each comes behind its operands.
        given: What stands for host arrays, or for calls, by their identities.
    """
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        used: list[Any] = [each for each in arguments_of(step) if type(each) is SpentCall]
        last.update(dict.fromkeys(map(id, used), number))
    over: dict[int, list[int]] = {}
    for each, number in last.items():
        over.setdefault(number, []).append(each)
    values, made = dict(given), None
    try:
        for number, step in enumerate(steps):
            args, named = replaced(step, values)
            # Results in between go as soon as nothing needs them any more.
            for each in over.get(number, ()):
                values.pop(each, None)
            values[id(step)] = made = await evaluate(step.function, args, named)
            del args, named
        return made
    finally:
        # An error keeps this frame.
        values.clear()


async def run_by_steps(chain: Chain, given: Mapping[int, Any]) -> Any:
    """Run the steps of a chain, expanded if need be; see `run_steps`."""
    if chain.has_expansions:
        chain.take_steps(chain.expanded())
    return await run_steps(chain.steps, given)


async def _run_alone(chain: Chain) -> Any:
    """Run a chain step by step; see `run_steps`."""
    try:
        return await run_by_steps(chain, {})
    finally:
        chain.let_go()


def start(call: SpentCall[T_co]) -> Pending[T_co]:
    """Hand a call over, and those that it is made of, without waiting; see `Call.start`."""
    if type(call) is not Call:
        raise spent_error(call)
    values: dict[int, Any] = {}
    pending: Pending[Any] | None = None
    try:
        chain = Chain(call)
    except Exception:
        call.silence()
        raise
    for step in chain.steps:
        name = step.function.name
        if step.function is GATHER:
            raise NotSupportedError("gather: cannot be started; start each of its calls", operation=name)
        if step.function.how == "awaitable":
            raise NotSupportedError(
                f"{name} waits in between, and cannot be handed over: run it in a task", operation=name
            )
    for step in chain.steps:
        function, pending = step.function, None
        args, named = replaced(step, values)
        made = function.make(*args, **named)
        if function.how == "message":
            pending = asked(function.name, args, named).submit(made)
            made = pending.value
        values[id(step)] = made
    chain.let_go()
    if pending is None:
        raise NotSupportedError(f"{call!r} has nothing to hand over", operation=call.function.name)
    return pending


def composed(
    function: Callable[ParametersP, Coroutine[Any, Any, ResultT]],
) -> Callable[ParametersP, Call[ResultT]]:
    """Tell type checkers what a public function of a package makes, of which `named` has it make calls."""
    return cast("Any", function)  # type: ignore[no-any-return]  # as it is


def called(function: ArrayFunction) -> Callable[..., Call[Any]]:
    """Make what a program calls, which makes calls of a function."""

    def call(*args: Any, **named: Any) -> Call[Any]:
        return Call(function, args, named or None)

    made: Any = call
    made.asked = function
    return made  # type: ignore[no-any-return]  # it is the function


def have_operators(namespace: Any) -> None:
    """Give references and calls their operators.

    Args:
        namespace: Has the functions by their names, such as ``add``, once they are needed.
    """
    NAMESPACE.append(namespace)
    give_operators(Operators, partial(getattr, namespace))

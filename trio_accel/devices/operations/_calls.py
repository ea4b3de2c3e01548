"""Calls: the lazy results of array functions, and how one is run.

Functions of arrays return a `Call` and do nothing else. Operators do the same: `have_operators` gives them to
`Operators`, the common base of calls and array references. A call may be an operand of further calls.
Awaiting the last one runs all of them as one request.

A call is used once. Its class is its state: a fresh call is a `Call`, and `Chain` turns it into a `SpentCall`
when it is awaited or is an operand of an awaited call. Using it again raises `spent_error`, unless code that
blocks has awaited it and retains its result (`kept`), which then replaces it as an operand. `Call.__del__`
warns about a call that was never awaited; `silence` prevents that for a call and its operands, so that a
chain warns once, and a refused chain not at all.

`SpentCall._run` chooses one of three ways:

* A direct function with plain arguments is evaluated at once, without a `Chain`. Most calls are like this, so
  this path avoids every unnecessary Python call.
* A chain without device arrays, or of one step that is direct or lacks a key, runs step by step
  (`_run_alone`).
* Any other chain is passed to `Device.ask_chain`, which may run it as one operation (see `front._chains`).

`start` hands a chain over without waiting, so it refuses functions that wait between operations. `spec`,
`len` and iteration look ahead: they plan the chain without a launch, and leave its calls fresh.

Memory must be released early, because arrays are large. `run_steps` drops each intermediate result after its
last use, and clears its variables at the end, because an error's traceback keeps the frame alive. A spent
call drops its arguments for the same reason: it may stay in a variable of the program.
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
    device_of_call,
    explain_hosts,
    refuse_results,
    replaced,
    retained_result,
    spent_error,
)
from ._operators import NAMESPACE, OF_TWO, OF_UFUNCS, give_operators, refuse_hosts
from ._pending import Pending
from ._updates import At

__all__ = ["Call", "called", "composed"]

T_co = TypeVar("T_co", covariant=True)
ParametersP = ParamSpec("ParametersP")
ResultT = TypeVar("ResultT")
RefT = TypeVar("RefT", bound="Operators[Any]")
T = TypeVar("T")


class Operators(OnDevice, Generic[T_co]):
    """Base of array references and calls: their operators make calls."""

    __slots__ = ()

    __hash__ = object.__hash__

    def __array_namespace__(self, /, *, api_version: str | None = None) -> NoReturn:
        """Refuse to be an array of the standard, whose functions return results and not calls.

        Libraries such as SciPy and array-api-compat would otherwise take the calls for results.

        Raises:
            TypeError: Always; it names the functions to use instead.
        """
        self.refuse(
            f"{self.noun} does not provide a namespace of functions with results, because it is awaited: "
            f"pass b.xp.asarray({self.first}) of b = ta.blocking(...), or write "
            f"await ta.arrays.sum({self.first})"
        )

    if not TYPE_CHECKING:  # a type checker would have NumPy's operators return anything

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
            name = OF_UFUNCS.get(ufunc.__name__, ufunc.__name__)
            is_operator = method == "__call__" and name in OF_TWO.values() and not named
            if is_operator and not isinstance(inputs[0], OnDevice):
                # NumPy also calls this for ``array + self``.
                if isinstance(self, ChainStep) and self.function.result_on_host:
                    special = next(key for key, value in OF_TWO.items() if value == name)
                    refuse_hosts(special, self, inputs[0], is_reflected=True)
                return getattr(NAMESPACE[0], name)(*inputs)
            path = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            return self.refuse_numpy("", path)

    if TYPE_CHECKING:
        # An attribute of references; a call computes it.
        @property
        def spec(self: Operators[Operators[RefT]]) -> ArraySpec: ...
        def __add__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __radd__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __sub__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rsub__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __mul__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rmul__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __truediv__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rtruediv__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __floordiv__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rfloordiv__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __mod__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rmod__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __pow__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rpow__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __matmul__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rmatmul__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __and__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rand__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __or__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __ror__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __xor__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rxor__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __lshift__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rlshift__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rshift__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __rrshift__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __lt__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __le__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __gt__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __ge__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...
        def __eq__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...  # type: ignore[override]
        def __ne__(self: Operators[Operators[RefT]], operand: OtherOperand) -> Call[RefT]: ...  # type: ignore[override]
        def __neg__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...
        def __pos__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...
        def __abs__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...
        def __invert__(self: Operators[Operators[RefT]]) -> Call[RefT]: ...

    @property
    def dtype(self: Operators[Operators[RefT]]) -> DType:
        """The element type. These properties of a call describe its result; see `Call.spec` for errors."""
        return self.spec.dtype

    @property
    def shape(self: Operators[Operators[RefT]]) -> Ints:
        """The number of elements along each axis."""
        return self.spec.shape

    @property
    def strides(self: Operators[Operators[RefT]]) -> Ints:
        """The bytes between neighbouring elements along each axis."""
        return self.spec.strides

    @property
    def ndim(self: Operators[Operators[RefT]]) -> int:
        """The number of axes."""
        return self.spec.ndim

    @property
    def size(self: Operators[Operators[RefT]]) -> int:
        """The number of elements."""
        return self.spec.size

    @property
    def nbytes(self: Operators[Operators[RefT]]) -> int:
        """The total size of the elements in bytes."""
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
        """Copy the array to host memory, after all operations that write it.

        Args:
            out: An array of the same shape and dtype to fill; by default a new one.

        Returns:
            `out`, or a new C-contiguous array that belongs to the caller. For a call with several results,
            such as `gather` or `qr`, a tuple with the arrays on the host.

        Raises:
            ValueError: `out` has another shape or dtype, is read-only, or has elements that share memory.
            StaleRefError: The array is no longer valid.
        """
        if out is None:
            return Call(METHODS["to_host"], (self,))
        return Call(METHODS["to_host out"], (self, out))

    @property
    def at(self: Operators[Operators[RefT]]) -> At[Call[RefT]]:
        """The parts for updated copies, such as ``await x.at[key].set(values)``; see `IndexUpdate`.

        The array itself does not change, as with `jax.Array.at`. `assign` changes a part in place.
        """
        return At(self)

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
        """Copy the array to new memory on its device."""
        return Call(METHODS["copy"], (self,))

    @named_arguments
    def cast(self: Operators[Operators[RefT]], dtype: DTypeLike) -> Call[RefT]:
        """Copy the array to new memory with another element type, as `numpy.ndarray.astype` does.

        C does not define the result if an integer type cannot hold a floating number, such as NaN, and
        NumPy's result depends on the layout. On the CPU, the result is the same in each call, layout and
        chain. On x86-64 it is the smallest integer of int32 or int64; smaller types keep its low bits, and
        uint32 keeps the low bits of int64. CUDA takes the nearest integer, and 0 or the smallest one for NaN.

        Raises:
            TypeError: `dtype` is not an element type, or is real while the array is complex.
        """
        return Call(METHODS["copy"], (self, DType.of(dtype)))

    @named_arguments
    def fill(self: Operators[Operators[RefT]], value: complex) -> Call[RefT]:
        """Set every element to one value, and return this reference.

        Raises:
            TypeError, ValueError: The dtype cannot hold the value.
        """
        return Call(METHODS["fill"], (self, value))

    @named_arguments
    def assign(self: Operators[Operators[RefT]], value: OtherOperand) -> Call[RefT]:
        """Write an array or a number into this one, as ``x[...] = value`` does in NumPy.

        On a view, it writes to that part of the array: ``await x[1:4, 2:6].assign(y)``. A host array of this
        shape and dtype is copied there directly; any other host array is first copied to the device. If
        `value` shares memory with this array, its old elements are read.

        Args:
            value: An array on this device or on the host, which broadcasts to this shape, or a number. It is
                converted to this dtype by NumPy's rule ``"same_kind"``.

        Returns:
            This reference.

        Raises:
            TypeError: The dtype of `value` is of a wider kind: complex to real, floating to integer, or
                signed to unsigned.
            ValueError: The shapes do not broadcast, the dtype cannot hold the number, `value` is on another
                device, or elements of this view share memory.
            StaleRefError: An array is no longer valid.
        """
        return Call(METHODS["assign"], (self, value))


OtherOperand: TypeAlias = "Operators[Any] | HostArray | complex | np.generic"
"""The other operand of an operator."""


class SpentCall(Operators[T_co], ChainStep, Coroutine[Any, Any, T_co]):
    """An awaited call, or an operand of an awaited call."""

    # `kept` is its result, which code that blocks keeps for a second `get` and for further calls.
    __slots__ = ("_is_silent", "_running", "kept")
    noun = "a Call"
    first = "call"

    def __init__(
        self, function: ArrayFunction, args: tuple[Any, ...], named: Mapping[str, Any] | None = None
    ) -> None:
        self.function = function
        self.args = args
        self.named = named
        self.layouts: Layouts | None = None
        self._is_silent: bool

    def __repr__(self) -> str:
        return f"<Call {self.function.name}>"

    if not TYPE_CHECKING:  # a checker takes it for a coroutine's name, which can be set

        @property
        def __name__(self) -> str:
            # Trio uses the name if a call is passed in place of a function.
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
        """Suppress the warnings about this call and its operands, if they are never awaited."""
        stack: list[SpentCall[Any]] = [self]
        while stack:
            step = stack.pop()
            if not getattr(step, "_is_silent", False):
                step._is_silent = True  # noqa: SLF001
                stack += [argument for argument in arguments_of(step) if type(argument) is Call]

    def __iter__(  # type: ignore[override]  # references are not iterable
        self: SpentCall[tuple[T, ...]],
    ) -> Iterator[Call[T]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a call for each of several results, as operands of further calls.

        Raises:
            TypeError: The call has one result, or the device determines their number.
        """
        try:
            layouts = self._look_ahead()
        except NotSupportedError as error:
            message = (
                f"the number of results of {self!r} is not known ({error.message}); use a, b = await call"
            )
            self.refuse(message)
        if isinstance(layouts, ArraySpec):
            self.refuse("a Call is not iterable: it was not awaited; await call.to_host() has its elements")
        return iter([self._part(number, layout) for number, layout in enumerate(layouts)])

    def _part(self, number: int, layout: Any) -> Call[Any]:
        part = Call[Any](METHODS["__getitem__"], (self, number))
        # Some parts may stay unused: the call itself warns if none is awaited.
        part.layouts, part._is_silent = layout, False  # noqa: SLF001
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
        """Let the call end without running it."""
        self.__class__ = SpentCall  # pyright: ignore[reportAttributeAccessIssue]  # it no longer warns
        self.silence()
        if hasattr(self, "_running"):
            self._running.close()

    def _coroutine(self) -> Coroutine[Any, Any, T_co]:
        if not hasattr(self, "_running"):
            self._running: Coroutine[Any, Any, T_co] = self._run()
        return self._running

    def _run(self) -> Any:
        """Begin this call and its operands as one request; return the coroutine to await."""
        if type(self) is not Call:
            raise spent_error(self)
        args, named, is_direct = self.args, self.named, self.function.is_direct
        if (
            is_direct
            and _COMPOSED.isdisjoint(map(type, args))
            and (named is None or _COMPOSED.isdisjoint(map(type, named.values())))
        ):
            # Most calls have neither another call nor a host array among their arguments.
            used: Any = self  # pyright: ignore[reportUnknownVariableType]
            # It no longer warns.
            used.__class__ = SpentCall
            # A spent call must not keep arrays alive.
            self.args, self.named = (), None
            return evaluate(self.function, args, named or {})
        try:
            chain = Chain(self)
        except Exception:
            self.silence()
            raise
        if not chain.refs or (len(chain.steps) == 1 and (is_direct or chain.key is None)):
            return _run_alone(chain)
        # `Chain.device` returns the same, with two more Python calls.
        device: Asked = chain.refs[0].block.table.device
        return device.ask_chain(chain)

    def start(self) -> Pending[T_co]:
        """Hand the call over without waiting, as `Device.submit` does with a message.

        Returns:
            The operation. Arrays in its ``value`` can be passed to further calls at once.

        Raises:
            NotSupportedError: The call has to wait between its operations.
        """
        return start(self)

    @property
    def spec(self: SpentCall[Operators[RefT]]) -> ArraySpec:
        """The layout of the resulting array, found by planning without a launch.

        Raises:
            TypeError, ValueError: An argument is wrong.
            NotSupportedError: The layout depends on computed values; await the call.
        """
        layouts = self.layouts or self._look_ahead()
        if not isinstance(layouts, ArraySpec):
            self.silence()
            name = self.function.name
            raise NotSupportedError(
                f"{name} has several results, and each is an operand: a, b = call, or call[0]", operation=name
            )
        return layouts

    def _look_ahead(self) -> Layouts:
        """Return the layout of the result, or of several results, by planning without a launch."""
        if self.layouts is None:
            if type(self) is not Call:
                result = retained_result(self)
                if not isinstance(result, Operators):
                    raise spent_error(self)
                return result.spec
            try:
                step: Any = self  # pyright: ignore[reportUnknownVariableType]
                self.layouts = device_of_call(step).look_ahead(step)
            except Exception:
                self.silence()
                raise
        return self.layouts

    @overload
    def __getitem__(self: SpentCall[Operators[RefT]], index: Index) -> Call[RefT]: ...
    @overload
    def __getitem__(self: SpentCall[tuple[T, ...]], index: int) -> Call[T]: ...
    def __getitem__(self: SpentCall[Any], index: Index) -> Call[Any]:
        """View a part, see `AccelRef.__getitem__`; or select one of several results."""
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
        """A view of the stack with each matrix transposed."""
        return Call(METHODS["mT"], (self,))

    def transpose(self: SpentCall[Operators[RefT]], axes: int | Sequence[int], *more_axes: int) -> Call[RefT]:
        """View it with the axes in another order; see `AccelRef.transpose`."""
        return Call(METHODS["transpose"], (self, axes, *more_axes))


class Call(SpentCall[T_co]):
    """A call to a function of arrays. It does nothing until it is awaited.

    A call is an operand of further calls. Awaiting the last of them runs all as one request, in which a call
    used twice runs once. Each call can be awaited, or be part of an awaited call, only once.

    See `Device.ask` for cancellation, and the errors that any operation can end with.

    Attributes:
        function: The function.
        args: The positional arguments.
        named: The keyword arguments, or None.
        layouts: The layout of its result, or of several results, if known.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Call {self.function.name}, not run>"

    def __del__(self) -> None:
        # Warn once for a chain, and not if awaiting or making the call was refused.
        if hasattr(self, "layouts") and not hasattr(self, "_is_silent"):
            self.silence()
            message = f"{super().__repr__()} was never awaited: nothing of it has run"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


# Errors show the class, whose objects are calls to a program.
SpentCall.__name__ = "Call"

_COMPOSED = frozenset({Call, SpentCall, np.ndarray, list, tuple})
ChainStep.spent, ChainStep.fresh = SpentCall, Call


async def evaluate(function: ArrayFunction, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Run one call without other calls among its arguments."""
    try:
        result = function.make(*args, **named)
        if function.how == "value":
            return result
        if function.how == "message":
            if function.ask is not None:
                result = function.ask(result)
            else:
                for argument in args:
                    # `asked` finds the same device, with five more Python calls.
                    if isinstance(argument, Operators):
                        array: Any = argument  # pyright: ignore[reportUnknownVariableType]
                        result = array.block.table.device.ask(result)
                        break
                else:
                    result = asked(function.name, args, named).ask(result)
        return await result
    except Exception as error:
        silence(*args, *named.values())
        if function.refuse is not None:
            function.refuse(error, args, named)
        if isinstance(error, AttributeError):
            refuse_results(function.name, args)
        raise


async def run_steps(steps: Sequence[ChainStep], placeholders: Mapping[int, Any]) -> Any:
    """Run calls one after the other, and return the result of the last.

    Args:
        steps: The calls, each after its operands.
        placeholders: Placeholders of host arrays or calls, by the `id` of the original.
    """
    last_uses: dict[int, int] = {}
    for number, step in enumerate(steps):
        used: list[Any] = [argument for argument in arguments_of(step) if type(argument) is SpentCall]
        last_uses.update(dict.fromkeys(map(id, used), number))
    over: dict[int, list[int]] = {}
    for identity, number in last_uses.items():
        over.setdefault(number, []).append(identity)
    values, result = dict(placeholders), None
    try:
        for number, step in enumerate(steps):
            args, named = replaced(step, values)
            # Drop each intermediate result after its last use.
            for identity in over.get(number, ()):
                values.pop(identity, None)
            try:
                values[id(step)] = result = await evaluate(step.function, args, named)
            except TypeError as error:
                explain_hosts(step, error)
                raise
            del args, named
        return result
    finally:
        # An error's traceback keeps this frame alive.
        values.clear()


async def run_by_steps(chain: Chain, placeholders: Mapping[int, Any]) -> Any:
    """Run the steps of a chain, expanded if necessary; see `run_steps`."""
    if chain.has_expansions:
        chain.take_steps(chain.expanded())
    return await run_steps(chain.steps, placeholders)


async def _run_alone(chain: Chain) -> Any:
    """Run a chain step by step; see `run_steps`."""
    try:
        return await run_by_steps(chain, {})
    finally:
        chain.let_go()


def start(call: SpentCall[T_co]) -> Pending[T_co]:
    """Hand over a call and its operands without waiting; see `Call.start`."""
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
        function = step.function
        values[id(step)], pending = _handed_over(function, *replaced(step, values))
    chain.let_go()
    if pending is None:
        raise NotSupportedError(f"{call!r} has nothing to hand over", operation=call.function.name)
    return pending


def _handed_over(
    function: ArrayFunction, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, Pending[Any] | None]:
    try:
        result = function.make(*args, **named)
        if function.how != "message":
            return result, None
        pending = asked(function.name, args, named).submit(result)
        return pending.value, pending
    except Exception as error:
        if function.refuse is not None:
            function.refuse(error, args, named)
        raise


def composed(
    function: Callable[ParametersP, Coroutine[Any, Any, ResultT]],
) -> Callable[ParametersP, Call[ResultT]]:
    """Declare the type of a public function from which `named` makes calls, for type checkers."""
    return cast("Any", function)  # type: ignore[no-any-return]  # as it is


def called(function: ArrayFunction) -> Callable[..., Call[Any]]:
    """Return the callable that a program uses, which makes calls of a function."""

    def call(*args: Any, **named: Any) -> Call[Any]:
        return Call(function, args, named or None)

    call_maker: Any = call
    call_maker.asked = function
    return call_maker  # type: ignore[no-any-return]  # it is the function


def have_operators(namespace: Any) -> None:
    """Give references and calls their operators.

    Args:
        namespace: Provides the functions by name, such as ``add``, when they are first used.
    """
    NAMESPACE.append(namespace)
    give_operators(Operators, partial(getattr, namespace))

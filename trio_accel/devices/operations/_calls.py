"""Calls: what functions of arrays return. Nothing happens until one is awaited, then all that it is made of.

References to arrays and calls have the same operators, which make calls by functions of the layers above.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Number
from struct import pack
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import attrs
import numpy as np
import trio

from ...actors import named_arguments, silence
from ...backends.base import ArraySpec, DType, DTypeLike, HostArray, Ints, NotSupportedError
from ..base._refusals import OnDevice
from ..base._views import Index
from ._pending import Pending

__all__ = ["Call", "Chain", "Function", "arguments_of", "called", "composed"]

T_co = TypeVar("T_co", covariant=True)
ParametersP = ParamSpec("ParametersP")
ResultT = TypeVar("ResultT")
RefT = TypeVar("RefT", bound="Operators[Any]")
T = TypeVar("T")
Layouts: TypeAlias = "ArraySpec | Sequence[Layouts]"
"""Layout of an array, or those of several."""

# A chain is planned in one turn of the loop, and a program that builds one in a loop has forgotten to await.
_MOST = 4096
# Values of these types stand for themselves in the key of a chain. Others have no key, and such a chain is
# asked step by step.
_PLAIN = frozenset({type(None), bool, int, str, bytes, type(...), object})
_SEVERAL = frozenset({list, tuple})
_ORDER = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "eq": "equal", "ne": "not_equal",
}  # fmt: skip
_OF_TWO = _ORDER | {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
# What has elements, or is one: with all else a reference is unequal, as any object is.
_EQUALITY = ("equal", "not_equal")
_COMPARED = (OnDevice, np.ndarray, np.generic, Number, list, tuple)
_OF_UFUNCS = {"power": "pow", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift"}
_OF_ONE = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}
# They stand around the members of a sequence, and before names: a key tells lists from tuples by them.
_OPENED: dict[type[Any], object] = {list: object(), tuple: object()}
_CLOSED = object()


def _is_one_operation(function: Function) -> bool:
    return function.how != "awaitable" and function.ask is None


@attrs.frozen(eq=False)
class Function:
    """A function of arrays, as its calls know it.

    Attributes:
        name: Its name, such as ``"linalg.matmul"``.
        make: Called with the arguments, once no call is left among them.
        how: What that returns: a message for a device, an awaitable, or the result itself.
        ask: Asks for a message; None for the device of the arguments.
        refuse: Raises the error of a call in the function's own words, if it has any.
        is_direct: Whether a call alone is asked for as it is. One that makes several operations, or has a
            long plan, is a chain of one: the plan is kept.
        expand: Makes the calls that compute it, by its arguments; None if `make` computes it. It is called
            when a chain is recorded, and not for later chains of the structure.
        is_fixed: Whether `expand` may look at its calls: they depend on nothing but their arguments.
        takes_hosts: Whether it makes arrays on the device of host arrays, so that no other function sees
            their elements.
    """

    name: str
    make: Callable[..., Any]
    how: Literal["message", "awaitable", "value"] = "message"
    ask: Callable[[Any], Awaitable[Any]] | None = None
    refuse: Callable[[Exception, tuple[Any, ...], Mapping[str, Any]], object] | None = None
    is_direct: bool = attrs.field(default=attrs.Factory(_is_one_operation, takes_self=True))
    expand: Callable[..., Call[Any]] | None = attrs.field(default=None, kw_only=True)
    is_fixed: bool = attrs.field(default=True, kw_only=True)
    takes_hosts: bool = attrs.field(default=False, kw_only=True)


class Asked(Protocol):
    """The device that calls are asked of."""

    @property
    def ask(self) -> Callable[[Any], Awaitable[Any]]:
        """See `Device.ask`."""
        ...

    def submit(self, operation: Any, /) -> Pending[Any]:
        """See `Device.submit`."""
        ...

    def ask_chain(self, chain: Chain, /) -> Awaitable[Any]:
        """Run the calls of a chain as one request."""
        ...

    def look_ahead(self, chain: Chain, /) -> Layouts:
        """Find what the last call of a chain makes, without a launch."""
        ...


VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
"""Versions of the array API standard."""

NAMESPACE: list[Any] = []
"""The namespace of the standard over calls: the layers above add it."""

METHODS: dict[str, Function] = {}
"""Functions that operators and methods make calls of, by their names; the layers above add them."""


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
            name = _OF_UFUNCS.get(ufunc.__name__, ufunc.__name__)
            is_operator = method == "__call__" and name in _OF_TWO.values() and not named
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


class SpentCall(Operators[T_co], Coroutine[Any, Any, T_co]):
    """A call that was awaited, or that was an operand of one that was."""

    __slots__ = ("_is_silent", "_running", "ahead", "args", "function", "named")
    noun = "a Call"
    first = "call"

    def __init__(
        self, function: Function, args: tuple[Any, ...], named: Mapping[str, Any] | None = None
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
            raise _spent(self)
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
            # Who keeps a call keeps no arrays by it.
            self.args, self.named = (), None
            return evaluate(self.function, args, named or {})
        try:
            chain = Chain(self)
        except Exception:
            self.silence()
            raise
        if not chain.refs or (len(chain.steps) == 1 and (is_direct or chain.key is None)):
            return chain.run()
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
                raise _spent(self)
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

    def transpose(self: SpentCall[Operators[RefT]], axes: int | Sequence[int], *more: int) -> Call[RefT]:
        """View it with the axes in another order; see `AccelRef.transpose`."""
        return Call(METHODS["transpose"], (self, axes, *more))


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


# Functions that take a number as an array without axes, of the other operand's dtype, with the same bits.
_OF_NUMBERS = frozenset({"arrays.add", "arrays.divide", "arrays.multiply", "arrays.subtract"})
_COMPOSED = frozenset({Call, SpentCall, np.ndarray, list, tuple})


async def _gathered(*results: Any) -> tuple[Any, ...]:
    await trio.lowlevel.checkpoint()
    return results


GATHER = Function("gather", _gathered, "awaitable")
"""Returns the results of several calls; see `gather`."""


class Chain:
    """The calls that one is made of, in an order in which they can run.

    Args:
        call: The last one.
        is_spent: Whether the calls are used now, which each is once.
        ends: Identities of calls that are operands of the chain, and none of its steps.

    Attributes:
        steps: The calls; each comes behind its operands.
        key: Tells chains of one structure from others: functions, arguments, layouts of arrays, and which of
            these are the same. None where an argument cannot be compared.
        refs: The arrays on the device among the arguments, in the order of the key.
        hosts: The host arrays, each once.
        numbers: Numbers that are handed over as host arrays are, with the places of their steps. Others are
            in the key.
        has_expansions: Whether steps are to be expanded before the chain can run.
        is_fixed: Whether all chains with the key expand to chains of one structure: no step has a rule of the
            program's own, or a host array whose elements a rule may read.

    Raises:
        RuntimeError: A call was used before.
        ValueError: There are too many.
    """

    __slots__ = ("has_expansions", "hosts", "is_fixed", "key", "numbers", "refs", "steps")

    def __init__(self, call: Any, *, is_spent: bool = True, ends: Iterable[int] = ()) -> None:
        self.steps: list[SpentCall[Any]] = []
        steps, places, stack, opened = self.steps, dict.fromkeys(ends, -1), [call], set[int]()
        while stack:
            step = stack[-1]
            depth = len(stack)
            # `_given` says the same of the usual call, with another one.
            args, named = step.args, step.named
            for each in (
                args if named is None and _SEVERAL.isdisjoint(map(type, args)) else arguments_of(step)
            ):
                kind: Any = type(each)  # pyright: ignore[reportUnknownVariableType]
                if kind is Call and id(each) not in places:
                    stack.append(each)
                elif kind is SpentCall:
                    raise _spent(each)
            if len(stack) > depth:
                if id(step) in opened:
                    # Its operands were on the stack above it, so that they are known by now.
                    raise ValueError(f"{step!r} is an operand of itself; take it out of the list in it")
                opened.add(id(step))
                # The first operand runs first, as in an expression of Python.
                stack[depth:] = stack[: depth - 1 : -1]
                continue
            stack.pop()
            if id(step) not in places:
                places[id(step)] = len(steps)
                steps.append(step)
        if len(steps) > _MOST:
            raise ValueError(f"a chain has at most {_MOST} calls: await one in between")
        for step in steps if is_spent else ():
            step.__class__ = SpentCall
        self.refs: list[Any] = []
        self.hosts: list[HostArray] = []
        self.numbers: list[tuple[int, float]] = []
        self.has_expansions: bool = False
        self.is_fixed: bool = True
        self.key: tuple[object, ...] | None = self._read(places)

    def expanded(self) -> Chain:
        """Return the chain with the calls of each `Function.expand` in place of its step.

        Raises:
            Exception: A function has raised it: the steps are spent.
        """
        made: dict[int, Any] = {}
        *_, last = steps = self.steps
        try:
            for step in steps:
                # It becomes an operand once more.
                step.__class__ = Call
            for step in steps:
                args, named = replaced(step, made)
                step.args, step.named = args, named or None
                if step.function.expand is not None:
                    made[id(step)] = step.function.expand(*args, **named)
                    step.args, step.named = (), None
            return Chain(made.get(id(last), last))
        except Exception:
            for call in made.values():
                call.silence()
            raise
        finally:
            for step in steps:
                step.__class__ = SpentCall

    def without_numbers(self) -> tuple[tuple[object, ...] | None, list[tuple[int, float]]]:
        """Return a key without the numbers that may be handed over, and these."""
        self.refs, self.hosts, numbers = [], [], list[tuple[int, float]]()
        return self._read({id(step): place for place, step in enumerate(self.steps)}, numbers), numbers

    def _read(
        self, places: Mapping[int, int], handed: list[tuple[int, float]] | None = None
    ) -> tuple[object, ...] | None:
        """Take the arguments; returns the key, without numbers that are added to `handed`."""
        key: list[object] = []
        refs, hosts, blocks, numbers = self.refs, self.hosts, dict[Any, int](), dict[int, int]()
        is_keyed = True
        for step in self.steps:
            function = step.function
            key.append(function)
            if function.expand is not None:
                self.has_expansions = True
            is_fixed = function.is_fixed
            # `_given` says the same of the usual call, with another one.
            args, named = step.args, step.named
            for each in (
                args if named is None and _SEVERAL.isdisjoint(map(type, args)) else arguments_of(step)
            ):
                kind: Any = type(each)  # pyright: ignore[reportUnknownVariableType]
                if kind is SpentCall or kind is Call:
                    key.append(places[id(each)])
                elif isinstance(each, Operators):
                    array: Any = each  # pyright: ignore[reportUnknownVariableType]
                    spec, block = array.spec, array.block
                    key += id(spec.dtype), spec.shape, spec.strides, spec.offset, block.nbytes
                    key.append(blocks.setdefault(block.id, len(blocks)))
                    refs.append(each)
                elif kind is np.ndarray:
                    is_fixed = is_fixed and function.takes_hosts
                    number = numbers.setdefault(id(each), len(hosts))
                    key += each.shape, each.dtype, number
                    if number == len(hosts):
                        hosts.append(each)
                elif handed is not None and kind is float and _takes_number(step):
                    key.append(float)
                    handed.append((places[id(step)], each))
                else:
                    # The sign of what is no number counts, too, and its text does not show it.
                    told = (
                        each
                        if kind in _PLAIN
                        else pack("d", each)
                        if kind is float
                        else pack("2d", each.real, each.imag)
                        if kind is complex
                        else _told(each)
                    )
                    key += kind, told
                    is_keyed = is_keyed and told is not NotImplemented
            self.is_fixed = self.is_fixed and is_fixed
        return tuple(key) if is_keyed else None

    async def run(self) -> Any:
        """Run it step by step; see `run_steps`."""
        try:
            return await self.run_steps({})
        finally:
            self.let_go()

    async def run_steps(self, given: Mapping[int, Any]) -> Any:
        """Run all steps, expanded if need be; see the function."""
        if self.has_expansions:
            self.take_steps(self.expanded())
        return await run_steps(self.steps, given)

    def take_steps(self, expanded: Chain) -> None:
        """Have the steps of the chain that this one expands to."""
        self.steps, self.has_expansions = expanded.steps, False

    def let_go(self) -> None:
        """Let the arguments go: the calls may stay in variables of the program."""
        for step in self.steps:
            step.args, step.named = (), None

    @property
    def device(self) -> Asked:
        """The device of the first array that is on one.

        Raises:
            TypeError: There is none.
        """
        if self.refs:
            found: Asked = self.refs[0].device
            return found
        return asked(
            self.steps[-1].function.name, (), {"": [one for step in self.steps for one in arguments_of(step)]}
        )


async def evaluate(function: Function, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
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
            _refuse_results(function.name, args)
        raise


def _refuse_results(name: str, args: Iterable[object]) -> None:
    """Refuse a result of another call which has no operators: several arrays, or elements on the host."""
    for each in args:
        kind = type(each)
        if issubclass(kind, (tuple, np.ndarray)):
            use = "take one of its arrays" if issubclass(kind, tuple) else "use it as an array of NumPy"
            told = f"an operand is of type {kind.__name__}"
            raise TypeError(f"{name}: {told}; await the call that returns it first, and {use}") from None


async def run_steps(steps: Sequence[SpentCall[Any]], given: Mapping[int, Any]) -> Any:
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


def start(call: SpentCall[T_co]) -> Pending[T_co]:
    """Hand a call over, and those that it is made of, without waiting; see `Call.start`."""
    if type(call) is not Call:
        raise _spent(call)
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


def replaced(step: SpentCall[Any], values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with values in place of what is known by its identity."""

    def one(each: Any) -> Any:
        if type(each) in _SEVERAL:
            return type(each)([values.get(id(item), item) for item in each])
        return values.get(id(each), each)

    return tuple(map(one, step.args)), {name: one(each) for name, each in (step.named or {}).items()}


def asked(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Asked:
    """Find the device of the first array that is on one.

    Raises:
        TypeError: There is none.
    """
    found: Asked = DEVICE_OF[0](name, *_flat((*args, *named.values())))
    return found


DEVICE_OF: list[Callable[..., Any]] = []
"""Finds the device of operands: the module of devices is above this one."""


def arguments_of(step: SpentCall[Any]) -> list[Any]:
    """List the arguments of a call, with the members of sequences one by one."""
    named = step.named
    return _flat(step.args if named is None else (*step.args, _CLOSED, *named, *named.values()))


def _flat(given: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for each in given:
        if type(each) in _SEVERAL:
            flat += _OPENED[type(each)], *each, _CLOSED
        else:
            flat.append(each)
    return flat


def _takes_number(step: SpentCall[Any]) -> bool:
    # A number in a sequence is none of its operands.
    is_one = step.named is None and step.function.name in _OF_NUMBERS
    return is_one and _SEVERAL.isdisjoint(map(type, step.args))


def _told(given: Any) -> object:
    """Return what tells an argument from others; NotImplemented where nothing does."""
    value: Any = given
    if isinstance(given, DType):
        # Its hash takes longer than all the rest.
        return id(value)
    if isinstance(given, slice):
        bounds = value.start, value.stop, value.step
        return bounds if _PLAIN.issuperset(map(type, bounds)) else NotImplemented
    if isinstance(given, np.generic):
        return value.dtype, value.tobytes()
    return value if isinstance(given, (np.dtype, type)) else NotImplemented


def _spent(call: SpentCall[Any]) -> RuntimeError:
    return RuntimeError(
        f"{call!r} was awaited before, or in another call; keep its result in a name, "
        "or await both calls at once: await ta.gather(a, b)"
    )


def composed(
    function: Callable[ParametersP, Coroutine[Any, Any, ResultT]],
) -> Callable[ParametersP, Call[ResultT]]:
    """Tell type checkers what a public function of a package makes, of which `named` has it make calls."""
    return cast("Any", function)  # type: ignore[no-any-return]  # as it is


def called(function: Function) -> Callable[..., Call[Any]]:
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
    find = partial(getattr, namespace)

    def of_two(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
        def ask(self: Any, other: Any) -> Any:
            if name in _EQUALITY:
                if not isinstance(other, _COMPARED):
                    return NotImplemented
            elif other is None or isinstance(other, (str, bytes)):
                self.silence()  # Python refuses it
                return NotImplemented
            return find(name)(other, self) if is_reflected else find(name)(self, other)

        return ask

    def of_one(name: str) -> Callable[[Any], Any]:
        return lambda self: find(name)(self)  # noqa: PLW0108  # it is not found before it is needed

    for special, name in _OF_TWO.items():
        setattr(Operators, f"__{special}__", of_two(name, is_reflected=False))
        if special not in _ORDER:
            setattr(Operators, f"__r{special}__", of_two(name, is_reflected=True))
    for special, name in _OF_ONE.items():
        setattr(Operators, f"__{special}__", of_one(name))

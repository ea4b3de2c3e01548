"""Declarations of a kernel: its code, its parameters, and rules of a launch that follow from arguments."""

from __future__ import annotations

import inspect
import math
import operator
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import attrs
import numpy as np

from ..actors import must_be_whole, named_options
from ..backends.base import DType, DTypeLike, Ints, Strs
from ..backends.base.contract.ops import (
    ArraySpec,
    Dim3,
    KernelCode,
    KernelLayout,
    KernelParameter,
    KernelRole,
    TensorMap,
    contiguous_strides,
)

__all__ = [
    "CompileOptions",
    "Parameter",
    "TensorMap",
    "cdiv",
    "cubin",
    "fatbin",
    "ltoir",
    "ptx",
    "reads",
    "scalar",
    "source",
    "updates",
    "writes",
]

Code: TypeAlias = "str | KernelCode"
"""Code of a kernel: CUDA C++ as a text, or what `source`, `ptx`, `cubin`, `fatbin` or `ltoir` made."""

_Value: TypeAlias = "str | float | None"
_Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


def source(text: str, name: str = "kernel.cu") -> KernelCode:
    """CUDA C++ with a name, which appears in the compiler's log.

    Raises:
        TypeError: An argument is not a string.
        ValueError: An argument is empty, or contains a zero character.
    """
    return KernelCode("c++", _text("source", text), _text("name", name))


def ptx(code: str | bytes, name: str = "kernel.ptx") -> KernelCode:
    """PTX, which the driver compiles when it is loaded."""
    if isinstance(code, bytes):
        try:
            code = code.rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"ptx: must be a text; a cubin or fatbin is none: {error}") from error
    return KernelCode("ptx", _text("ptx", code), _text("name", name))


def cubin(code: bytes, name: str = "kernel.cubin") -> KernelCode:
    """Return a cubin: code of one architecture, such as nvcc makes with ``-cubin``."""
    return KernelCode("cubin", _bytes("cubin", code), _text("name", name))


def fatbin(code: bytes, name: str = "kernel.fatbin") -> KernelCode:
    """Return a fatbin: code of several architectures, such as nvcc makes with ``-fatbin``."""
    return KernelCode("fatbin", _bytes("fatbin", code), _text("name", name))


def ltoir(code: bytes, name: str = "kernel.ltoir") -> KernelCode:
    """LTO IR, which is optimised and linked by nvJitLink before it is loaded."""
    return KernelCode("ltoir", _bytes("ltoir", code), _text("name", name))


def as_code(code: Code, name: str) -> KernelCode:
    """Code, of which a plain text is CUDA C++ with the kernel's name."""
    if isinstance(code, str):
        return source(code, f"{name}.cu")
    value: object = code
    if not isinstance(value, KernelCode):
        raise TypeError(
            f"code: must be CUDA C++ as a text, or made by source, ptx, cubin, fatbin or ltoir, got "
            f"{type(value).__name__}"
        )
    return code


_Check: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _several(*kinds: type[object], or_one: bool = False) -> _Check:
    """Check for several values of these types; refuse a text, which Python takes for several values."""

    def is_one(item: object) -> bool:
        # A truth value is an integer to Python.
        return isinstance(item, kinds) and not isinstance(item, bool)

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if or_one and isinstance(value, kinds):
            return
        is_several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if not is_several or not all(map(is_one, cast("Sequence[object]", value))):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(
                f"CompileOptions: {field.name} must be a list of {names}, got {value!r}"
                + (f"; give [{value!r}]" if isinstance(value, kinds) else "")
            )

    return check


def _check_macros(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"CompileOptions: macros must be a dict, such as {{'N': 4}}, got {value!r}")
    for name, content in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not name.strip() or "=" in name:
            raise ValueError(f"CompileOptions: macros: {name!r} is not a name of a macro")
        if content is not None and not isinstance(content, (str, int, float)):
            raise TypeError(
                f"CompileOptions: macros[{name!r}] must be a text, a number or None, got {content!r}"
            )


# Options with other names in `cuda.core`.
_NAMES = {
    "macros": "define_macro",
    "undefine": "undefine_macro",
    "architecture": "arch",
    "max_registers": "max_register_count",
    "fast_math": "use_fast_math",
    "line_info": "lineinfo",
    "bundled_headers": "use_bundled_headers",
}
_are_paths = _several(str, os.PathLike, or_one=True)


@named_options
@attrs.frozen(kw_only=True)
class CompileOptions:
    """Options of NVRTC. None leaves an option to NVRTC.

    Attributes:
        std: Dialect of C++, such as ``"c++17"``.
        macros: Macros, as ``-D`` defines them; None for a macro without a value. True is 1, False is 0.
        undefine: Macros that are not defined.
        include_path: Folders that are searched for headers, on the machine of the device.
        pre_include: Headers that are included before the source.
        architecture: The architecture, such as ``"sm_90a"``; by default the device's.
        max_registers: The most registers of a thread.
        fast_math: Whether to compute with less accuracy.
        fma: Whether products and sums may be contracted.
        ftz: Whether denormal numbers are zero.
        prec_div: Whether quotients in single precision are rounded correctly.
        prec_sqrt: Whether roots in single precision are rounded correctly.
        restrict: Whether no two pointers point to the same memory.
        device_int128: Whether there is ``__int128``.
        line_info: Whether profilers and tools find lines of the source.
        debug: Whether to compile for a debugger.
        bundled_headers: Whether NVRTC's own copies of the CUDA and CCCL headers are found.
        ptxas_options: Options of the assembler.
        diag_suppress: Numbers of suppressed warnings.

    Raises:
        TypeError, ValueError: An option of another type, or a macro without a name.
    """

    std: str | None = None
    macros: Mapping[str, _Value] = attrs.field(factory=dict[str, "_Value"], validator=_check_macros)
    undefine: Sequence[str] = attrs.field(default=(), validator=_several(str))
    include_path: _Paths = attrs.field(default=(), validator=_are_paths)
    pre_include: _Paths = attrs.field(default=(), validator=_are_paths)
    architecture: str | None = None
    max_registers: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(must_be_whole(1))
    )
    fast_math: bool | None = None
    fma: bool | None = None
    ftz: bool | None = None
    prec_div: bool | None = None
    prec_sqrt: bool | None = None
    restrict: bool | None = None
    device_int128: bool | None = None
    line_info: bool | None = None
    debug: bool | None = None
    bundled_headers: bool | None = None
    ptxas_options: Sequence[str] = attrs.field(default=(), validator=_several(str))
    diag_suppress: Sequence[int] = attrs.field(default=(), validator=_several(int))

    def plain(self) -> dict[str, object]:
        """Return the given options as plain values, by the names of `cuda.core.ProgramOptions`."""
        options = {
            **{_NAMES.get(name, name): value for name, value in attrs.asdict(self, recurse=False).items()},
            "define_macro": [_macro(name, value) for name, value in self.macros.items()],
            "undefine_macro": list(self.undefine),
            "include_path": _paths(self.include_path),
            "pre_include": _paths(self.pre_include),
            "ptxas_options": list(self.ptxas_options),
            "diag_suppress": list(self.diag_suppress),
        }
        return {name: value for name, value in options.items() if value is not None and value != []}


def _macro(name: str, value: str | float | None) -> str:
    # C++ has no `True`: the preprocessor would take it for 0.
    return name if value is None else f"{name}={int(value) if isinstance(value, bool) else value}"


def _paths(paths: _Paths) -> list[str]:
    several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return [os.fspath(path) for path in several]


def _text(label: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{label}: must be a text, got {type(text).__name__}")
    if not text.strip() or "\0" in text:
        raise ValueError(f"{label}: must be a non-empty text without null characters")
    return str(text)


def _bytes(label: str, code: object) -> bytes:
    if not isinstance(code, (bytes, bytearray, memoryview)):
        raise TypeError(f"{label}: must be bytes, got {type(code).__name__}; read it: Path(...).read_bytes()")
    copied = bytes(cast("bytes", code))
    if not copied:
        raise ValueError(f"{label}: must not be empty")
    return copied


ValueT = TypeVar("ValueT")
ValueT_co = TypeVar("ValueT_co", covariant=True)


class _OfAllArguments(Protocol[ValueT_co]):
    def __call__(self, **named: Any) -> ValueT_co: ...


# One for each count of parameters: with `Callable[..., int]`, pyright knows no parameter of a lambda.
LaunchRule: TypeAlias = (
    Callable[[], ValueT]
    | Callable[[Any], ValueT]
    | Callable[[Any, Any], ValueT]
    | Callable[[Any, Any, Any], ValueT]
    | Callable[[Any, Any, Any, Any], ValueT]
    | Callable[[Any, Any, Any, Any, Any], ValueT]
    | Callable[[Any, Any, Any, Any, Any, Any], ValueT]
    | _OfAllArguments[ValueT]
)
"""A function that names arguments of the kernel as its own parameters. It gets arrays as `ArraySpec` (shape,
size, ndim, dtype), scalars as numbers."""

ShapeRule: TypeAlias = LaunchRule["int | Sequence[int]"]
"""Tells the shape of a new array from arguments of the kernel."""

# Formats of `struct`; others are packed by NumPy.
_FORMATS = {
    DType.float64: "d",
    DType.float32: "f",
    DType.float16: "e",
    DType.int8: "b",
    DType.int16: "h",
    DType.int32: "i",
    DType.int64: "q",
    DType.uint8: "B",
    DType.uint16: "H",
    DType.uint32: "I",
    DType.uint64: "Q",
    DType.bool: "?",
}


@attrs.frozen
class Parameter:
    """One parameter: its role, and the arguments that it takes; made by `reads`, `scalar` and others.

    Attributes:
        role: Use by the kernel.
        dtype: Element type of an array; type of a scalar.
        ndim: The number of the array's axes; None for any number.
        layout: Layout of arrays that it takes.
        shape: Returns the shape of an omitted output.
        copy: Whether the kernel changes a copy of the array.
    """

    role: KernelRole
    dtype: DType
    ndim: int | None = None
    layout: KernelLayout = "contiguous"
    shape: ShapeRule | None = None
    copy: bool = False

    def named(self, name: str) -> KernelParameter:
        """Convert to the form for a definition."""
        return KernelParameter(
            name=name, role=self.role, dtype=self.dtype, ndim=self.ndim, layout=self.layout
        )


def reads(dtype: DTypeLike, *, ndim: int | None = None, layout: KernelLayout = "contiguous") -> Parameter:
    """Declare an array that is read only. The kernel gets the address of its first element.

    Args:
        dtype: Element type; an array of another type is refused.
        ndim: The number of its axes; None for any number.
        layout: ``"contiguous"``: the array must be in C order without gaps, or it is refused. ``"packed"``:
            other arrays are copied. ``"any"``: the array is passed with its strides; pass these to the kernel
            as scalars. A `TensorMap`: the kernel gets a map of the array instead of an address.

    Raises:
        TypeError, ValueError: Devices lack this dtype or layout, or the map does not suit the dtype.
    """
    return _array("read", dtype, ndim, layout)


def updates(
    dtype: DTypeLike, *, ndim: int | None = None, layout: KernelLayout = "contiguous", copy: bool = False
) -> Parameter:
    """Declare an array that is read and changed in place; see `reads`.

    Args:
        dtype: Element type.
        ndim: The number of its axes.
        layout: Layout of arrays that it takes.
        copy: Whether the kernel changes a copy, which is made before the launch and is part of the reply. The
            argument is not changed. Then a lost launch changes nothing, and may run again according to
            `DeviceOptions.retry`.
    """
    return attrs.evolve(_array("update", dtype, ndim, layout), copy=bool(copy))


def writes(
    dtype: DTypeLike,
    *,
    ndim: int | None = None,
    layout: KernelLayout = "contiguous",
    shape: ShapeRule | None = None,
) -> Parameter:
    """Declare an array that is overwritten in full; see `reads`.

    Args:
        dtype: Element type.
        ndim: The number of its axes.
        layout: Layout of arrays that it takes.
        shape: Returns the shape, given other arguments, ``shape=lambda x: x.shape``; then the launch may omit
            the array, and a new one is made.
    """
    if shape is not None and not callable(shape):
        raise TypeError(f"writes: shape must be a rule, such as lambda x: x.shape, got {shape!r}")
    return attrs.evolve(_array("write", dtype, ndim, layout), shape=shape)


def scalar(dtype: DTypeLike) -> Parameter:
    """Declare a number that is passed by value, with this type; a number that it cannot hold is refused."""
    return Parameter("scalar", DType.of(dtype))


def _array(role: KernelRole, dtype: DTypeLike, ndim: int | None, layout: KernelLayout) -> Parameter:
    value: object = layout
    if not isinstance(value, TensorMap) and value not in ("contiguous", "packed", "any"):
        raise ValueError(f"layout: must be 'contiguous', 'packed', 'any' or a TensorMap, got {value!r}")
    axes: object = ndim
    if axes is not None and (isinstance(axes, bool) or not isinstance(axes, int) or axes < 0):
        raise ValueError(f"ndim: must be an integer of at least 0, or None, got {axes!r}")
    kind = DType.of(dtype)
    if isinstance(layout, TensorMap):
        layout.codes(kind)
        rank = len(layout.box)
        if ndim not in (None, rank):
            raise ValueError(f"ndim: must be {rank}, as the box of the tensor map has, got {ndim}")
        ndim = rank
    return Parameter(role, kind, ndim, layout)


def check_array(operation: str, parameter: KernelParameter, array: ArraySpec) -> None:
    """Refuse an array that the kernel would take for another.

    Raises:
        TypeError: Another dtype.
        ValueError: Other axes, or gaps.
    """
    name = parameter.name
    if array.dtype is not parameter.dtype:
        raise TypeError(
            f"{operation}: {name} must have dtype {parameter.dtype}, got {array.dtype}; use cast()"
        )
    if parameter.ndim is not None and array.ndim != parameter.ndim:
        raise ValueError(f"{operation}: {name} must have {parameter.ndim} axes, got shape {array.shape}")
    if (
        parameter.layout == "contiguous"
        and array.strides != contiguous_strides(array.shape, array.dtype.itemsize)
        and not array.is_contiguous
    ):
        raise ValueError(
            f"{operation}: {name} must be contiguous, got a view of shape {array.shape} with strides "
            f"{array.strides}; copy it (await {name}.copy()), or declare it with layout='packed'"
        )


class Scalars:
    """Packs the scalars of a kernel, each aligned to its size as in a C structure.

    Args:
        dtypes: Their types, in order.
        offsets: Offset of each.
    """

    def __init__(self, dtypes: Sequence[DType], offsets: Sequence[int]) -> None:
        self._dtypes = tuple(dtypes)
        # The parameters that NumPy makes bytes of.
        self._others = tuple(number for number, dtype in enumerate(dtypes) if dtype not in _FORMATS)
        code, end = "=", 0
        for dtype, offset in zip(dtypes, offsets, strict=True):
            code += "x" * (offset - end) + _FORMATS.get(dtype, f"{dtype.itemsize}s")
            end = offset + dtype.itemsize
        self._pack = struct.Struct(code).pack

    def pack(self, values: list[Any]) -> bytes:
        """Return the bytes of values that their types can hold."""
        for number in self._others:
            values[number] = np.array(values[number], self._dtypes[number].dtype).tobytes()
        return self._pack(*values)


Extents: TypeAlias = "int | Sequence[int] | LaunchRule[int | Sequence[int]]"
"""One to three numbers along x, y and z, or a rule that gives them."""

_AXES = 3
# The driver has the same bound for every device.
_MOST_THREADS = 1024
_MOST_BLOCK = (1024, 1024, 64)
_MOST_GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up: how many blocks of ``b`` cover ``a`` elements.

    >>> cdiv(1000, 256)
    4
    """
    return -(-a // b)


class ArgumentRule:
    """A number, or several, that may follow from the arguments.

    Args:
        purpose: Its purpose: ``"grid"``, ``"block"``, ``"shared"`` or ``"shape of y"``.
        rule: The value, or the function.
        names: Names that a function may ask for.

    Raises:
        ValueError: The function names something else.
        TypeError: Its parameters cannot be read.

    Attributes:
        constant: The value, where it is one.
    """

    __slots__ = ("_asked", "_function", "_purpose", "constant")

    def __init__(self, purpose: str, rule: Any, names: Collection[str]) -> None:
        self._purpose = purpose
        self._function: Callable[..., Any] | None = rule if callable(rule) else None
        self.constant: Any = None if callable(rule) else rule
        self._asked: Strs = ()
        if self._function is not None:
            self._asked = _asked_by(purpose, self._function, names)

    def value(self, arguments: Mapping[str, Any]) -> Any:
        """Evaluate it for the arguments of a launch."""
        if self._function is None:
            return self.constant
        try:
            return self._function(**{name: arguments[name] for name in self._asked})
        except Exception as error:
            error.add_note(f"in the rule of the kernel for its {self._purpose}")
            raise


def _asked_by(purpose: str, function: Callable[..., Any], names: Collection[str]) -> Strs:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{purpose}: it cannot be told which arguments {function!r} takes: {error}"
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(names)
    asked = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.name in asked and parameter.name not in names and parameter.default is parameter.empty
    ]
    if unknown:
        raise ValueError(
            f"{purpose}: its rule asks for {', '.join(unknown)}; "
            f"there are {', '.join(names) or 'no arguments'}"
        )
    return tuple(name for name in asked if name in names)


def extents(name: str, purpose: str, value: Any) -> Dim3:
    """Return one to three integers as three.

    Raises:
        TypeError, ValueError: The value is something else.
    """
    if type(value) is int:
        return value, 1, 1
    numbers = _whole_numbers(value) or []
    if not 1 <= len(numbers) <= _AXES:
        raise TypeError(f"{name}: {purpose} must be an integer, or one to three of them, got {value!r}")
    x, y, z = (*numbers, 1, 1)[:_AXES]
    return x, y, z


def shape_of(name: str, parameter: str, value: Any) -> Ints:
    """Return the shape that a rule gives an output."""
    shape = _whole_numbers(value)
    if shape is None or any(extent < 0 for extent in shape):
        raise ValueError(f"{name}: the shape of {parameter} must be integers of at least 0, got {value!r}")
    return tuple(shape)


def _whole_numbers(value: Any) -> list[int] | None:
    """Return one integer or several as a list; None for anything else."""
    is_several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    try:
        return [operator.index(item) for item in cast("Sequence[Any]", value if is_several else (value,))]
    except TypeError:
        return None


def check_grid(name: str, grid: Dim3, cluster: Dim3 | None, *, may_be_empty: bool) -> None:
    """Refuse a grid that no device launches.

    Raises:
        ValueError: It is empty or too large, or its blocks do not fill clusters.
    """
    x, y, z = grid
    if x < 1 or y < 1 or z < 1:
        if may_be_empty and min(grid) == 0:
            return
        hint = "; to launch nothing then, declare the kernel with skip_empty=True" if min(grid) == 0 else ""
        raise ValueError(f"{name}: the grid must have at least one block along each axis, got {grid}{hint}")
    if x > _MOST_GRID[0] or y > _MOST_GRID[1] or z > _MOST_GRID[2]:
        raise ValueError(f"{name}: the grid must have at most {_MOST_GRID} blocks along x, y, z, got {grid}")
    if cluster is not None and any(all_ % extent for all_, extent in zip(grid, cluster, strict=True)):
        raise ValueError(f"{name}: the grid must be whole clusters of {cluster} blocks, got {grid}")


def check_block(name: str, block: Dim3) -> None:
    """Refuse a block that no device runs.

    Raises:
        ValueError: It is empty or too large.
    """
    if min(block) < 1:
        raise ValueError(f"{name}: a block must have at least one thread along each axis, got {block}")
    if math.prod(block) > _MOST_THREADS or any(a > b for a, b in zip(block, _MOST_BLOCK, strict=True)):
        raise ValueError(
            f"{name}: a block must have at most {_MOST_THREADS} threads, and {_MOST_BLOCK} along x, y, z, "
            f"got {block}, which is {math.prod(block)}"
        )


def check_shared(name: str, value: Any) -> int:
    """Return the bytes of dynamic shared memory.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is negative.
    """
    try:
        shared = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: shared must be an integer number of bytes, got {value!r}") from None
    if not 0 <= shared < 1 << 31:
        raise ValueError(f"{name}: shared must be at least 0 bytes, and below 2**31, got {shared}")
    return shared

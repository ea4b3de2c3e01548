"""Code of kernels, and options of the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs

from ..actors import named_options
from ..backends.base.contract.ops import KernelCode

__all__ = ["Code", "CompileOptions", "as_code", "cubin", "fatbin", "ltoir", "ptx", "source"]

Code: TypeAlias = "str | KernelCode"
"""Code of a kernel: CUDA C++ as a text, or what `source`, `ptx`, `cubin`, `fatbin` or `ltoir` made."""

_Value: TypeAlias = "str | float | None"
_Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


def source(text: str, name: str = "kernel.cu") -> KernelCode:
    """CUDA C++ with a name, by which the compiler's log calls it.

    Raises:
        TypeError: No text.
        ValueError: An empty text, or one with a zero character.
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
    given: object = code
    if not isinstance(given, KernelCode):
        raise TypeError(
            f"code: must be CUDA C++ as a text, or made by source, ptx, cubin, fatbin or ltoir, got "
            f"{type(given).__name__}"
        )
    return code


_Check: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _one(kind: type[object]) -> _Check:
    """One value of a type, or None."""

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        # A truth value is a whole number for Python.
        if value is not None and type(value) is not kind:
            raise TypeError(f"CompileOptions: {field.name} must be {kind.__name__} or None, got {value!r}")

    return check


def _several(*kinds: type[object], or_one: bool = False) -> _Check:
    """Several values of these types; a text, which Python takes for several values, is refused."""

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if or_one and isinstance(value, kinds):
            return
        is_several = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_several or not all(isinstance(each, kinds) for each in cast("Sequence[object]", value)):
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
            raise ValueError(f"CompileOptions: macros: {name!r} is no name of a macro")
        if content is not None and not isinstance(content, (str, int, float)):
            raise TypeError(
                f"CompileOptions: macros[{name!r}] must be a text, a number or None, got {content!r}"
            )


_is_flag = _one(bool)
_are_paths = _several(str, os.PathLike, or_one=True)


@named_options
@attrs.frozen(kw_only=True)
class CompileOptions:
    """Options of NVRTC. Those that are None are left to it.

    Attributes:
        std: Dialect of C++, such as ``"c++17"``.
        macros: Macros, as ``-D`` defines them; None for one without a value. True is 1, False is 0.
        undefine: Macros that are not defined.
        include_path: Folders where headers are looked for, on the machine that the device is on.
        pre_include: Headers that are included before the source.
        architecture: The architecture, such as ``"sm_90a"``; by default the device's.
        max_registers: The most registers of a thread.
        fast_math: Whether to compute with less accuracy.
        fma: Whether products and sums may be contracted.
        ftz: Whether denormal numbers are zero.
        prec_div: Whether quotients in single precision are rounded correctly.
        prec_sqrt: Whether roots in single precision are.
        restrict: Whether no two pointers show the same memory.
        device_int128: Whether there is ``__int128``.
        line_info: Whether profilers and tools find lines of the source.
        debug: Whether to compile for a debugger.
        bundled_headers: Whether the CUDA and CCCL headers that NVRTC has with it are found.
        ptxas_options: Options of the assembler.
        diag_suppress: Numbers of warnings that are not given.

    Raises:
        TypeError, ValueError: An option of another type, or a macro without a name.
    """

    std: str | None = attrs.field(default=None, validator=_one(str))
    macros: Mapping[str, _Value] = attrs.field(factory=dict[str, "_Value"], validator=_check_macros)
    undefine: Sequence[str] = attrs.field(default=(), validator=_several(str))
    include_path: _Paths = attrs.field(default=(), validator=_are_paths)
    pre_include: _Paths = attrs.field(default=(), validator=_are_paths)
    architecture: str | None = attrs.field(default=None, validator=_one(str))
    max_registers: int | None = attrs.field(default=None, validator=_one(int))
    fast_math: bool | None = attrs.field(default=None, validator=_is_flag)
    fma: bool | None = attrs.field(default=None, validator=_is_flag)
    ftz: bool | None = attrs.field(default=None, validator=_is_flag)
    prec_div: bool | None = attrs.field(default=None, validator=_is_flag)
    prec_sqrt: bool | None = attrs.field(default=None, validator=_is_flag)
    restrict: bool | None = attrs.field(default=None, validator=_is_flag)
    device_int128: bool | None = attrs.field(default=None, validator=_is_flag)
    line_info: bool | None = attrs.field(default=None, validator=_is_flag)
    debug: bool | None = attrs.field(default=None, validator=_is_flag)
    bundled_headers: bool | None = attrs.field(default=None, validator=_is_flag)
    ptxas_options: Sequence[str] = attrs.field(default=(), validator=_several(str))
    diag_suppress: Sequence[int] = attrs.field(default=(), validator=_several(int))

    def plain(self) -> dict[str, object]:
        """Return those that are given, by the names of `cuda.core.ProgramOptions`, in plain values."""
        given: dict[str, object] = {
            "std": self.std,
            "define_macro": [_macro(name, value) for name, value in self.macros.items()],
            "undefine_macro": list(self.undefine),
            "include_path": _paths(self.include_path),
            "pre_include": _paths(self.pre_include),
            "arch": self.architecture,
            "max_register_count": self.max_registers,
            "use_fast_math": self.fast_math,
            "fma": self.fma,
            "ftz": self.ftz,
            "prec_div": self.prec_div,
            "prec_sqrt": self.prec_sqrt,
            "restrict": self.restrict,
            "device_int128": self.device_int128,
            "lineinfo": self.line_info,
            "debug": self.debug,
            "use_bundled_headers": self.bundled_headers,
            "ptxas_options": list(self.ptxas_options),
            "diag_suppress": list(self.diag_suppress),
        }
        return {name: value for name, value in given.items() if value is not None and value != []}


def _macro(name: str, value: str | float | None) -> str:
    # C++ has no `True`: the preprocessor would take it for 0.
    return name if value is None else f"{name}={int(value) if isinstance(value, bool) else value}"


def _paths(paths: _Paths) -> list[str]:
    several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return [os.fspath(path) for path in several]


def _text(what: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{what}: must be a text, got {type(text).__name__}")
    if not text.strip() or "\0" in text:
        raise ValueError(f"{what}: must not be empty, and have no zero character")
    return str(text)


def _bytes(what: str, code: object) -> bytes:
    if not isinstance(code, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what}: must be bytes, got {type(code).__name__}; read it: Path(...).read_bytes()")
    copied = bytes(cast("bytes", code))
    if not copied:
        raise ValueError(f"{what}: must not be empty")
    return copied

"""NVRTC behind the disk cache: sources in C++ that are compiled once, and then found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from cuda.bindings import driver

from ...base.code_cache import CodeCache, CompiledCode, code_key, default_code_cache
from ...base.headers import header_parts

if TYPE_CHECKING:
    # To import it takes 0.3 s, which a device that compiles nothing does without.
    from cuda.core import ProgramOptions

__all__ = ["Target", "compiled"]

Target: TypeAlias = Literal["cubin", "ptx", "ltoir"]

# What a compilation does besides making code, or reads besides sources and headers: never found, always done.
_NOT_KEPT = ("create_pch", "use_pch", "pch", "pch_dir", "time", "fdevice_time_trace", "optimization_info")


def compiled(
    source: str,
    options: ProgramOptions,
    *,
    target: Target = "cubin",
    names: Sequence[str] = (),
    cache: CodeCache | None = None,
) -> CompiledCode:
    """Compile a source, or find what was compiled of the same before; blocks.

    The key has the source, the contents of all headers that it may include, the options, the name
    expressions, and the versions of NVRTC and of the driver.

    Args:
        source: C++ with CUDA's extensions.
        options: How to compile it; `arch` is set. If `name` has a folder, headers are looked for there.
        target: What to make.
        names: Name expressions whose symbols are wanted.
        cache: Where to look; by default the one that the environment names.

    Raises:
        cuda.core._utils.cuda_utils.NVRTCError: It does not compile; the log is in the message.
    """
    cache = default_code_cache() if cache is None else cache
    key = None if cache.folder is None else _key(source, options, target, names)
    return cache.compiled(key, lambda: _compile(source, options, target, names))


def _key(source: str, options: ProgramOptions, target: Target, names: Sequence[str]) -> bytes | None:
    from cuda.bindings import nvrtc

    if any(getattr(options, name, None) for name in _NOT_KEPT):
        return None
    headers = header_parts(
        source,
        folder=Path(str(options.name)).parent,
        folders=[Path(folder) for folder in _listed(options.include_path)],
        first=_listed(options.pre_include),
    )
    if headers is None:
        return None
    return code_key(
        source=source,
        headers=headers,
        options=tuple(options.as_bytes("nvrtc", target)),
        name=str(options.name),
        target=target,
        names=tuple(names),
        compiler=".".join(str(part) for part in nvrtc.nvrtcVersion()[1:]),
        driver=int(driver.cuDriverGetVersion()[1]),
    )


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _compile(source: str, options: ProgramOptions, target: Target, names: Sequence[str]) -> CompiledCode:
    from cuda.core import Program

    program = Program(source, "c++", options)
    try:
        made = program.compile(target, name_expressions=tuple(names))
        symbols = {_text(name): _text(symbol) for name, symbol in made.symbol_mapping.items()}
        return CompiledCode(bytes(made.code), symbols)
    finally:
        program.close()
        # An error's traceback has this frame: a program that ends as part of a cycle complains on stderr.
        del program


def _text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else str(symbol)

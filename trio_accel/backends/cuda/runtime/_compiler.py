"""NVRTC and nvJitLink with the disk cache: from a kernel's code to code that the driver loads.

cuda.core does the work; this module converts its errors, and caches compiled code. It blocks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import attrs
from cuda.bindings import driver

from ...base import AccelError, CompilationError, NotSupportedError, Strs
from ...base.contract.ops import KernelCode, KernelDefinition
from ...base.kit.code_cache import CodeCache, CompiledCode, code_key, default_code_cache, header_parts

if TYPE_CHECKING:
    # To import it takes 0.3 s, which a device that compiles nothing does without.
    from cuda.core import ProgramOptions

Target: TypeAlias = Literal["cubin", "ptx", "ltoir"]

# Options for which a compilation does more than make code, or reads more than sources and headers. It is
# always done then, and never found in the cache.
_NOT_KEPT = ("create_pch", "use_pch", "pch", "pch_dir", "time", "fdevice_time_trace", "optimization_info")


def compiled(
    source: str,
    options: ProgramOptions,
    *,
    target: Target = "cubin",
    names: Sequence[str] = (),
    cache: CodeCache | None = None,
) -> CompiledCode:
    """Compile a source, or find its code in the cache; blocks.

    The key has the source, the contents of all headers that it may include, the options, the name
    expressions, and the versions of NVRTC and of the driver.

    Args:
        source: C++ with CUDA's extensions.
        options: The compiler options; `arch` is set. If `name` has a folder, headers are searched there.
        target: Format of the code.
        names: Name expressions with symbols to return.
        cache: The cache; by default the cache that the environment names.

    Raises:
        cuda.core._utils.cuda_utils.NVRTCError: It does not compile; the log is in the message.
    """
    cache = default_code_cache() if cache is None else cache
    key = None if cache.folder is None else _key(source, options, target, names)
    return cache.compiled(key, lambda: _compile_program(source, options, target, names))


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


def _compile_program(
    source: str, options: ProgramOptions, target: Target, names: Sequence[str]
) -> CompiledCode:
    from cuda.core import Program

    program = Program(source, "c++", options)
    try:
        output = program.compile(target, name_expressions=tuple(names))
        symbols = {_as_text(name): _as_text(symbol) for name, symbol in output.symbol_mapping.items()}
        return CompiledCode(bytes(output.code), symbols)
    finally:
        program.close()
        # An error's traceback has this frame: a program that ends as part of a cycle complains on stderr.
        del program


def _as_text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else str(symbol)


MadeT = TypeVar("MadeT")

# Errors of cuda.core and cuda.bindings where NVIDIA's library is not installed.
_NOT_FOUND = frozenset({"DynamicLibNotFoundError", "FunctionNotFoundError"})
_LOG = "compilation log:"
# Headers of the runtime with the language's headers, and of the C++ libraries.
_HEADERS = ("cudart", "cccl")
# Options of the compiler that the linker also has.
_LINKED = frozenset(
    {"ftz", "prec_div", "prec_sqrt", "fma", "max_register_count", "lineinfo", "debug", "ptxas_options"}
)
# NVRTC does not find what CUDA's own header includes, and some C++ headers name the structure only.
_TENSOR_MAP = (
    "struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; }; "
    "typedef struct CUtensorMap_st CUtensorMap;\n#line 1\n"
)
_HAS_TENSOR_MAP = re.compile(r"\bcuda\.h\b|\bCUtensorMap(_st\b|\s*[;{=])")
_NAME = re.compile(r"(\w+)\s*\(")
_ATTRIBUTE = re.compile(r"__\w+__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")


@attrs.frozen
class CompiledKernel:
    """Code to load onto a device: plain data, the same in any process with that architecture.

    Attributes:
        code: A cubin or fatbin, or PTX that ends with a zero byte.
        symbol: The kernel's name in it.
        is_ptx: Whether the driver still has to compile it.
    """

    code: bytes
    symbol: str
    is_ptx: bool = False


def compile_kernel(definition: KernelDefinition, architecture: str) -> CompiledKernel:
    """Compile and link the code of a kernel; compiled code is only passed on.

    Args:
        definition: The kernel.
        architecture: The device's compute capability, such as ``"90"``.

    Raises:
        CompilationError: The code does not compile or link, or lacks the kernel.
        NotSupportedError: NVRTC or nvJitLink is not installed.
    """
    first = definition.code[0]
    if len(definition.code) == 1 and first.format in ("cubin", "fatbin"):
        return CompiledKernel(_bytes(first), definition.name)
    if len(definition.code) == 1 and first.format == "ptx":
        return CompiledKernel(_bytes(first).rstrip(b"\0") + b"\0", definition.name, is_ptx=True)
    # The definition's choice, or the device's.
    arch = str(definition.options.get("arch") or f"sm_{architecture}")
    if len(definition.code) == 1 and first.format == "c++":
        output = _compile(definition, first, arch, "cubin", {})
        return CompiledKernel(output.code, output.names[definition.name])
    return _link(definition, arch)


def _compile(
    definition: KernelDefinition,
    code: KernelCode,
    arch: str,
    target: Target,
    extra_options: Mapping[str, object],
) -> CompiledCode:
    from cuda.core import ProgramOptions

    options: list[str] = []

    def work() -> CompiledCode:
        settings: dict[str, Any] = {**definition.options, **extra_options, "arch": arch, "name": code.name}
        if "#include" in str(code.data) or "pre_include" in settings:
            # The installed headers come after the given folders.
            settings["include_path"] = [*settings.get("include_path", ()), *_header_folders()]
        chosen = ProgramOptions(**settings)
        options.extend(option.decode() for option in chosen.as_bytes("nvrtc", target))
        names = (definition.name,) if code is definition.code[0] else ()
        text = str(code.data)
        if "CUtensorMap" in text and not _HAS_TENSOR_MAP.search(text):
            text = _TENSOR_MAP + text
        return compiled(text, chosen, target=target, names=names)

    return _wrap_errors(definition, code, options, "compile", work)


def _link(definition: KernelDefinition, arch: str) -> CompiledKernel:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    lto_options = {"link_time_optimization": True, "relocatable_device_code": True}
    pieces: list[ObjectCode] = []
    symbol = definition.name
    for code in definition.code:
        if code.format == "c++":
            output = _compile(definition, code, arch, "ltoir", lto_options)
            symbol = output.names.get(definition.name, symbol)
            pieces.append(ObjectCode.from_ltoir(output.code, name=code.name))
        else:
            load = getattr(ObjectCode, f"from_{code.format}")
            pieces.append(load(_bytes(code), name=code.name))

    def work() -> bytes:
        link_options: dict[str, Any] = {
            name: value for name, value in definition.options.items() if name in _LINKED
        }
        linker = Linker(
            *pieces, options=LinkerOptions(arch=arch, link_time_optimization=True, **link_options)
        )
        try:
            return bytes(linker.link("cubin").code)
        finally:
            linker.close()

    linked = _wrap_errors(definition, definition.code[0], [f"-arch={arch}", "-lto"], "link", work)
    return CompiledKernel(linked, symbol)


def _wrap_errors(
    definition: KernelDefinition, code: KernelCode, options: list[str], verb: str, work: Callable[[], MadeT]
) -> MadeT:
    """Do a step; its failure is raised as one of the backends' own errors."""
    try:
        return work()
    except (AccelError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ in _NOT_FOUND:
            raise NotSupportedError(
                f"kernel {definition.name!r}: what would {verb} it is not installed: {error}", backend="cuda"
            ) from error
        raise _error(definition, code, tuple(options), verb, str(error)) from error


def _error(
    definition: KernelDefinition, code: KernelCode, options: Strs, verb: str, text: str
) -> CompilationError:
    log = text.partition(_LOG)[2].strip() if _LOG in text else text.strip()
    names = kernels_in(code.data) if isinstance(code.data, str) else ()
    base = definition.name.partition("<")[0].rpartition("::")[2].strip()
    if verb == "compile" and names and base not in names and base in log:
        summary = f"there is no kernel {definition.name!r} in {code.name}; it has {', '.join(names)}"
        reason = "no_such_kernel"
    else:
        summary, reason = f"kernel {definition.name!r} does not {verb}", verb
    return CompilationError(
        f"{summary} (source {code.name}, options {' '.join(options) or 'none'}):\n{log}\n",
        library="jit",
        code=reason,
        log=log,
        source=code.name,
        options=options,
    )


@functools.cache
def _header_folders() -> Strs:
    """Find the folders of CUDA's installed headers, such as cuda_fp16.h and cooperative_groups.h."""
    from cuda.pathfinder import find_nvidia_header_directory

    folders: list[str] = []
    for name in _HEADERS:
        # Older releases know fewer names.
        with suppress(RuntimeError):
            folder = find_nvidia_header_directory(name)
            if folder is not None:
                folders.append(folder)
    return tuple(dict.fromkeys(folders))


def ptx_log(code: bytes) -> str:
    """Return nvJitLink's log of PTX that the driver has refused, if nvJitLink is installed."""
    from cuda.core import Linker, ObjectCode

    try:
        linker = Linker(ObjectCode.from_ptx(code))
        try:
            linker.link("cubin")
        finally:
            linker.close()
    except Exception as error:  # noqa: BLE001  # whatever it says is the log
        return "" if isinstance(error, Warning) or type(error).__name__ in _NOT_FOUND else str(error).strip()
    return ""


def kernels_in(text: str) -> Strs:
    """Return the names of the kernels that a source declares, as far as possible without compiling it."""
    names: list[str] = []
    for declaration in text.split("__global__")[1:]:
        match = _NAME.search(_ATTRIBUTE.sub(" ", re.split(r"[{;]", declaration, maxsplit=1)[0]))
        if match is not None and match[1] not in names:
            names.append(match[1])
    return tuple(names)


def _bytes(code: KernelCode) -> bytes:
    return code.data if isinstance(code.data, bytes) else code.data.encode()

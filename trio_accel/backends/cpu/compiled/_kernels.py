"""CUDA source of the user's kernels on a processor, where threads of a grid run one after another (D186)."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...base import CompilationError, HostArray, HostCall, LibraryError, NotSupportedError, Strs
from ...base.contract.ops import KernelCode, KernelDefinition, KernelSpec, scalar_offsets
from ...base.kit.code_cache import CompiledCode, default_code_cache, header_parts
from ._compiler import CompilerError, Entry, compiler, load, mode

# The last option prevents a number from becoming -0.0 when it is converted to an integer and back.
_OPTIONS = ("-fexceptions", "-fmax-errors=20", "-fdiagnostics-color=never", "-ftrapping-math")
# The header refuses shared memory, barriers and warps with this text.
_REFUSED = "a processor runs threads one by one"
_FAILURES = {710: "an assertion failed", 719: "it called __trap"}
_POINTER = 8
_SHAPE, _SIZE = struct.Struct("=6I8x"), struct.Struct("=Q8x")
_ROOM = 16

# After the grid and the block, each parameter has 32 bytes: its size, and its kind.
_RUN = """
#line 1 "<run>"
STAND_IN_EXPORT(kernel, &%s)
extern "C" __attribute__((visibility("default")))
long long run(const char *packed, long long count, long long)
{
    void *parameters[%d];
    const size_t *sizes = stand_in_kernel_params.values;
    long long number = 0;
    for (; number < count && sizes[number] == *(const size_t *)(packed + 32 + 32 * number); number++)
        parameters[number] = (void *)(packed + 48 + 32 * number);
    if (number < count || sizes[number])
        return -1 - number;
    return stand_in_kernel(parameters, (const unsigned *)packed);
}
"""


def _check(definition: KernelDefinition) -> None:
    (first, *extra) = definition.code
    if mode() == "never" or compiler() is None:
        reason = "its source is compiled where there is a C++ compiler, and there is none"
    elif definition.cluster is not None or definition.is_cooperative:
        reason = "its source is compiled for one block after another, and it has blocks that run at once"
    elif definition.shared:
        reason = "its source is compiled for one thread after another, and it has shared memory"
    elif first.format != "c++" or extra:
        reason = "one source in C++ is compiled, and no other code"
    else:
        return
    raise _refusal(definition, reason)


def _refusal(definition: KernelDefinition, reason: str) -> NotSupportedError:
    return NotSupportedError(
        f"kernel {definition.name!r} needs a function for the CPU: cpu='module:function' ({reason})",
        backend="cpu",
    )


def launch(spec: KernelSpec, call: HostCall[Any]) -> None:
    """Run all threads.

    Raises:
        LibraryError: The kernel has other parameters than were declared, or it failed.
    """
    definition = KernelDefinition.decode(spec.definition)
    entry = find(spec.definition)
    arrays = {"read": iter(spec.read), "update": iter(spec.updated), "write": iter(spec.written)}
    offsets = iter(scalar_offsets(definition.scalars)[0])
    packed, copies = [_SHAPE.pack(*spec.grid, *spec.block)], list[tuple[HostArray, HostArray]]()
    for parameter in definition.parameters:
        if parameter.role == "scalar":
            size, start = parameter.dtype.itemsize, next(offsets)
            value = spec.scalars[start : start + size]
        else:
            size, array = _POINTER, next(arrays[parameter.role])
            address = call.address_of(array)
            if parameter.layout == "packed" and not array.is_contiguous:
                view = call.array(array)
                copies.append((view, np.ascontiguousarray(view)))
                address = int(copies[-1][1].ctypes.data)
            value = struct.pack("=Q", address)
        packed += [_SIZE.pack(size), value.ljust(_ROOM, b"\0")]
    code = entry(b"".join(packed), len(definition.parameters), 0)
    if code < 0:
        raise LibraryError(
            f"kernel {definition.name!r} has other parameters than were declared: number {-code} of them",
            library="jit",
            code="parameters",
        )
    if code:
        raise LibraryError(
            f"kernel {definition.name!r} ended: {_FAILURES.get(code, code)}", library="jit", code=code
        )
    for view, copy in copies:
        if view.flags.writeable:
            np.copyto(view, copy)


@functools.lru_cache(256)
def find(text: str) -> Entry:
    """Compile a definition, or find it in the disk cache; blocks.

    Raises:
        CompilationError: The source does not compile, or lacks the kernel.
        NotSupportedError: The kernel uses shared memory, barriers, or warp functions; or there is no
            compiler.
    """
    definition, cxx_compiler = KernelDefinition.decode(text), compiler()
    _check(definition)
    assert cxx_compiler is not None
    (code,) = definition.code
    source, options = str(code.data), _options(definition)
    translation_unit = "\n".join(
        (
            _head(),
            f'#line 1 "{code.name}"',
            source,
            _RUN % (definition.name.removeprefix("&"), len(definition.parameters) + 1),
        )
    )
    folders = [Path(folder) for folder in cast("list[str]", definition.options.get("include_path", ()))]
    first = cast("list[str]", definition.options.get("pre_include", ()))
    headers = header_parts(source, folders=folders, first=first)
    key = None if headers is None else cxx_compiler.key(translation_unit, options, headers)
    try:
        compiled = default_code_cache().compiled(
            key, lambda: CompiledCode(cxx_compiler.compile(translation_unit, options))
        )
        return load(compiled.code)
    except (CompilerError, OSError, AttributeError) as error:
        raise _compilation_error(
            definition, code, options, getattr(error, "log", "") or str(error)
        ) from error


def _compilation_error(
    definition: KernelDefinition, code: KernelCode, options: Strs, log: str
) -> CompilationError | NotSupportedError:
    for line in log.splitlines():
        if _REFUSED in line:
            return _refusal(definition, line.strip())
    problem, reason = f"kernel {definition.name!r} does not compile", "compile"
    if "<run>:1" in log.partition("error:")[0]:
        problem, reason = f"there is no kernel {definition.name!r} in {code.name}", "no_such_kernel"
    return CompilationError(
        f"{problem} (source {code.name}, options {' '.join(options)}):\n{log}\n",
        library="jit",
        code=reason,
        log=log,
        source=code.name,
        options=options,
    )


def _options(definition: KernelDefinition) -> Strs:
    """Return the options of NVRTC that a C++ compiler also has."""
    nvrtc_options: dict[str, Any] = dict(definition.options)
    std = [f"-std={nvrtc_options['std']}"] if nvrtc_options.get("std") else []
    named = [
        (f"-{letter}", value)
        for letter, name in (("D", "define_macro"), ("U", "undefine_macro"))
        for value in nvrtc_options.get(name, ())
    ]
    folders = [("-I", folder) for folder in nvrtc_options.get("include_path", ())]
    first = [("-include", header) for header in nvrtc_options.get("pre_include", ())]
    return (*_OPTIONS, *std, *(part for pair in (*named, *folders, *first) for part in pair))


@functools.cache
def _head() -> str:
    folder = Path(__file__).parent
    special = (folder / "special.h").read_text(encoding="utf-8").replace("#pragma once", "")
    text = (folder / "kernels.h").read_text(encoding="utf-8").replace("#pragma once", "")
    return text.replace('#include "special.h"', special).replace("the stand-in driver", "a processor")

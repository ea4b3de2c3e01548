"""A kernel of the user's own, loaded onto a device: its needs, and its launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from cuda.bindings import driver

from ...base import AccelError, CompilationError, DriverError, LibraryError
from ...base.ops import Dim3, KernelDefinition, KernelInfoSpec, KernelSpec, scalar_offsets
from ..runtime._compiler import CompiledKernel, kernels_in, ptx_log
from ..runtime._context import CudaContext
from ..runtime._kernels import LoadedCode
from ..runtime._stream import CudaStream

__all__ = ["LoadedKernel"]

_OF_FUNCTION = driver.CUfunction_attribute
_OF_DEVICE = driver.CUdevice_attribute
_OF_LAUNCH = driver.CUlaunchAttributeID
_ALIGNMENT = 16
_POINTER = 8
# More blocks need a permission: no device promises to have room for them.
_PORTABLE_CLUSTER = 8


class LoadedKernel(LoadedCode):
    """One kernel of a loaded module. Made in a thread, with the device's context current: that may wait.

    The driver takes the parameters by their addresses. They are packed into one buffer, at places that are
    known once the kernel is: the scalars first, and behind them the addresses of the arrays.

    Args:
        context: The context.
        definition: The kernel's definition.
        compiled: The same, compiled.

    Raises:
        CompilationError: The driver does not take the code, or it has no such kernel.
        LibraryError: The kernel has other parameters than were declared.

    Attributes:
        definition: Its definition.
        is_plain: Whether no array is packed first.
    """

    def __init__(self, context: CudaContext, definition: KernelDefinition, compiled: CompiledKernel) -> None:
        self.definition: KernelDefinition = definition
        self.is_plain: bool = all(each.layout != "packed" for each in definition.parameters)
        self._context = context
        super().__init__(None)
        try:
            self._library = context.load(compiled.code)
            self._kernel = self._find(compiled.symbol)
            self._function = context.function_of(self._kernel)
            self._check_parameters()
            self._read_limits()
        except DriverError as error:
            self.close()
            # The driver may check code only when a kernel of it is asked for.
            raise self._not_loaded(compiled, error) from error
        except BaseException:
            self.close()
            raise
        self._lay_out()
        self._config = self._make_config()
        # Blocks, shared memory and cooperative grids that were found to fit.
        self._fitting: set[tuple[object, ...]] = set()

    def _not_loaded(self, compiled: CompiledKernel, error: DriverError) -> CompilationError:
        first = self.definition.code[0]
        log = ptx_log(compiled.code) if compiled.is_ptx else ""
        return CompilationError(
            f"kernel {self.definition.name!r}: the driver does not load {first.name} ({first.format}): "
            f"{error.message}" + (f"\n{log}\n" if log else ""),
            library="jit",
            code=error.code,
            log=log,
            source=first.name,
        )

    def _find(self, symbol: str) -> Any:
        code, kernel = driver.cuLibraryGetKernel(self._library, symbol.encode())
        if code == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            definition = self.definition
            names = ", ".join(self._names()) or "none that can be told"
            raise CompilationError(
                f"there is no kernel {definition.name!r} in {definition.code[0].name}; it has {names}",
                library="jit",
                code="no_such_kernel",
                source=definition.code[0].name,
            )
        return self._context.check((code, kernel))

    def _names(self) -> tuple[str, ...]:
        data = self.definition.code[0].data
        if isinstance(data, str) and self.definition.code[0].format == "c++":
            return kernels_in(data)
        # Drivers before CUDA 12.4 cannot tell.
        with suppress(RuntimeError, AccelError):
            check = self._context.check
            count = check(driver.cuLibraryGetKernelCount(self._library))
            kernels: list[Any] = check(driver.cuLibraryEnumerateKernels(count, self._library))
            return tuple(sorted(check(driver.cuKernelGetName(kernel)).decode() for kernel in kernels))
        return ()

    def _check_parameters(self) -> None:
        """Refuse a declaration that the compiled kernel does not have: it would read foreign memory."""
        found: list[int] = []
        with suppress(RuntimeError):  # drivers before CUDA 12.4 cannot tell
            while True:
                code, _, size = driver.cuKernelGetParamInfo(self._kernel, len(found))
                if code:
                    break
                found.append(int(size))
            parameters = self.definition.parameters
            declared = [each.dtype.itemsize if each.role == "scalar" else _POINTER for each in parameters]
            if found == declared:
                return
            told = ", ".join(f"{each.name} ({size})" for each, size in zip(parameters, declared, strict=True))
            raise self._refusal(
                "parameters",
                f" takes {len(found)} parameters of {found} bytes; declared are {len(declared)}, in bytes: "
                f"{told or 'none'}",
            )

    def _read_limits(self) -> None:
        check, number = self._context.check, self._context.number

        def of_kernel(name: str) -> int:
            return int(check(driver.cuKernelGetAttribute(getattr(_OF_FUNCTION, name), self._kernel, number)))

        def of_device(name: str) -> int:
            return int(check(driver.cuDeviceGetAttribute(getattr(_OF_DEVICE, name), number)))

        self._max_threads = of_kernel("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
        self._registers = of_kernel("CU_FUNC_ATTRIBUTE_NUM_REGS")
        self._local_bytes = of_kernel("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
        self._static_shared = of_kernel("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
        self._all_shared = of_device("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._multiprocessors = of_device("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
        self._max_shared = max(0, self._all_shared - self._static_shared)
        self._has_clusters = of_device("CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH") == 1
        if self.definition.shared:
            # Without this attribute the driver gives 48 KiB at most.
            self._allow("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", self._max_shared)
        if self.definition.cluster is not None:
            if not self._has_clusters:
                raise self._refusal("cluster", ": this device has no clusters of blocks")
            if math.prod(self.definition.cluster) > _PORTABLE_CLUSTER:
                self._allow("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)

    def _allow(self, name: str, value: int) -> None:
        self._context.check(driver.cuFuncSetAttribute(self._function, getattr(_OF_FUNCTION, name), value))

    def _lay_out(self) -> None:
        """Return the offset of each parameter in the buffer."""
        definition = self.definition
        offsets, size = scalar_offsets(definition.scalars)
        self._scalar_bytes = size
        self._array_offset = -(-size // _ALIGNMENT) * _ALIGNMENT
        arrays = [each for role in ("read", "update", "write") for each in definition.arrays(role)]
        places = {each.name: self._array_offset + _POINTER * number for number, each in enumerate(arrays)}
        scalars = [each.name for each in definition.parameters if each.role == "scalar"]
        places.update(zip(scalars, offsets, strict=True))
        self._addresses = struct.Struct(f"={len(arrays)}Q")
        buffer = np.zeros(self._array_offset + self._addresses.size + _ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % _ALIGNMENT
        base = buffer.ctypes.data + start
        self._buffer = memoryview(buffer[start:].data)
        pointers = [base + places[each.name] for each in definition.parameters]
        self._pointers = np.array(pointers or [0], np.uint64)
        self._pointer = int(self._pointers.ctypes.data)

    def _make_config(self) -> Any:
        """Return the common part of launches with attributes; None for a plain kernel."""
        definition, attributes = self.definition, list[driver.CUlaunchAttribute]()
        if definition.is_cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = _OF_LAUNCH.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if definition.cluster is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = _OF_LAUNCH.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            extents = attribute.value.clusterDim
            extents.x, extents.y, extents.z = definition.cluster
            attributes.append(attribute)
        if not attributes:
            return None
        config = driver.CUlaunchConfig()
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def launch(self, spec: KernelSpec, addresses: Sequence[int], stream: CudaStream) -> None:
        """Enqueue a launch.

        Args:
            spec: Grid, block and scalars; the grid is not empty.
            addresses: Addresses of the arrays: those that are read, then the updated, then the written ones.
            stream: The stream.

        Raises:
            LibraryError: The block or the grid does not fit on the device.
        """
        grid, block, shared = spec.grid, spec.block, spec.shared
        key = (block, shared) if self._config is None else (grid, block, shared)
        if key not in self._fitting:
            self._check_fit(spec)
            self._fitting.add(key)
        self._buffer[: self._scalar_bytes] = spec.scalars
        self._addresses.pack_into(self._buffer, self._array_offset, *addresses)
        if self._config is None:
            result = driver.cuLaunchKernel(
                self._function, *grid, *block, shared, stream.handle, self._pointer, 0
            )
        else:
            result = self._launch_with_attributes(spec, stream)
        if result[0]:
            self._refused(spec, result)
        self.note_use(stream)

    def _launch_with_attributes(self, spec: KernelSpec, stream: CudaStream) -> tuple[Any, ...]:
        config: driver.CUlaunchConfig = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = spec.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = spec.block
        config.sharedMemBytes, config.hStream = spec.shared, stream.handle
        return driver.cuLaunchKernelEx(config, self._function, self._pointer, 0)

    def _check_fit(self, spec: KernelSpec) -> None:
        """Refuse what the driver would refuse, and say how much there is."""
        threads = math.prod(spec.block)
        if spec.shared > self._max_shared:
            raise self._refusal(
                "shared_memory",
                f" asks for {spec.shared} bytes of dynamic shared memory for each block; there are "
                f"{self._max_shared}: {self._all_shared} less {self._static_shared} static ones",
            )
        if threads > self._max_threads:
            raise self._refusal(
                "block",
                f": a block of {_extents(spec.block)} has {threads} threads; it can have "
                f"{self._max_threads}, by launch bounds or the {self._registers} registers of each thread",
            )
        if self.definition.is_cooperative:
            most = self._max_active(threads, spec.shared) * self._multiprocessors
            if math.prod(spec.grid) > most:
                raise self._refusal(
                    "cooperative_grid",
                    f" is cooperative, so all blocks run at once: {most} blocks of {threads} threads fit on "
                    f"this device, the grid of {_extents(spec.grid)} has {math.prod(spec.grid)}",
                )

    def _max_active(self, threads: int, shared: int) -> int:
        found = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared)
        return int(self._context.check(found))

    def _refused(self, spec: KernelSpec, result: tuple[Any, ...]) -> None:
        """Raise the driver's refusal of a launch: the asker's problem, unless the context is lost."""
        try:
            self._context.check(result)
        except DriverError as error:
            raise self._refusal(
                error.code,
                f": a grid of {_extents(spec.grid)} blocks of {_extents(spec.block)} threads with "
                f"{spec.shared} bytes of dynamic shared memory was not launched: {error.message}",
            ) from error

    def _refusal(self, code: int | str, text: str) -> LibraryError:
        return LibraryError(f"kernel {self.definition.name!r}{text}", library="jit", code=code)

    def inform(self, spec: KernelInfoSpec) -> None:
        """Fill the words of `KernelInfoSpec`."""
        threads = math.prod(spec.block)
        grid, block = self._context.check(
            driver.cuOccupancyMaxPotentialBlockSize(self._function, None, spec.shared, 0)
        )
        fits = threads <= self._max_threads and spec.shared <= self._max_shared
        values = {
            "max_active_blocks": self._max_active(threads, spec.shared) if fits else 0,
            "suggested_block": int(block),
            "suggested_grid": int(grid),
            "max_active_clusters": self._max_clusters(spec) if fits else 0,
            "max_threads": self._max_threads,
            "registers": self._registers,
            "static_shared": self._static_shared,
            "max_dynamic_shared": self._max_shared,
            "local_bytes": self._local_bytes,
            "multiprocessors": self._multiprocessors,
        }
        spec.words[:] = [values[name] for name in KernelInfoSpec.WORDS]

    def _max_clusters(self, spec: KernelInfoSpec) -> int:
        cluster = self.definition.cluster
        if cluster is None:
            return 0
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster
        config.blockDimX, config.blockDimY, config.blockDimZ = spec.block
        config.sharedMemBytes, config.hStream = spec.shared, 0
        return int(self._context.check(driver.cuOccupancyMaxActiveClusters(self._function, config)))


def _extents(extents: Dim3) -> str:
    return " x ".join(map(str, extents))

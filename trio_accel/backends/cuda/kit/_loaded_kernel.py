"""A kernel of the user's own, loaded onto a device: its limits, and its launch by the driver."""

from __future__ import annotations

import ctypes
import math
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver

from ...base import AccelError, CompilationError, DriverError, NotSupportedError, Strs
from ...base.contract.ops import MAP_BYTES, ArraySpec, KernelDefinition, KernelInfoSpec, KernelSpec, TensorMap
from ...base.gpu.driver import GpuStream
from ...base.gpu.kernels import UserKernel
from ..runtime._compiler import CompiledKernel, kernels_in, ptx_log
from ..runtime._context import CudaContext

_OF_FUNCTION = driver.CUfunction_attribute
_OF_DEVICE = driver.CUdevice_attribute
_OF_LAUNCH = driver.CUlaunchAttributeID
# More blocks need a permission: no device promises to have room for them.
_PORTABLE_CLUSTER = 8
# The bindings encode to memory of Python's, which need not be aligned as the driver's manual wants it.
_U32, _U64, _INT = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
_ENCODE = "cuTensorMapEncodeTiled"
_Encode = ctypes.CFUNCTYPE(
    _INT, _U64, _INT, _U32, _U64, *(ctypes.POINTER(_U64),) * 2, *(ctypes.POINTER(_U32),) * 2, *(_INT,) * 4
)
_LEAST_MAJOR = 9


class LoadedKernel(UserKernel):
    """One kernel of a loaded module. Made in a thread, with the context current, because it may wait.

    Args:
        context: The context.
        definition: The kernel's definition.
        compiled: The same, compiled.

    Raises:
        CompilationError: The driver refuses the code, or the code lacks the kernel.
        LibraryError: The kernel's parameters differ from the declaration.
        NotSupportedError: The kernel has tensor maps, but the device or the driver lacks them.
    """

    def __init__(self, context: CudaContext, definition: KernelDefinition, compiled: CompiledKernel) -> None:
        self._context = context
        with ExitStack() as undo:
            try:
                library = context.load(compiled.code)
                unload = partial(driver.cuLibraryUnload, library)
                undo.callback(unload)
                super().__init__(definition, unload)
                self._kernel = self._find(library, compiled.symbol)
                self._function = context.function_of(self._kernel)
                with suppress(RuntimeError):  # drivers before CUDA 12.4 cannot report the parameters
                    self.check_parameters(self._parameter_sizes())
                self.limits = self._read_limits()
                if self._maps:
                    self._encode = self._find_encoder()
            except DriverError as error:
                # The driver may check code only when a kernel of it is asked for.
                first = definition.code[0]
                log = ptx_log(compiled.code) if compiled.is_ptx else ""
                raise CompilationError(
                    f"kernel {definition.name!r}: the driver does not load {first.name} ({first.format}): "
                    f"{error.message}" + (f"\n{log}\n" if log else ""),
                    library="jit",
                    code=error.code,
                    log=log,
                    source=first.name,
                ) from error
            undo.pop_all()
        self._config = self._make_config()

    def _find(self, library: Any, symbol: str) -> Any:
        code, kernel = driver.cuLibraryGetKernel(library, symbol.encode())
        if code == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            definition = self.definition
            names = ", ".join(self._names(library)) or "none that can be told"
            raise CompilationError(
                f"kernel {definition.name!r} is missing in {definition.code[0].name}, which defines {names}",
                library="jit",
                code="no_such_kernel",
                source=definition.code[0].name,
            )
        return self._context.check((code, kernel))

    def _names(self, library: Any) -> Strs:
        data = self.definition.code[0].data
        if isinstance(data, str) and self.definition.code[0].format == "c++":
            return kernels_in(data)
        # Drivers before CUDA 12.4 cannot report the names.
        with suppress(RuntimeError, AccelError):
            check = self._context.check
            count = check(driver.cuLibraryGetKernelCount(library))
            kernels: list[Any] = check(driver.cuLibraryEnumerateKernels(count, library))
            return tuple(sorted(check(driver.cuKernelGetName(kernel)).decode() for kernel in kernels))
        return ()

    def _parameter_sizes(self) -> list[int]:
        sizes: list[int] = []
        while True:
            code, _, size = driver.cuKernelGetParamInfo(self._kernel, len(sizes))
            if code:
                return sizes
            sizes.append(int(size))

    def _read_limits(self) -> dict[str, int]:
        check, number = self._context.check, self._context.number

        def of_kernel(name: str) -> int:
            return int(check(driver.cuKernelGetAttribute(getattr(_OF_FUNCTION, name), self._kernel, number)))

        def of_device(name: str) -> int:
            return int(check(driver.cuDeviceGetAttribute(getattr(_OF_DEVICE, name), number)))

        static = of_kernel("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
        shared = max(0, of_device("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - static)
        if self.definition.shared:
            # Without this attribute the driver gives 48 KiB at most.
            self._allow("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
        if self.definition.cluster is not None:
            if of_device("CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH") != 1:
                raise self.refusal("cluster", ": this device does not support clusters of blocks")
            if math.prod(self.definition.cluster) > _PORTABLE_CLUSTER:
                self._allow("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        return {
            "max_threads": of_kernel("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"),
            "registers": of_kernel("CU_FUNC_ATTRIBUTE_NUM_REGS"),
            "static_shared": static,
            "max_dynamic_shared": shared,
            "local_bytes": of_kernel("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES"),
            "multiprocessors": of_device("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        }

    def _find_encoder(self) -> Any:
        check, label = self._context.check, f"kernel {self.definition.name!r} has tensor maps, which"
        attribute = _OF_DEVICE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        major = int(check(driver.cuDeviceGetAttribute(attribute, self._context.number)))
        if major < _LEAST_MAJOR:
            raise NotSupportedError(
                f"{label} need compute capability {_LEAST_MAJOR}.0; this device has {major}", backend="cuda"
            )
        code, address, _ = driver.cuGetProcAddress(_ENCODE.encode(), 12000, 0)
        if code or not address:
            raise NotSupportedError(f"{label} need {_ENCODE}, which this driver lacks", backend="cuda")
        return _Encode(int(address))

    def encode(self, tensor_map: TensorMap, array: ArraySpec, address: int) -> bytes:
        """Make a tensor map; see `UserKernel.encode`."""
        rank, (kind, *choices) = array.ndim, tensor_map.codes(array.dtype)
        room = np.zeros(2 * MAP_BYTES, np.uint8)
        start = -room.ctypes.data % MAP_BYTES
        # The driver counts axes from the last one.
        code = self._encode(
            room.ctypes.data + start,
            kind,
            rank,
            address,
            (_U64 * rank)(*array.shape[::-1]),
            (_U64 * rank)(*tensor_map.strides(array)[::-1]),
            (_U32 * rank)(*tensor_map.box[::-1]),
            (_U32 * rank)(*(tensor_map.element_strides or (1,) * rank)[::-1]),
            *choices,
        )
        self._context.check((driver.CUresult(code),))
        return room[start : start + MAP_BYTES].tobytes()

    def _allow(self, name: str, value: int) -> None:
        self._context.check(driver.cuFuncSetAttribute(self._function, getattr(_OF_FUNCTION, name), value))

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

    def enqueue(self, spec: KernelSpec, stream: GpuStream) -> None:
        """Enqueue it; see `UserKernel.enqueue`."""
        config = self._config
        if config is None:
            result = driver.cuLaunchKernel(
                self._function, *spec.grid, *spec.block, spec.shared, stream.handle, self.pointer, 0
            )
        else:
            config.gridDimX, config.gridDimY, config.gridDimZ = spec.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = spec.block
            config.sharedMemBytes, config.hStream = spec.shared, stream.handle
            result = driver.cuLaunchKernelEx(config, self._function, self.pointer, 0)
        if result[0]:
            self._context.check(result)

    def max_active(self, threads: int, shared: int) -> int:
        """Return how many blocks a multiprocessor runs at once."""
        answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared)
        return int(self._context.check(answer))

    def occupancy(self, spec: KernelInfoSpec, *, fits: bool) -> dict[str, int]:
        """Return how much of it the device runs at once; see `UserKernel.occupancy`."""
        answer = driver.cuOccupancyMaxPotentialBlockSize(self._function, None, spec.shared, 0)
        grid, block = self._context.check(answer)
        return {
            "max_active_blocks": self.max_active(math.prod(spec.block), spec.shared) if fits else 0,
            "suggested_block": int(block),
            "suggested_grid": int(grid),
            "max_active_clusters": self._max_clusters(spec) if fits else 0,
        }

    def _max_clusters(self, spec: KernelInfoSpec) -> int:
        cluster = self.definition.cluster
        if cluster is None:
            return 0
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster
        config.blockDimX, config.blockDimY, config.blockDimZ = spec.block
        config.sharedMemBytes, config.hStream = spec.shared, 0
        return int(self._context.check(driver.cuOccupancyMaxActiveClusters(self._function, config)))

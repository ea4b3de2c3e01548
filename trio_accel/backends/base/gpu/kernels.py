"""Libraries with kernels from sources of this package, or from the user's, instead of a vendor's library.

A backend derives from one of these and from its own base class, and declares the methods as its kernels.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np

from ..contract import ops
from ..contract.device_array import DeviceArray
from ..contract.errors import DriverError, LibraryError
from ..expressions import CHECK_WORDS, check_words, compiled, decode_program
from .device import AddressDevice
from .driver import GpuStream, KernelFunction, LoadedCode
from .library import EnqueuingCall, EnqueuingLibrary

# The argument of a tensor map is the largest one.
_PARAMETER_ALIGNMENT = 64
_POINTER = 8
_MOST_MAPS = 256

_Call: TypeAlias = EnqueuingCall[Any, Any]
_Device: TypeAlias = AddressDevice[Any, Any, Any]
_Draw: TypeAlias = "ops.SequenceSpec | ops.RejectionSpec | ops.SobolSpec"


class UserKernel(LoadedCode):
    """One kernel of a loaded module. A backend finds it, sets its limits, and enqueues it.

    The driver takes the parameters by their addresses. They are packed into one buffer, at offsets that are
    fixed for the kernel: the scalars first, then the addresses of the arrays, then their tensor maps.

    Args:
        definition: The kernel's definition.
        unload: Gives the module back.

    Attributes:
        definition: Its definition.
        limits: The device's limits for it, under the names of `KernelInfoSpec`; the backend sets them before
            the first launch.
        pointer: The address of its parameters' addresses, in their order.
    """

    limits: Mapping[str, int]

    def __init__(self, definition: ops.KernelDefinition, unload: Callable[[], object]) -> None:
        super().__init__(unload)
        self.definition: ops.KernelDefinition = definition
        # Recently made tensor maps.
        self._encoded: dict[tuple[object, ...], bytes] = {}
        self._lay_out()

    def enqueue(self, spec: ops.KernelSpec, stream: GpuStream) -> None:
        """Enqueue it with the parameters at `pointer`, which the driver copies.

        Raises:
            DriverError: The driver refused.
        """
        raise NotImplementedError

    def max_active(self, threads: int, shared: int) -> int:
        """Return how many blocks a multiprocessor runs at once."""
        raise NotImplementedError

    def occupancy(self, spec: ops.KernelInfoSpec, *, fits: bool) -> Mapping[str, int]:
        """Return the other words of `KernelInfoSpec`: how much of the kernel the device runs at once.

        Args:
            spec: Threads and shared memory of a block.
            fits: Whether the device has those.
        """
        raise NotImplementedError

    def encode(self, tensor_map: ops.TensorMap, array: ops.ArraySpec, address: int) -> bytes:
        """Make the tensor map of an array at an address.

        Raises:
            DriverError: The driver refused.
        """
        raise NotImplementedError

    def _lay_out(self) -> None:
        """Find the offset of each parameter in the buffer."""
        definition = self.definition
        offsets, size = ops.scalar_offsets(definition.scalars)
        self._scalar_bytes = size
        self._array_offset = -(-size // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
        self._arrays = [
            parameter for role in ("read", "update", "write") for parameter in definition.arrays(role)
        ]
        arrays = self._arrays
        parameter_offsets = {
            parameter.name: self._array_offset + _POINTER * number for number, parameter in enumerate(arrays)
        }
        scalars = [parameter.name for parameter in definition.parameters if parameter.role == "scalar"]
        parameter_offsets.update(zip(scalars, offsets, strict=True))
        self._addresses = struct.Struct(f"={len(arrays)}Q")
        end = self._array_offset + self._addresses.size
        self._maps: list[tuple[int, str, ops.TensorMap, int]] = []
        for number, parameter in enumerate(arrays):
            if isinstance(parameter.layout, ops.TensorMap):
                parameter_offsets[parameter.name] = start = (
                    -(-end // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
                )
                self._maps.append((number, parameter.name, parameter.layout, start))
                end = start + ops.MAP_BYTES
        buffer = np.zeros(end + _PARAMETER_ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % _PARAMETER_ALIGNMENT
        base = buffer.ctypes.data + start
        self._buffer = memoryview(buffer[start:].data)
        pointers = [base + parameter_offsets[parameter.name] for parameter in definition.parameters]
        self._pointers = np.array(pointers or [0], np.uint64)
        self.pointer: int = int(self._pointers.ctypes.data)

    def launch(self, spec: ops.KernelSpec, call: _Call) -> None:
        """Enqueue a launch; do nothing if its grid is empty.

        Args:
            spec: Arrays, grid, block and scalars.
            call: The call.

        Raises:
            LibraryError: The block or the grid does not fit on the device.
        """
        if 0 in spec.grid:
            return
        arrays = *spec.read, *spec.updated, *spec.written
        addresses = [_address(*pair, call) for pair in zip(self._arrays, arrays, strict=True)]
        self._check_fit(spec)
        self._buffer[: self._scalar_bytes] = spec.scalars
        self._addresses.pack_into(self._buffer, self._array_offset, *addresses)
        if self._maps:
            self._set_maps(arrays, addresses)
        try:
            self.enqueue(spec, call.stream)
        except DriverError as error:
            # The caller must handle this error, because the context is not lost.
            raise self.refusal(
                error.code,
                f": a grid of {_extents(spec.grid)} blocks of {_extents(spec.block)} threads with "
                f"{spec.shared} bytes of dynamic shared memory was not launched: {error.message}",
            ) from error
        self._runs.note(call.stream)

    def _set_maps(self, arrays: tuple[ops.ArraySpec, ...], addresses: list[int]) -> None:
        """Write the tensor maps of arrays to the buffer; each address and layout has one."""
        for number, name, tensor_map, start in self._maps:
            array, address = arrays[number], addresses[number]
            key = number, address, array.shape, array.strides
            if key not in self._encoded:
                if address % tensor_map.alignment:
                    requirement = (
                        f"{name} must lie at a multiple of {tensor_map.alignment} bytes (globalAddress)"
                    )
                    raise self.refusal("tensor_map", f": {requirement}, its address is {address:#x}")
                if len(self._encoded) >= _MOST_MAPS:
                    self._encoded.clear()
                try:
                    self._encoded[key] = self.encode(tensor_map, array, address)
                except DriverError as error:
                    raise self.refusal(
                        error.code, f": no {tensor_map} of {name}, {array}: {error.message}"
                    ) from error
            self._buffer[start : start + ops.MAP_BYTES] = self._encoded[key]

    def _check_fit(self, spec: ops.KernelSpec) -> None:
        """Refuse a launch that the driver would refuse, and state the limit."""
        threads, limits = math.prod(spec.block), self.limits
        limit, static = limits["max_dynamic_shared"], limits["static_shared"]
        if spec.shared > limit:
            raise self.refusal(
                "shared_memory",
                f" asks for {spec.shared} bytes of dynamic shared memory for each block; there are "
                f"{limit}: {limit + static} less {static} static ones",
            )
        if threads > limits["max_threads"]:
            raise self.refusal(
                "block",
                f": a block of {_extents(spec.block)} has {threads} threads; it can have "
                f"{limits['max_threads']}, by launch bounds or the {limits['registers']} registers of each "
                "thread",
            )
        if self.definition.is_cooperative:
            limit = self.max_active(threads, spec.shared) * limits["multiprocessors"]
            if math.prod(spec.grid) > limit:
                raise self.refusal(
                    "cooperative_grid",
                    f" is cooperative, so all blocks run at once: {limit} blocks of {threads} threads fit on "
                    f"this device, the grid of {_extents(spec.grid)} has {math.prod(spec.grid)}",
                )

    def check_parameters(self, compiled_sizes: list[int]) -> None:
        """Refuse a declaration that the compiled kernel does not have: it would read foreign memory.

        Args:
            compiled_sizes: Bytes of each parameter in the compiled kernel.

        Raises:
            LibraryError: The compiled kernel's parameters differ from the declaration.
        """
        parameters = self.definition.parameters
        sizes = {name: ops.MAP_BYTES for _, name, *_ in self._maps}
        sizes |= {
            parameter.name: parameter.dtype.itemsize for parameter in parameters if parameter.role == "scalar"
        }
        declared = [sizes.get(parameter.name, _POINTER) for parameter in parameters]
        if compiled_sizes != declared:
            listing = ", ".join(
                f"{parameter.name} ({size})" for parameter, size in zip(parameters, declared, strict=True)
            )
            raise self.refusal(
                "parameters",
                f" takes {len(compiled_sizes)} parameters of {compiled_sizes} bytes; "
                f"declared are {len(declared)}, in bytes: {listing or 'none'}",
            )

    def refusal(self, code: int | str, text: str) -> LibraryError:
        """Make the error for a feature that the kernel or the device lacks."""
        return LibraryError(f"kernel {self.definition.name!r}{text}", library="jit", code=code)

    def inform(self, spec: ops.KernelInfoSpec) -> None:
        """Fill the words of `KernelInfoSpec`."""
        limits = self.limits
        fits = math.prod(spec.block) <= limits["max_threads"] and spec.shared <= limits["max_dynamic_shared"]
        values = {**limits, **self.occupancy(spec, fits=fits)}
        spec.words[:] = [values[name] for name in ops.KernelInfoSpec.WORDS]


def _address(parameter: ops.KernelParameter, array: ops.ArraySpec, call: _Call) -> int:
    """Return the address of an array: of workspace, where it must be packed and is not."""
    if parameter.layout != "packed":
        return call.address_of(array)
    if parameter.role == "read":
        return call.packed(array)
    return call.result(array, is_updated=parameter.role == "update")


def _extents(extents: ops.Dim3) -> str:
    return " x ".join(map(str, extents))


@attrs.define(eq=False)
class CompiledExpression(LoadedCode):
    """A compiled expression.

    Attributes:
        source: Its source.
        functions: Its kernels by their names.
    """

    source: compiled.KernelSource
    functions: dict[str, KernelFunction]

    @staticmethod
    def load(source: compiled.KernelSource, device: _Device) -> CompiledExpression:
        """Compile it; blocks."""
        unload, functions = device.kernels.load(source.text, source.names, source.arguments.size)
        return CompiledExpression(unload, source, functions)

    def launch(self, name: str, call: _Call, values: tuple[object, ...], count: int, **how: int) -> None:
        """Launch one of the kernels with `count` threads."""
        self.functions[name].run(call.handle, count, self.source.arguments, *values, **how)
        self._runs.note(call.stream)

    def elementwise(
        self,
        spec: ops.ExpressionSpec,
        call: _Call,
        address: Callable[[ops.ArraySpec], int],
        *extra_values: object,
    ) -> None:
        """Compute each element; `extra_values` follows the arguments."""
        count = math.prod(spec.shape)
        if count:
            values = (*compiled.elementwise_arguments(spec, self.source, address), *extra_values)
            self.launch(
                "elementwise",
                call,
                values,
                -(-count // self.source.elements_per_thread),
                max_blocks=compiled.MOST_BLOCKS,
            )


class CompiledLibrary(EnqueuingLibrary[Any, Any]):
    """Enqueues expressions, and kernels of the user's own. A plan is loaded code.

    The plan of an expression is for certain types and layouts, whatever the extents. The plan of the user's
    own kernel is a `UserKernel`.
    """

    def _key_of(self, spec: ops.OperationSpec) -> tuple[object, ...]:
        if isinstance(spec, ops.ExpressionSpec):
            return compiled.plan_key(spec)
        if isinstance(spec, (ops.KernelSpec, ops.KernelInfoSpec)):
            # Whatever the arrays are: one kernel is loaded once.
            return (spec.definition,)
        return super()._key_of(spec)

    def _close_plan(self, plan: Any) -> None:
        plan.close()

    def _is_busy(self, plan: Any) -> bool:
        return bool(plan.is_busy)

    def captures(self, spec: ops.OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: the host looks at checked indices."""
        if isinstance(spec, ops.ExpressionSpec):
            return not decode_program(spec.program).program.checked
        return super().captures(spec)

    def compile_expression(self, spec: ops.ExpressionSpec, device: _Device) -> CompiledExpression:
        """Compile a program; blocks."""
        return CompiledExpression.load(compiled.make_kernel(spec, self.backend), device)

    def loop(self, spec: ops.ExpressionSpec, call: _Call) -> None:
        """Compute a program."""
        match call.plan.source.names[0]:
            case "elementwise":
                self._elements(spec, call)
            case "reduce":
                self._reduce(spec, call)
            case _:
                self._rows(spec, call)

    def _elements(self, spec: ops.ExpressionSpec, call: _Call) -> None:
        """Compute each element of the results, or each value and its place."""
        extra_values: tuple[int, ...] = ()
        if call.plan.source.is_checked and math.prod(spec.shape):
            program = decode_program(spec.program).program
            shapes = [array.shape for array in (*spec.loaded, *spec.stored)]
            extra_values = (call.words(CHECK_WORDS, partial(check_words, program, shapes)),)
        call.plan.elementwise(spec, call, call.device.address, *extra_values)

    def _reduce(self, spec: ops.ExpressionSpec, call: _Call) -> None:
        """Reduce along axes, in parts if that fills the device."""
        plan = call.plan
        how = compiled.reduction_launch(spec, plan.source, call.device.kernels.most_blocks)
        if how is None:
            return
        values = how.values(call.device.address, call.workspace(how.partial))
        plan.launch("reduce", call, values, how.threads, threads=how.block)
        if how.finish:
            plan.launch(how.finish, call, values, how.finish_threads, threads=how.block)

    def _rows(self, spec: ops.ExpressionSpec, call: _Call) -> None:
        """Reduce rows, and continue with the results."""
        plan = call.plan
        values, threads = compiled.rows_arguments(spec, call.device.address)
        if spec.results[0].size:
            plan.launch("rows", call, values, threads, threads=compiled.ROW_THREADS)


class TransferLibrary:
    """Copies and fills."""

    def copy_from_host(self, spec: ops.CopyFromHostSpec, call: _Call) -> None:
        """Copy a host array of any strides."""
        out, transfers = call.array(spec.out), call.device.transfers
        if not out.size:
            return
        packed = out if out.is_contiguous else call.room(out)
        start = transfers.straight(spec.host)
        spec.note_use(transfers.to_device(call.stream, spec.host, start, packed.address))
        if packed is not out:
            call.convert(packed, out)

    def copy_to_host(self, spec: ops.CopyToHostSpec, call: _Call) -> None:
        """Copy to a host array of any strides."""
        source, transfers = call.array(spec.source), call.device.transfers
        if not source.size:
            return
        start = transfers.straight(spec.host)
        packed = source if source.is_contiguous else call.copy_of(source)
        spec.note_use(transfers.to_host(call.stream, packed.address, spec.host, start))

    def copy(self, spec: ops.CopySpec, call: _Call) -> None:
        """Copy, and convert as `numpy.ndarray.astype` does."""
        call.convert(call.array(spec.source), call.array(spec.out))

    def fill(self, spec: ops.FillSpec, call: _Call) -> None:
        """Set all elements to one value."""
        call.fill(spec.out, spec.value)

    def join(self, spec: ops.JoinSpec, call: _Call) -> None:
        """Copy to places in one array."""
        out = call.array(spec.out)
        if spec.is_padded:
            call.fill(out, spec.pad)
        for start, source in spec.source_starts:
            # The beginning of its place.
            address = out.address + start * out.strides[spec.axis]
            call.convert(call.array(source), DeviceArray(address, out.dtype, source.shape, out.strides))


# The source `philox` has the same structure, with its padding, and the same order of kinds.
_ARGUMENTS = struct.Struct("<QQQqddiii4x")
_KINDS = [(distribution, dtype) for distribution, dtypes in ops.RANDOM_DTYPES.items() for dtype in dtypes]
# Four numbers come from a counter, or from one in each of two rows; they are stored 16 bytes at a time.
_FOUR = 4
_ALIGNMENT = 16
_MASK = (1 << 64) - 1


_SEQUENCE = struct.Struct("<3Q2q2i")
_SEQUENCES = "mrg32k3a", "xorwow"
_REJECTION = struct.Struct("<6Q3q2i")
_REJECTIONS = "gamma", "log_gamma", "poisson", "binomial"
_SOBOL = struct.Struct("<3Q2qQq")
# Source, name and structure of the kernel for each of the other draws.
_DRAWS = {
    ops.SequenceSpec: ("sequences", "draw_sequence", _SEQUENCE),
    ops.RejectionSpec: ("rejection", "reject", _REJECTION),
    ops.SobolSpec: ("sequences", "sobol_points", _SOBOL),
}


class PhiloxLibrary(EnqueuingLibrary[Any, Any]):
    """Philox numbers by one kernel, compiled when the library is made. A launch names a part of a sequence.

    The kernels for other sequences and for rejection are compiled at their first use.
    """

    def __init__(self, device: _Device) -> None:
        super().__init__(device)
        self._fill = device.kernels.function("philox", "philox_fill", _ARGUMENTS.size)

    def plan(self, spec: ops.PhiloxSpec, device: _Device) -> int:
        """Find how numbers are made."""
        return _KINDS.index((spec.distribution, spec.out.dtype))

    def philox(self, spec: ops.PhiloxSpec, call: _Call) -> None:
        """Draw numbers."""
        out = call.array(spec.out)
        size = out.size
        if not size:
            return
        seed, row = ops.PHILOX_START.unpack(spec.start)
        is_moved = (spec.low, spec.width) != (0.0, 1.0)
        is_aligned = not out.address % _ALIGNMENT
        self._fill.run(
            call.handle,
            -(-size // _FOUR),
            _ARGUMENTS,
            out.address,
            seed,
            row & _MASK,
            size,
            spec.low,
            spec.width,
            call.plan,
            is_moved,
            is_aligned,
        )

    def plan_draw(self, spec: _Draw, device: _Device) -> KernelFunction:
        """Compile and load the kernel, which blocks."""
        source, name, layout = _DRAWS[type(spec)]
        return device.kernels.function(source, name, layout.size)

    def sequence(self, spec: ops.SequenceSpec, call: _Call) -> None:
        """Draw words, one thread for a piece."""
        if size := spec.out.size:
            call.plan.run(
                call.handle,
                -(-size // spec.piece),
                _SEQUENCE,
                call.address_of(spec.out),
                call.address_of(spec.state),
                call.address_of(spec.jumps),
                size,
                spec.piece,
                spec.jumps.shape[0],
                _SEQUENCES.index(spec.sequence),
            )

    def rejection(self, spec: ops.RejectionSpec, call: _Call) -> None:
        """Draw numbers, one thread for each."""
        a, b, out = spec.a, spec.b, spec.out
        seed, row = ops.PHILOX_START.unpack(spec.start)
        if size := out.size:
            call.plan.run(
                call.handle,
                size,
                _REJECTION,
                call.address_of(out),
                call.address_of(a),
                0 if b is None else call.address_of(b),
                call.status(spec.fault),
                seed,
                row,
                size,
                a.size > 1,
                b is not None and b.size > 1,
                _REJECTIONS.index(spec.distribution),
                out.dtype.itemsize == 4,
            )

    def sobol(self, spec: ops.SobolSpec, call: _Call) -> None:
        """Make points, one thread for each number."""
        out, directions = spec.out, spec.directions
        if out.size:
            call.plan.run(
                call.handle,
                out.size,
                _SOBOL,
                call.address_of(out),
                call.address_of(directions),
                call.address_of(spec.shift),
                out.size,
                out.shape[1],
                *ops.FIRST.unpack(spec.first),
                directions.shape[0],
            )

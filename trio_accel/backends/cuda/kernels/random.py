"""Random numbers: cuRAND's Philox-4x32-10, whose order is the one that every backend keeps to."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from cuda.bindings import driver
from nvmath.bindings import curand

from ...base import DType, LibraryError, NotSupportedError
from ...base.ops import PHILOX_ROW, PhiloxSpec
from .._arrays import DeviceArray
from .._library import CudaLibrary
from .._stream import CudaStream
from .._workspace import Workspace

if TYPE_CHECKING:
    from .._device import CudaDevice

__all__ = ["RandomLibrary"]

# Four words come from each counter; a row of counters is the unit of what a generator's offset can say.
_BLOCK = 4 * PHILOX_ROW
_ROWS_IN_ALL = 1 << 46
# cuRAND stores four words at once, or two doubles.
_ALIGNMENT = 16
# So many blocks are made elsewhere at a time, where they cannot be made in place: 16 MiB of doubles.
_BLOCKS_ELSEWHERE = 8

_Draw: TypeAlias = Callable[..., None]
"""Makes numbers from where the generator stands: takes the address, their count, of normal ones also mean and
standard deviation."""


class RandomLibrary(CudaLibrary):
    """One generator, told for each array which part of which sequence it draws.

    A row begins at the offset ``row * 4 * 65536``, for every distribution; so does each following block of
    262144 numbers, of doubles in every second row.
    """

    name: ClassVar[str] = "random"
    statuses: ClassVar[type[Exception] | None] = curand.cuRANDError
    codes: ClassVar[type[enum.IntEnum] | None] = curand.Status
    refused: ClassVar[frozenset[str]] = frozenset({"LENGTH_NOT_MULTIPLE", "OUT_OF_RANGE", "TYPE_ERROR"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOCATION_FAILED"})
    missing: ClassVar[frozenset[str]] = frozenset({"ARCH_MISMATCH", "DOUBLE_PRECISION_REQUIRED"})

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._elsewhere = Workspace(self._context)
        self._stream: CudaStream | None = None
        self._table = {PhiloxSpec: self._philox}
        self._generator: int = curand.create_generator(curand.RngType.PSEUDO_PHILOX4_32_10)
        self._draws: dict[tuple[str, DType], _Draw] = {
            ("bits", DType.uint32): partial(curand.generate, self._generator),
            ("uniform", DType.float32): partial(curand.generate_uniform, self._generator),
            ("uniform", DType.float64): partial(curand.generate_uniform_double, self._generator),
            ("normal", DType.float32): partial(curand.generate_normal, self._generator),
            ("normal", DType.float64): partial(curand.generate_normal_double, self._generator),
        }
        try:
            # The only one that is promised to stay as it is.
            curand.set_generator_ordering(self._generator, curand.Ordering.PSEUDO_LEGACY)
            self._warm_up()
        except BaseException:
            self._destroy()
            raise

    def _destroy(self) -> None:
        curand.destroy_generator(self._generator)
        self._elsewhere.close()

    def _philox(self, spec: PhiloxSpec, stream: CudaStream) -> None:
        draw = self._draws.get((spec.distribution, spec.out.dtype))
        out = self._device.at(spec.out)
        if draw is None or not out.is_contiguous:
            allowed = ", ".join(str(dtype) for kind, dtype in self._draws if kind == spec.distribution)
            raise NotSupportedError(
                f"random {spec.distribution} makes contiguous arrays of {allowed}, not {spec.out.dtype}",
                backend="cuda",
            )
        rows = _rows_of_a_block(out.dtype)
        if spec.row + rows * -(-out.size // _BLOCK) > _ROWS_IN_ALL:
            raise LibraryError(
                f"row: {spec.row} and what follows are beyond cuRAND's {_ROWS_IN_ALL} rows",
                library="random",
                code="invalid_value",
            )
        if not out.size:
            return
        numbers = DeviceArray.packed(out.address, out.dtype, (out.size,))
        self._fill(spec, stream, numbers, draw)
        if spec.distribution == "uniform" and (spec.width != 1.0 or spec.low != 0.0):
            self._device.arrays.convert(stream, numbers, numbers, scale=spec.width, shift=spec.low)

    def _fill(self, spec: PhiloxSpec, stream: CudaStream, numbers: DeviceArray, draw: _Draw) -> None:
        """Draw in place what can be, and the rest in pieces elsewhere."""
        here = _count_in_place(spec, numbers)
        room = min(numbers.size - here, _BLOCKS_ELSEWHERE * _BLOCK)
        elsewhere = self._elsewhere.reserve(stream, _even(room) * numbers.dtype.itemsize) if room else 0
        moments = (spec.low, spec.width) if spec.distribution == "normal" else ()
        self._select(stream)
        curand.set_pseudo_random_generator_seed(self._generator, spec.seed)
        if here:
            self._place(spec, numbers, 0)
            draw(numbers.address, here, *moments)
        for first in range(here, numbers.size, max(room, 1)):
            count = min(room, numbers.size - first)
            self._place(spec, numbers, first)
            draw(elsewhere, _even(count), *moments)
            made = DeviceArray.packed(elsewhere, numbers.dtype, (count,))
            self._device.arrays.convert(stream, made, _part(numbers, first, count))

    def _place(self, spec: PhiloxSpec, numbers: DeviceArray, first: int) -> None:
        """Set the generator to a number of the array that begins a block."""
        row = spec.row + _rows_of_a_block(numbers.dtype) * (first // _BLOCK)
        curand.set_generator_offset(self._generator, row * _BLOCK)

    def _select(self, stream: CudaStream) -> None:
        """Let the generator work on a stream."""
        if stream is self._stream:
            return
        if self._stream is not None and not self._stream.is_closed:
            # Its state in device memory is one for all streams.
            stream.wait(self._stream.record())
        self._stream = None
        curand.set_stream(self._generator, stream.handle)
        self._stream = stream

    def _warm_up(self) -> None:
        """Draw of each kind: cuRAND allocates and loads kernels at first use, which would hold up an ask."""
        check = self._context.check
        stream = int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        try:
            place = int(check(driver.cuMemAllocAsync(_ALIGNMENT, stream)))
            curand.set_stream(self._generator, stream)
            for (distribution, _), draw in self._draws.items():
                curand.set_generator_offset(self._generator, 0)
                draw(place, 2, *((0.0, 1.0) if distribution == "normal" else ()))
            check(driver.cuMemFreeAsync(place, stream))
            check(driver.cuStreamSynchronize(stream))
        finally:
            driver.cuStreamDestroy(stream)


def _rows_of_a_block(dtype: DType) -> int:
    # A counter is two doubles: of four, two come from each of two rows.
    return 2 if dtype is DType.float64 else 1


def _count_in_place(spec: PhiloxSpec, numbers: DeviceArray) -> int:
    """How many of an array's first numbers cuRAND can put where they belong: whole blocks, or all."""
    if numbers.address % _ALIGNMENT:
        return 0
    if spec.distribution == "normal" and numbers.size % 2:
        # Normal numbers are made two at a time.
        return numbers.size // _BLOCK * _BLOCK
    return numbers.size


def _even(count: int) -> int:
    return count + count % 2


def _part(numbers: DeviceArray, first: int, count: int) -> DeviceArray:
    size = numbers.dtype.itemsize
    return DeviceArray.packed(numbers.address + first * size, numbers.dtype, (count,))

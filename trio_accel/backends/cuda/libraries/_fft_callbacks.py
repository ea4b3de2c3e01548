"""Expressions that cuFFT computes for each element that it loads or stores: callbacks by LTO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import numpy as np
from cuda.bindings import driver
from nvmath.bindings import cufft

from ...base import DType
from ...base.contract.ops import ElementwiseSpec
from ...base.expressions import compiled
from ..kit._library import KernelCall
from ..runtime._compiler import compiled as compile_source
from ..runtime._context import CudaContext
from ..runtime._stream import CudaStream

__all__ = ["Callback", "Callbacks"]

# Of structures of arguments.
_ALIGNMENT = 16
# By dtype: what names of functions end in, the type of an element, and what types of callbacks end in.
_TYPES = {
    DType.float32: ("Real", "float", "REAL"),
    DType.float64: ("DoubleReal", "double", "REAL_DOUBLE"),
    DType.complex64: ("Complex", "float2", "COMPLEX"),
    DType.complex128: ("DoubleComplex", "double2", "COMPLEX_DOUBLE"),
}
_LOAD = """
__device__ {type} cufftJITCallbackLoad{name}(void *, unsigned long long i, void *info, void *)
{{
    const Arguments &arguments = *(const Arguments *)info;
    const auto x = compute(arguments, (Index)i, load_at(arguments, (Index)i)).x0;
    return {value};
}}
"""
# The element takes the place of the one that was loaded, which the compiler leaves out then.
_STORE = """
__device__ void cufftJITCallbackStore{name}(void *, unsigned long long i, {type} x, void *info, void *)
{{
    const Arguments &arguments = *(const Arguments *)info;
    Loaded loaded = load_at(arguments, (Index)i);
    loaded.x0 = {value};
    store_at(arguments, (Index)i, compute(arguments, (Index)i, loaded));
}}
"""


@attrs.frozen(eq=False)
class Callback:
    """The source of one callback, and its type as cuFFT has it."""

    source: compiled.KernelSource
    type: cufft.XtCallbackType

    @classmethod
    def load(cls, spec: ElementwiseSpec) -> Callback:
        """Make one that computes an element in place of loading it."""
        return cls._made(spec, "LD", _LOAD, spec.results[0].dtype, ("x", "{type}{{x.re, x.im}}"))

    @classmethod
    def store(cls, spec: ElementwiseSpec, scale: float) -> Callback:
        """Make one that multiplies an element, computes another of it, and stores that."""
        by = f"* ({{part}}){scale.hex()}"
        return cls._made(spec, "ST", _STORE, spec.arrays[0].dtype, (f"x {by}", f"{{{{x.x {by}, x.y {by}}}}}"))

    @classmethod
    def _made(
        cls, spec: ElementwiseSpec, side: str, text: str, dtype: DType, values: tuple[str, str]
    ) -> Callback:
        name, element, ending = _TYPES[dtype]
        value = values[dtype.kind == "complex"].format(type=element, part=element.removesuffix("2"))
        source = compiled.make_functions(spec, text.format(name=name, type=element, value=value))
        return cls(source, cufft.XtCallbackType[f"{side}_{ending}"])


class Callbacks:
    """The callbacks of one plan of cuFFT, and the memory that they read their arguments from.

    cuFFT takes the address of that when the plan is made, so it is written before transforms whose arguments
    are others. The context is current.

    Args:
        callbacks: One to load by, one to store by, or both.
        context: The device's context.
        architecture: Its compute capability.
    """

    def __init__(self, callbacks: Sequence[Callback], context: CudaContext, architecture: str) -> None:
        self._callbacks = callbacks
        self._context = context
        sizes = [-(-one.source.arguments.size // _ALIGNMENT) * _ALIGNMENT for one in callbacks]
        *self._places, self._size = accumulate(sizes, initial=0)
        self._told = b""
        self._images = [_compiled(one.source.text, architecture) for one in callbacks]
        self._address = 0

    def set(self, handle: int) -> None:
        """Have a plan call them, which is not made yet: what was compiled is read when it is."""
        self._address = int(self._context.check(driver.cuMemAlloc(self._size)))
        for callback, place, image in zip(self._callbacks, self._places, self._images, strict=True):
            cufft.xt_set_jit_callback(handle, 0, image, len(image), callback.type, [self._address + place])

    def tell(self, call: KernelCall, last: CudaStream | None, values: Sequence[tuple[object, ...]]) -> None:
        """Have them read these arguments from now on; the transforms before read those that they had.

        Args:
            call: The launch.
            last: The stream of the last transform.
            values: Arguments of each.
        """
        told = bytearray(self._size)
        for callback, place, each in zip(self._callbacks, self._places, values, strict=True):
            callback.source.arguments.pack_into(told, place, *each)
        if call.stream is not last and last is not None and not last.is_destroyed:
            self._context.order(last.handle, call.handle)
        if bytes(told) != self._told:
            call.stream.copy(self._address, call.uploaded(np.frombuffer(told, np.uint8)), len(told))
            self._told = bytes(told)

    def close(self) -> None:
        """Give the memory back: the plan is destroyed."""
        if self._address:
            driver.cuMemFree(self._address)


def _compiled(text: str, architecture: str) -> bytes:
    from cuda.core import ProgramOptions

    options = ProgramOptions(
        arch=f"sm_{architecture}", fma=False, link_time_optimization=True, relocatable_device_code=True
    )
    return compile_source(text, options, target="ltoir").code

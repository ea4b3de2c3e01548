"""Kernels of the user's own: compiled by NVRTC, linked by nvJitLink, loaded by the driver."""

from __future__ import annotations

from ...base.kernels import kernel
from ...base.ops import KernelDefinition, KernelInfoSpec, KernelSpec, OperationSpec
from ..kit._library import KernelCall, LibraryDevice
from ..kit._loaded_kernel import LoadedKernel
from ..runtime._compiler import compile_kernel
from .arrays import ArraysLibrary

__all__ = ["JitLibrary"]


class JitLibrary(ArraysLibrary):
    """A plan is a loaded kernel: so it is compiled where that may block, and kept while it is used."""

    name = "jit"

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        if isinstance(spec, (KernelSpec, KernelInfoSpec)):
            # Whatever the arrays are: one kernel is loaded once.
            return (spec.definition,)
        return super()._key_of(spec)

    def _load(self, spec: KernelSpec | KernelInfoSpec, device: LibraryDevice) -> LoadedKernel:
        definition = KernelDefinition.decode(spec.definition)
        return LoadedKernel(self._context, definition, compile_kernel(definition, self._device.architecture))

    @kernel(KernelSpec, backend="cuda", plan=_load)
    def _launch(self, spec: KernelSpec, call: KernelCall) -> None:
        if 0 in spec.grid:
            return
        loaded: LoadedKernel = call.plan
        if loaded.is_plain:
            at = call.device.address
            addresses = [at(array) for array in (*spec.read, *spec.updated, *spec.written)]
        else:
            addresses = _packed(loaded.definition, spec, call)
        loaded.launch(spec, addresses, call.stream)

    @kernel(KernelInfoSpec, backend="cuda", plan=_load)
    def _inform(self, spec: KernelInfoSpec, call: KernelCall) -> None:
        loaded: LoadedKernel = call.plan
        loaded.inform(spec)


def _packed(definition: KernelDefinition, spec: KernelSpec, call: KernelCall) -> list[int]:
    """Return the addresses of the arrays: of workspace for those that must be packed and are not."""
    addresses: list[int] = []
    for parameter, array in zip(definition.arrays("read"), spec.read, strict=True):
        addresses.append(call.packed(array) if parameter.layout == "packed" else call.at(array))
    for parameter, array in zip(definition.arrays("update"), spec.updated, strict=True):
        is_packed = parameter.layout == "packed"
        addresses.append(call.result(array, is_updated=True) if is_packed else call.at(array))
    for parameter, array in zip(definition.arrays("write"), spec.written, strict=True):
        addresses.append(call.result(array) if parameter.layout == "packed" else call.at(array))
    return addresses

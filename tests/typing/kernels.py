"""Types of custom kernels; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any, assert_type

import attrs
import numpy as np
import numpy.typing as npt

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends.base import (
    AccelStream,
    DeviceArray,
    DeviceCall,
    HostCall,
    KernelCall,
    KernelDevice,
    kernel,
    ops,
)
from trio_accel.backends.base.contract.ops import ArraySpec
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cpu.libraries.memory import copy
from trio_accel.backends.cuda.kit._library import KernelCall as CudaCall
from trio_accel.devices import DeclaredSpec, LibraryActor, Operand, operation


def blocks(x: ArraySpec) -> int:
    return jit.cdiv(x.size, 256)


scale = jit.Kernel(
    "scale",
    "",
    parameters={"a": jit.scalar("float32"), "x": jit.updates("float32")},
    grid=blocks,
    block=(256, 1),
    options=jit.CompileOptions(macros={"N": 4, "F": None}),
)

# Rules as lambdas, of arrays, scalars and the block, without a cast.
rules = jit.Kernel(
    "rules",
    "",
    parameters={
        "n": jit.scalar("int64"),
        "x": jit.reads("float32"),
        "y": jit.writes("float32", shape=lambda x: x.shape),
        "z": jit.writes("float32", shape=lambda n, x: (*x.shape[1:], 2 * n)),
    },
    grid=lambda n: jit.cdiv(n, 256),
    block=lambda n, x, y: (min(n, x.size), y.shape[0]),
    shared=lambda block: 4 * block[0],
)
jit.Kernel("rules", "", parameters={}, grid=lambda a, b, c, d, e, f: a + b + c + d + e + f, block=1)
jit.Kernel("rules", "", parameters={}, grid=lambda n, m=1: (n, m), block=lambda block: block)


class Sizes:
    def of(self, x: ArraySpec, n: int = 1) -> tuple[int, ...]:
        return (x.size, n)


jit.Kernel("rules", "", parameters={}, grid=Sizes().of, block=1, shared=lambda n: n)
jit.Kernel("rules", "", parameters={}, grid=lambda **every: every["n"], block=lambda: 1)

jit.Kernel("rules", "", parameters={}, grid=lambda n: "x", block=1)  # type: ignore[arg-type]
jit.Kernel("rules", "", parameters={}, grid=1, block=1, shared=Sizes().of)  # type: ignore[arg-type]
jit.writes("float32", shape="x")  # type: ignore[arg-type]


async def launches(device: ta.Device, x: ta.AccelRef) -> None:
    assert_type(await scale(2.0, x), tuple[ta.AccelRef, ...])
    assert_type(await scale(a=2, x=x), tuple[ta.AccelRef, ...])
    assert_type(await device.ask(scale.launch(2.0, x)), tuple[ta.AccelRef, ...])
    assert_type(await scale.occupancy(device), jit.Occupancy)
    assert_type(device.submit(scale.launch(2.0, x)), ta.Pending[tuple[ta.AccelRef, ...]])


class HalvesActor(LibraryActor):
    library = "halves"


@operation("a(..., n) -> out(..., n)", actor=HalvesActor)
async def halve(a: Operand) -> ta.AccelRef:
    raise NotImplementedError


@ops.specification
class PowerSpec(ops.OperationSpec):
    x: ops.ArraySpec = ops.reads()
    out: ops.ArraySpec = ops.writes()
    counts: ops.StatusArray = ops.status()


@attrs.frozen
class Plan:
    name: str


def planned(spec: PowerSpec, device: KernelDevice) -> Plan:
    return Plan(device.info.name)


@kernel(halve, backend="cpu")
def halve_cpu(spec: DeclaredSpec, call: HostCall) -> None:
    a, out = call.array(spec.a), call.array(spec.out)
    assert_type(out, npt.NDArray[Any])
    np.multiply(a, 0.5, out=out)


@kernel(PowerSpec, backend="cpu", plan=planned)
def power_cpu(spec: PowerSpec, call: HostCall[Plan]) -> None:
    call.array(spec.out)[:] = call.array(spec.x) ** 2
    assert_type(call.plan.name, str)
    assert_type(call.address_of(spec.x), int)
    copy(ops.CopySpec(spec.x, spec.out), call)


@kernel(PowerSpec, backend="cuda", plan=planned)
def power_cuda(spec: PowerSpec, call: DeviceCall[Plan]) -> None:
    assert_type(call.array(spec.x), DeviceArray)
    assert_type((call.handle, call.packed(spec.x), call.result(spec.out, "F")), tuple[int, int, int])
    assert_type(call.plan.name, str)
    address = call.status(spec.counts) + call.words(1, lambda words: print(words.sum())) + call.workspace(8)
    assert_type(address, int)


def either(call: KernelCall) -> None:
    assert_type(call.plan, object)
    assert_type(call.device, KernelDevice)
    assert_type(call.stream, AccelStream)


def calls(host: HostCall[Plan], device: DeviceCall[Plan], spec: PowerSpec) -> None:
    either(host)
    either(device)
    power_cpu(spec, host)
    power_cuda(spec, host)  # type: ignore[arg-type]
    halve_cpu(halve.spec(), device)  # type: ignore[arg-type]


def of_the_backends(cpu: CpuBackend, spec: PowerSpec, cuda: CudaCall) -> None:
    device = cpu.open_device(0, memory_limit=None)
    power_cpu(spec, device.open_library("blas").call_of(spec, device.open_stream("blas")))
    power_cuda(spec, cuda)

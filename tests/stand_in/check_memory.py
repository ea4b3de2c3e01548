"""Checks the memory of the stand-in driver by `cuda.bindings`."""

from __future__ import annotations

import array
import ctypes
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np
from checking import call, code_of, main, make_stream, open_device, pinned, read
from cuda.bindings import driver

MIB = 1 << 20
CHUNK = 2 * MIB
POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def free_memory() -> int:
    return int(call(driver.cuMemGetInfo)[0])


def check_allocations() -> None:
    """Runs with 64 MiB of memory."""
    open_device()
    assert call(driver.cuMemGetInfo) == [64 * MIB, 64 * MIB]
    assert call(driver.cuDeviceTotalMem, 0) == 64 * MIB
    first, second = call(driver.cuMemAlloc, 40 * MIB), call(driver.cuMemAlloc, 1)
    assert free_memory() == 24 * MIB - 512
    assert code_of(driver.cuMemAlloc, 24 * MIB) == 2
    assert code_of(driver.cuMemAlloc, 2**62) == 2
    assert code_of(driver.cuMemAlloc, 0) == 1
    assert read(int(first), 4, np.uint8).any()  # nothing makes it zero
    assert code_of(driver.cuMemFree, int(first) + 512) == 1
    call(driver.cuMemFree, first)
    assert code_of(driver.cuMemFree, first) == 1
    call(driver.cuMemFree, 0)
    call(driver.cuMemFree, second)
    call(driver.cuMemAlloc, 64 * MIB)
    assert free_memory() == 0


def check_pools() -> None:
    """Runs with 64 MiB of memory."""
    open_device()
    stream = make_stream()
    pool = call(driver.cuDeviceGetDefaultMemPool, 0)
    kind = driver.CUmemPool_attribute
    assert int(call(driver.cuMemPoolGetAttribute, pool, kind.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)) == 0
    first = call(driver.cuMemAllocAsync, 5 * MIB, stream)
    assert (int(call(driver.cuMemPoolGetAttribute, pool, kind.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))) == 5 * MIB
    assert free_memory() == 58 * MIB
    assert code_of(driver.cuMemAllocAsync, 60 * MIB, stream) == 2
    call(driver.cuMemFreeAsync, first, stream)
    assert code_of(driver.cuMemFreeAsync, first, stream) == 1
    assert free_memory() == 64 * MIB
    threshold = driver.cuuint64_t(2**64 - 1)
    call(driver.cuMemPoolSetAttribute, pool, kind.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, threshold)
    call(driver.cuMemFreeAsync, call(driver.cuMemAllocAsync, 5 * MIB, stream), stream)
    assert int(call(driver.cuMemPoolGetAttribute, pool, kind.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)) == 6 * MIB
    assert int(call(driver.cuMemPoolGetAttribute, pool, kind.CU_MEMPOOL_ATTR_USED_MEM_HIGH)) == 5 * MIB
    assert free_memory() == 58 * MIB
    call(driver.cuMemPoolTrimTo, pool, 0)
    assert free_memory() == 64 * MIB
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.maxSize = 4 * MIB
    own = call(driver.cuMemPoolCreate, properties)
    held = call(driver.cuMemAllocFromPoolAsync, 4 * MIB, own, stream)
    assert code_of(driver.cuMemAllocFromPoolAsync, 1, own, stream) == 2
    call(driver.cuMemFree, held)  # frees such memory too
    call(driver.cuMemPoolDestroy, own)
    assert free_memory() == 64 * MIB


def check_host_memory() -> None:
    open_device()
    address = call(driver.cuMemHostAlloc, 4096, 2)
    assert int(call(driver.cuMemHostGetDevicePointer, address + 8, 0)) == address + 8
    assert call(driver.cuMemHostGetFlags, address) == 2
    kind = driver.CUpointer_attribute
    asked = [kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL]
    assert [int(each) for each in call(driver.cuPointerGetAttributes, 2, asked, address)] == [1, 0]
    assert code_of(driver.cuMemFree, address) == 1
    call(driver.cuMemFreeHost, address)
    assert code_of(driver.cuMemFreeHost, address) == 1
    plain = np.zeros(4096, np.uint8)
    start = plain.ctypes.data
    assert code_of(driver.cuPointerGetAttribute, asked[0], start) == 1
    assert int(call(driver.cuPointerGetAttributes, 2, asked, start)[1]) == -2
    assert code_of(driver.cuMemHostGetDevicePointer, start, 0) == 1
    call(driver.cuMemHostRegister, start, 2048, 0)
    assert int(call(driver.cuMemHostGetDevicePointer, start, 0)) == start
    assert code_of(driver.cuMemHostRegister, start, 2048, 0) == 712
    assert code_of(driver.cuMemHostRegister, start + 1024, 2048, 0) == 712
    call(driver.cuMemHostRegister, start + 2048, 2048, 0)
    assert code_of(driver.cuMemHostUnregister, start + 1024) == 713
    call(driver.cuMemHostUnregister, start)
    assert code_of(driver.cuMemHostUnregister, start) == 713


def _copy_3d(source: np.ndarray[Any, Any], target: int, stream: object) -> None:
    """The box [1:3, 1:4, 2:5] of a pinned array into dense memory of the device."""
    item = source.itemsize
    copied = driver.CUDA_MEMCPY3D()
    copied.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copied.srcHost = source.ctypes.data
    copied.srcXInBytes, copied.srcY, copied.srcZ = 2 * item, 1, 1
    copied.srcPitch, copied.srcHeight = source.strides[1], source.shape[1]
    copied.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copied.dstDevice = target
    copied.dstPitch, copied.dstHeight = 3 * item, 3
    copied.WidthInBytes, copied.Height, copied.Depth = 3 * item, 3, 2
    call(driver.cuMemcpy3DAsync, copied, stream)


def check_copies() -> None:
    open_device()
    stream = make_stream()
    source = pinned(4 * 5 * 6).reshape(4, 5, 6)
    source[:] = np.random.default_rng(5).integers(0, 2**32, source.shape, np.uint32)
    target = int(call(driver.cuMemAlloc, source.nbytes))
    _copy_3d(source, target, stream)
    call(driver.cuStreamSynchronize, stream)
    assert (read(target, 18, np.uint32).reshape(2, 3, 3) == source[1:3, 1:4, 2:5]).all()
    copied = driver.CUDA_MEMCPY2D()
    copied.srcMemoryType = copied.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copied.srcDevice, copied.srcXInBytes, copied.srcY, copied.srcPitch = source.ctypes.data, 4, 2, 24
    copied.dstDevice, copied.dstPitch, copied.WidthInBytes, copied.Height = target, 12, 12, 10
    call(driver.cuMemcpy2DAsync, copied, stream)
    call(driver.cuStreamSynchronize, stream)
    expected = source.reshape(20, 6)[2:12, 1:4]
    assert (read(target, 30, np.uint32).reshape(10, 3) == expected).all()
    call(driver.cuMemsetD2D16Async, target, 8, 0xBEEF, 2, 3, stream)
    call(driver.cuMemsetD32Async, target + 24, 0xCAFE, 2, stream)
    call(driver.cuStreamSynchronize, stream)
    filled = read(target, 16, np.uint16).reshape(4, 4)
    assert (filled[:3, :2] == 0xBEEF).all()
    assert (filled[:2, 2:] == expected.ravel()[[1, 3]].view(np.uint16).reshape(2, 2)).all()
    assert filled[3].tolist() == [0xCAFE, 0, 0xCAFE, 0]
    behind = target + source.nbytes - 8  # the copy would go over the end
    assert code_of(driver.cuMemcpyHtoDAsync, behind, source.ctypes.data, 16, stream) == 1
    assert code_of(driver.cuMemsetD8Async, behind, 0, 16, stream) == 1
    assert code_of(driver.cuMemcpyDtoD, target, source.ctypes.data + source.nbytes, 8) == 1


def _properties() -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = POSIX
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    return properties


def _access() -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _map(handle: object, size: int) -> int:
    address = int(call(driver.cuMemAddressReserve, size, 0, 0, 0))
    call(driver.cuMemMap, address, size, 0, handle, 0)
    call(driver.cuMemSetAccess, address, size, [_access()], 1)
    return address


def check_mappings() -> None:
    """Runs with 64 MiB of memory."""
    open_device()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert call(driver.cuMemGetAllocationGranularity, _properties(), minimum) == CHUNK
    assert code_of(driver.cuMemCreate, CHUNK + 4096, _properties(), 0) == 1
    assert code_of(driver.cuMemCreate, 66 * MIB, _properties(), 0) == 2
    handles = [call(driver.cuMemCreate, CHUNK, _properties(), 0) for _ in range(2)]
    assert free_memory() == 60 * MIB
    address = int(call(driver.cuMemAddressReserve, 4 * CHUNK, 0, 0, 0))
    assert address % CHUNK == 0
    behind = int(call(driver.cuMemAddressReserve, CHUNK, 0, address, 0))
    assert behind != address  # taken
    call(driver.cuMemAddressFree, behind, CHUNK)
    assert int(call(driver.cuMemAddressReserve, CHUNK, 0, behind, 0)) == behind  # free: the hint holds
    for place, handle in enumerate(handles):
        call(driver.cuMemMap, address + place * CHUNK, CHUNK, 0, handle, 0)
    assert code_of(driver.cuMemMap, address, CHUNK, 0, handles[0], 0) == 1
    assert code_of(driver.cuMemMap, address + 4 * CHUNK, CHUNK, 0, handles[0], 0) == 1
    assert code_of(driver.cuMemsetD8, address, 1, 16) == 1  # no access yet
    assert code_of(driver.cuMemSetAccess, address, 4 * CHUNK, [_access()], 1) == 1
    call(driver.cuMemSetAccess, address, 2 * CHUNK, [_access()], 1)
    call(driver.cuMemsetD8, address, 0x5A, 2 * CHUNK)
    assert (read(address, 2 * CHUNK, np.uint8) == 0x5A).all()
    for handle in handles:
        call(driver.cuMemRelease, handle)
    assert free_memory() == 60 * MIB  # the mappings hold the memory
    assert code_of(driver.cuMemAddressFree, address, 4 * CHUNK) == 1
    call(driver.cuMemUnmap, address, CHUNK)
    assert free_memory() == 62 * MIB
    assert code_of(driver.cuMemsetD8, address, 1, 16) == 1
    call(driver.cuMemUnmap, address + CHUNK, CHUNK)
    call(driver.cuMemAddressFree, address, 4 * CHUNK)
    assert free_memory() == 64 * MIB
    assert code_of(driver.cuMemRelease, handles[0]) == 1


def check_mappings_without_access() -> None:
    """Ends by a segmentation fault."""
    open_device()
    handle = call(driver.cuMemCreate, CHUNK, _properties(), 0)
    address = int(call(driver.cuMemAddressReserve, CHUNK, 0, 0, 0))
    call(driver.cuMemMap, address, CHUNK, 0, handle, 0)
    print(ctypes.c_char.from_address(address).value)


def own_memory(descriptor: str) -> None:
    """Exports a chunk with numbers in it through a socket, then waits to be killed."""
    open_device()
    handle = call(driver.cuMemCreate, CHUNK, _properties(), 0)
    address = _map(handle, CHUNK)
    numbers = np.arange(CHUNK // 8, dtype=np.uint64)
    call(driver.cuMemcpyHtoD, address, numbers.ctypes.data, CHUNK)
    exported = call(driver.cuMemExportToShareableHandle, handle, POSIX, 0)
    with socket.socket(fileno=int(descriptor)) as channel:
        rights = array.array("i", [exported])
        channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        signal.pause()


def _receive_memory() -> int:
    here, there = socket.socketpair()
    command = [sys.executable, __file__, "own_memory", str(there.fileno())]
    with here, subprocess.Popen(command, pass_fds=[there.fileno()]) as owner:
        there.close()
        _, ((_, _, rights),), _, _ = here.recvmsg(1, socket.CMSG_SPACE(4))
        owner.send_signal(signal.SIGKILL)
        assert owner.wait() == -signal.SIGKILL
    return int.from_bytes(rights, sys.byteorder)


def check_exported_memory() -> None:
    """Memory outlives its process, killed, as long as a descriptor of it is open. Runs with 64 MiB."""
    descriptor = _receive_memory()
    open_device()
    imported = [call(driver.cuMemImportFromShareableHandle, descriptor, POSIX) for _ in range(2)]
    assert free_memory() == 62 * MIB  # once, though it was imported twice
    os.close(descriptor)
    address = _map(imported[0], CHUNK)
    assert (read(address, CHUNK // 8, np.uint64) == np.arange(CHUNK // 8)).all()
    call(driver.cuMemUnmap, address, CHUNK)
    for handle in imported:
        call(driver.cuMemRelease, handle)
    assert free_memory() == 64 * MIB
    with open(os.devnull) as other:
        assert code_of(driver.cuMemImportFromShareableHandle, other.fileno(), POSIX) == 1


if __name__ == "__main__":
    main(list(globals().items()))

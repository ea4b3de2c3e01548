"""Bare figures of several GPUs of one host: copies by PyTorch, and NCCL by nccl4py."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["nccl", "pytorch"]

# Seconds that each may take.
_PATIENCE = 25.0

BARE_NCCL = """
import json, os, statistics, sys, time
import numpy as np
import nccl.bindings.nccl as nccl
from cuda.bindings import driver
def check(result):
    assert not result[0], result[0]
    return result[1] if len(result) == 2 else None
rank, size, nbytes = map(int, sys.argv[1:4])
check(driver.cuInit(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(rank))))
stream = int(check(driver.cuStreamCreate(1)))
if rank == 0:
    name = bytes(nccl.get_unique_id())
    print(name.hex(), flush=True)
else:
    name = bytes.fromhex(sys.stdin.readline())
config = nccl.Config()
start = time.perf_counter()
comm = nccl.comm_init_rank_scalable(size, rank, 1, bytearray(name), config.ptr)
opened = time.perf_counter() - start
source, out = (int(check(driver.cuMemAlloc(nbytes))) for _ in range(2))
def run(count, times):
    taken = []
    for _ in range(times + 3):
        start = time.perf_counter()
        nccl.all_reduce(source, out, count, 7, 0, comm, stream)
        check(driver.cuStreamSynchronize(stream))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])
large, small = run(nbytes // 4, 15), run(256, 300)
print(json.dumps({"large": large, "small": small, "open": opened, "version": nccl.get_version()}), flush=True)
nccl.comm_abort(comm)
"""

BARE_TORCH = """
import json, statistics, sys, time
import torch
nbytes = int(sys.argv[1])
count = torch.cuda.device_count()
peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
figures = {"peers": peers, "copies": {}}
for size in (1 << 10, nbytes >> 4, nbytes >> 2, nbytes) if count > 1 else ():
    source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
    taken = []
    for _ in range(15):
        torch.cuda.synchronize(0); torch.cuda.synchronize(1)
        start = time.perf_counter()
        target = source.to("cuda:1")
        torch.cuda.synchronize(0); torch.cuda.synchronize(1)
        taken.append(time.perf_counter() - start)
        del target
    figures["copies"][size] = statistics.median(taken[3:])
print(json.dumps(figures))
"""


def pytorch(nbytes: int) -> dict[str, Any]:
    """Measure copies of up to so many bytes, and tell which devices reach which."""
    done = subprocess.run(  # noqa: S603  # this file's own program
        [sys.executable, "-c", BARE_TORCH, str(nbytes)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def nccl(size: int, nbytes: int) -> dict[str, Any]:
    """Measure sums over so many devices, of so many bytes and of 1 KiB."""
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-c", BARE_NCCL, str(rank), str(size), str(nbytes)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, **pipes))  # noqa: S603  # the same
        assert ranks[0].stdout is not None
        name = ranks[0].stdout.readline()
        for one in ranks[1:]:
            assert one.stdin is not None
            one.stdin.write(name)
            one.stdin.flush()
        found = json.loads(ranks[0].communicate(timeout=_PATIENCE)[0].splitlines()[-1])
        return {f"nccl {key}": value for key, value in found.items()}
    finally:
        for one in ranks:
            one.kill()

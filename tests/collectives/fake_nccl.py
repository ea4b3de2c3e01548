"""A library of collectives for the CPU backend, as NCCL is one for CUDA: ranks meet by files.

It never blocks, can be given up from another thread, and hangs where a rank does not come.
"""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trio_accel.backends.base import HostCall, LibraryError, kernel
from trio_accel.backends.base.contract.ops import (
    CloseCommunicatorSpec,
    CollectiveSpec,
    CommunicatorIdSpec,
    OpenCommunicatorSpec,
)
from trio_accel.backends.base.kit.communicators import Communicators
from trio_accel.devices import LibraryActor

# Identifies a test, also in its workers, because folders of other test processes are not its own.
MARK = "TRIO_ACCEL_TEST_MARK"
_OPEN = Communicators("fake")
_STEPS = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}


def prefix() -> str:
    """How the names of communicators begin, which are folders."""
    return f"trio-accel-fake-nccl-{os.environ.get(MARK, 'none')}-"


def broken() -> Path:
    """A file that makes the opening of communicators fail."""
    return Path(tempfile.gettempdir()) / f"{prefix()}broken"


class FakeActor(LibraryActor):
    library = "fake_nccl"


class FakeControlActor(LibraryActor):
    library = "fake_nccl"


@attrs.define(eq=False)
class Handle:
    """One rank: it posts a file for each message, and looks for the other ranks' files."""

    folder: Path
    rank: int
    size: int
    sent: Counter[int] = attrs.field(factory=Counter)
    taken: Counter[int] = attrs.field(factory=Counter)
    wanted: dict[int, Path] = attrs.field(factory=dict)
    received: dict[int, Any] = attrs.field(factory=dict)

    def exchange(self, sends: dict[int, Any], sources: list[int]) -> None:
        for peer, message in sends.items():
            self.sent[peer] += 1
            path = self.folder / f"{self.rank}-{peer}-{self.sent[peer]}"
            # Another rank may have given up, and has removed the folder: then this one waits until it does.
            with suppress(FileNotFoundError):
                path.with_suffix(".new").write_bytes(pickle.dumps(message))
                path.with_suffix(".new").rename(path)
        self.taken.update(sources)
        self.wanted = {peer: self.folder / f"{peer}-{self.rank}-{self.taken[peer]}" for peer in sources}
        self.received = {}

    def poll(self) -> bool:
        for peer, path in list(self.wanted.items()):
            if path.exists():
                self.received[peer] = pickle.loads(path.read_bytes())
                path.unlink()
                del self.wanted[peer]
        return not self.wanted

    def abort(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@kernel(CommunicatorIdSpec, backend="cpu")
def make_id(spec: CommunicatorIdSpec, call: HostCall) -> None:
    if broken().exists():
        raise LibraryError("the fake is broken", library="fake", code="BROKEN")
    name = tempfile.mkdtemp(prefix=prefix()).encode().ljust(spec.words.nbytes)
    spec.words[:] = np.frombuffer(name, np.int32)


@kernel(OpenCommunicatorSpec, backend="cpu")
def open_one(spec: OpenCommunicatorSpec, call: HostCall) -> None:
    others = [rank for rank in range(spec.size) if rank != spec.rank]
    communicator = _OPEN.new(spec.number)
    with communicator.calling(spec.waiting):
        communicator.begin(lambda: Handle(Path(spec.name.decode().strip()), spec.rank, spec.size))
        communicator.call(lambda handle: handle.exchange(dict.fromkeys(others), others))
        communicator.settle()


@kernel(CloseCommunicatorSpec, backend="cpu")
def close(spec: CloseCommunicatorSpec, call: HostCall) -> None:
    _OPEN.close(spec.number).join()


@kernel(CollectiveSpec, backend="cpu")
def meet(spec: CollectiveSpec, call: HostCall) -> None:
    communicator = _OPEN.find(spec.number)
    source = None if spec.source is None else np.ascontiguousarray(call.array(spec.source, write=False))
    out = None if spec.out is None else call.array(spec.out)
    found: list[Handle] = []

    def post(handle: Handle) -> None:
        found.append(handle)
        ranks = range(handle.size)
        if spec.kind == "exchange":
            flat = np.empty(0) if source is None else source.reshape(-1)
            sends = {peer: flat[first : first + count] for peer, first, count in spec.sends}
            handle.exchange(sends, [peer for peer, *_ in spec.receives])
        elif spec.kind == "broadcast":
            is_root = handle.rank == spec.root
            peers = [rank for rank in ranks if rank != spec.root] if is_root else []
            handle.exchange(dict.fromkeys(peers, source), [] if is_root else [spec.root])
        else:
            handle.exchange(dict.fromkeys(ranks, source), list(ranks))

    with communicator.calling(spec.waiting):
        communicator.call(post)
        communicator.settle()
    if out is not None:
        _finish(spec, found[0], out)


def _finish(spec: CollectiveSpec, handle: Handle, out: npt.NDArray[Any]) -> None:
    received = handle.received
    if spec.kind == "exchange":
        flat = out.reshape(-1)
        for peer, first, count in spec.receives:
            flat[first : first + count] = received[peer]
        return
    arrays = [received[rank] for rank in sorted(received)]
    if spec.kind == "all_gather":
        made = np.concatenate(arrays)
    elif spec.kind == "broadcast":
        made = arrays[0]
    else:
        made = functools.reduce(_STEPS.get(spec.reduction, np.add), arrays)
        if spec.reduction == "mean":
            made = made / handle.size
    if spec.kind == "reduce_scatter":
        rows = out.shape[0]
        made = made[handle.rank * rows : handle.rank * rows + rows]
    np.copyto(out, made.astype(out.dtype).reshape(out.shape))

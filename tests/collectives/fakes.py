"""Puts the fake of NCCL in the place of a vendor's library."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import attrs
import fake_nccl
import pytest

from trio_accel.backends.base import CollectiveLibrary
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cuda import CudaBackend

NCCL = CudaBackend().collectives

FAKE = CollectiveLibrary(
    title="the fake",
    package="fake_nccl",
    missing="the fake is not installed",
    actor="fake_nccl:FakeActor",
    control="fake_nccl:FakeControlActor",
    reductions=NCCL.reductions,
    is_apart=False,
)


@contextmanager
def fake_libraries(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Give the CPU backend a library of collectives, and CUDA on the stand-in driver its own."""
    monkeypatch.setattr(CpuBackend, "collectives", FAKE)
    monkeypatch.setenv(fake_nccl.MARK, str(os.getpid()))
    # All ranks are on one device.
    monkeypatch.setattr(CudaBackend, "collectives", attrs.evolve(NCCL, is_apart=False))
    yield
    # Killed workers leave theirs.
    for folder in Path(tempfile.gettempdir()).glob(f"{fake_nccl.prefix()}*"):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)

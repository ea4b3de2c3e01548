"""What files hold, without loading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._files import OpenFiles, StrPath, paths_of
from ._header import TensorInfo

__all__ = ["Contents", "inspect"]


@attrs.frozen(kw_only=True)
class Contents:
    """What files of weights hold.

    Attributes:
        tensors: By name, in the order of the files.
        metadata: Text by name, which the writer has added; of several files, the first has its way.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@enable_ki_protection
async def inspect(path: StrPath | Iterable[StrPath]) -> Contents:
    """Read what files of weights hold: their headers alone, in a thread.

    Args:
        path: As for `load`.

    Raises:
        WeightsError: A file is not what it claims to be.
        OSError: A file cannot be opened or read.
    """
    return await trio.to_thread.run_sync(_contents, paths_of(path))


def _contents(paths: list[str]) -> Contents:
    with OpenFiles(paths) as files:
        tensors = {name: tensor for name, (_, tensor) in files.tensors.items()}
        return Contents(tensors=tensors, metadata=files.metadata)

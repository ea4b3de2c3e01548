"""The layout of named parameters in one flat array, and the distribution of a batch to ranks."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt

from ..devices.base._refusals import OnDevice

__all__ = ["Batch"]

Batch: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Arrays of the host by name, with a sample in each row."""


@attrs.frozen
class FlatLayout:
    """Named arrays in sequence in one flat array, padded with zeros to a multiple of the ranks.

    Attributes:
        names: The names, in array order.
        shapes: The shapes.
        ranks: The number of ranks that share the array.
    """

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    ranks: int = 1

    @property
    def size(self) -> int:
        """The number of elements without the padding."""
        return sum(map(math.prod, self.shapes))

    @property
    def padded(self) -> int:
        """The number of elements in the flat array."""
        return -(-max(self.size, 1) // self.ranks) * self.ranks

    def rank_slice(self, rank: int) -> slice:
        """Return the slice of a rank; numbers above `ranks` wrap around."""
        part = self.padded // self.ranks
        first = rank % self.ranks * part
        return slice(first, first + part)

    def entries(self) -> Iterator[tuple[str, slice, tuple[int, ...]]]:
        """Yield each name, its slice of the flat array, and its shape."""
        stops = itertools.accumulate(map(math.prod, self.shapes))
        for name, shape, stop in zip(self.names, self.shapes, stops, strict=True):
            yield name, slice(stop - math.prod(shape), stop), tuple(shape)

    def views(self, flat: Any) -> dict[str, Any]:
        """Return the named arrays as views of a flat one."""
        return {name: flat[span].reshape(shape) for name, span, shape in self.entries()}

    def flattened(self, arrays: Mapping[str, Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return host arrays as one flat array.

        Raises:
            ValueError: A name is missing or unknown, or a shape differs.
        """
        if difference := self.difference({name: np.shape(array) for name, array in arrays.items()}):
            raise ValueError(difference)
        flat: npt.NDArray[Any] = np.zeros(self.padded, dtype)
        for name, span, _ in self.entries():
            flat[span] = np.asarray(arrays[name]).reshape(-1)
        return flat

    def difference_to(self, layout: FlatLayout) -> str:
        """Describe the first difference to another layout in any order; see `difference`."""
        return self.difference(dict(zip(layout.names, layout.shapes, strict=True)))

    def difference(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Describe the first difference to these names and shapes; an empty text if there is none."""
        mine = {name: tuple(shape) for name, _, shape in self.entries()}
        for name in dict.fromkeys((*mine, *shapes)):
            if name not in mine or name not in shapes:
                return f"{name!r} is {'not wanted' if name in shapes else 'missing'}"
            if tuple(shapes[name]) != mine[name]:
                return f"{name!r} has the shape {tuple(shapes[name])}, and {mine[name]} is wanted"
        return ""


def checksum_of(name: str, array: Any) -> int:
    """Return the CRC-32 of a host array with its name and shape."""
    host: npt.NDArray[Any] = np.ascontiguousarray(array)
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(f"{name} {host.shape}".encode()))


def base_of(checksums: Mapping[str, int]) -> int:
    """Return one checksum of several, by their names; 0 if there are none."""
    return zlib.crc32(json.dumps(sorted(checksums.items())).encode()) if checksums else 0


def check_batch(batch: Batch, *, takes_cuda: bool) -> None:
    """Refuse a batch that is not a mapping of NumPy arrays or lists of numbers.

    Args:
        batch: The batch.
        takes_cuda: Whether it may have arrays of other libraries in CUDA memory.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(f"a batch must be a dict of arrays by name, got {type(batch).__name__}")
    for name, value in cast("Mapping[str, Any]", batch).items():
        kind = type(cast("object", value))
        if isinstance(value, (np.ndarray, np.generic, list, tuple)) or (
            takes_cuda and hasattr(value, "__cuda_array_interface__")
        ):
            continue
        entry, advice = f"batch[{name!r}]", ""
        if isinstance(value, OnDevice):
            value.silence()
            advice = f"; write await {entry}.to_host()"
        elif callable(getattr(value, "numpy", None)):  # a tensor of PyTorch or TensorFlow
            is_on_host = getattr(getattr(value, "device", None), "type", "cpu") == "cpu"
            advice = f"; write {entry}{'' if is_on_host else '.cpu()'}.numpy()"
        elif isinstance(value, Number) or hasattr(value, "__array__"):
            advice = f"; write np.asarray({entry})"
        path = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise TypeError(f"a batch must have NumPy arrays by name, got {path} for {name!r}{advice}")


def rows_of(batch: Batch) -> int:
    """Return the number of samples in a batch.

    Raises:
        ValueError: Its arrays have different numbers of rows.
    """
    counts = {name: np.shape(array)[:1] for name, array in batch.items()}
    if () in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(f"the arrays of a batch must agree on the number of rows, got {counts}")
    return int(next(iter(counts.values()))[0])


def shared(batch: Batch, parts: int) -> list[dict[str, Any]]:
    """Divide the rows of a batch into parts, as evenly as possible.

    Raises:
        ValueError: There are fewer rows than parts.
    """
    rows = rows_of(batch)
    if rows < parts:
        raise ValueError(f"a batch of {rows} samples cannot be shared among {parts}; each needs one at least")
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [
        {name: array[start:stop] for name, array in batch.items()}
        for start, stop in itertools.pairwise(bounds)
    ]


def shared_loosely(batch: Batch, parts: int) -> list[dict[str, Any]]:
    """Divide the rows of a batch into parts; if there are fewer rows than parts, the last parts are empty."""
    count = min(rows_of(batch), parts)
    return shared(batch, count) + [{} for _ in range(parts - count)] if count else []


@attrs.frozen
class Work:
    """The work of the ranks with the same samples in a step.

    Attributes:
        number: The number of the step, from 1 on.
        rates: The rate of the optimizer, and of each group.
        scale: The factor of the loss, which is divided out of the gradients later.
        weight: The share of these samples in the whole step.
        batch: The samples.
    """

    number: int
    rates: Sequence[float]
    scale: float
    weight: float
    batch: Batch

    def parts(self, batch: Batch, count: int) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield parts of the samples, and each part's share in the whole step."""
        for part in shared(batch, count):
            yield part, self.weight * rows_of(part) / rows_of(batch)

    def clipped(self, squares: float, max_norm: float | None) -> tuple[float, float]:
        """Return the norm of a scaled gradient, and by which factor it is no longer scaled, and clipped.

        Args:
            squares: The sum of its squares.
            max_norm: The largest norm; None for any.
        """
        norm, factor = math.sqrt(squares) / self.scale, 1.0 / self.scale
        return norm, factor if max_norm is None or not norm > max_norm else factor * max_norm / norm

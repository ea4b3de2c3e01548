"""Operations that differ from earlier ones in their blocks alone: the rest is sent only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt

from ....backends.base.fast_paths import current_fast_paths
from ....backends.base.ops import ArraySpec, map_arrays
from ...operations._operation import Launch
from ..transport._codec import Message
from ..transport._wire import Wire, encode_spec, spec_key

__all__ = ["TemplateTable"]

# Then all are forgotten: a program whose shapes are always others gains nothing by them.
_MOST = 1024

_Key: TypeAlias = tuple[Any, ...]
_AddressOf: TypeAlias = Callable[[npt.NDArray[Any]], "Wire | None"]


def _nowhere(host: npt.NDArray[Any]) -> None:
    """No host array lies where a worker has it, too."""


class TemplateTable:
    """The launch templates that one worker has.

    Two launches have one template if they are the same once their blocks are numbered in the order in which
    they occur. The second of them makes it, as many occur only once.

    Args:
        post: Sends a message to the worker.
    """

    __slots__ = ("_is_on", "_last", "_numbers", "_post")

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._is_on = current_fast_paths().templates
        # 0 stands for one that was seen once.
        self._numbers: dict[_Key, int] = {}
        self._last = 0

    def find(self, launch: Launch, host: _AddressOf = _nowhere) -> tuple[int, tuple[int, ...]] | None:
        """Find the template of a launch; a new one is posted, ahead of what is posted next.

        Args:
            launch: The launch. Host arrays are part of the template, by their addresses.
            host: Tells the address of one; None where the worker does not have it.

        Returns:
            Number of the template, and the blocks in the order in which they occur. None where the launch has
            no template, or is the first of its kind: then it is sent whole.

        Raises:
            TypeError: No other process can import the specification's class.
        """
        if launch.staged or launch.fault is not None or not self._is_on:
            return None
        found = spec_key(launch.spec, host)
        if found is None:
            return None
        key, blocks = found
        key += launch.name, launch.library
        for block, nbytes in launch.allocations:
            key.append(nbytes)
            blocks.append(block)
        # Where one kind of block ends and the next begins.
        key.append("outputs")
        for output in launch.outputs:
            blocks.append(output.id)
        key.append(len(blocks))
        for argument, used in launch.uses:
            key.append(argument)
            blocks.append(used.id)
        positions: dict[int, int] = {}
        position_of = positions.setdefault
        key += [position_of(block, len(positions)) for block in blocks]
        whole = tuple(key)
        numbers = self._numbers
        number = numbers.get(whole)
        if number is None:
            if len(numbers) >= _MOST:
                numbers.clear()
                self._post(("forget_templates",))
            numbers[whole] = 0
            return None
        if not number:
            plain = _encode(launch, positions, host)
            self._last += 1
            number = numbers[whole] = self._last
            self._post(("template", number, plain))
        return number, tuple(positions)


def _encode(launch: Launch, positions: Mapping[int, int], host: _AddressOf) -> Message:
    """Make plain values of a launch, with the positions of its blocks in place of their ids."""
    described = launch.spec.descriptor()

    def numbered(array: ArraySpec) -> ArraySpec:
        return ArraySpec(positions[array.block], array.offset, array.dtype, array.shape, array.strides)

    spec = described.make([map_arrays(value, numbered) for value in described.values(launch.spec)])
    return (
        launch.name,
        launch.library,
        encode_spec(spec, host),
        tuple([(positions[block], nbytes) for block, nbytes in launch.allocations]),
        tuple([positions[output.id] for output in launch.outputs]),
        tuple([(argument, positions[used.id]) for argument, used in launch.uses]),
    )

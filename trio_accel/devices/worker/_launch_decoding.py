"""Decodes launches from the application, with or without a template."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import attrs
import numpy as np

from ...backends.base import DType, HostArray, Ints
from ...backends.base.contract.ops import ArraySpec, OperationSpec, map_arrays
from ...backends.base.kit.kept_plans import KeptPlans
from ..base._waits import Arrival
from ..operations._blocks import Block
from ..operations._faults import FaultHit, FaultPlan, Faults
from ..operations._operation import Launch
from ..wire._protocol import DTYPES
from ..wire._specs import decode_array, decode_spec
from ..wire._wire_values import decode_fault
from ._memory import RemoteArray, WorkerBlocks


def decode_launch(
    data: Any,
    number: int,
    blocks: Mapping[int, Block],
    shared: Callable[..., HostArray],
    results: list[HostArray],
) -> Launch:
    """Decode a launch.

    Args:
        data: The launch as plain values.
        number: The number of the request.
        blocks: The blocks by id.
        shared: Makes an array over the application's memory, and adds the arrivals that must precede its use.
        results: Collects the host arrays that are sent with the reply.

    Raises:
        ImportError: This process lacks the specification's module.
    """
    name, library, spec, allocations, staged, trailing, outputs, uses, fault = data
    arrivals: list[Arrival] = []

    def host(plain: Any) -> HostArray:
        kind, *rest = plain
        if kind == "value":
            return decode_array(rest[0])
        if kind == "copy":
            return cast("HostArray", RemoteArray(number, rest[0]))
        if kind == "shared":
            return shared(arrivals, *rest)
        dtype: str
        shape: Ints
        dtype, shape = rest
        # Zeros, because an operation may skip words, and this process's old memory must not be sent.
        results.append(np.zeros(shape, DType(dtype).dtype))
        return results[-1]

    main = decode_spec(spec, host)
    copies: Any = tuple([decode_spec(copy, host) for copy in staged]) if staged else ()
    copies_behind: Any = tuple([decode_spec(copy, host) for copy in trailing]) if trailing else ()
    reads, writes = main.blocks()
    for copy in copies:
        reads |= copy.blocks()[0]
    for copy in copies_behind:
        writes |= copy.blocks()[1]
    return Launch(
        name,
        main,
        reads,
        writes,
        allocations,
        copies,
        copies_behind,
        [blocks[output] for output in outputs],
        [(argument, blocks[used]) for argument, used in uses],
        [],
        library,
        None if fault is None else FaultHit(FaultPlan(name, decode_fault(fault), 1), Faults()),
        number,
        arrivals,
    )


def no_host(array: Any) -> NoReturn:
    """Refuse a host array, for specifications without host arrays."""
    raise TypeError(f"the operation takes host arrays nowhere, got {reprlib.repr(array)}")


@attrs.frozen
class _HostAddress:
    """The place of a host array in a template."""

    plain: Any


@attrs.define(eq=False, on_setattr=None)
class Binding:
    """A launch template bound to blocks: the common part of all its launches on these blocks.

    Attributes:
        spec: The specification; None if it has host arrays, because each launch has its own.
        reads: The blocks that it reads.
        writes: The blocks that it changes.
        allocations: The ids and sizes of the blocks to make first.
        outputs: The ids of the blocks that it writes.
        uses: The existing arguments, with the ids of their blocks.
        written: The blocks of `outputs`, as found last.
        used: The blocks of `uses`, as found last.
    """

    spec: OperationSpec | None
    reads: frozenset[int]
    writes: frozenset[int]
    allocations: tuple[tuple[int, int], ...]
    outputs: Ints
    uses: tuple[tuple[str, int], ...]
    written: tuple[Block, ...] = ()
    used: tuple[tuple[str, Block], ...] = ()
    _new: tuple[Block, ...] = ()
    # The value of the table's `changes` at that time.
    _changes: int = -1

    def is_found(self, table: WorkerBlocks) -> bool:
        """Return whether the found blocks are still valid, and no block to be made is damaged."""
        is_found = self._changes == table.changes
        for block in self._new:
            is_found = is_found and block.damaged_by is None
        return is_found

    def find(self, table: WorkerBlocks) -> None:
        """Look up the blocks."""
        self.written = tuple([table[block] for block in self.outputs])
        self.used = tuple([(argument, table[block]) for argument, block in self.uses])
        self._new = tuple([table[block] for block, _ in self.allocations])
        self._changes = table.changes


class LaunchTemplate:
    """A launch template in the worker (D23). Its launches differ only in their blocks.

    Args:
        data: The template, as sent by the application's `TemplateTable`.
        number: Its number.
        bindings: The bindings of all templates.

    Raises:
        ImportError: This process lacks the specification's module.
    """

    def __init__(self, data: Any, number: int, bindings: KeptPlans[LaunchTemplate]) -> None:
        self._allocations: tuple[tuple[int, int], ...]
        self._outputs: Ints
        self._uses: tuple[tuple[str, int], ...]
        self._name, self._library, plain, self._allocations, self._outputs, self._uses = data
        address: Any = _HostAddress
        spec = decode_spec(plain, address)
        described = spec.descriptor()
        self._make_spec: Callable[[list[Any]], OperationSpec] = described.make
        self._reads, self._writes = spec.blocks()
        self._fields: list[Any] = list(described.values(spec))
        # Fields with one array; then fields with several, which have positions in place of block ids.
        self._arrays = [
            (index, field.block, (field.offset, field.dtype, field.shape, field.strides))
            for index, field in enumerate(self._fields)
            if type(field) is ArraySpec
        ]
        self._many = [
            (index, self._fields[index])
            for index, field in enumerate(described.fields)
            if field.role.count == "many"
        ]
        self._hosts = [
            (index, field.plain[1:])
            for index, field in enumerate(self._fields)
            if isinstance(field, _HostAddress) and field.plain[0] != "result"
        ]
        # Status words, which are new for each launch.
        self._words = [
            (index, DTYPES[field.plain[1]].dtype, field.plain[2])
            for index, field in enumerate(self._fields)
            if isinstance(field, _HostAddress) and field.plain[0] == "result"
        ]
        self._packed = described.packed
        self._values: Callable[[Any], Iterable[Any]] = described.values
        self._number = number
        self._bindings = bindings

    def bind(self, blocks: Ints) -> Binding:
        """Bind the template to the blocks of a launch, in their order of occurrence."""
        key = self._number, blocks
        plan = self._bindings.plans.get(key)
        if plan is None:
            plan = self._bindings.record(key, self)
            plan.move("bind")
            plan.binding = self._make(blocks)
        else:
            plan.is_used = True
            self._bindings.counts.hits += 1
        binding: Binding = plan.binding
        return binding

    def _make(self, blocks: Ints) -> Binding:
        return Binding(
            None if self._hosts else self._make_spec(self._fields_on(blocks)),
            frozenset([blocks[position] for position in self._reads]),
            frozenset([blocks[position] for position in self._writes]),
            tuple([(blocks[position], nbytes) for position, nbytes in self._allocations]),
            tuple([blocks[position] for position in self._outputs]),
            tuple([(argument, blocks[position]) for argument, position in self._uses]),
        )

    def launch(
        self,
        number: int,
        blocks: Ints,
        binding: Binding,
        shared: Callable[..., HostArray] = no_host,
        packed: tuple[bytes, ...] = (),
        results: list[HostArray] | None = None,
    ) -> Launch:
        """Make a launch of this template.

        Args:
            number: The number of the request.
            blocks: Its blocks, in their order of occurrence.
            binding: The binding to these blocks, which are already found.
            shared: Makes an array over the application's memory; see `decode_launch`.
            packed: Its packed scalars.
            results: Collects the host arrays that are sent with the reply.
        """
        arrivals: list[Arrival] = []
        spec = binding.spec
        if spec is None:
            spec = self._with_hosts(blocks, arrivals, shared)
        if packed or self._words:
            spec = self._with_own(spec, packed, results)
        if spec.asker is not None:
            # Each call has its own `asker`, and the binding's specification is shared.
            spec = self._make_spec(list(self._values(spec)))
        return Launch(
            self._name,
            spec,
            binding.reads,
            binding.writes,
            binding.allocations,
            (),
            (),
            binding.written,
            binding.used,
            (),
            self._library,
            None,
            number,
            arrivals,
        )

    def _with_own(
        self, spec: OperationSpec, packed: tuple[bytes, ...], results: list[HostArray] | None
    ) -> OperationSpec:
        """Return the specification with these scalars and new words, or itself if nothing differs."""
        fields = list(self._values(spec))
        if not self._words and packed == tuple([fields[index] for index in self._packed]):
            return spec
        for index, dtype, shape in self._words:
            fields[index] = np.zeros(shape, dtype)
            if results is not None:
                results.append(fields[index])
        for index, content in zip(self._packed, packed, strict=True):
            fields[index] = content
        return self._make_spec(fields)

    def _fields_on(self, blocks: Ints) -> list[Any]:
        """Return the fields of a specification, without host arrays. The next call changes the list."""
        fields = self._fields
        for index, position, layout in self._arrays:
            block = blocks[position]
            if fields[index].block != block:
                # Most operands are the same as in the previous launch, so their specifications can stay.
                fields[index] = ArraySpec(block, *layout)
        for index, arrays in self._many:
            fields[index] = map_arrays(arrays, lambda array: attrs.evolve(array, block=blocks[array.block]))
        return fields

    def _with_hosts(
        self, blocks: Ints, arrivals: list[Arrival], shared: Callable[..., HostArray]
    ) -> OperationSpec:
        fields = self._fields_on(blocks)
        for index, location in self._hosts:
            fields[index] = shared(arrivals, *location)
        spec = self._make_spec(fields)
        for index, _ in self._hosts:
            # The template must not keep an array over memory that may be taken back (D60).
            fields[index] = None
        return spec

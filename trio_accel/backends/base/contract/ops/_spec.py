"""Operation specifications, and their descriptors, which follow from the roles of the fields.

The descriptor drives hazards, checks, the wire, launch templates and plan caches. Its functions are generated
for each class, because they run at each launch: to look fields up by name would take twice as long.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias, TypeVar, cast, dataclass_transform

import attrs
import numpy as np

from ..dtypes import Ints, Strs
from ..values import ALWAYS_HELD, element, factor
from ._array import (
    Access,
    ArraySpec,
    NumberRole,
    Role,
    exact,
    number,
    packed,
    reads,
    role_of,
    scalar,
    status,
    updates,
    writes,
)
from ._asker import Asker

__all__ = [
    "Descriptor",
    "OperationSpec",
    "SpecField",
    "array_key",
    "arrays_of",
    "field_repr",
    "map_arrays",
    "specification",
    "value_key",
]

SpecT = TypeVar("SpecT")

_Blocks: TypeAlias = "tuple[frozenset[int], frozenset[int]]"

ALIGNMENT = 16
"""Alignment, in bytes, of array starts that have plans of their own: no element is longer."""

# For values of these types, the type and the value make the key.
_PLAIN = frozenset({type(None), bool, int, str, bytes})
_INT = {int}
_EXACT = (int, str, bytes, enum.Enum, np.integer)


@attrs.frozen
class SpecField:
    """One field of a specification class.

    Attributes:
        name: Its name.
        role: Its role.
    """

    name: str
    role: Role

    @property
    def is_array(self) -> bool:
        """Whether it holds arrays."""
        return self.role.kind == "array"


@attrs.frozen(eq=False)
class Descriptor:
    """Facts that follow from the roles of a class's fields.

    Attributes:
        cls: The class.
        fields: All fields of a specification, in the order of its initializer; keyword-only fields are last.
        keywords: The initializer's names of the keyword-only fields.
        values: Gets the values of the fields.
        compared: Gets the values that are equal in equal specifications: all but status words.
        blocks: Gets the blocks that a specification reads, and the blocks that it changes.
        plan_key: Gets the key of a plan: the class, layouts and alignment of its arrays, exact values.
            Scalars and addresses are passed with each launch.
        has_status: Whether there are status words.
        packed: Indexes of the fields with packed scalars.
        status: Indexes of the fields with status words.
        is_in_order: Returns quickly, for nearly all specifications, that their fields are in order.
    """

    cls: type[Any]
    fields: tuple[SpecField, ...]
    keywords: Strs
    values: Callable[[Any], Iterable[Any]]
    compared: Callable[[Any], Iterable[Any]]
    blocks: Callable[[Any], _Blocks]
    plan_key: Callable[[Any], tuple[object, ...]]
    has_status: bool
    packed: Ints
    status: Ints
    is_in_order: Callable[[Any], bool]

    def arrays(self, spec: Any, access: Access | None = None) -> tuple[ArraySpec, ...]:
        """Return the arrays of a specification, in the order of its fields.

        Args:
            spec: The specification.
            access: Return only the arrays that are read, or only those being changed; updated arrays are
                both.
        """
        arrays: list[ArraySpec] = []
        for field in self.fields:
            if field.is_array and (access is None or field.role.access in (access, "update")):
                map_arrays(getattr(spec, field.name), arrays.append)
        return tuple(arrays)

    def check(self, name: str, spec: Any) -> None:
        """Refuse a specification that a library could only fail over.

        Args:
            name: Name of the operation, for the message.
            spec: The specification.

        Raises:
            TypeError: An array field without an `ArraySpec`, or no number where there is to be one.
            ValueError: A number that the arrays cannot hold, or shapes that do not fit each other.
        """
        if not self.is_in_order(spec):
            for field in self.fields:
                _check_field(name, spec, field)
        spec.check_shapes(name)

    def make(self, values: list[Any]) -> Any:
        """Make a specification from the values of its fields."""
        if not self.keywords:
            return self.cls(*values)
        count = len(values) - len(self.keywords)
        return self.cls(*values[:count], **dict(zip(self.keywords, values[count:], strict=True)))


@dataclass_transform(
    field_specifiers=(attrs.field, exact, number, packed, reads, scalar, status, updates, writes)
)
def specification(cls: type[SpecT]) -> type[SpecT]:
    """Make a specification from a subclass of `OperationSpec` with roles for its fields.

    The class becomes an attrs class with slots. It is not frozen, because a specification is made for each
    operation, and enforcing that would double the time. All classes share the methods that write and compare
    them, because compiling these for each class took a quarter of the import of `linalg`.
    """
    return attrs.define(on_setattr=None, eq=False, repr=False)(cls)


def field_repr(instance: Any) -> str:
    """Write a value of an attrs class as attrs does: its class, and its fields by name."""
    cls = cast("type[attrs.AttrsInstance]", type(instance))
    shown = [field.name for field in attrs.fields(cls) if field.repr]
    fields = ", ".join([f"{name}={getattr(instance, name)!r}" for name in shown])
    return f"{cls.__qualname__.rpartition('>.')[2]}({fields})"


class _Described:
    """Makes the descriptor of a class at its first use, which then takes this place."""

    def __get__(self, spec: object, cls: type[Any]) -> Descriptor:
        described: Descriptor = _describe(cls)
        cls.described = described
        return described


_DESCRIBED = _Described()


class OperationSpec:
    """Base of operation specifications, made by `specification`: codes, sizes and `ArraySpec` fields.

    A specification does not change after it is made.

    A specification holds no actor and no reference, so it means the same in another process.
    The role of each field is declared: arrays by `reads`, `writes` and `updates`, values by `exact`, `scalar`
    and `number`, status words by `status`. The `Descriptor` of the class is made from the roles.

    Attributes:
        operation: Names the class in the tables of kernels; by default its module and name.
        runs_once: Whether it cannot run again alone after its context is lost, because others meet it.
        is_from_outside: Whether its results depend on memory that none of its arrays names: of another
            library, or of another device.
        runs_code: Whether it runs code that it names: a program of the user's, or a kernel.
        is_idempotent: Whether it may run again in part or in full, whatever happened to the first run,
            because the arrays that it changes in place have valid contents at any time.
        asker: How its kernel sees its caller; None if the kernel does not look.
    """

    # Set where an operand was withdrawn: then no kernel is to see it. No field of the specification, and not
    # there otherwise, as it would have to be set in each.
    __slots__ = ("is_withdrawn",)
    is_withdrawn: bool

    operation: ClassVar[str]
    described: ClassVar[Descriptor] = cast("Any", _DESCRIBED)
    runs_once: ClassVar[bool] = False
    is_from_outside: ClassVar[bool] = False
    runs_code: ClassVar[bool] = False
    is_idempotent: bool = False
    asker: Asker | None = None

    def __repr__(self) -> str:
        return field_repr(self)

    def __eq__(self, value: object) -> bool:
        if type(value) is not type(self):
            return NotImplemented
        compared = self.described.compared
        return tuple(compared(self)) == tuple(compared(value))

    def __hash__(self) -> int:
        return hash((type(self), *self.described.compared(self)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Each class has its own, and no table keeps the classes of a program.
        cls.described = cast("Any", _DESCRIBED)
        # attrs makes each class with slots twice: the second one has what the first one was given.
        if "operation" not in vars(cls):
            cls.operation = f"{cls.__module__}.{cls.__qualname__}"

    @property
    def waits_for_others(self) -> bool:
        """Whether its kernel waits for kernels of other devices now, so that nothing here counts as stuck."""
        return False

    @classmethod
    def descriptor(cls) -> Descriptor:
        """Return the descriptor of the class; the same object at each call.

        Raises:
            TypeError: The class is not made by attrs.
        """
        return cls.described

    def inputs(self) -> tuple[ArraySpec, ...]:
        """List the arrays that the operation reads (updated ones too)."""
        return self.descriptor().arrays(self, "read")

    def outputs(self) -> tuple[ArraySpec, ...]:
        """List the arrays that the operation changes (updated ones too)."""
        return self.descriptor().arrays(self, "write")

    def blocks(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the blocks that the operation reads, and those being changed (updated blocks are both)."""
        return self.descriptor().blocks(self)

    def check_shapes(self, name: str) -> None:
        """Refuse arrays with shapes or dtypes that do not fit each other, before the launch.

        By default nothing is refused. A class with several arrays that can disagree overrides this.

        Args:
            name: Name of the operation, for the message.

        Raises:
            ValueError: Shapes that do not fit.
            TypeError: Dtypes that do not fit.
        """

    def check_status(self) -> None:
        """Check the status words of a complete operation, and raise if they report a failure.

        By default nothing is raised. Called where the operation ran, once its `status` fields are filled. An
        error is the outcome of the operation: its outputs count as never made.

        Raises:
            AccelError: The library could not finish the operation, with the reason.
        """


def map_arrays(value: object, function: Callable[[ArraySpec], Any]) -> Any:
    """Apply a function to an array, or to each of a tuple; anything else is returned as it is."""
    if type(value) is ArraySpec:
        return function(value)
    arrays = arrays_of(value)
    return tuple([function(array) for array in arrays]) if arrays else value


def arrays_of(value: object) -> tuple[ArraySpec, ...]:
    """Return the arrays of a field that holds a tuple of arrays; an empty tuple for any other field."""
    # Without `cast`, because it would cost a call for each field of each operation.
    arrays: Any = value
    return arrays if type(value) is tuple and arrays and type(arrays[0]) is ArraySpec else ()


def array_key(array: ArraySpec) -> tuple[object, ...]:
    """Return all of an array but its block, to be compared while the dtypes live."""
    # A dtype by its identity, as its hash takes longer than all the rest.
    return array.offset, id(array.dtype), array.shape, array.strides


def value_key(value: object) -> tuple[object, ...] | None:
    """Return a key that a value shares only with equal values; None for a value without a key.

    This rule alone decides which values count as the same: zeros of different signs differ, and NaN equals
    itself.
    """
    kind: type[Any] = type(value)
    items: Any = value
    if kind in _PLAIN or (kind is tuple and _INT.issuperset(map(type, items))):
        return kind, value
    if kind is float or kind is complex or issubclass(kind, np.generic):
        return type(value), repr(value)
    return None


def _describe(cls: type[Any]) -> Descriptor:
    if not attrs.has(cls):
        raise TypeError(f"a specification is an attrs class; {cls.__qualname__} is not")
    init_fields = [field for field in attrs.fields(cls) if field.init]
    ordered = [field for field in init_fields if not field.kw_only] + [
        field for field in init_fields if field.kw_only
    ]
    fields = tuple(SpecField(field.name, role_of(field)) for field in ordered)
    kinds = {field.role.kind for field in fields}
    return Descriptor(
        cls=cls,
        fields=fields,
        keywords=tuple(str(field.alias) for field in ordered if field.kw_only),
        values=_getter([field.name for field in fields]),
        compared=_getter([field.name for field in attrs.fields(cls) if field.eq]),
        blocks=_generated(
            f"({_blocks(fields, 'read')}, {_blocks(fields, 'write')})", block=attrgetter("block")
        ),
        plan_key=_plan_key(cls, fields),
        has_status="status" in kinds,
        packed=tuple(index for index, field in enumerate(fields) if field.role.is_packed),
        status=tuple(index for index, field in enumerate(fields) if field.role.kind == "status"),
        is_in_order=_test(fields),
    )


def _getter(names: list[str]) -> Callable[[Any], Iterable[Any]]:
    if len(names) > 1:
        return attrgetter(*names)
    # `attrgetter` makes no tuple of one name.
    return lambda spec: [getattr(spec, name) for name in names]


def _blocks(fields: Iterable[SpecField], access: Access) -> str:
    chosen = [field for field in fields if field.is_array and field.role.access in (access, "update")]
    # A loop for each field of many arrays would be a call.
    items = [
        f"*map(block, spec.{field.name}), " if field.role.count == "many" else _list_items(field, "{}.block")
        for field in chosen
    ]
    return f"frozenset(({''.join(items)}))"


def _plan_key(cls: type[Any], fields: Iterable[SpecField]) -> Callable[[Any], tuple[object, ...]]:
    items: list[str] = []
    for field in fields:
        if field.is_array:
            layout = f"id({{0}}.dtype), {{0}}.shape, {{0}}.strides, {{0}}.offset % {ALIGNMENT}"
            items.append(_list_items(field, layout))
            if field.role.count != "one":
                items.append("None, ")
        elif field.role.kind == "exact":
            items.append(f"spec.{field.name}, ")
    return _generated(f"(cls, {''.join(items)})", cls=cls)


def _list_items(field: SpecField, items: str) -> str:
    """Write the source of list items for a field's arrays, with a comma after each."""
    value = f"spec.{field.name}"
    if field.role.count == "one":
        return f"{items.format(value)}, "
    if field.role.count == "optional":
        return f"*(() if {value} is None else ({items.format(value)},)), "
    return f"*[item for array in {value} for item in ({items.format('array')},)], "


def _generated(source: str, **names: Any) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda spec: {source}", names)  # noqa: S307  # of names of attributes
    return function


def _test(fields: Iterable[SpecField]) -> Callable[[Any], bool]:
    """See `Descriptor.is_in_order`."""
    tests: list[str] = []
    for field in fields:
        value, role = f"spec.{field.name}", field.role
        if field.is_array and role.count == "one":
            tests.append(f"type({value}) is ArraySpec")
        elif field.is_array:
            tests.append(f"({value} is nothing or is_of({role.count!r}, {value}))")
        elif role.kind == "status":
            tests.append(f"({value} is {role.count} or is_status({value}))")
        elif role.kind == "exact":
            tests.append(f"(type({value}) in exact or {value} is nothing or is_exact({value}))")
        elif role.number is not None:
            # Others are looked at more closely: large ones, complex ones, elements of whole-number arrays.
            tests.append(f"type({value}) in plain and -{ALWAYS_HELD} <= {value} <= {ALWAYS_HELD}")
            tests.append(f"spec.{role.of}.dtype.is_inexact")
    names = {"ArraySpec": ArraySpec, "plain": (int, float), "is_of": _is_of, "is_status": _is_status}
    # There is one empty tuple, which needs no further look.
    constants = {
        "exact": frozenset(_EXACT),
        "is_exact": _is_exact,
        "nothing": (),
        "optional": None,
        "one": (),
    }
    return _generated(" and ".join(tests) or "True", **names, **constants)


def _check_field(name: str, spec: Any, field: SpecField) -> None:
    """Refuse a value that is not an array, a status array or a number as declared."""
    label, value, role = f"{type(spec).__name__}.{field.name}", getattr(spec, field.name), field.role
    if field.is_array and not _is_of(role.count, value):
        expected = {"one": "an ArraySpec", "optional": "an ArraySpec or None", "many": "a tuple of ArraySpec"}
        raise TypeError(
            f"{name}: {label} must be {expected[role.count]}, got {_type_of(value)}; "
            "planner.read() and planner.update() return one, and planner.output() a reference that has "
            "it as .spec"
        )
    if role.kind == "status" and not (_is_status(value) or (role.count == "optional" and value is None)):
        raise TypeError(f"{name}: {label} must be an array of planner.status(), got {_type_of(value)}")
    if role.kind == "exact" and not _is_exact(value):
        raise TypeError(f"{name}: {label} must be an integer, a name, or a tuple of these, got {value!r}")
    if role.number is not None:
        check = factor if role.number is NumberRole.FACTOR else element
        check(name, label, value, getattr(spec, role.of).dtype)


def _is_of(count: str, value: Any) -> bool:
    """Return whether a field of arrays holds an allowed number of them."""
    if count == "many":
        items: Any = value
        if type(value) is not tuple:
            return False
        # No generator is made: it takes longer than the few items.
        for item in items:  # noqa: SIM110
            if type(item) is not ArraySpec and not isinstance(item, ArraySpec):
                return False
        return True
    return isinstance(value, ArraySpec) or (count == "optional" and value is None)


def _is_status(value: Any) -> bool:
    """Return whether a field holds status words, which have a layout of their own."""
    return type(value) is np.ndarray and bool(value.dtype == np.int32 and value.flags.c_contiguous)


def _is_exact(value: Any) -> bool:
    """Whether a plan can depend on a value: it is hashable, and has the same type in a worker."""
    if type(value) is tuple:
        return all(map(_is_exact, cast("tuple[object, ...]", value)))
    return isinstance(value, _EXACT)


def _type_of(value: Any) -> str:
    name = type(value).__name__
    items = cast("tuple[object, ...]", value) if type(value) is tuple else ()
    return f"a tuple with {type(items[0]).__name__}" if items else name

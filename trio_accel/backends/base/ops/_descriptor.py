"""The descriptor of a specification class: what follows from the roles of its fields.

It drives hazards, checks, the wire, launch templates and plan caches. Its functions are generated for each
class, because they run at each launch: to look fields up by name would take twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ._array import ArraySpec
from ._roles import Access, Role, role_of

__all__ = ["Descriptor", "SpecField", "array_key", "arrays_of", "descriptor_of", "map_arrays", "value_key"]

_Blocks: TypeAlias = "tuple[frozenset[int], frozenset[int]]"

ALIGNMENT = 16
"""Bytes to which plans tell the starts of arrays apart: no element is longer."""

# Values of these types are told by the type and the value.
_PLAIN = frozenset({type(None), bool, int, str, bytes})
_INT = {int}


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
    """What follows from the roles of a class's fields.

    Attributes:
        cls: The class.
        fields: All fields that make a specification, in the order of its initializer, those that are only
            keywords last.
        keywords: How the initializer calls the latter.
        values: Gets the values of the fields.
        blocks: Gets the blocks that a specification reads, and those that it changes.
        plan_key: Gets what a plan depends on: the class, layouts and alignment of its arrays, exact values.
            Scalars and addresses are handed over with each launch.
        has_status: Whether there are status words.
    """

    cls: type[Any]
    fields: tuple[SpecField, ...]
    keywords: tuple[str, ...]
    values: Callable[[Any], Iterable[Any]]
    blocks: Callable[[Any], _Blocks]
    plan_key: Callable[[Any], tuple[object, ...]]
    has_status: bool

    def arrays(self, spec: Any, access: Access | None = None) -> tuple[ArraySpec, ...]:
        """The arrays of a specification, in the order of its fields.

        Args:
            spec: The specification.
            access: Only those that are read, or only those that are changed; updated ones are both.
        """
        found: list[ArraySpec] = []
        for field in self.fields:
            if field.is_array and (access is None or field.role.access in (access, "update")):
                map_arrays(getattr(spec, field.name), found.append)
        return tuple(found)

    def make(self, values: list[Any]) -> Any:
        """Make a specification of the values of its fields."""
        if not self.keywords:
            return self.cls(*values)
        count = len(values) - len(self.keywords)
        return self.cls(*values[:count], **dict(zip(self.keywords, values[count:], strict=True)))


def descriptor_of(cls: type[Any]) -> Descriptor:
    """The descriptor of a specification class.

    Raises:
        TypeError: The class is not made by attrs.
    """
    found = _DESCRIPTORS.get(cls)
    if found is None:
        found = _DESCRIPTORS[cls] = _describe(cls)
    return found


_DESCRIPTORS: dict[type[Any], Descriptor] = {}


def map_arrays(value: object, function: Callable[[ArraySpec], Any]) -> Any:
    """Apply a function to an array, or to each of a tuple; anything else is returned as it is."""
    if type(value) is ArraySpec:
        return function(value)
    arrays = arrays_of(value)
    return tuple([function(array) for array in arrays]) if arrays else value


def arrays_of(value: object) -> tuple[ArraySpec, ...]:
    """The arrays that a field holds which is a tuple of them; an empty tuple for any other."""
    kind = type(value)
    arrays = cast("tuple[ArraySpec, ...]", value) if kind is tuple else ()
    return arrays if arrays and type(arrays[0]) is ArraySpec else ()


def array_key(array: ArraySpec) -> tuple[object, ...]:
    """All of an array but its block, to be compared while the dtypes live."""
    # A dtype by its identity, as its hash takes longer than all the rest.
    return array.offset, id(array.dtype), array.shape, array.strides


def value_key(value: object) -> tuple[object, ...] | None:
    """What tells a value that is not an array from others; None if that cannot be told.

    The one rule of what counts as the same: zeros of both signs are not, and NaN is the same as itself.
    """
    kind = type(value)
    if kind is float or kind is complex or issubclass(kind, np.generic):
        return type(value), repr(value)
    if kind in _PLAIN or (kind is tuple and set(map(type, cast("tuple[object, ...]", value))) <= _INT):
        return kind, value
    return None


def _describe(cls: type[Any]) -> Descriptor:
    if not attrs.has(cls):
        raise TypeError(f"a specification is an attrs class; {cls.__qualname__} is not")
    made = [field for field in attrs.fields(cls) if field.init]
    ordered = [field for field in made if not field.kw_only] + [field for field in made if field.kw_only]
    fields = tuple(SpecField(field.name, role_of(field)) for field in ordered)
    kinds = {field.role.kind for field in fields}
    return Descriptor(
        cls=cls,
        fields=fields,
        keywords=tuple(str(field.alias) for field in ordered if field.kw_only),
        values=_getter([field.name for field in fields]),
        blocks=_generated(f"({_blocks(fields, 'read')}, {_blocks(fields, 'write')})"),
        plan_key=_plan_key(cls, fields),
        has_status="status" in kinds,
    )


def _getter(names: list[str]) -> Callable[[Any], Iterable[Any]]:
    if len(names) > 1:
        return attrgetter(*names)
    # Of one name, `attrgetter` makes no tuple.
    return lambda spec: [getattr(spec, name) for name in names]


def _blocks(fields: Iterable[SpecField], access: Access) -> str:
    items = [
        _each(field, "{}.block")
        for field in fields
        if field.is_array and field.role.access in (access, "update")
    ]
    return f"frozenset(({''.join(items)}))"


def _plan_key(cls: type[Any], fields: Iterable[SpecField]) -> Callable[[Any], tuple[object, ...]]:
    items: list[str] = []
    for field in fields:
        if field.is_array:
            layout = f"id({{0}}.dtype), {{0}}.shape, {{0}}.strides, {{0}}.offset % {ALIGNMENT}"
            items.append(_each(field, layout))
            if field.role.count != "one":
                items.append("None, ")
        elif field.role.kind == "exact":
            items.append(f"spec.{field.name}, ")
    return _generated(f"(cls, {''.join(items)})", cls=cls)


def _each(field: SpecField, items: str) -> str:
    """The source of what is listed of each array of a field; with a comma behind it."""
    value = f"spec.{field.name}"
    if field.role.count == "one":
        return f"{items.format(value)}, "
    if field.role.count == "optional":
        return f"*(() if {value} is None else ({items.format(value)},)), "
    return f"*[item for array in {value} for item in ({items.format('array')},)], "


def _generated(source: str, **names: Any) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda spec: {source}", names)  # noqa: S307  # of names of attributes
    return function

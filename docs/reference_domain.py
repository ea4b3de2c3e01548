"""The reference as objects of Sphinx's Python domain: `objects.inv` has them, and types in signatures link.

The signature of each entry is a directive: ``py:function`` and its like. Its types have their whole names, by
which Sphinx finds them; the pages show the last part of each. Everything else is as in the plain pages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

import make_reference
import reference_source as source
from make_reference import Writer, constructor_of, has_self
from reference_source import Class, Definition, Function

_CONTEXTS = {
    "asynccontextmanager": "An async context manager, for `async with`.",
    "contextmanager": "A context manager, for `with`.",
}


def objects() -> Mapping[str, list[str]]:
    """The name that each entry has in the domain, and the other names that programs have for it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(make_reference.PAGES.glob("*.md"))]
    entries = [entry for text in texts for entry in make_reference.entries_of(text)]
    return {f"{module}.{name}": _other_names(module, name) for module, name in entries}


def _other_names(module: str, name: str) -> list[str]:
    """Return the names that programs write: ``ta.linalg.matmul``, and for the package also ``ta.Device``."""
    names = [f"{module}.{name}"]
    is_ours = name in source.public_names("trio_accel")
    if is_ours and source.find("trio_accel", name) == source.find(module, name):
        names.append(f"trio_accel.{name}")
    return [*names[1:], *(f"ta.{one.removeprefix('trio_accel.')}" for one in names)]


class DomainWriter(Writer):
    """Writes the entries of one page, with a directive for each signature."""

    def module(self, name: str) -> Iterator[str]:
        """Name the module of the entries that follow; where the first of all pages are, make it known."""
        mark = f"<!-- reference: {name} -->"
        first = next(page for page in self.links.pages if mark in page.template)
        is_known = first is not self.page or name in self.modules
        self.modules.add(name)
        yield _directive("currentmodule" if is_known else "module", name)

    def _fixture(self, node: Function) -> Iterator[str]:
        yield _directive("data", node.name, "no-typesetting")
        yield from super()._fixture(node)

    def _signature(self, node: Function, definition: Definition) -> Iterator[str]:
        is_method, made_by = isinstance(definition.node, ast.ClassDef), source.decorators(node)

        def text(types: source.Types) -> str:
            arguments = source.arguments_of(node, skip_first=has_self(node, definition), types=types)
            returns = f" -> {types(source.unquoted(node.returns))}" if node.returns else ""
            return f"({', '.join(arguments)}){returns}"

        name = f"{definition.name}.{node.name}" if is_method else node.name
        options: list[str] = [one for one in ("classmethod", "staticmethod") if one in made_by]
        options += ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
        options += _short(name + text(source.as_it_is))
        whole = name + text(self._whole(definition))
        yield _directive("method" if is_method else "function", whole, *options)
        yield from (sentence for kind, sentence in _CONTEXTS.items() if kind in made_by)

    def _constructor(self, cls: Class) -> Iterator[str]:
        name = cls.definition.name
        shown = whole = name
        if (arguments := constructor_of(cls, source.as_it_is)) is not None:
            shown = f"{name}({', '.join(arguments)})"
            whole = f"{name}({', '.join(constructor_of(cls, self._whole(cls.definition)) or [])})"
        is_exception = any(base.endswith(("Error", "Exception")) for base in cls.base_names())
        kind = "exception" if is_exception else "class"
        yield _directive(kind, whole, *_short(shown))
        yield from self._attribute_objects(cls)
        bases = [base for base in self._bases(cls) if base != "Exception"]
        if not arguments and bases:
            yield self._inline("Derives from " + ", ".join(f"`{base}`" for base in bases) + ".")

    def _attribute_objects(self, cls: Class) -> Iterator[str]:
        """Objects for what tables show; reStructuredText lets many have one directive."""
        members = [name for name, _, _ in cls.fields()] if cls.is_enum else []
        names = [*members, *(name for name, _, _ in self._rows(cls))]
        if names:
            listed = "\n    ".join(f"{cls.definition.name}.{name}" for name in names)
            yield f"```{{eval-rst}}\n.. py:attribute::\n    {listed}\n    :no-typesetting:\n```"

    def _assignment(self, definition: Definition) -> Iterator[str]:
        value = source.value_of(definition)
        kind = getattr(definition.node, "annotation", None)
        if value.startswith("Literal[") or (kind is not None and ast.unparse(kind) == "TypeAlias"):
            yield _directive("type", definition.name, f"canonical: {self._whole(definition)(value)}")
        else:
            yield _directive("data", definition.name, "no-typesetting")
            yield from super()._assignment(definition)

    def _whole(self, definition: Definition) -> source.Types:
        """Gives the types in an annotation their whole names."""
        return lambda annotation: self.links.whole(annotation, definition.module)


def _short(signature: str) -> Sequence[str]:
    return ["single-line-parameter-list"] if source.is_short(signature) else []


def _directive(kind: str, argument: str, *options: str) -> str:
    lines = [option if ": " in option else f"{option}:" for option in options]
    return "\n".join([f"```{{py:{kind}}} {argument}", *(f":{line}" for line in lines), "```"])

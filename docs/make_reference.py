"""Fill the reference from the docstrings: `python docs/make_reference.py [FOLDER]`.

The folder is docs/_build/reference by default. The pages in docs/reference are written by hand, but for names
between two comments, which get entries here:

    <!-- reference: package.module -->
    `Name`, `OtherName`.
    <!-- end of reference -->

Above the first of them stands a table of each heading's names: a line for each, which leads to its entry.
Tables are put in place in the same way: those of `operations_table.py`, `determinism_table.py` and
`array_api_table.py`, and the index of all names with their arguments. The result is plain Markdown, and is
not committed. The web pages have directives of Sphinx in place of the signatures: see `reference_domain.py`.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import array_api_table
import determinism_table
import operations_table
import reference_source as source
from internal_names import INTERNAL, names
from reference_source import Class, Definition, Function

from trio_accel.backends.base import ops

PAGES = Path(__file__).parent / "reference"
BLOCK = re.compile(r"<!-- reference: (\S+) -->\n(.*?)\n<!-- end of reference -->", re.DOTALL)
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
TABLES = re.compile(r"<!-- tables of ([\w ]+) -->\n.*?\n<!-- end of tables -->", re.DOTALL)
_TABLES = {
    "operations": operations_table.tables,
    "the array API suite": array_api_table.suite_tables,
    "functions that are not deterministic": determinism_table.tables,
    "the callers of the array API": array_api_table.caller_tables,
}
_COLUMNS = 116
INDEX = re.compile(r"<!-- index of signatures -->\n.*?\n<!-- end of index -->", re.DOTALL)
# Stands for a space in code while lines are filled.
_NO_BREAK = "\0"
# The name of a type in an annotation; the name behind a dot or in quotes is another's.
_TYPE = re.compile(r"(?<![\w.\"'])([A-Z]\w*)(?![\w.\"'])")
_ROLES = {
    "read": "read",
    "write": "written",
    "update": "read and written",
    "exact": "exact: a plan depends on it",
    "scalar": "scalar: handed over with each launch",
    "status": "status words: filled by the operation",
    "other": "handed over as it is",
}
_COUNTS = {"one": "", "optional": ", or None", "many": ", any number of them"}


def _role(one: ops.SpecField) -> str:
    """Key of the role of a field."""
    return one.role.access or one.role.kind


# Classes that a program gets and does not make: their constructors are no part of the reference.
GIVEN = names(
    "Graph GraphsActor Array ArrayApi "
    "AccelRef ActorContext ActorSnapshot ActorSystem ArraysActor BlasActor Call DeferredReply Device "
    "DeviceInfo FaultInjection FftActor FunctionProgram IndexUpdate JitActor Leak LeakError LibraryActor "
    "Pending ItemStream Program ProgramOpening Planner Probe Ref RngActor SparseActor SupervisorScope "
    "Subscription Recorder System Terminated Timer"
)
_PROPERTIES = frozenset({"property", "cached_property", "functools.cached_property"})


@dataclass(eq=False)
class Page:
    """A page and the entries that it has.

    Attributes:
        path: The file.
        template: Its text, with names in place of entries.
        text: Its text with the entries; the template at first.
        anchors: The address of each entry within the page, by the text of its heading. Fixtures have none, as
            their names are common words.
    """

    path: Path
    template: str
    text: str
    anchors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where an entry is: its page, and the name as users import it."""

    page: Page
    module: str
    name: str


class Links:
    """Where each name has its entry."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = pages
        self._places: dict[tuple[str, str], Place] = {}
        for page in pages:
            for module, name in entries_of(page.template):
                if (found := source.find(module, name)) is not None:
                    self._places.setdefault((found.module, found.name), Place(page, module, name))

    def meant(self, module: str, name: str) -> Place | None:
        """The entry of what a module means by the name of a type; None if there is none."""
        if (found := source.find(module, name)) is not None:
            return self._places.get((found.module, found.name))
        known = [place for place in self._places.values() if place.name == name]
        return known[0] if len(known) == 1 else None

    def to_type(self, module: str, name: str, page: Page) -> str | None:
        """The address of the entry of a type, seen from a page; None if there is none."""
        place = self.meant(module, name)
        anchor = place and place.page.anchors.get(name)
        if place is None or anchor is None:
            return None
        return f"#{anchor}" if place.page is page else f"{place.page.path.name}#{anchor}"

    def whole(self, annotation: str, module: str) -> str:
        """An annotation with the whole names of the types that have entries."""

        def name(match: re.Match[str]) -> str:
            place = self.meant(module, match[1])
            return match[1] if place is None else f"{place.module}.{place.name}"

        return _TYPE.sub(name, annotation)

    def to(self, name: str, page: Page, owner: str) -> str | None:
        """The address of a name's entry, seen from a page; None if there is none."""
        short = name.removesuffix("()").removeprefix("ta.")
        short = re.sub(r"^trio_accel(\.[a-z_.]+)?\.(?=\w)", "", short)
        if short == owner:
            return None
        for candidate in (f"{owner.partition('.')[0]}.{short}", short):
            for other in (page, *self.pages):
                anchor = other.anchors.get(candidate)
                if anchor is not None and f"{owner.partition('.')[0]}" != candidate:
                    return f"#{anchor}" if other is page else f"{other.path.name}#{anchor}"
        return None


def slug(heading: str) -> str:
    """The anchor that repository pages and MyST make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors_of(text: str) -> dict[str, str]:
    """The anchors of a page by their headings; of two of one name the second gets a number."""
    seen: dict[str, int] = {}
    result: dict[str, str] = {}
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} (.+)$", prose, re.MULTILINE):
        plain = heading.replace("`", "")
        anchor = slug(plain)
        number = seen[anchor] = seen.get(anchor, -1) + 1
        result[plain] = f"{anchor}-{number}" if number else anchor
    return result


class Writer:
    """Writes the entries of one page."""

    def __init__(self, page: Page, links: Links, documented: frozenset[str]) -> None:
        self.page = page
        self.links = links
        self.documented = documented
        self.owner = ""
        self.modules: set[str] = set()  # those whose entries have begun

    def entry(self, module: str, name: str) -> Iterator[str]:
        """The entry of a name, paragraph by paragraph."""
        definition = source.find(module, name)
        if definition is None:
            raise SystemExit(f"{self.page.path.name}: {module} has no {name}")
        self.owner = name
        yield f"### {name}"
        if isinstance(definition.node, ast.ClassDef):
            yield from self._class(Class(definition))
        elif isinstance(definition.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from self._function(definition.node, definition)
        else:
            yield from self._value(definition)

    def group(self, title: str, entries: Sequence[tuple[str, str]]) -> str:
        """The table of a heading's names: a line for each, with the first sentence of its docstring."""
        rows = [f"| [{title}](#{slug(title)}) | |", "|---|---|"]
        anchors = anchors_of(self.page.text)
        for module, self.owner in entries:
            definition = source.find(module, self.owner)
            if definition is not None:
                link = f"[`{self.owner}`](#{anchors.get(self.owner, '')})"
                rows.append(f"| {link} | {self._cell(source.first_sentence(definition))} |")
        return "\n".join(rows)

    def module(self, name: str) -> Iterator[str]:
        """Write the part of a page ahead of the entries of a module."""
        yield from ()

    # What entries are made of

    def _inline(self, text: str) -> str:
        text = re.sub(r"``(.+?)``", "\x00\\1\x00", text)  # code that is no reference
        text = re.sub(r"`([^`\x00]+)`", self._reference, text)
        return text.replace("\x00", "`")

    def _reference(self, match: re.Match[str]) -> str:
        address = self.links.to(match[1], self.page, self.owner)
        return f"`{match[1]}`" if address is None else f"[`{match[1]}`]({address})"

    def _prose(self, text: str) -> Iterator[str]:
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            if paragraph.startswith(">>> "):
                yield f"```pycon\n{paragraph}\n```"
            elif re.match(r"[*-] ", paragraph):
                items = re.split(r"\n(?=[*-] )", paragraph)
                yield "\n".join(_item(self._inline(" ".join(item[2:].split()))) for item in items)
            elif paragraph:
                yield wrapped(self._inline(" ".join(paragraph.split())))

    def _sections(self, docstring: source.Docstring) -> Iterator[str]:
        for title, name in (("Arguments", "Args"), ("Returns", "Returns"), ("Yields", "Yields")):
            entries = docstring.sections.get(name, [])
            if name != "Args" and entries:
                yield wrapped(f"**{title}**: {self._inline(entries[0][1])}")
            elif entries:
                yield f"**{title}**"
                yield "\n".join(_item(f"`{key}`: {self._inline(text)}") for key, text in entries)
        if raised := docstring.sections.get("Raises"):
            yield "**Raises**"
            yield "\n".join(_item(f"{self._errors(key)}: {self._inline(text)}") for key, text in raised)

    def _errors(self, names: str) -> str:
        return ", ".join(self._inline(f"`{name.strip()}`") for name in names.split(","))

    def _function(self, node: Function, definition: Definition) -> Iterator[str]:
        """The entry of a function, or of a method of the class that the definition is of."""
        made_by = source.decorators(node)
        if "pytest.fixture" in made_by or "pytest_trio.trio_fixture" in made_by:
            yield from self._fixture(node)
        else:
            yield from self._signature(node, definition)
        docstring = source.parse(ast.get_docstring(node) or "")
        yield from self._prose(docstring.text)
        yield from self._sections(docstring)

    def _fixture(self, node: Function) -> Iterator[str]:
        yield "A fixture."

    def _signature(self, node: Function, definition: Definition) -> Iterator[str]:
        made_by = source.decorators(node)
        head = "".join(
            f"@{decorator}\n" for decorator in made_by if decorator in {"classmethod", "staticmethod"}
        )
        head += "".join(f"@{name}\n" for name in ("asynccontextmanager", "contextmanager") if name in made_by)
        head += "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
        returns = f" -> {source.unquoted(node.returns)}" if node.returns else ""
        arguments = source.arguments_of(node, skip_first=has_self(node, definition))
        yield f"```python\n{source.laid_out(head + node.name, arguments, returns)}\n```"

    def _value(self, definition: Definition) -> Iterator[str]:
        yield from self._assignment(definition)
        yield from self._prose(definition.text)

    def _assignment(self, definition: Definition) -> Iterator[str]:
        if value := source.value_of(definition):
            if len(value) > _COLUMNS - len(definition.name):
                value = "(\n    " + value.replace(" | ", "\n    | ") + "\n)"
            yield f"```python\n{definition.name} = {value}\n```"

    # Classes

    def _class(self, cls: Class) -> Iterator[str]:
        yield from self._constructor(cls)
        docstring = source.parse(cls.definition.text)
        yield from self._prose(docstring.text)
        yield from self._kinds(cls)
        yield from self._roles(cls)
        yield from self._sections(docstring)
        yield from self._members(cls) if cls.is_enum else self._attributes(cls)
        for node in self._methods(cls):
            if not _PROPERTIES.intersection(source.decorators(node)):
                yield f"#### {cls.definition.name}.{node.name}"
                yield from self._function(node, cls.definition)

    def _roles(self, cls: Class) -> Iterator[str]:
        """What an operation does with the fields of its specification, as its descriptor says."""
        found = getattr(ops, cls.definition.name, None)
        if (
            isinstance(found, type)
            and issubclass(found, ops.OperationSpec)
            and found is not ops.OperationSpec
        ):
            rows = [
                f"| `{one.name}` | {_ROLES[_role(one)]}{_COUNTS[one.role.count]} |"
                for one in found.descriptor().fields
            ]
            yield "\n".join(["| field | role |", "|---|---|", *rows])

    def _kinds(self, cls: Class) -> Iterator[str]:
        """The classes of this page that it derives from, where its signature has arguments in their place."""
        bases = [base.definition.name for base in cls.bases() if base.definition.name in self.page.anchors]
        if cls.is_attrs and bases and "Exception" not in cls.base_names():
            yield self._inline("A kind of " + ", ".join(f"`{base}`" for base in bases) + ".")

    def _constructor(self, cls: Class) -> Iterator[str]:
        name = cls.definition.name
        arguments = constructor_of(cls, source.as_it_is)
        if arguments or (cls.is_attrs and arguments is not None):
            text = source.laid_out(f"class {name}", arguments, "")
        elif bases := self._bases(cls):
            text = f"class {name}({', '.join(bases)})"
        else:
            text = f"class {name}" if arguments is None else f"class {name}()"
        yield f"```python\n{text}\n```"

    def _bases(self, cls: Class) -> list[str]:
        """The bases that have entries, and those that say what kind of class it is."""
        if cls.is_enum:
            return ["enum.Enum"]
        bases = [base.definition.name for base in cls.bases()]
        others = {"Exception", "Protocol"} & {ast.unparse(base) for base in cls.node.bases}
        return [
            *(base for base in bases if base in self.documented and base != cls.definition.name),
            *sorted(others),
        ]

    def _methods(self, cls: Class) -> list[Function]:
        found = {node.name: node for node in cls.methods()}
        for base in cls.bases():
            inherited = self._methods(base)
            if base.definition.name in self.documented and base.definition.name != cls.definition.name:
                for node in inherited:  # what a documented base has, and does the same here
                    found.pop(node.name, None)
            else:
                found = {**{node.name: node for node in inherited}, **found}
        hidden = INTERNAL.get(cls.definition.name, frozenset())
        return [node for name, node in found.items() if name not in hidden]

    def _members(self, cls: Class) -> Iterator[str]:
        members = [(name, text) for name, _, text in cls.fields()]
        if any(text for _, text in members):
            rows = [f"| `{name}` | {self._cell(text)} |" for name, text in members]
            yield "\n".join(["| member | meaning |", "|---|---|", *rows])
        elif members:
            yield wrapped("Members: " + ", ".join(f"`{name}`" for name, _ in members) + ".")
        yield from self._attributes(cls)

    def _attributes(self, cls: Class) -> Iterator[str]:
        rows = [
            f"| `{name}` | {self._type(kind, cls.definition.module)} | {self._cell(text)} |"
            for name, kind, text in self._rows(cls)
        ]
        if rows:
            yield "\n".join(["| attribute | type | meaning |", "|---|---|---|", *rows])

    def _rows(self, cls: Class) -> list[tuple[str, str, str]]:
        hidden = INTERNAL.get(cls.definition.name, frozenset())
        rows: dict[str, tuple[str, str]] = {}
        for base in cls.bases():
            if base.definition.name not in self.documented or base.definition.name == cls.definition.name:
                rows |= {name: (kind, text) for name, kind, text in self._rows(base)}
        for name, text in source.parse(cls.definition.text).sections.get("Attributes", []):
            rows[name] = (cls.annotation(name), text)
        if not cls.is_enum:
            rows |= {
                name: (cls.annotation(name), text)
                for name, _, text in cls.fields()
                if text and name not in rows
            }
        for node in self._methods(cls):
            if _PROPERTIES.intersection(source.decorators(node)):
                rows[node.name] = (source.unquoted(node.returns) if node.returns else "", _in_short(node))
        return [(name, *row) for name, row in rows.items() if name not in hidden]

    def _type(self, text: str, module: str) -> str:
        """A type as a cell of a table, with links to the entries of the types in it."""
        cell = rest = ""
        for index, part in enumerate(_TYPE.split(text)):
            address = self.links.to_type(module, part, self.page) if index % 2 else None
            if address is None:
                rest += part
            else:
                cell += f"{_code(rest)}[`{part}`]({address})"
                rest = ""
        return cell + _code(rest)

    def _cell(self, text: str) -> str:
        return self._inline(" ".join(text.split())).replace("|", "\\|")


def has_self(node: Function, definition: Definition) -> bool:
    """Whether a function is a method whose first argument is bound."""
    return isinstance(definition.node, ast.ClassDef) and "staticmethod" not in source.decorators(node)


def constructor_of(cls: Class, types: source.Types) -> list[str] | None:
    """The arguments of a constructor; None where a program does not call it."""
    if cls.is_enum or cls.definition.name in GIVEN or cls.base_names() & {"Protocol", "Exception"}:
        return None
    if cls.is_attrs:
        # The field of a class stands in place of one of its base by the same name.
        fields = list(
            {text.partition(":")[0]: (text, named) for text, named in _init_fields(cls, types)}.values()
        )
        named = [text for text, is_named in fields if is_named]
        return [*(text for text, is_named in fields if not is_named), *(["*"] if named else []), *named]
    init = cls.init()
    return [] if init is None else source.arguments_of(init, skip_first=True, types=types)


def _init_fields(cls: Class, types: source.Types) -> Iterator[tuple[str, bool]]:
    """The arguments of a constructor that attrs makes, each with whether it has to be named."""
    for base in cls.bases():
        if base.is_attrs:
            yield from _init_fields(base, types)
    for name, node, _ in cls.fields():
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in (kind := source.unquoted(node.annotation)):
            default = source.default_of(node)
            if "init=False" not in ast.unparse(node):
                is_named = cls.is_keyword_only or "kw_only=True" in ast.unparse(node)
                yield f"{name}: {types(kind)}" + ("" if default is None else f" = {default}"), is_named


def _in_short(node: Function) -> str:
    """A docstring as one paragraph, for a cell of a table."""
    docstring = source.parse(ast.get_docstring(node) or "")
    raised = [f"Raises `{name}`: {text}" for name, text in docstring.sections.get("Raises", [])]
    return " ".join([" ".join(docstring.text.split()), *raised])


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def _item(text: str) -> str:
    return wrapped(text, first="* ", others="  ")


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """A paragraph in lines that fit; code is not broken, as a line of it may begin like an item of a list."""
    whole = re.sub(r"`[^`]+`", lambda found: found[0].replace(" ", _NO_BREAK), text)
    filled = textwrap.fill(
        whole,
        _COLUMNS,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_NO_BREAK, " ")


def entries_of(text: str) -> list[tuple[str, str]]:
    """Module and name of each entry that a page asks for."""
    return [(block[1], name) for block in BLOCK.finditer(text) for name in re.findall(r"`(\w+)`", block[2])]


@functools.cache
def generated(kind: type[Writer] = Writer) -> Mapping[Path, str]:
    """Every page with its entries, by the path of its template."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    pages = [Page(path, text, text) for path, text in texts.items()]
    documented = frozenset(name for page in pages for _, name in entries_of(page.template))
    for _ in range(2):  # the second time with links
        links = Links(pages)
        filled = [_filled(page, kind(page, links, documented)) for page in pages]
        for page, text in zip(pages, filled, strict=True):
            page.text = text
            names = {name for module, name in entries_of(page.template) if not module.endswith(".fixtures")}
            page.anchors = {
                heading: anchor
                for heading, anchor in anchors_of(text).items()
                if heading.partition(".")[0] in names
            }
    for page in pages:
        page.text = INDEX.sub(lambda _: index_of(pages), page.text)
    return {page.path: page.text for page in pages}


def index_of(pages: Sequence[Page]) -> str:
    """The tables of all names, one for each page: a name leads to its entry, beside its arguments."""
    tables: list[str] = []
    for page in pages:
        title = page.template.partition("\n")[0].removeprefix("# ")
        rows: list[str] = []
        for module, name in sorted(
            dict.fromkeys(entries_of(page.template)), key=lambda entry: entry[1].lower()
        ):
            definition = source.find(module, name)
            if definition is not None and (anchor := page.anchors.get(name)):
                cells = [f"[`{name}`]({page.path.name}#{anchor})", _code(arguments_in_short(definition))]
                rows.append(f"| {' | '.join(cells)} | `{module}` |")
        if rows:
            table = "\n".join(["| name | arguments | module |", "|---|---|---|", *rows])
            tables.append(f"## {title}\n\n{table}")
    return "\n\n".join(tables)


def arguments_in_short(definition: Definition) -> str:
    """The arguments of a function or of a constructor, with defaults and without types; empty for a value."""
    node = definition.node
    if isinstance(node, ast.ClassDef):
        arguments = constructor_of(Class(definition), source.as_it_is)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = source.arguments_of(node, skip_first=False)
    else:
        return ""
    return "" if arguments is None else f"({', '.join(map(_without_type, arguments))})"


def _without_type(argument: str) -> str:
    name, has_type, rest = argument.partition(": ")
    if not has_type:
        return argument
    _, has_default, default = rest.rpartition(" = ")
    return f"{name}={default}" if has_default else name


def _filled(page: Page, writer: Writer) -> str:
    def fill(match: re.Match[str]) -> str:
        entries = (text for entry in entries_of(match[0]) for text in writer.entry(*entry))
        return "\n\n".join([*writer.module(match[1]), *entries])

    groups = [
        writer.group(section[1], entries)
        for section in SECTION.finditer(page.template)
        if (entries := entries_of(section[2]))
    ]
    filled = BLOCK.sub(fill, page.template)
    if groups:
        filled = filled.replace("\n## ", "\n" + "\n\n".join(groups) + "\n\n## ", 1)
    return TABLES.sub(lambda found: "\n\n".join(_TABLES[found[1]]()), filled)


def main(folder: Path) -> None:
    """Write the pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in generated().items():
        (folder / path.name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{folder / 'index.md'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PAGES.parent / "_build" / "reference")

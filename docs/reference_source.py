"""What the reference is made from: definitions and docstrings, read from the source without importing it.

Nothing depends on the version of Python, on installed packages or on the machine.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Replacements in the text of an annotation.
Types = Callable[[str], str]

_SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
# What declares a field of an operation specification.
_ROLES = {"exact", "number", "reads", "scalar", "status", "updates", "writes"}
# Decorators whose first argument is a function with the same signature.
_LIKE = {"arguments_of", "asks", "like", "operation_like", "slope_of"}
_WIDTH = 88


@dataclass
class Docstring:
    """A docstring in Google style, taken apart.

    Attributes:
        text: The prose ahead of, between and behind the sections.
        sections: The entries of each section: pairs of name and text. The name is empty where there is none.
    """

    text: str = ""
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


@dataclass
class Definition:
    """A public name and what it stands for.

    Attributes:
        name: The name.
        module: Module that has the definition.
        node: The definition.
        text: The docstring, or the string that follows an assignment.
    """

    name: str
    module: str
    node: ast.stmt
    text: str


@functools.cache
def tree_of(module: str) -> ast.Module | None:
    """The syntax tree of a module of this project; None if it is another's."""
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return ast.parse(candidate.read_text(encoding="utf-8"), type_comments=True)
    return None


def public_names(module: str) -> list[str]:
    """The names in a module's ``__all__``, or those that a package imports by ``*``, or as themselves."""
    tree = tree_of(module)
    assert tree is not None, module
    names: list[str] = []
    for node in _statements(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names += public_names(_source(module, node)) if alias.name == "*" else []
                names += [alias.name] if alias.asname == alias.name else []
    return names


@functools.cache
def find(module: str, name: str) -> Definition | None:
    """Find the definition of a name in a module, there or where the module has it from."""
    tree = tree_of(module)
    if tree is None:
        return None
    for index, node in enumerate(tree.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            if "overload" not in decorators(node):
                return Definition(name, module, _written_out(module, node), ast.get_docstring(node) or "")
        elif _assigned(node) == name:
            return _message_of(module, node) or Definition(
                name, module, node, _string_behind(tree.body, index)
            )
    return next(filter(None, (_imported(module, node, name) for node in _statements(tree))), None)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, those below ``if TYPE_CHECKING`` included."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def _imported(module: str, node: ast.stmt, name: str) -> Definition | None:
    """Find what a statement of a module imports under a name."""
    source = _source(module, node) if isinstance(node, ast.ImportFrom) else module
    if not isinstance(node, ast.ImportFrom) or source == module:  # its own name is a module below it
        return None
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            return find(source, alias.name)
    is_there = node.names[0].name == "*" and name in public_names(source)
    return find(source, name) if is_there else None


def _message_of(module: str, node: ast.stmt) -> Definition | None:
    """The class of a declared operation's message, as in ``Lu = lu.message`` and ``Qr = message_of(qr)``."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Attribute) and value.attr == "message":
        asked = ast.unparse(value.value)
    elif isinstance(value, ast.Call) and ast.unparse(value.func) == "message_of":
        asked = ast.unparse(value.args[0])
    else:
        return None
    function = find(module, asked)
    assert function is not None
    assert isinstance(function.node, ast.AsyncFunctionDef)
    arguments = function.node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    fields = [
        f"    {one.arg}: {ast.unparse(one.annotation or ast.Constant(None))}"
        + ("" if default is None else f" = {ast.unparse(default)}")
        for one, default in zip([*plain, *arguments.kwonlyargs], defaults, strict=True)
    ]
    name, text = _assigned(node), f"Asks for `{asked.lstrip('_')}`, which says what the fields mean."
    lines = ["@attrs.define", f"class {name}(Operation):", f'    """{text}"""', *fields]
    (made,) = ast.parse("\n".join(lines)).body
    return Definition(name, module, made, text)


def _written_out(module: str, node: ast.ClassDef | Function) -> ast.ClassDef | Function:
    """A function with the signature that its decorator names, as in ``@operation_like(other)``."""
    if isinstance(node, ast.ClassDef) or not (other := _like(node)):
        return node
    found = find(module, other)
    assert found is not None
    assert isinstance(found.node, ast.AsyncFunctionDef)
    made = _with_signature(node, found.node)
    if "slope_of" in decorators(node):
        made.args = copy.copy(made.args)
        made.args.args = [ast.arg("grad", ast.Name("ExpressionArgument")), *made.args.args]
    return made


def _like(node: Function) -> str:
    """The name of the function whose signature a decorator takes; empty if none does."""
    taken = [
        one for one in node.decorator_list if isinstance(one, ast.Call) and ast.unparse(one.func) in _LIKE
    ]
    return ast.unparse(taken[0].args[0]) if taken else ""


def _with_signature(node: Function, other: Function) -> Function:
    return ast.AsyncFunctionDef(node.name, other.args, node.body, [], other.returns)


def _assigned(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""


def _string_behind(body: list[ast.stmt], index: int) -> str:
    if index + 1 < len(body):
        node = body[index + 1]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return inspect.cleandoc(str(node.value.value))
    return ""


def _source(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = ROOT.joinpath(*module.split("."), "__init__.py").is_file()
    parts = module.split(".")[: None if is_package else -1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def decorators(node: ast.ClassDef | Function) -> list[str]:
    """The decorators of a definition, without their arguments."""
    return [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]


def first_sentence(definition: Definition) -> str:
    """The first sentence of a docstring; the value where there is none."""
    text = " ".join(parse(definition.text).text.partition("\n\n")[0].split())
    value = value_of(definition)
    return re.split(r"(?<=[.?!]) (?=[^a-z])", text)[0] if text or not value else f"``{value}``"


def value_of(definition: Definition) -> str:
    """Return the text of the value that a name gets; empty if it gets none."""
    node = definition.node
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        return unquoted(node.value)
    return ""


def parse(text: str) -> Docstring:
    """Take a docstring apart."""
    result = Docstring()
    prose: list[str] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        name = line.removesuffix(":")
        if not (line.endswith(":") and name in _SECTIONS):
            prose.append(line)
            continue
        block: list[str] = []
        while lines and (not lines[0].strip() or lines[0].startswith(" ")):
            block.append(lines.pop(0))
        result.sections[name] = list(_entries(textwrap.dedent("\n".join(block)), name))
    result.text = "\n".join(prose).strip()
    return result


def _entries(block: str, section: str) -> Iterator[tuple[str, str]]:
    """Each entry begins at the left margin; only the first colon behind the name separates."""
    if section in {"Returns", "Yields"}:
        yield "", " ".join(block.split())
        return
    for entry in re.split(r"\n(?=\S)", block.strip()):
        name, colon, text = " ".join(entry.split()).partition(": ")
        yield (name, text) if colon else ("", name)


@dataclass
class Class:
    """A class with what it has from bases that have no entry of their own."""

    definition: Definition

    @property
    def node(self) -> ast.ClassDef:
        """Its syntax tree."""
        assert isinstance(self.definition.node, ast.ClassDef)
        return self.definition.node

    def bases(self) -> list[Class]:
        """Those of its bases that are classes of this project."""
        found = []
        for base in self.node.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            definition = self._find(node)
            if definition is not None and isinstance(definition.node, ast.ClassDef):
                found.append(Class(definition))
        return found

    def _find(self, node: ast.expr) -> Definition | None:
        if isinstance(node, ast.Name):
            return find(self.definition.module, node.id)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "actors":
            return find("trio_accel.actors", node.attr)
        return None

    def base_names(self) -> set[str]:
        """Names of all bases, those of other projects included."""
        names = {ast.unparse(base) for base in self.node.bases}
        return names.union(*(base.base_names() for base in self.bases()))

    @property
    def is_enum(self) -> bool:
        """Whether it is an enumeration."""
        return bool(self.base_names() & {"enum.Enum", "Enum", "enum.IntEnum"})

    @property
    def is_attrs(self) -> bool:
        """Whether attrs, or `NamedTuple`, makes its constructor."""
        made = any(name.startswith("attrs.") or name == "specification" for name in decorators(self.node))
        # A class that adds nothing has what was made for its base.
        adds = any(not isinstance(node, ast.Expr) for node in self.node.body)
        inherited = not adds and any(base.is_attrs for base in self.bases())
        return made or inherited or "NamedTuple" in self.base_names()

    @property
    def is_keyword_only(self) -> bool:
        """Whether its constructor takes keyword arguments alone."""
        return any("kw_only=True" in ast.unparse(decorator) for decorator in self.node.decorator_list)

    def methods(self) -> list[Function]:
        """Methods and properties with a docstring and a public name."""
        every = [one for one in self.node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        named = {one.name: one for one in every}
        return [
            _with_signature(node, named[_like(node)]) if _like(node) else node
            for node in every
            if not node.name.startswith("_")
            and ast.get_docstring(node)
            and not any(name == "overload" or name.endswith(".setter") for name in decorators(node))
        ]

    def fields(self) -> Iterator[tuple[str, ast.AnnAssign | ast.Assign, str]]:
        """Public names that are assigned in the body, each with the string that follows."""
        for index, node in enumerate(self.node.body):
            if isinstance(node, (ast.AnnAssign, ast.Assign)) and not _assigned(node).startswith("_"):
                yield _assigned(node), node, _string_behind(self.node.body, index)

    def init(self) -> Function | None:
        """Its own constructor, or that of the base that has one."""
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return node
        return next((init for base in self.bases() if (init := base.init())), None)

    def annotation(self, name: str) -> str:
        """The type of an attribute, as the source says it; empty if it does not."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in {name, f"self.{name}"}:
                return unquoted(node.annotation)
        init = self.init()
        for argument in [] if init is None else [*init.args.args, *init.args.kwonlyargs]:
            if argument.arg == name and argument.annotation is not None:
                return unquoted(argument.annotation)
        return ""


def unquoted(node: ast.expr) -> str:
    """An annotation as text, without quotes around the names of types that come later."""
    text = ast.unparse(node)
    return as_written(text) if "Literal[" in text else re.sub(r"'([\w.\[\], |]+)'", r"\1", text)


def as_written(text: str) -> str:
    """Source text with the quotes that the formatter takes."""
    return re.sub(r"'([^'\"\\]*)'", r'"\1"', text)


def default_of(node: ast.AnnAssign | ast.Assign) -> str | None:
    """The default of a field, as the source says it; None if there is none."""
    value = node.value
    if value is None:
        return None
    if isinstance(value, ast.Call) and ast.unparse(value.func) in {"attrs.field", "attr.field"}:
        options = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in options:
            return as_written(ast.unparse(options["default"]))
        factory = options.get("factory")
        if isinstance(factory, ast.Lambda):
            return as_written(ast.unparse(factory.body))
        return None if factory is None else f"{ast.unparse(factory)}()"
    if isinstance(value, ast.Call) and ast.unparse(value.func) in _ROLES:
        return None
    return as_written(ast.unparse(value))


def as_it_is(annotation: str) -> str:
    """The same text."""
    return annotation


def arguments_of(node: Function, *, skip_first: bool, types: Types = as_it_is) -> list[str]:
    """The arguments of a function as in its definition."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    result: list[str] = []
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True), 1):
        if not (skip_first and index == 1):
            result.append(_argument(argument, default, types))
        if index == len(args.posonlyargs) and result:
            result.append("/")
    if args.vararg:
        result.append(f"*{_argument(args.vararg, None, types)}")
    elif args.kwonlyargs:
        result.append("*")
    result += [_argument(a, d, types) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    kind = args.kwarg and args.kwarg.annotation
    # Of type Never it is there for its error.
    if args.kwarg and not (kind and unquoted(kind) == "Never"):
        result.append(f"**{_argument(args.kwarg, None, types)}")
    return result


def _argument(argument: ast.arg, default: ast.expr | None, types: Types) -> str:
    if argument.annotation is None:
        return argument.arg if default is None else f"{argument.arg}={as_written(ast.unparse(default))}"
    text = f"{argument.arg}: {types(unquoted(argument.annotation))}"
    return text if default is None else f"{text} = {as_written(ast.unparse(default))}"


def is_short(signature: str) -> bool:
    """Whether a signature is shown on one line."""
    return len(signature) <= _WIDTH


def laid_out(head: str, arguments: list[str], tail: str) -> str:
    """A signature on one line, or with a line for each argument where that is too long."""
    line = f"{head}({', '.join(arguments)}){tail}"
    if is_short(line) or not arguments:
        return line
    return f"{head}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){tail}"

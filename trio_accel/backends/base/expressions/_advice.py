"""Messages about constructs that expressions refuse, and alternatives to them."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ..contract.foreign_names import instead_of
from ._expression import FUNCTIONS

# Python's grammar has names for these, and the text has not.
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("List", "ListComp"), "a list"),
    **dict.fromkeys(("Set", "SetComp"), "a set"),
    **dict.fromkeys(("Dict", "DictComp"), "a dict"),
    **dict.fromkeys(("Assign", "AugAssign"), "this assignment"),
    "AnnAssign": "an annotation (y: int)", "AsyncFor": "'async for'", "AsyncFunctionDef": "'async def'",
    "AsyncWith": "'async with'", "Attribute": "an attribute (.name)", "ClassDef": "'class'",
    "Delete": "'del'", "FunctionDef": "'def'", "GeneratorExp": "a generator", "ImportFrom": "'import'",
    "IsNot": "'is not'", "JoinedStr": "an f-string", "MatMult": "'@'", "NamedExpr": "an assignment (:=)",
    "NotIn": "'not in'", "Slice": "a slice (a:b)", "Starred": "a starred value (*x)",
    "TemplateStr": "a t-string", "TryStar": "'try'", "Tuple": "a tuple", "YieldFrom": "'yield from'",
}  # fmt: skip
_SEVERAL = "vector(x, y) has several numbers, and several results are several lines: y = ...; z = ..."
_WAYS: Mapping[str, str] = {
    **dict.fromkeys(("List", "Set", "Tuple"), _SEVERAL),
    **dict.fromkeys(("ListComp", "SetComp", "GeneratorExp"), "write a loop, or sum(x[k] for k in range(n))"),
    **dict.fromkeys(("Dict", "DictComp", "Starred"), "name each number"),
    **dict.fromkeys(("Is", "IsNot"), "compare by == or !=, or by isnan(x)"),
    **dict.fromkeys(("In", "NotIn"), "compare with each: x == 1 or x == 2"),
    **dict.fromkeys(("Await", "Yield", "YieldFrom"), "await it before, and pass its result as an argument"),
    "Attribute": "write a function, as real(x), or pass what it is as an argument",
    "JoinedStr": "numbers are",
    "Lambda": "write what it computes",
    "TemplateStr": "numbers are",
    "MatMult": "await (x @ y) multiplies matrices, and dot(a, b) vectors",
    "NamedExpr": "assign on a line of its own: name = expression",
}
_OTHER_LANGUAGES: Mapping[str, str] = {
    "&&": "write x and y",
    "||": "write x or y",
    "!": "write not x",
    "?": "write a if condition else b",
    ":=": "write name = expression",
    "++": "write x += 1",
    "--": "write x -= 1",
    "<>": "write x != y",
    "{": "write a colon, and the statements below it with an indent",
}


def label_of(node: ast.AST) -> str:
    """Name a node in the user's words."""
    name = type(node).__name__
    return _WORDS.get(name, f"'{name.lower()}'")


def not_allowed(node: ast.AST) -> str:
    """Return the message that refuses a node, with an alternative."""
    way = _WAYS.get(type(node).__name__)
    return f"{label_of(node)} is not allowed in an expression" + (f"; {way}" if way else "")


def of_other_languages(line: str) -> str:
    """Return the counterpart of another language's operator in a line that Python cannot parse."""
    return next((f": {way}" for sign, way in _OTHER_LANGUAGES.items() if sign in line.replace("!=", "")), "")


def similar(name: str) -> str:
    """Return the functions with similar names, or that there is no such function."""
    import difflib

    matches = difflib.get_close_matches(name, FUNCTIONS, 3)
    advice = f"; there is {', '.join(matches)}" if matches else ""
    return instead_of(name) or advice or "; compute it before, and pass the result as an argument"

"""Markers of the project's dialect, per 1000 words, beside the rates of Trio and httpcore.

    python tests/words.py README.md docs/guide trio_accel .git    # rates by kind of text, the worst sentences
    python tests/words.py --worst 100 --kind comments trio_accel  # more of them, of one kind
    python tests/words.py --check README.md docs/guide            # exit status 1 if a rate misses its target
    python tests/words.py --names trio_accel                      # vague names, and class names used twice

A path is a Markdown, reStructuredText or Python file, a folder of them, or a `.git` folder, of which the last
300 commit subjects are read (`--commits 300`). Code, links' targets and literal blocks do not count.

`Marker.norm` holds the pooled rates of Trio 60d0c2f and httpcore 9820975 (documentation and source), in the
order of `KINDS`. The target is 1.5 times the norm, but at least 0.5, or 1.0 for error messages, because the
norm has only 2300 words of them. A wanted marker has a lower bound: the norm divided by 1.5. Its norm for
"you" is httpcore's, the lower of the two. One hit more or less than the target is not a miss.

Markers are patterns, so they have false positives. Look at rates, not at single hits.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

KINDS = ("readme", "pages", "docstrings", "comments", "errors", "commits")


class Marker(NamedTuple):
    """One habit: a pattern, its cure, and its rate in the norm for each kind of text."""

    name: str
    pattern: str
    cure: str
    norm: tuple[float, ...]
    wanted: bool = False  # a habit to have: the target is a lower bound


MARKERS = (
    Marker(
        "that is",
        r"(?<=\w )(?<!so )(?:that|which) (?:is|are|was|were|has|have|had)\b",
        "an adjective: damaged arrays; or make it the main verb",
        (0.8, 0.8, 1.7, 1.0, 0.9, 0.7),
    ),
    Marker(
        "those of",
        r"\b(?:one|ones|those) (?:that|which|whose|with|without)\b|\b(?:ones|those|the one|that) of\b",
        "repeat the noun, or its short form",
        (0.3, 0.3, 0.2, 0.3, 0.0, 0.0),
    ),
    Marker(
        "what",
        r"(?:^|[.:;,(] ?|\b(?:and|or|of|by|from|with|for|to|is|in|on|at|as|are) )"
        r"[Ww]hat (?!if\b|to\b|happen|about)(?![^.]*\?)",
        "name the thing: its value, the result, the pending requests",
        (0.5, 0.5, 0.1, 0.2, 0.0, 0.2),
    ),
    Marker(
        "told",
        r"\b(?:[Tt]ells?|[Tt]old|[Ss]ays?|[Ss]aid)\b",
        "return, report, raise, explain, state",
        (0.5, 0.5, 0.5, 1.2, 0.0, 0.3),
    ),
    Marker(
        "stands",
        r"\b(?:stands?|stood|lies|lay|goes|went|gone|comes|came)\b",
        "is, runs, follows, arrives, continues, is sent",
        (0.5, 0.5, 0.3, 0.6, 0.0, 0.4),
    ),
    Marker(
        "behind",
        r"\b(?:[Bb]ehind|[Aa]head|[Bb]esides?|[Bb]eyond)\b",
        "after, before, in advance, next to",
        (0.3, 0.3, 0.3, 0.2, 0.0, 0.0),
    ),
    Marker("whose", r"\bwhose\b", "with, or a second sentence", (0.2, 0.2, 0.2, 0.2, 0.0, 0.0)),
    Marker(
        "is no",
        r"\b(?:is|are|was|were|has|have|had) no (?!longer|more|op)\w",
        "is not a; does not have; lacks",
        (0.3, 0.3, 0.4, 0.4, 0.9, 0.2),
    ),
    Marker(
        "has it",
        r"\b(?:has|have|had) (?:it|them|none|one)\b(?! of| or)(?=[ ,.;:]|$)",
        "repeat the noun, or use a real verb",
        (0.1, 0.1, 0.0, 0.1, 0.0, 0.0),
    ),
    Marker("alone, too", r"\b(?<!stand)alone\b|, too\b", "only; also", (0.1, 0.1, 0.0, 0.0, 0.0, 0.0)),
    Marker(
        "so many",
        r"\b[Ss]o (?:many|much|long|often|few)\b(?! as\b| that\b)",
        "give the number a name: n, count",
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ),
    Marker("Where", r"(?:^|[.:;] )Where\b(?![^.]*\?)", "if, when", (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    Marker(
        "of .. of",
        r"\bof (?:\w+ ){1,3}of\b",
        "a compound noun or a possessive",
        (0.4, 0.4, 0.4, 0.2, 0.0, 0.0),
    ),
    Marker(
        "is an Error",
        r"\b(?:is|are|was|were) (?:then )?an? [A-Z]\w*Error\b",
        "raises ValueError",
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ),
    Marker(
        "coined",
        r"\b(?:whole numbers?|askers?|servants?|vigils?|spoil\w*|lendings?|anew|any more)\b",
        "integer, caller, callable, lease, again, no longer",
        (0.0, 0.0, 0.0, 0.1, 0.4, 0.0),
    ),
    Marker(
        "because",
        r"\b(?:[Bb]ecause|[Ss]ince|so that|[Ff]or example|[Ii]nstead|[Uu]nless|such as|[Hh]owever"
        r"|[Tt]herefore|e\.g\.)",
        "(wanted) give the reason in the sentence",
        (3.1, 6.5, 5.5, 8.5, 6.1, 2.8),
        wanted=True,
    ),
    Marker(
        "you",
        r"\b[Yy]ou(?:r|rs)?\b",
        "(wanted) address the reader",
        (14.5, 14.5, 1.7, 0.7, 13.6, 0.0),
        wanted=True,
    ),
)
FACTOR, LEAST = 1.5, {"errors": 1.0}


class Text(NamedTuple):
    """One paragraph, comment, message or subject, without its code."""

    kind: str
    path: str
    line: int
    words: str


# Extracting prose


def plain(text: str) -> str:
    """Drop markup: keep link texts and names of errors, and put X for other code."""
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", " ", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":[a-z:]+:(`[^`]*`)", r"\1", text)
    text = re.sub(r"`+~?(?:\w+\.)*([A-Z]\w*Error)`+", r"\1", text)
    text = re.sub(r"`+[^`]+`+_*", "X", text)
    return re.sub(r"\*+", "", text)


def paragraphs(source: str, is_rst: bool) -> Iterator[tuple[int, str]]:  # noqa: C901, PLR0912  # one pass
    """Yield (line, text) of paragraphs, list items and cells of tables."""
    block: list[str] = []
    first = block_indent = 0
    fence = False
    skip: int | None = None
    for number, line in enumerate([*source.splitlines(), ""], 1):
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        if bare.startswith(("```", "~~~")) and not is_rst:
            fence, bare = not fence, ""
        elif fence:
            continue
        if skip is not None:
            if not bare or indent > skip:
                continue
            skip = None
        if is_rst and re.match(
            r"\.\. (?:_|code|literal|table|list-|auto|current|module|image|toc|high)", bare
        ):
            skip, bare = indent, ""
        elif is_rst and bare.startswith(".. "):
            bare = bare.partition("::")[2].strip()
        if bare.startswith((">>>", "...", "<!--", ":")) or re.fullmatch(r"[-=~^+*#|\s:\"']{3,}", bare):
            bare = ""
        begins = re.match(r"(?:[*-]|#+|\d+\.|\|) ", bare)
        if block and (not bare or begins):
            text = " ".join(block)
            yield first, plain(text)
            block = []
            if is_rst and text.endswith("::"):
                skip = block_indent
        if bare.startswith("|"):
            cells = re.split(r"(?<!\\)\|", bare)
            yield from ((number, plain(cell.strip())) for cell in cells if re.search("[A-Za-z]", cell))
        elif bare:
            if not block:
                first, block_indent = number, indent
            block.append(bare[begins.end() :] if begins else bare)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comment lines, and each trailing comment."""
    lines, block, first, last = source.splitlines(), [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        words = token.string.lstrip("#:").strip()
        if token.type != tokenize.COMMENT or re.match(
            r"noqa|type:|pyright|fmt:|pragma|!|isort|mypy|ruff", words
        ):
            continue
        line = token.start[0]
        is_whole = lines[line - 1].lstrip().startswith("#")
        if block and not (is_whole and last == line - 1 and words):
            yield first, plain(" ".join(block))
            block = []
        if not block:
            first = line
        block.append(words)
        last = line if is_whole else 0
    if block:
        yield first, plain(" ".join(block))


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of all docstrings."""
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for line, text in paragraphs(ast.get_docstring(node) or "", is_rst=True):
                yield node.body[0].lineno + line - 1, text


def literal(node: ast.AST) -> str:
    """Return the text of a string expression, with X for its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return literal(node.left) + literal(node.right) if isinstance(node, ast.BinOp) else ""


def errors(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the messages of errors that are raised, or made."""
    for node in nodes:
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if isinstance(node, ast.Raise) == name.endswith("Error"):
            continue  # an error that is raised comes by again as a call
        for arg in call.args:
            if len(literal(arg).split()) > 2:
                yield call.lineno, plain(literal(arg))


def read(path: Path, commits: int = 300) -> Iterator[Text]:
    """Yield all texts of a file, a folder or a repository's history."""
    if path.name == ".git" or (path / "objects").is_dir():
        command = ["git", "-C", str(path), "log", f"-{commits}", "--no-merges", "--format=%h %s"]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            number, _, subject = line.partition(" ")
            yield Text("commits", number, 0, plain(subject))
    elif path.is_dir():
        for entry in sorted(path.iterdir()):
            is_read = entry.suffix == ".py" or (entry.suffix in {".md", ".rst"} and entry.name[0] not in "._")
            if is_read or (entry.is_dir() and entry.name[0] != "."):
                yield from read(entry)
    elif path.suffix in {".md", ".rst"}:
        is_first_page = path.stem.upper() == "README" and (path.parent / "pyproject.toml").exists()
        kind = "readme" if is_first_page else "pages"
        for line, text in paragraphs(path.read_text(), path.suffix == ".rst"):
            yield Text(kind, str(path), line, text)
    elif path.suffix == ".py":
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        found = {"docstrings": docstrings(nodes), "comments": comments(source), "errors": errors(nodes)}
        for kind, texts in found.items():
            yield from (Text(kind, str(path), line, text) for line, text in texts)


# Reports


def target(marker: Marker, kind: str) -> float | None:
    """Return the bound of a rate; None if this kind has none."""
    norm = marker.norm[KINDS.index(kind)]
    if marker.wanted:
        applies = kind in {"readme", "pages"} or (marker.name == "because" and kind == "comments")
        return norm / FACTOR if applies else None
    return max(FACTOR * norm, LEAST.get(kind, 0.5))


def rates(texts: list[Text]) -> dict[str, dict[str, float]]:
    """Return rates per 1000 words: by kind, then by marker."""
    words, hits = Counter[str](), defaultdict(Counter[str])
    for text in texts:
        words[text.kind] += len(text.words.split())
        for marker in MARKERS:
            hits[text.kind][marker.name] += len(re.findall(marker.pattern, text.words))
    return {
        kind: {marker.name: 1000 * hits[kind][marker.name] / words[kind] for marker in MARKERS}
        | {"": words[kind]}
        for kind in KINDS
        if words[kind]
    }


def worst(texts: list[Text], count: int) -> list[tuple[float, Text, list[str]]]:
    """Return the sentences with the most markers for their length."""
    found = []
    usual = [marker for marker in MARKERS if not marker.wanted]
    for text in texts:
        if not any(re.search(marker.pattern, text.words) for marker in usual):
            continue
        for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z])", text.words):
            names = [m.name for m in usual for _ in re.findall(m.pattern, sentence)]
            if names:
                score = len(names) - len(sentence.split()) / 25
                found.append((score, text._replace(words=sentence), names))
    return sorted(found, key=lambda entry: -entry[0])[:count]


def report(texts: list[Text], count: int) -> bool:
    """Print the rates and the worst sentences; return whether all targets are met."""
    table, are_met = rates(texts), True
    print(f"{'per 1000 words':<14}" + "".join(f"{kind:>18}" for kind in table))
    print(f"{'words':<14}" + "".join(f"{table[kind]['']:>18,.0f}" for kind in table))
    for marker in MARKERS:
        cells = []
        for kind in table:
            rate, bound = table[kind][marker.name], target(marker, kind)
            one = 1000 / table[kind][""]  # a single hit more or less is no miss
            misses = bound is not None and (rate < bound - one if marker.wanted else rate > bound + one)
            are_met &= not misses
            limit = "" if bound is None else f"{'≥' if marker.wanted else '≤'} {bound:.1f}"
            cells.append(f"{rate:9.1f} {limit:>6}{' *' if misses else '  '}")
        print(f"{marker.name:<14}" + "".join(cells) + f"   {marker.cure}")
    if count:
        print("\nThe worst sentences (* above: the target is missed)")
    for _, text, names in worst(texts, count):
        place = f"{text.path}:{text.line}" if text.line else text.path
        print(f"{place}: [{', '.join(names)}] {text.words[:160]}")
    return are_met


_VAGUE = (
    "about again ahead alone at before behind believed between beyond each far few found given gone "
    "here kept known last late least left long look made many more most near none once one other "
    "others own place places seen short small so soon some told twice want wanted what where whole "
    "why"
)
VAGUE = frozenset(_VAGUE.split())


Uses = Mapping[tuple[str, str], Counter[str]]


def uses_of_names(paths: Sequence[Path]) -> tuple[Uses, dict[str, list[str]]]:
    """Return the bindings of each name by kind and file, and the places of each class name."""
    uses: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in [
        file for root in paths for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                uses["function", node.name][str(path)] += 1
            elif isinstance(node, ast.arg):
                uses["parameter", node.arg][str(path)] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                uses["constant" if node.id.isupper() else "variable", node.id][str(path)] += 1
    return uses, classes


def vague_names(uses: Uses, kind: str) -> list[tuple[str, Counter[str]]]:
    """Return the vague names of a kind with their bindings by file."""
    return [
        (name, files) for (of, name), files in uses.items() if of == kind and name.strip("_").lower() in VAGUE
    ]


def report_names(paths: Sequence[Path]) -> None:
    """Print vague names, and class names of several files."""
    uses, classes = uses_of_names(paths)
    for kind in ("constant", "parameter", "function", "variable"):
        vague = vague_names(uses, kind)
        print(f"\nvague {kind}s (name: bindings in files): {sum(f.total() for _, f in vague)}")
        vague.sort(key=lambda entry: (-len(entry[1]), entry[0]))
        print(", ".join(f"{name}: {files.total()} in {len(files)}" for name, files in vague[:60]))
    double = {name: places for name, places in classes.items() if len(places) > 1}
    print(f"\nclass names in several places: {len(double)} of {len(classes)}")
    for name, places in sorted(double.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        print(f"{name}: {' '.join(places)}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--worst", type=int, default=30, metavar="N")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--commits", type=int, default=300, metavar="N")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--names", action="store_true")
    options = parser.parse_args()
    if options.names:
        report_names(options.paths)
        return 0
    texts = [text for path in options.paths for text in read(path, options.commits)]
    are_met = report([text for text in texts if options.kind in (None, text.kind)], options.worst)
    return int(options.check and not are_met)


if __name__ == "__main__":
    sys.exit(main())

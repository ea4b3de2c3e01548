"""Makes mutants of the package, and finds which tests kill them: ``python tests/mutants make|kill|choose``.

A mutant is the package with one small change, such as `<` in place of `<=`, or a statement less. A test that
fails with a mutant kills it. A mutant that no test kills shows a missing test, or its change has no effect.
cosmic-ray makes the changes; it is no requirement of the package (``pip install cosmic-ray``).

1. ``make`` writes mutants into a file, chosen by a seed from all rooms, in proportion to their sources.
2. ``pytest -p reached`` (beside this file) notes which mutated functions each test enters, and its time.
3. ``kill`` runs the tests that enter the function of each mutant, the nearest first, in a copy of the tree.
4. ``choose`` takes the cheapest tests that kill nearly all mutants that all tests kill, by greedy choice.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trio_accel"

# Each room has at least so many mutants, and the others are shared by the sizes of the rooms.
_LEAST = 3
# Tests of one mutant: at first the nearest, then the others, if all of those pass.
_NEAREST, _SECONDS_NEAREST = 60, 40.0
_OTHERS, _SECONDS_OTHERS = 600, 240.0
# Files that only a GPU runs, or the stand-in for its driver.
_OF_A_GPU = ("trio_accel/backends/cuda/", "trio_accel/backends/base/gpu/", "trio_accel/testing/stand_in/")
_KILLERS = 12  # so many killers of a mutant are enough to choose from
_OPERATORS = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_Mod_Mul",
    "ReplaceBinaryOperator_Mul_Add",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_Gt_LtE",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Lt_GtE",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ZeroIterationForLoop",
)


def room_of(file: str) -> str:
    """Return the room of a file of the package; devices and backends have one for each folder below."""
    parts = file.split("/")
    depth = 3 if parts[1] in ("backends", "devices") else 2
    return ".".join(parts[1:depth]) if len(parts) > depth else (parts[1] if len(parts) > 2 else "facade")


def make(count: int, seed: int, file: Path) -> None:
    """Write mutants into a file."""
    chosen, rng = [], random.Random(seed)
    rooms: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        rooms.setdefault(room_of(str(path.relative_to(ROOT))), []).append(path)
    sizes = {room: sum(path.stat().st_size for path in paths) for room, paths in rooms.items()}
    counts = dict.fromkeys(rooms, _LEAST)
    while sum(counts.values()) < count:
        # The room that has the fewest for its size.
        counts[max(rooms, key=lambda room: sizes[room] / counts[room])] += 1
    for room, paths in rooms.items():
        found, tries = [], 0
        while len(found) < counts[room] and tries < 60 * counts[room]:
            tries += 1
            path = rng.choices(paths, [path.stat().st_size for path in paths])[0]
            mutant = _mutant(path, rng)
            if mutant is not None and (mutant["file"], mutant["at"]) not in {
                (m["file"], m["at"]) for m in found
            }:
                found.append(mutant)
        chosen += found
    for number, mutant in enumerate(chosen):
        mutant["number"] = number
    file.write_text(json.dumps(chosen, indent=1), encoding="utf-8")


def _mutant(path: Path, rng: random.Random) -> dict[str, Any] | None:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = path.read_text(encoding="utf-8")
    # One of the kinds first, so that the many numbers do not crowd out all others; a third are statements.
    name = rng.choice(_OPERATORS)
    operator = _removal() if rng.random() < 1 / 3 else get_operator(f"core/{name}")()
    places = [place for node in ast_nodes(get_ast(source)) for place in operator.mutation_positions(node)]
    if not places:
        return None
    occurrence = rng.randrange(len(places))
    line = places[occurrence][0][0]
    function = _function_at(source, line)
    mutated = mutate_code(source, operator, occurrence)
    if function is None or mutated is None or _is_of_types(source, line):
        return None
    with contextlib.suppress(SyntaxError):
        if ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)):
            file = str(path.relative_to(ROOT))
            before, after = source.splitlines(), mutated.splitlines()
            pairs = ((a, b) for a, b in zip(before, after, strict=False) if a != b)
            return {
                "file": file,
                "room": room_of(file),
                "line": function,
                "at": line,
                "kind": type(operator).__name__,
                "change": next(pairs, ("", "")),
                "source": mutated,
            }
    return None


def _removal() -> Any:
    """Return an operator that removes a call or an assignment to a part of an object."""
    import parso
    from cosmic_ray.operators.operator import Operator

    class StatementRemoval(Operator):  # type: ignore[misc]
        def mutation_positions(self, node: Any) -> Iterator[Any]:
            if node.type == "simple_stmt" and len(node.children) == 2:
                first = node.children[0]
                text = first.get_code(include_prefix=False)
                is_call = first.type in ("atom_expr", "power") or text.startswith("await ")
                is_change = first.type == "expr_stmt" and re.match(r"[\w.]+(\.\w+|\[.*?\]) [-+*]?= ", text)
                if is_call or is_change:
                    yield node.start_pos, node.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            first = node.children[0]
            node.children[0] = parso.python.tree.Keyword(
                "pass", first.start_pos, first.get_first_leaf().prefix
            )
            return node

        @classmethod
        def examples(cls) -> tuple[()]:
            return ()

    return StatementRemoval()


def _function_at(source: str, line: int) -> int | None:
    """Return the line where the innermost function around a line begins, with its decorators."""
    found: ast.AST | None = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno < line <= (
            node.end_lineno or 0
        ):
            found = node
    return min([found.lineno, *(each.lineno for each in found.decorator_list)]) if found is not None else None  # type: ignore[attr-defined]


def _is_of_types(source: str, line: int) -> bool:
    """Tell whether a line has an overload, or is for type checkers."""
    return bool(
        re.search(r"TYPE_CHECKING|@overload|: \.\.\.$|assert_never|\bcast\(", source.splitlines()[line - 1])
    )


def kill(mutants: Path, reached: Path, results: Path, slots: int, *, is_stand_in: bool) -> None:
    """Run the tests of each mutant in copies of the tree, and write a line for each."""
    tests = [
        json.loads(line)
        for file in sorted(reached.glob("*.jsonl"))
        for line in file.read_text("utf-8").splitlines()
    ]
    tests = [test for test in tests if test["outcome"] == "passed"]
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for slot in range(slots):
        folder = results.parent / "slots" / str(slot)
        ignored = shutil.ignore_patterns(".git", ".whl", ".nox", "_build", "__pycache__", "slots")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
        free.put(folder)
    done = set()
    if results.exists():
        done = {json.loads(line)["number"] for line in results.read_text("utf-8").splitlines()}

    def work(mutant: dict[str, Any]) -> None:
        folder = free.get()
        try:
            line = _killers(mutant, tests, folder, command)
        finally:
            free.put(folder)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    todo = [
        mutant
        for mutant in json.loads(mutants.read_text("utf-8"))
        if mutant["number"] not in done and mutant["file"].startswith(_OF_A_GPU) == is_stand_in
    ]
    command = [
        sys.executable,
        *(["-m", "trio_accel.testing.stand_in"] if is_stand_in else []),
        "-m",
        "pytest",
    ]
    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(work, todo))


def _killers(
    mutant: dict[str, Any], tests: Iterable[dict[str, Any]], folder: Path, command: Sequence[str]
) -> dict[str, Any]:
    entering = [test for test in tests if [mutant["file"], mutant["line"]] in test["entered"]]
    room = set(mutant["room"].replace("_", "").split("."))
    stem = Path(mutant["file"]).stem.strip("_")

    def distance(test: dict[str, Any]) -> tuple[bool, bool, float]:
        path = test["test"].partition("::")[0]
        return stem not in path, not room & set(path.split("/")), test["seconds"]

    entering.sort(key=distance)
    path = folder / mutant["file"]
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant["source"], encoding="utf-8")
    began, killers, asked = time.monotonic(), [], 0
    try:
        waiting = iter(entering)
        for most, seconds in ((_NEAREST, _SECONDS_NEAREST), (_OTHERS, _SECONDS_OTHERS)):
            part, sum_of = [], 0.0
            for test in itertools.islice(waiting, most):
                part.append(test["test"])
                sum_of += test["seconds"]
                if sum_of > seconds:
                    break
            if part and not killers:
                asked += len(part)
                killers = _failing(part, folder, command, 3 * sum_of + 90)
    finally:
        path.write_text(source, encoding="utf-8")
    kept = {key: value for key, value in mutant.items() if key != "source"}
    spent = round(time.monotonic() - began, 1)
    return {**kept, "entered": len(entering), "asked": asked, "killers": killers, "seconds": spent}


def _failing(tests: Sequence[str], folder: Path, command: Sequence[str], limit: float) -> list[str]:
    """Return the tests that fail, and the one that was running if the process died."""
    arguments = [
        "-v",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-x" if _KILLERS == 1 else f"--maxfail={_KILLERS}",
    ]
    process = subprocess.Popen(
        [*command, *arguments, "--timeout=60", *tests],
        cwd=folder,
        env={**os.environ, "TRIO_ACCEL_TEST_GRACE": "5"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output = process.communicate()[0]
    ended = dict(re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", output, re.MULTILINE))
    failing = [name for name, outcome in ended.items() if outcome in ("FAILED", "ERROR")]
    if process.returncode not in (0, 1) or (process.returncode and not failing):
        begun = re.findall(r"^(tests/\S+::\S+)", output, re.MULTILINE)
        failing += [name for name in begun[-1:] if name not in failing] or ["collection: " + output[-300:]]
    return failing


def choose(results: Path, reached: Path, share: float, file: Path) -> None:
    """Write the cheapest tests, by greedy choice, that kill a share of the mutants that all tests kill."""
    seconds = {}
    for each in sorted(reached.glob("*.jsonl")):
        for line in each.read_text("utf-8").splitlines():
            test = json.loads(line)
            seconds[test["test"]] = test["seconds"]
    mutants = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    killed = {mutant["number"]: set(mutant["killers"]) for mutant in mutants if mutant["killers"]}
    left, chosen = dict(killed), []
    while len(left) > (1 - share) * len(killed):
        counts: dict[str, int] = {}
        for killer in itertools.chain(*left.values()):
            counts[killer] = counts.get(killer, 0) + 1
        best = max(counts, key=lambda test: counts[test] / (0.1 + seconds.get(test, 10.0)))
        chosen.append(best)
        left = {number: killers for number, killers in left.items() if best not in killers}
    file.write_text("\n".join(sorted(chosen)) + "\n", encoding="utf-8")
    cost = sum(seconds.get(test, 0.0) for test in chosen)
    print(f"{len(mutants)} mutants, {len(killed)} killed by all tests")
    print(f"{len(chosen)} tests of {cost:.0f} s kill {len(killed) - len(left)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("make")
    one.add_argument("--count", type=int, default=200)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("file", type=Path)
    one = commands.add_parser("kill")
    for name in ("mutants", "reached", "results"):
        one.add_argument(name, type=Path)
    one.add_argument("--slots", type=int, default=2)
    one.add_argument("--stand-in", action="store_true")
    one = commands.add_parser("choose")
    for name in ("results", "reached", "file"):
        one.add_argument(name, type=Path)
    one.add_argument("--share", type=float, default=0.95)
    given = parser.parse_args()
    if given.command == "make":
        make(given.count, given.seed, given.file)
    elif given.command == "kill":
        kill(given.mutants, given.reached, given.results.resolve(), given.slots, is_stand_in=given.stand_in)
    else:
        choose(given.results, given.reached, given.share, given.file)


if __name__ == "__main__":
    main()

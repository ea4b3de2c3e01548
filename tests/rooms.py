"""Finds the tests of what has changed: the folders of the changed rooms, and of the rooms that import them.

``python tests/rooms.py`` prints them for the files that differ from a commit. A room is a part of the package
in the table of `layers`. A test says by its folder which room it belongs to; `FOLDERS` has the folders whose
name is not the name of their room. Most rooms import a *wide* one, such as `actors` or `devices`, and some
rooms, such as the command line, import all others. Such an importer gets only the sample of `pytest --brief`,
because each change would be a run of everything. Mutants have chosen the sample (`tests/mutants`).

This module needs the standard library only, because `noxfile.py` runs it before it makes an environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from layers import CAPABILITIES, DOWNWARDS, PACKAGE, VENDOR_MAY, VENDORS

ROOT = Path(__file__).parents[1]
FACADE, EXAMPLES, DOCS, BENCHMARKS = "facade", "examples", "docs", "benchmarks"
# Folders of tests with another name than their room. A room may have several.
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "compiled": ("backends.cpu",),
    "encode": (EXAMPLES,),
    "finetune": (EXAMPLES,),
    "generate": (EXAMPLES,),
    "gpu": (),  # on the hardware only
    "mutants": (),
    "otp": ("actors",),
    "plug_ins": ("backends",),
    "public": (FACADE,),
    "simulations": (EXAMPLES,),
    "stand_in": ("backends.cuda", "testing"),
    "tree": (),  # whole in each run
    "backends": ("backends", "backends.base", "backends.cpu", "backends.cuda", "backends.opencl"),
}
# A room that more than this share of the rooms imports is wide.
_WIDE = 0.4
# So long before the newest commit a change has begun that neither a tag nor a branch tells.
_HOURS = 12


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def base() -> str:
    """Return the commit to compare with: the newest tag, else where the branch left ``origin/main``.

    Without both, it is the newest commit that is half a day older than the last one.
    """
    if tag := _git("describe", "--tags", "--abbrev=0"):
        return tag
    head, merged = _git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "origin/main")
    if merged and merged != head:
        return merged
    last = int(_git("log", "-1", "--format=%ct") or 0)
    older = _git("rev-list", "-1", f"--before={last - 3600 * _HOURS}", "HEAD")
    return older or (_git("rev-list", "--max-parents=0", "HEAD").splitlines() or [""])[0]


def changed_files(since: str) -> list[str]:
    """List the files that differ from a commit, and those that git does not know yet."""
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted(
        {*_git("diff", "--name-only", "--no-renames", since).splitlines(), *new.splitlines()} - {""}
    )


def importing(room: str) -> frozenset[str]:
    """Return the rooms that import a room, by way of others, too; of those that import all, the facade.

    A vendor is imported by its name only. The capabilities compute by it.
    """
    if room.removeprefix("backends.") in VENDORS:
        return frozenset((*CAPABILITIES, FACADE))
    # Each part says by `_names` which of its names are public.
    below = {part: {*parts, "_names"} - {part} for part, parts in DOWNWARDS.items()}
    below |= {f"backends.{vendor}": set(VENDOR_MAY) for vendor in VENDORS}
    below[FACADE] = set(DOWNWARDS)
    found, waiting = set[str](), [room]
    while waiting:
        name = waiting.pop()
        more = {part for part, parts in below.items() if name in parts} - found - {room}
        found |= more
        waiting += more
    return frozenset(found)


def is_wide(room: str) -> bool:
    """Return whether most rooms import a room."""
    return room.removeprefix("backends.") not in VENDORS and len(importing(room)) > _WIDE * len(DOWNWARDS)


def room_of(file: str) -> str:
    """Return the room of a file; a file of a test has the rooms of its folder, and "" here."""
    first, *others = file.split("/")
    if first in (EXAMPLES, DOCS, BENCHMARKS) and others:
        return first
    if first != PACKAGE:
        return DOCS if file.endswith(".md") else ""
    second, third = [*others, "", ""][:2]
    if second == "backends" and (third in VENDORS or third == "base"):
        return f"backends.{third}"
    return second.removesuffix(".py") if second.removesuffix(".py") in ALL_ROOMS else FACADE


def rooms_of_folder(folder: str) -> tuple[str, ...]:
    """Return the rooms that a folder of tests belongs to."""
    return FOLDERS.get(folder, (folder,))


def folders() -> list[str]:
    """List the folders of tests."""
    return sorted({path.parts[len(ROOT.parts) + 1] for path in (ROOT / "tests").glob("*/**/test_*.py")})


ALL_ROOMS = frozenset(
    {*DOWNWARDS, *(f"backends.{vendor}" for vendor in VENDORS), FACADE, "testing", "cli", "interop"}
)


def folders_of(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the folders of tests of the rooms of files, and those of the rooms that import them.

    A wide room counts without the rooms that import it.
    """
    files = list(files)
    rooms = {room for file in files if (room := room_of(file))}
    own = {file.split("/")[1] for file in files if file.startswith("tests/") and file.count("/") > 1}
    own |= {folder for folder in folders() if rooms & set(rooms_of_folder(folder))} | {"tree"}
    near = {other for room in rooms if not is_wide(room) for other in importing(room)} - rooms
    others = {folder for folder in folders() if near & set(rooms_of_folder(folder))} - own
    there = set(folders())
    return sorted(own & there), sorted(others)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print which folders of tests belong to a change.")
    parser.add_argument("--since", help="a commit; the default is the newest tag or a merge base")
    parser.add_argument("--json", action="store_true", help="print it for a program")
    given = parser.parse_args()
    since = given.since or base()
    files = changed_files(since)
    own, others = folders_of(files)
    rooms = sorted({room_of(file) for file in files} - {""})
    found = {"since": since, "files": files, "rooms": rooms, "own": own, "others": others}
    if given.json:
        print(json.dumps(found))
        return
    for name in ("since", "rooms", "own", "others"):
        print(f"{name}: {found[name] if name == 'since' else ' '.join(found[name])}")


if __name__ == "__main__":
    main()

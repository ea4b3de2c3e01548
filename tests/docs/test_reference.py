"""The reference is made from the docstrings, has every public name, and no other."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest
from internal_names import INTERNAL
from make_reference import entries_of, generated
from pages import REFERENCE, ROOT, anchors, name_of, read
from reference_domain import DomainWriter, objects

import trio_accel as ta

pytestmark = pytest.mark.docs


def text() -> str:
    return "\n".join(read(path) for path in sorted(REFERENCE.glob("*.md")))


def entries() -> list[tuple[str, str]]:
    return [
        entry for path in REFERENCE.glob("*.md") for entry in entries_of(path.read_text(encoding="utf-8"))
    ]


MODULES = sorted({where for where, _ in entries()})


def test_a_command_writes_the_pages(tmp_path: Path) -> None:
    program = str(ROOT / "docs" / "make_reference.py")
    subprocess.run([sys.executable, program, str(tmp_path / "new")], check=True, cwd=tmp_path)
    pages = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert pages == {path.name: read(path) for path in REFERENCE.glob("*.md")}


def test_no_entry_is_committed() -> None:
    """Each is made from a docstring when the pages are built."""
    committed = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    headings = set(re.findall(r"^### (\w+)$", committed, re.MULTILINE))
    assert headings & {name for _, name in entries()} == set()
    assert all(re.search(rf"^### {name}$", text(), re.MULTILINE) for _, name in entries())


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry_or_is_named_as_internal(module: str) -> None:
    public = set(importlib.import_module(module).__all__)
    listed = [name for where, name in entries() if where == module]
    assert len(listed) == len(set(listed))
    internal = INTERNAL.get(module, frozenset())
    assert set(listed) | internal == public
    assert set(listed) & internal == set()


def test_every_name_of_the_package_has_an_entry() -> None:
    names = {name for _, name in entries()}
    modules = {name for name in ta.__all__ if isinstance(getattr(ta, name), ModuleType)}
    assert {f"trio_accel.{name}" for name in modules} <= set(MODULES)
    assert set(ta.__all__) - modules - names == {"__version__"}


@pytest.mark.parametrize(
    "name", ["poll_once_more", "idle_actor", "validated", "after_enqueue", "fail_as_crash", "launch_here"]
)
def test_internals_of_the_runtime_have_no_entry(name: str) -> None:
    assert not re.search(rf"^#+ (\w+\.)?{name}$", text(), re.MULTILINE)


@pytest.mark.parametrize(
    "entry",
    [
        "| `RESUME` | The exception is the reply: the caller gets it, and the actor continues",
        "| `ONE_FOR_ALL` | All children: the others end in reverse start order, then",
        "| `isolation` | [`Isolation`](#isolation) | The place of the context: a worker process, or",
    ],
)
def test_a_colon_in_a_docstring_is_a_part_of_the_sentence(entry: str) -> None:
    assert entry in text()


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=name_of)
def test_a_page_begins_with_a_line_for_each_name(page: Path) -> None:
    """By group: the name, with a link to its entry, and the first sentence of its docstring."""
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(#([\w-]+)\) \| (.*) \|$", read(page).partition("\n## ")[0], re.MULTILINE
    )
    assert [name for name, _, _ in rows] == [name for _, name in entries_of(page.read_text(encoding="utf-8"))]
    assert {anchor for _, anchor, _ in rows} <= anchors(page)
    assert [name for name, _, sentence in rows if not sentence.endswith((".", "`"))] == []


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=name_of)
def test_no_group_is_long(page: Path) -> None:
    """Lists of messages go by the names of their functions, which have groups."""
    groups = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    long = [title for title, text in groups if len(entries_of(text)) > 30]
    assert [title for title in long if not title.startswith("Messages")] == []


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("devices", "| `system` | [`ActorSystem`](actors.md#actorsystem) |"),
        ("devices", "| `outage` | [`DeviceLostError`](errors.md#devicelosterror)` \\| None` |"),
        ("actors", "| `children` | `tuple[`[`ActorSnapshot`](#actorsnapshot)`, ...]` |"),
    ],
)
def test_types_in_tables_lead_to_their_entries(page: str, line: str) -> None:
    assert line in read(REFERENCE / f"{page}.md")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("trio_accel.linalg.matmul", "ta.linalg.matmul"),
        ("trio_accel.fft.fft", "ta.fft.fft"),
        ("trio_accel.nn.gelu", "ta.nn.gelu"),
        ("trio_accel.devices.Device", "trio_accel.Device"),
        ("trio_accel.devices.Device", "ta.Device"),
        ("trio_accel.devices.System", "ta.System"),
        ("trio_accel.actors.Actor", "ta.Actor"),
        ("trio_accel.programs.open_program", "ta.open_program"),
    ],
)
def test_the_inventory_has_the_names_that_programs_write(name: str, other: str) -> None:
    """`docs/conf.py` takes these, and refuses a build without an object for one."""
    assert other in objects()[name]


def test_an_object_has_one_name_of_the_package() -> None:
    """`ta.System` is the class of devices, and not the class of actors."""
    assert "ta.System" not in objects()["trio_accel.actors.ActorSystem"]
    others = [other for names in objects().values() for other in names]
    assert len(others) == len(set(others))


@pytest.mark.slow
def test_sphinx_makes_objects_and_links_of_a_page(tmp_path: Path) -> None:
    """A build of a single page, because the whole reference takes a minute."""
    page = generated(DomainWriter)[REFERENCE / "weights.md"]
    (tmp_path / "index.md").write_text(page, encoding="utf-8")
    out = tmp_path / "out"
    options = ["-D", "extensions=myst_parser", "-D", "python_use_unqualified_type_names=1"]
    command = [sys.executable, "-m", "sphinx", "-Q", "-C", *options, str(tmp_path), str(out)]
    subprocess.run(command, check=True)
    lines = zlib.decompress((out / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    kinds = {line.split()[0]: line.split()[1] for line in lines}
    assert kinds["trio_accel.weights.load"] == "py:function"
    assert kinds["trio_accel.weights.Contents"] == "py:class"
    assert kinds["trio_accel.weights.WeightsError"] == "py:exception"
    signature = re.search(
        r'<dt[^>]*id="trio_accel.weights.inspect">.*?</dt>', (out / "index.html").read_text(), re.DOTALL
    )
    assert signature is not None
    assert 'href="#trio_accel.weights.Contents"' in signature[0]

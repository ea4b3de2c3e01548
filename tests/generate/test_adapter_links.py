"""`examples/generate/adapters.py`: links that lead out of the folder, and errors about secret files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_adapters import admin, error_of, header, write

pytestmark = pytest.mark.examples


SECRET = b"root:$6$secret"


def make_links(folder: Path) -> dict[str, bool]:
    """Make links in a folder; return for each whether it leads out of the folder."""
    outside = folder.parent / f"{folder.name} outside"
    outside.mkdir()
    write(outside / "one", 1)
    (outside / "secret").write_bytes(SECRET)
    (folder / "deeper").mkdir()
    write(folder / "deeper" / "one", 1)
    found = {"through a folder": True}
    for name, target, leads_out in (
        ("absolute", outside / "one", True),
        ("secret", outside / "secret", True),
        ("relative", f"../{outside.name}/one", True),
        ("link to a link", "absolute", True),
        ("out and in", f"../{outside.name}/../{folder.name}/deeper/one", False),
        ("folder", outside, True),
        ("missing", outside / "none", True),
        ("process", "/proc/self/environ", True),
        ("inside", "deeper/one", False),
        ("twice inside", "inside", False),
    ):
        (folder / name).symlink_to(target)
        found[name] = leads_out
    (folder / "through a folder").symlink_to("folder/one")
    return found


async def test_links_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "adapters").mkdir()
    links = make_links(folder)
    async with admin(folder) as (send, adapters):
        for name, leads_out in links.items():
            if not leads_out:
                assert (await send("POST", {"adapter": name}))[0] == 200, name
                continue
            status, code, message = error_of(await send("POST", {"adapter": name}))
            assert (status, code) == (400, "unusable_adapter"), name
            assert (
                message
                == f"the adapter {name} cannot be used: it is a link that leads out of the folder of adapters"
            )
        (folder / "loop").symlink_to("loop")
        assert error_of(await send("POST", {"adapter": "loop"}))[0] == 400
        (folder / "nothing").symlink_to("none")
        assert error_of(await send("POST", {"adapter": "nothing"}))[0] == 404
        assert adapters.state()["adapter"] == "twice inside"


async def test_links_that_change_while_they_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, or a folder on its path, becomes a link to elsewhere just before it is opened."""
    (folder := tmp_path / "adapters").mkdir()
    make_links(folder)
    outside, opening = tmp_path / "adapters outside", os.open
    os.mkfifo(outside / "pipe")
    change, opened = list[Path](), list[str]()

    def late(path: Any, *given: Any, **options: Any) -> int:
        if path != folder / "deeper" / "one":
            return opening(path, *given, **options)
        replaced, target = change
        replaced.rename(tmp_path / "moved")
        replaced.symlink_to(target)
        try:
            file = opening(path, *given, **options)
            opened.append(os.readlink(f"/proc/self/fd/{file}"))
            return file
        finally:
            replaced.unlink()
            (tmp_path / "moved").rename(replaced)

    count = len(os.listdir("/proc/self/fd"))
    async with admin(folder) as (send, adapters):
        for replaced, target, says in (
            (folder / "deeper", outside, "it is a link that leads out of the folder of adapters"),
            (folder, outside, "there is no adapter 'inside' in the folder of adapters"),
            (folder / "deeper" / "one", outside / "one", "Too many levels of symbolic links"),
            (folder / "deeper" / "one", outside / "pipe", "Too many levels of symbolic links"),
        ):
            change[:] = [replaced, target]
            monkeypatch.setattr(os, "open", late)
            message = error_of(await send("POST", {"adapter": "inside"}))[2]
            monkeypatch.undo()
            assert message.endswith(says), message
            assert adapters.state()["adapter"] is None
        # Only the link in place of a folder was followed.
        assert opened == [str(outside / "one")]
    assert len(os.listdir("/proc/self/fd")) == count


async def test_a_hard_link_shows_no_bytes_of_its_file(tmp_path: Path) -> None:
    (folder := tmp_path / "adapters").mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    (folder / "linked").hardlink_to(tmp_path / "secret")
    async with admin(folder) as (send, _):
        message = error_of(await send("POST", {"adapter": "linked"}))[2]
    what = f"linked has {len(SECRET)} bytes, and is not a complete safetensors file"
    assert message == f"the adapter linked cannot be used: {what}"


async def test_errors_have_no_bytes_of_a_file(tmp_path: Path) -> None:
    secrets = {
        "bytes": SECRET,
        "length": SECRET[:2] + bytes(6) + SECRET,
        "index.json": json.dumps({"weight_map": {"a": SECRET.decode()}}).encode(),
        "twice": header(a=1).replace(b'{"a": 1}', b'{"a":1,"a":2}'),
        "names": header(secret={"dtype": "secret", "shape": [], "data_offsets": [0, 0]}),
    }
    async with admin(tmp_path) as (send, _):
        for name, data in secrets.items():
            (tmp_path / name).write_bytes(data)
            message = error_of(await send("POST", {"adapter": name}))[2]
            what = f"{name} has {len(data)} bytes, and is not a complete safetensors file"
            assert message == f"the adapter {name} cannot be used: {what}"

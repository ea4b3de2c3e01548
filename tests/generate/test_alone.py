"""`examples/generate`, copied without the other examples, and without the package for grammars."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import ROOT, SEARCHED
from serving import RANDOM, Serving, post

pytestmark = pytest.mark.examples

# As if the package were not installed.
HIDDEN = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "llguidance" else super().find_spec(name, path, target)

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


def command(folder: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a copy of the folder, which finds no `llguidance`."""
    copy = folder / "copied" / "mine"
    shutil.copytree(ROOT / "examples" / "generate", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text(HIDDEN)
    searched = os.pathsep.join([str(folder / "hidden"), SEARCHED])
    environment = {**os.environ, "PYTHONPATH": searched, "OPENBLAS_NUM_THREADS": "1"}
    return [sys.executable, str(copy / "serve.py"), "--port", "0", *options], environment


def test_a_copy_without_grammars_writes_plain_texts(tmp_path: Path) -> None:
    given, environment = command(tmp_path, *RANDOM)
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)
            assert found is not None, line
            service = Serving(process, int(found[1]))
            body = {"model": "random", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            status, answer = post(service, "/v1/chat/completions", json.dumps(body))
            assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
            tool = {"type": "function", "function": {"name": "add"}}
            for field, value in (
                ("response_format", {"type": "json_object"}),
                ("tools", [tool]),
            ):
                asked = {**body, field: value, **({"tool_choice": "required"} if field == "tools" else {})}
                status, answer = post(service, "/v1/chat/completions", json.dumps(asked))
                assert (status, answer["error"]["param"]) == (400, field)
                assert answer["error"]["message"] == (
                    f"{field} is not supported here, because the package llguidance is missing: "
                    "pip install '.[generate]' in a checkout"
                )
            asked = {"model": "x", "input": "Hello"}
            status, answer = post(service, "/v1/embeddings", json.dumps(asked))
            assert status == 404
            assert answer["error"]["message"].endswith(
                ", and copy examples/encode next to the folder of this service"
            )
        finally:
            process.terminate()
        assert process.wait(20) in {0, -15}


def test_a_copy_refuses_an_encoder(tmp_path: Path) -> None:
    given, environment = command(tmp_path, *RANDOM, "--encoder", str(tmp_path))
    found = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert (
        f"--encoder needs the modules of examples/encode, but {tmp_path / 'copied' / 'encode'}"
        in found.stderr
    )

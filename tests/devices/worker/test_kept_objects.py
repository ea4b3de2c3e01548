"""An application keeps nothing of launchers that it has lost, or of devices that it has closed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="one backend is enough")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["launchers", "devices"])
def test_objects_and_descriptors_do_not_become_more(what: str) -> None:
    program = Path(__file__).with_name("counting_application.py")
    done = subprocess.run([sys.executable, program, what], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}

"""`import trio_accel` is light: quick, without threads, without a driver, without the heavy libraries.

So are the parts with an import at first use, because the Trio loop imports them if no device has opened.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("cuda", "nvmath", "scipy", "matplotlib", "rich", "cyclopts", "pytest", "hypothesis")
# Times the calls that NumPy and Trio make when they are imported. They are counted, because a share of their
# time was 1.3 to 2.2 on different machines. 1.37 before declared expressions were parsed at their first use.
LIMIT = 1.15
# The same for the first use of a part, and the number of texts that it may compile, of 0.1 ms each. Below
# both limits it takes less than 50 ms of processor time. `gradients` had 1.2 and 1083, `linalg` 0.33 and 423.
LIMIT_OF_PART, COMPILED = 0.45, 340

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the probe reads /proc")

PROBE = """
import sys
before = set(sys.modules)  # what `.pth` files of other packages load into every interpreter
import json, threading
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
import numpy, trio
first = calls
import {module}
sys.setprofile(None)
share = (calls - first) / first
with open("/proc/self/maps") as file:
    maps = sorted({{line.split(maxsplit=5)[5].strip() for line in file if line.count("/")}})
with open("/proc/self/status") as file:
    tasks = next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
print(json.dumps(dict(
    share=share, modules=sorted(set(sys.modules) - before), maps=maps, tasks=tasks,
    threads=[thread.name for thread in threading.enumerate()],
)))
"""


# Each public name with an import at first use. Forks share the import of the package, and no part sees what
# another has imported.
PARTS = """
import json, os, sys
calls = compiled = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
def hook(event, arguments):
    global compiled
    compiled += event == "compile"
sys.setprofile(count)
import numpy, trio
sys.setprofile(None)
first = calls
import trio_accel as ta
PARTS = [name for name in ta.__all__ if name not in vars(ta)]
sys.addaudithook(hook)

async def use(part):
    global calls, compiled
    calls = compiled = 0
    sys.setprofile(count)
    getattr(ta, part)
    sys.setprofile(None)
    print(json.dumps([part, calls / first, compiled]), flush=True)

def in_fork(function, *arguments):
    child = os.fork()
    if not child:
        function(*arguments)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

# The first import of a module may have to compile it.
in_fork(lambda: [getattr(ta, part) for part in PARTS])
for part in PARTS:
    in_fork(trio.run, use, part)
"""


def probe(module: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        # One thread for NumPy's BLAS, so that there is one before the import, whatever the machine.
        env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    return probe("trio_accel")


def test_no_type_of_low_precision_is_hashed(imported: dict[str, Any]) -> None:
    assert "ml_dtypes" not in imported["modules"]


def test_no_heavy_library_is_loaded(imported: dict[str, Any]) -> None:
    assert [name for name in imported["modules"] if name.split(".")[0] in HEAVY] == []


def test_no_thread_is_started(imported: dict[str, Any]) -> None:
    assert imported["threads"] == ["MainThread"]
    assert imported["tasks"] == 1  # threads of native code too


def test_no_driver_is_opened(imported: dict[str, Any]) -> None:
    assert any("libc" in name for name in imported["maps"])
    assert [name for name in imported["maps"] if "libcuda" in name or "nvidia" in name] == []


def test_import_takes_little_beyond_trio_and_numpy(imported: dict[str, Any]) -> None:
    assert imported["share"] < LIMIT


def test_the_first_use_of_each_part_takes_little() -> None:
    command = [sys.executable, "-c", PARTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"gradients", "grad", "interop", "blocking", "testing"} <= {part for part, _, _ in found}
    assert [line for line in found if line[1] > LIMIT_OF_PART or line[2] > COMPILED] == []


def test_the_probe_sees_a_heavy_library() -> None:
    seen = probe("scipy.linalg")
    assert "scipy.linalg" in seen["modules"]
    assert any("scipy" in name for name in seen["maps"])

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from chosen import ROOT, SEARCHED
from counts import code_tokens

from trio_accel.backends import list_devices, register, resolve
from trio_accel.backends.base import NotSupportedError

VARIABLE = "TRIO_ACCEL_BACKEND"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("spec", ["cpu", "cpu:0"])
def test_the_cpu_by_name(spec):
    backend, info = resolve(spec)
    assert backend.name == "cpu"
    assert info == backend.list_devices()[0]
    assert info in list_devices()


def test_without_a_name_it_is_the_best_there_is():
    backend, info = resolve(None)
    assert info == list_devices()[0]
    assert backend.name == info.backend


def test_the_environment_variable_names_the_device(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cpu:0")
    assert resolve(None)[1].name == "cpu:0"
    monkeypatch.setenv(VARIABLE, "")
    assert resolve(None)[1] == list_devices()[0]
    monkeypatch.setenv(VARIABLE, "no such")
    assert resolve("cpu")[1].name == "cpu:0"  # an explicit name wins


@pytest.mark.parametrize(
    "spec", ["cpu:x", "", "gpu", "cpu:", "cpu:-1", "CPU", " cpu", "cpu:0:0", "cpu:\u0661", "cpu\n"]
)
def test_an_invalid_name_is_refused_with_the_allowed_names(spec, monkeypatch):
    with pytest.raises(ValueError, match=r"allowed: cuda, cuda:<number>, cpu, cpu:<number>") as caught:
        resolve(spec)
    assert repr(spec) in str(caught.value)
    assert VARIABLE not in str(caught.value)
    if spec:
        monkeypatch.setenv(VARIABLE, spec)
        with pytest.raises(ValueError, match="allowed") as caught:
            resolve(None)
        assert VARIABLE in str(caught.value)


def test_a_missing_device_is_refused_with_the_existing_devices(monkeypatch):
    with pytest.raises(ValueError, match=r"spec: 'cpu:7'.*available: .*cpu:0"):
        resolve("cpu:7")
    monkeypatch.setenv(VARIABLE, "cpu:7")
    with pytest.raises(ValueError, match=VARIABLE):
        resolve(None)


@pytest.mark.parametrize("spec", ["cuda", "cuda:1"])
def test_a_backend_without_a_device_gives_the_reason(spec, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # with a driver as without one
    with pytest.raises(NotSupportedError, match=r"NVIDIA driver.*; available: cpu:0") as caught:
        resolve(spec)
    assert caught.value.backend == "cuda"
    assert resolve(None)[1].name == "cpu:0"
    monkeypatch.setenv(VARIABLE, spec)
    with pytest.raises(NotSupportedError, match=VARIABLE):
        resolve(None)


def test_a_backend_of_another_package():
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from trio_accel import backends\n"
        "backends.register('third', 'third_backend:ThirdBackend')\n"
        "assert 'third_backend' not in sys.modules\n"
        "assert backends.resolve('third')[1].name == 'third:0'\n"
        "names = [info.backend for info in backends.list_devices()]\n"
        "assert names.index('cpu') < names.index('third')\n"
    )
    env = {**os.environ, "PYTHONPATH": SEARCHED}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=env)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Third", "is not a name of a backend"),
        ("a:0", "is not a name"),
        ("", "is not a name"),
        ("cpu", "already, trio"),
    ],
)
def test_a_name_that_a_backend_cannot_have(name, text):
    with pytest.raises(ValueError, match=text):
        register(name, "nowhere:Nothing")


def test_a_backend_needs_little_code():
    assert 1000 < code_tokens(ROOT / "tests" / "third_backend.py") <= 2500


def test_finding_the_devices_is_light():
    program = (
        "import sys, threading; from trio_accel.backends import list_devices; list_devices();"
        "heavy = {'scipy', 'cuda', 'nvmath'} & set(sys.modules); sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

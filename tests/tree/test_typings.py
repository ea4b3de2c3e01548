"""The hand-written stubs of vendors' packages match the contents of these packages."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STUBS = sorted((ROOT / "typings").rglob("*.pyi"))


def name_of(stub: Path) -> str:
    return ".".join(stub.relative_to(ROOT / "typings").with_suffix("").parts).removesuffix(".__init__")


def parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def differences(name: str, tree: ast.Module, module: ModuleType) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=function):
                real = getattr(module, function, None)
                # Bindings of another version may have further ones, which have defaults.
                theirs = [] if real is None else list(inspect.signature(real).parameters)
                if real is None or theirs[: len(parameters(node))] != parameters(node):
                    yield f"{name}.{function}({', '.join(parameters(node))})"
            case ast.ClassDef(name=kind) if not kind.startswith("_"):
                yield from (f"{name}.{one}" for one in class_differences(node, getattr(module, kind, None)))
            case ast.AnnAssign(target=ast.Name(id=constant)) if not constant.startswith("_"):
                if not hasattr(module, constant):
                    yield f"{name}.{constant}"
            case _:
                pass


def class_differences(node: ast.ClassDef, real: Any) -> Iterator[str]:
    is_error = any(isinstance(base, ast.Name) and base.id == "Exception" for base in node.bases)
    for member in node.body:
        match member:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if int(getattr(real, name, None) or 0) != ast.literal_eval(value):
                    yield f"{node.name}.{name}"
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                # The attributes of an exception come from its `__init__`.
                if not is_error and not hasattr(real, name):
                    yield f"{node.name}.{name}"
            case _:
                if real is None:
                    yield node.name


@pytest.mark.parametrize("stub", STUBS, ids=name_of)
def test_the_names_of_a_stub_exist(stub: Path) -> None:
    name = name_of(stub)
    # TensorRT's wheels are too large for the machines that test the package.
    module = pytest.importorskip(name) if name == "tensorrt" else importlib.import_module(name)
    assert list(differences(name, ast.parse(stub.read_text(encoding="utf-8")), module)) == []


def test_a_missing_name_or_value_is_found() -> None:
    from cuda.bindings import driver

    wrong = ast.parse(
        "def cuNothing(): ...\ndef cuInit(flags): ...\nCU_NOTHING: int\n"
        "class CUresult:\n    CUDA_ERROR_NOT_READY = 7\n"
    )
    assert list(differences("d", wrong, driver)) == [
        "d.cuNothing()",
        "d.cuInit(flags)",
        "d.CU_NOTHING",
        "d.CUresult.CUDA_ERROR_NOT_READY",
    ]


@pytest.mark.slow
def test_the_modules_of_the_backend_can_be_imported_without_a_driver() -> None:
    folder = ROOT / "trio_accel" / "backends" / "cuda"
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in folder.rglob("*.py")]
    program = f"import importlib\nfor name in {sorted(names)}: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

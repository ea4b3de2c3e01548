"""NVRTC with the disk cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.core")

from cuda.core import Program, ProgramOptions

from trio_accel.backends.base.kit.code_cache import CodeCache
from trio_accel.backends.cuda.runtime import _compiler

pytestmark = pytest.mark.no_device

SOURCE = '#include "scale.h"\ntemplate<class T> __global__ void scale(T* x) { *x *= SCALE; }\n'


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of the compilations so far."""
    targets: list[str] = []
    compile_it = Program.compile

    class Counted(Program):
        def compile(self, target_type: str, **keywords: Any) -> Any:
            targets.append(target_type)
            return compile_it(self, target_type, **keywords)

    monkeypatch.setattr("cuda.core.Program", Counted)
    return targets


@pytest.mark.usefixtures("only_cuda")
def test_compiled_code_is_found_with_its_names(tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "scale.h").write_text("#define SCALE 2\n")
    cache = CodeCache(tmp_path / "kernels")

    def compiled(**options: Any) -> Any:
        chosen = ProgramOptions(**{"arch": "sm_90", "include_path": str(tmp_path), **options})
        return _compiler.compiled(SOURCE, chosen, names=["scale<float>"], cache=cache)

    first = compiled()
    assert first.code
    assert list(first.names) == ["scale<float>"]
    assert compiled() == first
    assert compilations == ["cubin"]
    compiled(fma=False)
    assert len(compilations) == 2
    (tmp_path / "scale.h").write_text("#define SCALE 3\n")
    assert compiled().code
    assert len(compilations) == 3


@pytest.mark.usefixtures("only_cuda")
def test_unknown_origins_are_compiled_each_time(tmp_path: Path, compilations: list[str]) -> None:
    cache = CodeCache(tmp_path / "kernels")
    source = '#define NAME "x.h"\n#if 0\n#include NAME\n#endif\nextern "C" __global__ void f() {}\n'
    for _ in range(2):
        _compiler.compiled(source, ProgramOptions(arch="sm_90"), cache=cache)
    assert len(compilations) == 2
    assert not (tmp_path / "kernels").exists()

"""A stranger's first steps: the wheel, the README's commands and example, the sessions of nox."""

from __future__ import annotations

import doctest
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import hatchling.build
import pytest

import trio_accel as ta
from trio_accel.backends.cuda import _installed
from trio_accel.backends.cuda.manifest import VENDOR

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    "adapters",
    "benchmarks",
    "coverage",
    "cuda12",
    "cuda13",
    "dashboard",
    "dev",
    "docs",
    "generate",
    "http",
    "lint",
    "metrics",
    "nvtx",
    "plot",
    "postgres",
    "ray",
    "tensorboard",
    "test",
    "tracing",
    "types",
}


def fenced(language: str, *, after: str = "") -> str:
    """The first fenced block of a language in the README, after a given text."""
    position = README.index(after) + len(after)
    found = re.search(rf"^```{language}\n(.*?)^```$", README[position:], re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where a PEP 517 build backend works
        name = hatchling.build.build_wheel(str(folder))
    return zipfile.Path(folder / name)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.Path) -> Message:
    (folder,) = (child for child in wheel.iterdir() if child.name.endswith(".dist-info"))
    return email.message_from_string((folder / "METADATA").read_text(encoding="utf-8"))


def tracked(*patterns: str) -> set[str]:
    files = (path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_with_types_and_data(wheel: zipfile.Path) -> None:
    names = {name for name in wheel.root.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert names == tracked("trio_accel/**/*", "_trio_accel.py")
    assert "trio_accel/py.typed" in names
    kernels = "trio_accel/backends/cuda/kernels/"
    assert {
        f"{kernels}{name}" for name in ("arrays.cu", "common.cuh", "faults.cu")
    } <= names  # compiled where they are used


def test_the_source_distribution_holds_all_files_of_the_tests(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling.build.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        names = {member.partition("/")[2] for member in archive.getnames()}
    folders = (
        "trio_accel/**/*",
        "_trio_accel.py",
        "typings/**/*",
        "examples/**/*.py",
        "examples/encode/*.txt",
        "benchmarks/**/*.py",
    )
    assert tracked(*folders) <= names
    assert {"noxfile.py", "pyproject.toml", "trio_accel/backends/cuda/kernels/arrays.cu"} <= names


def test_the_wheel_names_its_command_and_carries_its_licence(wheel: zipfile.Path) -> None:
    (folder,) = (child for child in wheel.iterdir() if child.name.endswith(".dist-info"))
    assert "trio-accel = _trio_accel:main" in (folder / "entry_points.txt").read_text(encoding="utf-8")
    licence = (folder / "licenses" / "LICENSE").read_text(encoding="utf-8")
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence


def test_the_version_is_the_same_everywhere(metadata: Message) -> None:
    assert metadata["Version"] == ta.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", ta.__version__)
    try:
        installed = importlib.metadata.version("trio-accel")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed here")
    assert installed == ta.__version__


def test_every_extra_exists_and_refers_to_ones_that_exist(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    referred = re.findall(r"trio-accel\[([^\]]*)\]", str(PROJECT["optional-dependencies"]))
    assert {name.strip() for names in referred for name in names.split(",")} <= EXTRAS


def requirements(*extras: str) -> set[str]:
    """Names of the packages that this one asks for with some extras; not what these ask for in turn."""
    found = {_name(line) for line in PROJECT["dependencies"]}
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            own = re.match(r"trio-accel\[(.*)\]", line)
            found |= requirements(*own[1].split(",")) if own else {_name(line)}
    return found


def _name(requirement: str) -> str:
    return re.sub("[-_.]+", "-", re.split(r"[<>=\[; ]", requirement)[0]).lower()


IMPORT = re.compile(r"^ *(?:from (\w+)[\w.]* import |import (\w+)[\w.]*(?: as \w+)?$)", re.MULTILINE)


def imported(folder: str) -> dict[str, str]:
    """Packages that programs import, each with a file; without what their file skips tests for."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        skipped = re.findall(r"""(?:importorskip|find_spec)\(\s*["'](\w+)""", text)
        for name in {one or other for one, other in IMPORT.findall(text)} - set(skipped):
            found.setdefault(name, path.relative_to(ROOT).as_posix())
    return found


# Sessions of their own, and machines with a GPU, have these.
NOT_IN_CI = {"numba", "ray", "sphinx_polyversion", "tensorrt", "torch", "trio_accel_torch"}
FOLDERS = ("tests", "examples", "benchmarks", "docs")


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_of_programs_are_installed_for_ci(folder: str) -> None:
    installed = requirements("dev")
    files = [path for one in FOLDERS for path in (ROOT / one).rglob("*") if path.suffix in {"", ".py"}]
    own = {path.stem for path in files} | {"trio_accel", *FOLDERS}
    providers = importlib.metadata.packages_distributions()
    missing = {
        name: path
        for name, path in imported(folder).items()
        if name not in sys.stdlib_module_names
        and name not in own | NOT_IN_CI
        and not {_name(provider) for provider in providers.get(name, [])} & installed
    }
    assert missing == {}


def test_no_requirement_is_written_twice() -> None:
    for extra, lines in PROJECT["optional-dependencies"].items():
        names = [_name(line) for line in lines if not line.startswith("trio-accel[")]
        assert sorted(set(names)) == sorted(names), extra


def test_the_base_installation_is_light() -> None:
    base = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert base >= {"trio", "numpy", "scipy", "cuda-core", "cuda-bindings", "nvmath-python"}
    heavy = ("nvidia", "cuda-toolkit", "torch", "cupy", "matplotlib")
    assert [name for name in base if name.startswith(heavy)] == []


@pytest.mark.parametrize("major", [12, 13])
def test_an_extra_installs_all_that_the_cuda_backend_loads(major: int) -> None:
    extra = f"cuda{major}"
    lines = [line.partition(";")[0] for line in PROJECT["optional-dependencies"][extra]]
    bindings, toolkit, sorting, nccl, nccl_itself, cudnn, front_end, cutensor, cudss = lines
    parts = re.fullmatch(rf"cuda-toolkit\[(.*)\]=={major}\.\*", toolkit)
    assert parts is not None
    # cuSPARSE cannot be loaded without nvJitLink. The toolkit has neither cuDNN nor cuTENSOR.
    assert {*parts[1].split(",")} >= {*VENDOR, "nvjitlink"} - {"cudnn", "cutensor"}
    assert cudnn.startswith(f"nvidia-cudnn-cu{major}")
    assert cutensor.startswith(f"cutensor-cu{major}")
    assert front_end.startswith("nvidia-cudnn-frontend")
    assert cudss == f"nvidia-cudss-cu{major}>=0.8,<0.9"
    assert sorting.startswith(f"cuda-cccl[minimal-cu{major}]")
    assert nccl.startswith("nccl4py")
    assert nccl_itself.startswith(f"nvidia-nccl-cu{major}")
    assert bindings.startswith(f"cuda-bindings>={major}")
    assert bindings.endswith(f",<{major + 1}")
    assert _installed.extra_for((major, 0)) == f"pip install '.[{extra}]' in a checkout"


def test_the_extras_that_the_documentation_names_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = [
        name.strip()
        for page in pages
        for names in re.findall(r"(?:trio-accel|'\.)\[([a-z0-9,]+)\]", page.read_text(encoding="utf-8"))
        for name in names.split(",")
    ]
    assert {"cuda12", "cuda13", "plot"} <= set(named) <= EXTRAS


def test_no_unpublished_name_is_installed() -> None:
    """From a checkout, until there is something to find."""
    folders = [ROOT / name for name in ("docs", "trio_accel", "examples")]
    texts = [page for folder in folders for kind in ("md", "py", "txt") for page in folder.rglob(f"*.{kind}")]
    wrong = re.compile(r"pip install '?trio-accel|'trio.accel\[")
    assert [page for page in (ROOT / "README.md", *texts) if wrong.search(page.read_text("utf-8"))] == []


def test_a_newer_driver_gets_the_newest_extra() -> None:
    assert "[cuda13]" in _installed.extra_for((14, 1))


def test_ci_runs_the_readmes_test_command() -> None:
    done = subprocess.run([ROOT / ".ci" / "run", "--print"], capture_output=True, text=True, check=True)
    assert done.stdout == fenced("sh", after="<!-- test command -->\n")
    assert done.stdout.endswith("bin/nox\n")


def test_the_readmes_commands_use_names_that_exist() -> None:
    command = fenced("sh", after="<!-- main command -->\n")
    assert " install . " in command
    (script,) = re.findall(r"\.venv/bin/(trio-accel) ", command)
    assert script in PROJECT["scripts"]


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_the_readmes_example_prints_the_shown_output() -> None:
    program, expected = fenced("python"), fenced("text", after="trio.run(main)")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    # On a busy machine a thread may start so late that the watch of the loop says so.
    said = [line for line in done.stderr.splitlines() if "the Trio loop was held for" not in line]
    assert (done.returncode, said) == (0, [])
    assert doctest.OutputChecker().check_output(expected, done.stdout, doctest.ELLIPSIS), done.stdout


def nox(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # With no device to see, the cuda session cannot run on any machine.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOX")}
    return subprocess.run(
        [sys.executable, "-m", "nox", "--no-venv", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_the_cuda_session_is_skipped_with_the_reason_if_it_cannot_run() -> None:
    done = nox("--session", "tests", "--", "--version")
    assert done.returncode == 0, done.stderr
    assert "tests(backend='cpu'): success" in done.stderr
    assert re.search(r"tests\(backend='cuda'\): skipped \(cannot test the cuda backend: .+\)", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["-s", "tests(backend='cuda')"], {}),
        (["--session=tests(backend='cuda')"], {}),
        (["-k", "cuda"], {}),
        ([], {"NOXSESSION": "tests(backend='cuda')"}),
    ],
)
def test_the_cuda_session_fails_if_it_was_requested_and_cannot_run(
    arguments: list[str], environment: dict[str, str]
) -> None:
    done = nox(*arguments, "--", "--version", **environment)
    assert done.returncode != 0
    assert "aborted: cannot test the cuda backend: " in done.stderr


def test_a_backend_named_for_pytest_is_not_asked_of_nox() -> None:
    done = nox("-s", "tests", "--", "--version", "-k", "cuda")
    assert done.returncode == 0, done.stderr

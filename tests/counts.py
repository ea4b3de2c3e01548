"""Counts of the project about itself: `python tests/counts.py` prints them, with `-v` in detail.

docs/design/counts.md gives the reasons, and `test_counts.py` has the bounds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import itertools
import json
import re
import statistics
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import numpy as np
import scipy.sparse
import trio
from traced_worker import Doubler, entered

import trio_accel as ta
from trio_accel.devices import opened
from trio_accel.patterns import ContinuousBatcher, Last, RunningSequence, Submit

__all__ = [
    "PACKAGE",
    "Executed",
    "Tokens",
    "Trace",
    "code_tokens",
    "count_tokens",
    "executed_files",
    "library_of",
    "package_tokens",
    "private_names",
]

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trio_accel"
# The code of the backends for each library, and their base. Code for several libraries is shared.
LIBRARIES = {
    "arrays": r"/expressions/|cpu/compiled/|gpu/(kernels|primitives)\.|ops/arrays\."
    r"|kernels/(arrays|integers|values|halves)\.|libraries/(arrays|compiled|_order|_radix_sort)\.",
    "collectives": r"ops/collectives\.|/communicators\.|libraries/(_nccl_ranks|nccl)\.",
    "fft": r"/fft_steps\.|libraries/fft\.",
    "linalg": r"base/kit/(blas|product_layouts)\.|/subscripts\.|ops/fused\.|kernels/solver\."
    r"|libraries/(blas|blaslt|solver|_cublas|_cusolver|_fortran)\.",
    "nn": r"ops/dnn\.|kernels/(dnn|norms)\."
    r"|libraries/(dnn|_attention|_cudnn)\.",
    "random": r"ops/random\.|kernels/(philox|rejection|sequences)\."
    r"|libraries/random\.",
    # These only call functions of other libraries.
    **dict.fromkeys(("ndimage", "signal", "spatial", "tables"), r"(?!)"),
    "sparse": r"kernels/(sparse|structures|residuals)\."
    r"|libraries/(sparse|_sparse_makers|_sparse_steps|_cudss)\.",
    "tensor": r"ops/tensor\.|libraries/tensor\.",
}
SHARED = re.compile(r"base/contract/ops/|base/gpu/|(cpu|cuda)/(libraries|kernels|kit)/")
# Functions that run the user's own code, move data, or replay: they count on neither side.
OWN_CODE = re.compile(r"/_?(jit|programs?|graphs?|conditions|faults|foreign|memory|tensor_maps)\.")
METHODS = {"random": ("Generator", "Sobol"), "collectives": ("Rank",), "tables": ("HashMap",)}
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


@functools.cache  # two counts have most files in common
def code_tokens(path: Path) -> int:
    """Count the tokens of a file, without comments, docstrings, indentation and line ends.

    Tokens do not depend on how a formatter breaks lines, so nothing is gained by long lines.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cu", ".cuh"):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
        return len(re.findall(r"\w+|[^\w\s]", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    docstrings = sum(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in ast.walk(ast.parse(text))
    )
    return sum(token.type not in SILENT for token in _whole_strings(tokens)) - docstrings


def _whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Leave out what is in a formatted string: since Python 3.12 it has tokens of its own."""
    depth = 0
    for token in tokens:
        name = tokenize.tok_name[token.type]
        if depth == 0:
            yield token
        depth += name in {"FSTRING_START", "TSTRING_START"}
        depth -= name in {"FSTRING_END", "TSTRING_END"}


def package_tokens() -> int:
    """Count the tokens of the package in Python."""
    return sum(map(code_tokens, PACKAGE.rglob("*.py")))


@attrs.frozen
class Tokens:
    """Tokens of the code of computing public functions.

    Attributes:
        by_library: Tokens of each library: capability, specifications, and its parts of both backends.
        shared: Tokens of specifications, kits and kernels that serve several libraries.
        functions: Public functions by library, with the drawing and collective methods of its objects.
    """

    by_library: Counter[str]
    shared: int
    functions: dict[str, set[str]]

    @property
    def per_function(self) -> float:
        """The tokens for each function, including shared tokens."""
        return (self.by_library.total() + self.shared) / sum(map(len, self.functions.values()))

    def of(self, library: str) -> float:
        """The tokens of a library for each of its functions."""
        return self.by_library[library] / len(self.functions[library])

    @property
    def median(self) -> float:
        """The tokens for each function of the median library."""
        return statistics.median(map(self.of, self.functions))


def count_tokens() -> Tokens:
    """Count the code of each public function that computes, in Python and in CUDA."""
    tokens, shared = Counter[str](), 0
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix not in (".py", ".pyi", ".cu", ".cuh") or OWN_CODE.search(name):
            continue
        if library := library_of(name):
            tokens[library] += code_tokens(path)
        elif SHARED.match(name.removeprefix("backends/")):
            shared += code_tokens(path)
    return Tokens(tokens, shared, {library: set(public_functions(library)) for library in LIBRARIES})


def library_of(name: str) -> str | None:
    """Name the library that a file of the package belongs to; None for all others."""
    folder, _, rest = name.partition("/")
    if folder == "backends":
        return next((library for library, rooms in LIBRARIES.items() if re.search(rooms, f"/{rest}")), None)
    # Array functions are made of expressions.
    return "arrays" if folder == "expressions" else folder if folder in LIBRARIES else None


def public_functions(library: str) -> Iterator[str]:
    """Find the functions that a library offers, and the methods of its objects that draw or exchange."""
    module = import_module(f"{PACKAGE.name}.{library}")
    yield from (name for name in module.__all__ if inspect.isfunction(getattr(module, name)))
    for class_name in METHODS.get(library, ()):
        for name, _ in inspect.getmembers(getattr(module, class_name), inspect.isfunction):
            if not name.startswith("_"):
                yield f"{class_name}.{name}"


class Trace:
    """The entered Python functions of the package, by file."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.moves = self.folder_moves = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.add(frame.f_code.co_filename)

    def add(self, name: str) -> None:
        """Note that a function of this file was entered."""
        if not name.startswith(str(PACKAGE)):
            return
        self.calls[name] += 1
        if self._last and self._last != name:
            self.moves += 1
            self.folder_moves += Path(self._last).parent != Path(name).parent
        self._last = name


@attrs.frozen
class Executed:
    """One warm operation.

    Attributes:
        application: The functions in the application's thread.
        worker: Those in the loop of the worker, if there is one.
        requests: Requests to the first device.
    """

    application: Trace
    worker: Trace | None
    requests: int


class OneLayer(ta.train.CallModule):
    """The model of a training step."""

    def initial(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return a matrix and a vector."""
        return {"w": rng.normal(0, 0.1, (64, 10)), "b": np.zeros(10)}

    def loss(self, parameters: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        """Return the mean cross entropy."""
        return ta.nn.cross_entropy(batch["x"] @ parameters["w"] + parameters["b"], batch["y"])


@ta.step
def product(x: Any, scale: float) -> Any:
    """Multiply on the device, for the host: traced once."""
    return (ta.linalg.matmul(x, x) * scale).to_host()


async def executed_files(isolation: ta.Isolation) -> dict[str, Executed]:
    """Trace one warm operation of each kind."""
    preload = (ta.Preload("traced_worker", trusted=True),) if isolation == "process" else ()
    options = ta.DeviceOptions(isolation=isolation, preload=preload)
    traced: dict[str, Executed] = {}
    async with ta.open_system("counts") as system:
        device, other = [
            await system.open_device("cpu", name=name, options=options) for name in ("counted", "other")
        ]
        a = await device.put(np.random.default_rng(1).standard_normal((64, 64)))
        s = await device.put(np.eye(64) * 3)
        x = await device.put(np.ones(64))
        sparse = await ta.sparse.csr(device, scipy.sparse.eye_array(64, format="csr"))
        ranks = [x, await other.put(np.ones(64))]
        generator = ta.random.Generator(device, seed=1)
        batch: ta.train.Batch = {"x": np.ones((32, 64), np.float32), "y": np.arange(32) % 10}
        config = ta.train.Config(optimizer=ta.train.adamw(ta.train.warmup_cosine(1e-2, 10, 1000)))
        async with (
            ta.open_program(device, Doubler) as program,
            ta.open_world([device, other]) as world,
            ta.train.open_trainer([device, other], OneLayer, config) as trainer,
        ):
            steps = trainer.steps(itertools.repeat(batch))

            async def step(batch: list[RunningSequence[ta.AccelRef, ta.AccelRef]]) -> list[Any]:
                return [Last([await program.ask(Doubler.double, one.item)]) for one in batch]

            batcher = await system.spawn(ContinuousBatcher[ta.AccelRef, ta.AccelRef], step)
            asks: dict[str, Callable[[], Awaitable[object]]] = {
                "matmul": lambda: ta.linalg.matmul(a, a),
                "cholesky": lambda: ta.linalg.cholesky(s),
                "rfft": lambda: ta.fft.rfft(a),
                "expression": lambda: ta.arrays.hypot(a, s),
                "loss": lambda: ta.nn.mse_loss(a, s),
                "chain": lambda: (ta.linalg.matmul(a, a) * 2.0).to_host(),  # noqa: PLW0108  # made anew each time
                "step": functools.partial(product, a, 2.0),
                "random draw": lambda: generator.normal((64, 64)),
                "sparse product": lambda: ta.sparse.spmv(sparse, x),
                "program call": lambda: program.ask(Doubler.double, x),
                "decode step": lambda: batcher.ask(Submit(x)),
                "collective": lambda: world.all_reduce(ranks),
                "train step": steps.__anext__,
            }
            for name, ask in asks.items():
                traced[name] = await _traced(ask, device, x if isolation == "process" else None)
    return traced


async def _traced(
    ask: Callable[[], Awaitable[object]], device: ta.Device, in_worker: ta.AccelRef | None
) -> Executed:
    for _ in range(30):
        await ask()
        # clock: a longer pause only makes it surer
        await trio.sleep(0.002)
    application: list[Trace] = []
    worker: list[Trace] = []
    # The shortest of seven: the loops also do other things, which do not belong to the operation.
    for _ in range(7):
        begun = time.perf_counter_ns()
        sys.setprofile(trace := Trace())
        try:
            await ask()
        finally:
            sys.setprofile(None)
        application.append(trace)
        # clock: a longer pause only makes it surer
        await trio.sleep(0.002)  # the worker's work after its answer is also the operation's
        if in_worker is not None:
            worker.append(trace := Trace())
            for name in json.loads(await ta.run(entered, in_worker, begun, time.perf_counter_ns())):
                trace.add(name)
            # clock: a longer pause only makes it surer
            await trio.sleep(0.002)
    requests = 0

    def seen(phase: Any, launch: object) -> None:
        nonlocal requests
        requests += phase.value == "validate"

    with opened(device).observed(seen, lambda ask: ask):
        await ask()
    return Executed(_shortest(application), _shortest(worker) if worker else None, requests)


def _shortest(traces: list[Trace]) -> Trace:
    return min(traces, key=lambda trace: (len(trace.calls), trace.calls.total()))


def private_names() -> set[str]:
    """Find the private names of the package that tests import: their own, or from a private module."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name.rpartition(".")[2] for name in full if re.search(r"\._(?!_)", name))
    return found


def main() -> None:
    """Print all counts."""
    is_long = "-v" in sys.argv[1:]
    for isolation in ("inline", "process"):
        for name, executed in trio.run(executed_files, isolation).items():
            for side in ("application", "worker"):
                trace = getattr(executed, side)
                if trace is not None:
                    moves = f"{trace.moves} moves between files, {trace.folder_moves} between folders"
                    calls = f"{len(trace.calls)} files, {trace.calls.total()} calls, {moves}"
                    calls += f", {executed.requests} requests"
                    print(f"{isolation} {name}, {side}: {calls}")
                    rows = [f"    {n:3} {Path(file).relative_to(PACKAGE)}" for file, n in trace.calls.items()]
                    print("\n".join(rows) if is_long else "", end="\n" if is_long else "")
    tokens = count_tokens()
    for library, names in tokens.functions.items():
        whole = tokens.by_library[library]
        print(f"{tokens.of(library):.0f} tokens per function of {library}: {whole} for {len(names)}")
        print(f"    {' '.join(sorted(names))}\n" if is_long else "", end="")
    print(f"{tokens.per_function:.1f} tokens per public function, {tokens.shared} of all tokens shared")
    print(f"{tokens.median:.1f} tokens per public function of the median library")
    print(f"{package_tokens()} tokens of Python in the package")
    print(f"{len(private_names())} private names that tests import")


if __name__ == "__main__":
    main()

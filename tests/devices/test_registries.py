"""Each registry and cache names the kind of dropped objects that watches it, or why it needs none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from chosen import ROOT
from test_dropped_objects import KINDS

pytestmark = [pytest.mark.lint, pytest.mark.no_device]

PACKAGE = ROOT / "trio_accel"
CACHES = ("cache", "lru_cache")
WEAK = ("WeakKeyDictionary", "WeakSet", "WeakValueDictionary")
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "update"),
}

# Kinds of `test_dropped_objects`, each with the registries that it would find.
WATCHED = {
    "actor": "actors._messages:cells actors._system:_around_each expressions._arguments:_served_by",
    "batcher": "actors._loop_watch:_watches",
    "elementwise": "backends.cpu.compiled._plans:_plans expressions._declared:DECLARED",
    "entity": "actors._conditions:_faults cluster._frames:digest_of",
    "hook": "devices.dispatch._chunks:_left_memory devices.launcher._launcher:_launchers",
    "dtype": "backends.base.contract.dtypes:_member_cache",
    "operation": "backends.base.contract.errors:_FUNCTIONS backends.base.kit.kernels:ALLOWED "
    "devices.operations._declared:DECLARED",
    "program": "programs._messages:message_class programs._open:_names programs._program:_programs",
    "recorder": "telemetry._recorder:_recorders",
    "served": "http._serve:_end_interpreter_quickly",
}
# Reasons why a registry has no object of a program, each with its registries.
UNWATCHED = {
    "what the package declares when it is imported": """
        devices.operations._operators:NAMESPACE gradients._backward:operand_names
        gradients._backward:parameters_of
        interop._scipy_fft:_signature nn._losses:LOSSES nn._slopes:DERIVED
    """,
    "backends, which a program registers for good by the import path of their class": """
        backends.__init__:_BACKENDS backends.__init__:_LOADED backends.__init__:_PROBLEMS
        backends.__init__:_backend_paths backends.__init__:_load_own
    """,
    "files, libraries, compilers, threads and processes of this machine": """
        backends.base.expressions._source:prelude backends.base.gpu.primitives:_source
        backends.base.kit.code_cache:_cache_of backends.base.kit.fast_paths:_current
        backends.base.kit.host:model_name backends.base.kit.ranks:_mapped
        backends.cpu.compiled._compiler:_find backends.cpu.compiled._compiler:_sweep
        backends.cpu.compiled._compiler:counts backends.cpu.compiled._compiler:has_fma
        backends.cpu.compiled._compiler:machine backends.cpu.compiled._kernels:_head
        backends.cpu.compiled._text:head backends.cpu.libraries._fortran:find
        backends.cpu.runtime._stream:_THREADS backends.cuda._installed:installed
        backends.cuda._probe:_answers backends.cuda._probe:_stuck
        backends.cuda.runtime._compiler:_header_folders backends.cuda.runtime._graphs:_rooms
        backends.cuda.runtime._signals:_abandoned signal._spectra:_scipy_windows
    """,
    "derived iterations, at most eight for the code of a function, with which they end": """
        gradients._scan:_FUNCTIONS
    """,
    "specifications by import path, which live as long as their module, in workers and replays": """
        devices.wire._specs:_descriptor_at devices.wire._specs:_enum_at
    """,
    "keys and values of texts, numbers and dtypes, and what is made of them": """
        arrays._calculus:_elementwise arrays._calculus:_gradient arrays._calculus:_interpolated
        arrays._calculus:_unwrapped arrays._creation:_expression arrays._indexing:_elementwise
        arrays._indexing:_scattering arrays._indexing:_unravelled arrays._manipulation:_padding
        arrays._scans:_combination arrays._selection:_selecting arrays._sorting:_expression
        arrays._sorting:_reduction arrays._updates:_numbering
        backends.base.contract.ops._array:contiguous_strides
        backends.base.contract.ops._signature:common_shape backends.base.contract.ops.fused:_CHECKED
        backends.base.contract.ops.fused:_DTYPES_BY_NUMBERS
        backends.base.contract.ops.fused:_results backends.base.contract.ops.jit:decode
        backends.base.contract.ops.jit:scalar_offsets
        backends.base.contract.ops.numeric:product_shape
        backends.base.contract.ops.numeric:transformed_shape
        backends.base.contract.ops.tensor:contraction_terms
        backends.base.contract.program_definition:_cached_loads
        backends.base.contract.subscripts:_find backends.base.expressions._arguments:decode
        backends.base.expressions._codec:_of_function
        backends.base.expressions._codec:decode_program backends.base.expressions._parse:parse
        backends.base.expressions._typing:typed backends.base.expressions.compiled:_find_elements
        backends.base.expressions.compiled:_find_reduced
        backends.base.expressions.compiled:_output_count backends.base.gpu.driver:with_axes
        backends.cpu.compiled._kernels:find backends.cpu.compiled._loops:text_of
        backends.cpu.compiled._triangles:_find backends.cpu.libraries.random:_compiled
        backends.cpu.runtime._stream:COMPILED collectives._operations:expression_of
        derivatives._derive:_rule devices.base._library_paths:title_of devices.front._chains:run_on
        devices.operations._operation:_layout devices.wire._answers:_layout
        devices.wire._specs:_layout_of expressions._contractions:_expression
        expressions._contractions:_reduction fft._convolutions:_added fft._convolutions:_factors
        fft._convolutions:_one_sided fft._helpers:_frequency fft._helpers:_moved
        fft._helpers:_smooth fft._real:_expression gradients._elementwise:_gather
        gradients._scan:_loaded gradients._scan:_stored
        interop._array_api:_membership linalg._composed:_polynomial linalg._contractions:_cross
        linalg._contractions:_sum linalg._norms:_identity linalg._norms:_norm
        linalg._norms:_scaled_norm ndimage._interpolation:_interpolated
        ndimage._interpolation:_kernel ndimage._morphology:_looked ndimage._ranks:_network
        ndimage.windows:_padding ndimage.windows:compute ndimage.windows:several
        nn._activations:_glu_grad nn._library:summing nn._losses:_row nn._losses:_rows
        nn._losses:_slopes nn._losses:_terms nn._norms:_part nn._optimizers:_clipping
        nn._optimizers:_step_expression random._distributions:after random._generator:_take
        random._sequences:_power random._sobol:_scaled random._stream:_bounded
        random._stream:_normal random._stream:_transform signal._recursions:_recursion
        signal._recursions:_taps sparse._elements:_scaled sparse._elements:_scatter
        sparse._products:_product sparse._products:_scatter spatial._points:_around
        spatial._points:_cells spatial._points:_is_near tensor._contractions:_expression
        tensor._contractions:_sums tensor._elements:_expression tensor._elements:_reduction
        train._updates:_step_of
    """,
}


def _name_of(expression: ast.expr) -> str:
    """The last part of the name of a function or class, without its arguments."""
    while isinstance(expression, (ast.Call, ast.Subscript)):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return ast.unparse(expression).rpartition(".")[2]


def _variables(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The variables of a module, with their first values."""
    pending: list[ast.stmt] = [*tree.body]
    while pending:
        statement = pending.pop()
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            pending += [*statement.body, *getattr(statement, "orelse", [])]
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value: ast.expr | None = getattr(statement, "value", None)
        yield from ((one.id, value) for one in targets if isinstance(one, ast.Name) and value is not None)


def _cached(body: list[ast.stmt]) -> Iterator[str]:
    """The functions and methods with a cache."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _cached(statement.body)
        for decorator in getattr(statement, "decorator_list", []):
            if (
                isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
                and _name_of(decorator) in CACHES
            ):
                yield statement.name


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _changed(tree: ast.Module) -> Iterator[str]:
    """Names whose objects a function changes: by an item, a method, or a new value."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    for node in {inner for function in functions for inner in ast.walk(function)}:
        changed: list[ast.expr] = []
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CHANGES:
            changed = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        for target in _targets(node):
            changed += [part.value for part in ast.walk(target) if isinstance(part, ast.Subscript)]
            changed += [target] * isinstance(node, ast.AugAssign)
        yield from (one.id for one in changed if isinstance(one, ast.Name))


@cache
def registries() -> frozenset[str]:
    """All registries and caches of the package, as ``package.module:name``."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    variables = {path: dict(_variables(tree)) for path, tree in trees.items()}
    owners: dict[str, list[Path]] = {}
    for path, names in variables.items():
        for name in names:
            owners.setdefault(name, []).append(path)
    found: set[tuple[Path, str]] = set()
    for path, tree in trees.items():
        imported = {
            one.asname or one.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for one in node.names
        }
        found |= {(path, name) for name in _cached(tree.body)}
        found |= {(path, name) for name, value in variables[path].items() if _name_of(value) in CACHES + WEAK}
        for name in set(_changed(tree)):
            if name in variables[path]:
                found.add((path, name))
            elif name in imported:
                found |= {(owner, name) for owner in owners.get(name, ())}
    return frozenset(
        f"{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}:{name}" for path, name in found
    )


def test_each_registry_has_a_kind_or_a_reason() -> None:
    listed = [name for names in [*WATCHED.values(), *UNWATCHED.values()] for name in names.split()]
    assert sorted(registries().difference(listed)) == []
    assert sorted({*listed} - registries()) == []
    assert len({*listed}) == len(listed)


def test_the_kinds_are_there() -> None:
    assert WATCHED.keys() <= KINDS.keys()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("A = {}\ndef f(): A[1] = 2", {"A"}),
        ("A: list[int] = []\nasync def f(): A.append(1)", {"A"}),
        ("A = set()\nclass B:\n    def f(self): A.add(1)", {"A"}),
        ("A = {}\ndef f(): del A[1]", {"A"}),
        ("A = ()\ndef f():\n    global A\n    A = A + (1,)", {"A"}),
        ("A = {}\nA[1] = 2", set()),
    ],
)
def test_a_change_by_a_function_is_found(code: str, names: set[str]) -> None:
    tree = ast.parse(code)
    assert set(_changed(tree)) & dict(_variables(tree)).keys() == names


def test_a_cache_is_found() -> None:
    tree = ast.parse("@functools.lru_cache(3)\ndef f(): ...\nclass A:\n    @cache\n    def g(self): ...")
    assert [*_cached(tree.body)] == ["f", "g"]

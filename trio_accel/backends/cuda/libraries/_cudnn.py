"""cuDNN's graphs, by NVIDIA's Python front end: built once for a specification, run by addresses (D165).

And the base of convolutions, pooling and attention: kernels of `dnn.cu`, and wide arrays for them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from types import ModuleType
from typing import Any, ClassVar

import attrs

from ....actors import warn_untold
from ...base import DType, Ints, LibraryError
from ...base.contract.ops import ArraySpec, StatusArray
from ...base.gpu.driver import KernelFunction, LoadedCode, with_axes
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice
from ..runtime._stream import CudaStream, capture_once

# Set if the stand-in driver is used.
_STAND_IN = "TRIO_ACCEL_STAND_IN"
_MODULE = "cudnn._compiled_module"
# If a graph needs more, cuDNN's other choices are tried.
_MOST_WORKSPACE = 1 << 30
# An address that nothing reads, because a captured call does not run.
_NOWHERE = 1 << 40


@attrs.frozen
class TensorDescription:
    """An array as a graph sees it.

    Attributes:
        dtype: Element type.
        shape: Elements along each axis: four axes at least.
        strides: Elements from one to the next along each axis.
    """

    dtype: DType
    shape: Ints
    strides: Ints

    @classmethod
    def packed(cls, dtype: DType, shape: Sequence[int]) -> TensorDescription:
        """Make the layout of elements in C order without gaps."""
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.append(strides[-1] * extent)
        return cls(dtype, tuple(shape), tuple(reversed(strides)))


class CudnnGraph(LoadedCode):
    """A built graph, which determines the kernels of cuDNN and their order.

    Attributes:
        size: Bytes of workspace that it needs.
    """

    __slots__ = ("_graph", "_order", "_owner", "size")

    def __init__(self, owner: Cudnn, graph: Any, names: Sequence[str]) -> None:
        super().__init__(self._drop)
        self._owner = owner
        self._graph: Any = graph
        numbers: list[int] = graph._get_variant_pack_uids_sorted()  # noqa: SLF001
        self._order: list[str] = [names[number - 1] for number in numbers]
        self.size: int = int(graph.get_workspace_size())

    def _drop(self) -> None:
        self._graph = None

    def run(self, stream: CudaStream, workspace: int, addresses: dict[str, int]) -> None:
        """Enqueue it; the addresses are by the names of its arrays."""
        self._runs[stream] = stream.timeline.sequence + 1
        self._owner.move_to(stream)
        self._execute(addresses, workspace, self._owner.running)

    def _execute(self, addresses: dict[str, int], workspace: int, handle: int) -> None:
        self._graph._execute_with_ptrs([addresses[name] for name in self._order], workspace, handle)  # noqa: SLF001

    def try_out(self, handle: int) -> None:
        """Have the driver load its kernels: it is captured on a stream of its own, and does not run."""
        self._execute(dict.fromkeys(self._order, _NOWHERE), _NOWHERE, handle)


class Cudnn:
    """The library on a device. Made in a thread, with the context current; that blocks.

    Args:
        device: The device.
        front: The result of `front_end`.

    Attributes:
        front: The front end's extension module.
        running: The handle that executes graphs.
    """

    def __init__(self, device: LibraryDevice, front: ModuleType) -> None:
        self._context = device.context
        self.front: ModuleType = front
        self._stream: CudaStream | None = None
        # A handle serves one thread at a time, and threads other than the executing one build graphs.
        self.running: int = self.front.create_handle()
        self._building: int = self.front.create_handle()

    def destroy(self) -> None:
        """Give the handles back; the context is current."""
        self.front.destroy_handle(self.running)
        self.front.destroy_handle(self._building)

    def move_to(self, stream: CudaStream) -> None:
        """Let the handle work on a stream."""
        if stream is not self._stream:
            self.front.set_stream(self.running, stream.handle)
            self._stream = stream

    def build(
        self,
        arrays: dict[str, TensorDescription],
        outputs: Iterable[str],
        describe: Callable[[Any, dict[str, Any]], Sequence[Any]],
        *,
        is_exact: bool,
    ) -> CudnnGraph | None:
        """Build a graph; blocks.

        Args:
            arrays: Its arrays by names, written arrays last.
            outputs: Names of the written arrays, in the order of the results of `describe`.
            describe: Called with the graph and its arrays; adds nodes, and returns their results.
            is_exact: Whether float32 must not be computed in a shorter type.

        Returns:
            The graph; None if cuDNN lacks kernels for it.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        front, names, written = self.front, tuple(arrays), tuple(outputs)
        try:
            graph = self._describe(arrays, written, describe)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([front.heur_mode.A, front.heur_mode.FALLBACK])
            notes = front.numerical_note
            shorter = [notes.DOWN_CONVERT_INPUTS, notes.REDUCED_PRECISION_REDUCTION]
            graph.deselect_numeric_notes([*shorter, notes.TENSOR_CORE] if is_exact else shorter)
            graph.deselect_workspace_greater_than(_MOST_WORKSPACE)
            graph.check_support()
            graph.build_plans(front.build_plan_policy.HEURISTICS_CHOICE)
            result = CudnnGraph(self, graph, names)
        except front.cudnnGraphNotSupportedError:
            return None
        except (RuntimeError, ValueError) as error:
            # A library may not know a feature of a newer front end, and reports that by other errors.
            self._raise_lost(error)
            return None
        self._try_out(result)
        return result

    def _describe(
        self,
        arrays: dict[str, TensorDescription],
        written: Sequence[str],
        describe: Callable[[Any, dict[str, Any]], Sequence[Any]],
    ) -> Any:
        """Make a graph without building it."""
        kinds = self.front.data_type
        is_double = any(layout.dtype is DType.float64 for layout in arrays.values())
        inner = kinds.DOUBLE if is_double else kinds.FLOAT
        graph = self.front.pygraph(
            io_data_type=inner, intermediate_data_type=inner, compute_data_type=inner, handle=self._building
        )
        tensors = {
            name: graph._make_tensor(  # noqa: SLF001
                dim=list(layout.shape),
                stride=list(layout.strides),
                data_type=getattr(kinds, _NAMES[layout.dtype]),
                name=name,
                uid=number,
            )
            for number, (name, layout) in enumerate(arrays.items(), 1)
            if name not in written
        }
        numbers = {name: number for number, name in enumerate(arrays, 1)}
        for name, tensor in zip(written, describe(graph, tensors), strict=True):
            layout = arrays[name]
            tensor.set_output(True).set_uid(numbers[name])
            # The method of the extension: Python's own layer has another of this name.
            tensor._set_data_type(getattr(kinds, _NAMES[layout.dtype]))  # noqa: SLF001
            tensor.set_dim(list(layout.shape)).set_stride(list(layout.strides))
        return graph

    def _try_out(self, graph: CudnnGraph) -> None:
        """Capture a graph once, and throw that away: its first launch has nothing to load then."""

        def enqueue(stream: int) -> None:
            self.front.set_stream(self._building, stream)
            graph.try_out(self._building)

        try:
            # A module that fails to load here is loaded by the first launch.
            with suppress(RuntimeError):
                capture_once(self._context, enqueue)
        finally:
            self.front.set_stream(self._building, 0)

    def error_of(self, error: Exception) -> Exception:
        """Convert an error of the front end to an error of backends."""
        self._raise_lost(error)
        return LibraryError(f"dnn: cuDNN: {error}", library="dnn", code="cudnn")

    def _raise_lost(self, error: Exception) -> None:
        """Raise the failure of the context, if it is lost: the library cannot name it."""
        self._context.detect_loss()
        failure = self._context.failure()
        if failure is not None:
            raise failure from error


def front_end() -> ModuleType | None:
    """Find cuDNN and the extension module of its front end; None where there is none of use. Blocks.

    Not by the front end's own package: that imports PyTorch where it is installed.
    """
    if os.environ.get(_STAND_IN):
        # It would call the stand-in as a real driver.
        return None
    reason = "nvidia-cudnn-frontend is of another version; pip install '.[cuda13]' in a checkout"
    try:
        module = sys.modules.get(_MODULE) or _load()
        if hasattr(module, "pygraph") and hasattr(module.pygraph, "_execute_with_ptrs"):
            return module
    except Exception as error:  # noqa: BLE001  # whatever is wrong with an installation, there is another way
        reason = str(error)
    text = "convolutions and attention go without cuDNN, which is slower: %s"
    warn_untold("trio_accel.backends", text, reason)
    return None


def _load() -> ModuleType:
    spec = importlib.util.find_spec("cudnn")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("_compiled_module*.so"))]
    if not files:
        raise ImportError("nvidia-cudnn-frontend is not installed: pip install '.[cuda13]' in a checkout")
    library = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cudnn")
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(files[0]))
    module_spec = importlib.util.spec_from_file_location(_MODULE, files[0], loader=loader)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    loader.exec_module(module)
    module._set_dlhandle_cudnn(ctypes.CDLL(library.abs_path)._handle)  # noqa: SLF001
    sys.modules[_MODULE] = module
    return module


FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)

KINDS = {dtype: number for number, dtype in enumerate(FLOATS)}
"""Numbers of the dtypes, as dnn.cu has them."""

# The front end's names of types.
_NAMES: dict[DType, str] = dict(
    zip((*FLOATS, DType.int32), ("HALF", "BFLOAT16", "FLOAT", "DOUBLE", "INT32"), strict=True)
)

LANES = 32
"""Threads that share a row, or a weight."""

SCORES = "7Q11qd4i"
"""Layout of what a kernel over scores is told, before the axes of its mask."""

_GRID = "18q"
# The layouts of the structures in dnn.cu.
_LAYOUTS: dict[str, Struct] = {
    **dict.fromkeys(
        ("convolution", "convolution_input_grad", "convolution_weight_grad"), Struct(f"<4Q5q{_GRID}q")
    ),
    "add_bias": Struct("<2Q3qi4x"),
    **dict.fromkeys(("pool", "mean_pool_grad"), Struct(f"<3Qq{_GRID}3qq4i")),
    "max_pool_grad": Struct("<4Q3q2i"),
    "check_lengths": Struct("<3Q2q2i"),
    "check_blocks": Struct("<4Q4q2i"),
    "gather": Struct("<4Q11q"),
    "attention_fused": Struct("<12Q41qd"),
    "mask_to_bias": Struct("<2Q2q"),
    "attention_means": Struct("<3Q3q"),
    "attention_mend": Struct("<4Q12q"),
    **dict.fromkeys(("attention_weights", "attention_slopes"), with_axes(SCORES, 2, 0)),
}

_SPATIAL = 3
# Alignment in bytes that the front end takes for granted of its tensors.
_ALIGNMENT = 16


class DnnKernels(CudaLibrary):
    """The kernels of the source `dnn`, and cuDNN: both are loaded when a plan needs them."""

    name = "dnn"
    # Graphs of cuDNN have kernels in device memory.
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._functions: dict[str, KernelFunction] = {}
        self._cudnn: Cudnn | None = None
        self._has_looked = False

    def _find_cudnn(self) -> Cudnn | None:
        """Load cuDNN, once; None where it is not installed. Blocks."""
        if not self._has_looked:
            self._has_looked = True
            front = front_end()
            self._cudnn = None if front is None else Cudnn(self._device, front)
        return self._cudnn

    def _run_graph(self, graph: CudnnGraph, call: KernelCall, addresses: dict[str, int]) -> None:
        """Enqueue a graph of cuDNN."""
        workspace = call.workspace(graph.size)
        try:
            graph.run(call.stream, workspace, addresses)
        except (RuntimeError, ValueError) as error:
            assert self._cudnn is not None
            raise self._cudnn.error_of(error) from error

    def _close_plan(self, plan: Any) -> None:
        graph = getattr(plan, "graph", None)
        if graph is not None:
            graph.close()

    def _is_busy(self, plan: Any) -> bool:
        graph = getattr(plan, "graph", None)
        return graph is not None and graph.is_busy

    def _destroy(self) -> None:
        if self._cudnn is not None:
            self._cudnn.destroy()
        super()._destroy()

    def _load_kernels(self) -> None:
        """Compile the source, and load its kernels, once; blocks."""
        if not self._functions:
            load = self._device.kernels.function
            self._functions = {name: load("dnn", name, layout.size) for name, layout in _LAYOUTS.items()}

    def launch(
        self, name: str, call: KernelCall, count: int, *values: object, layout: Struct | None = None
    ) -> None:
        """Launch a loaded kernel with `count` threads."""
        self._functions[name].run(call.handle, count, layout or _LAYOUTS[name], *values)


def wide_of(dtype: DType) -> DType:
    """Return the type that an array is computed in."""
    return DType.float32 if dtype.is_half else dtype


def wide(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array, or of a copy, without gaps and in the type that it is computed in."""
    if not array.dtype.is_half:
        return call.packed(array)
    room = call.workspace_array(DType.float32, array.shape)
    call.convert(call.array(array), room)
    return room.address


def is_aligned(array: ArraySpec) -> bool:
    """Return whether the first element is aligned, so that cuDNN may read several at once."""
    return array.offset % _ALIGNMENT == 0


def aligned(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array without gaps, as cuDNN wants it: its own, or a copy's."""
    return call.packed(array) if is_aligned(array) else call.copy_of(array).address


@contextmanager
def aligned_result(call: KernelCall, array: ArraySpec, *, is_direct: bool = False) -> Generator[int]:
    """Yield the address to write a result to: in place, or without gaps in cuDNN's layout."""
    if is_direct or (array.is_contiguous and is_aligned(array)):
        yield call.address_of(array)
        return
    room = call.workspace_array(array.dtype, array.shape)
    yield room.address
    call.convert(room, call.array(array))


@contextmanager
def wide_result(call: KernelCall, array: ArraySpec) -> Generator[int]:
    """Give the address to write a result to, without gaps and in the type that it is computed in."""
    if array.is_contiguous and not array.dtype.is_half:
        yield call.address_of(array)
        return
    room = call.workspace_array(wide_of(array.dtype), array.shape)
    yield room.address
    call.convert(room, call.array(array))


def grid_of(spec: Any, images: ArraySpec, windows: ArraySpec, extents: Ints) -> Ints:
    """Return the numbers of a grid with three axes; missing leading axes have one element.

    Args:
        spec: Has stride and padding, and perhaps a dilation.
        images: Images of shape (..., *spatial).
        windows: Windows of shape (..., *windows).
        extents: Elements of a window.
    """
    axes = len(spec.stride)
    rows = (
        (images.shape[-axes:], 1),
        (extents, 1),
        (windows.shape[-axes:], 1),
        (spec.stride, 1),
        (spec.padding, 0),
        (getattr(spec, "dilation", (1,) * axes), 1),
    )
    return tuple([number for row, fill in rows for number in (*(fill,) * (_SPATIAL - axes), *row)])


def images_of(array: ArraySpec, axes: int) -> int:
    """Return the number of images; 1 without an axis of images."""
    return math.prod(array.shape[: array.ndim - axes - 1])


def first_wrong(words: StatusArray) -> int:
    """Return the number that a kernel has found wrong, out of its two halves."""
    return (int(words[2]) << 32) | (int(words[1]) & 0xFFFFFFFF)

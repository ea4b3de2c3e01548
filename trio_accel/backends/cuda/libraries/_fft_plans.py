"""The plans of cuFFT, and a cache of those that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakValueDictionary

from nvmath.bindings import cufft

from ..runtime._context import CudaContext
from ..runtime._stream import CudaStream
from ._fft_layout import PlanKey

__all__ = ["Plan", "Plans"]

_TYPES = {
    ("c2c", False): cufft.Type.C2C,
    ("c2c", True): cufft.Type.Z2Z,
    ("r2c", False): cufft.Type.R2C,
    ("r2c", True): cufft.Type.D2Z,
    ("c2r", False): cufft.Type.C2R,
    ("c2r", True): cufft.Type.Z2D,
}
_FUNCTIONS: dict[cufft.Type, Callable[..., None]] = {
    cufft.Type.C2C: cufft.exec_c2c,
    cufft.Type.Z2Z: cufft.exec_z2z,
    cufft.Type.R2C: cufft.exec_r2c,
    cufft.Type.D2Z: cufft.exec_d2z,
    cufft.Type.C2R: cufft.exec_c2r,
    cufft.Type.Z2D: cufft.exec_z2d,
}
_FORWARD, _INVERSE = -1, 1


class Plan:
    """One plan: made when it is needed, and made again when it was given back meanwhile.

    Attributes:
        key: What it is made from.
        size: Bytes of the work area that it needs.
        handle: cuFFT's; None while there is none.
    """

    __slots__ = ("__weakref__", "_area", "_function", "_runs", "_signs", "_stream", "handle", "key", "size")

    def __init__(self, key: PlanKey) -> None:
        self.key: PlanKey = key
        self.size: int = 0
        self.handle: int | None = None
        self._function = _FUNCTIONS[_TYPES[key.kind, key.is_double]]
        self._signs: tuple[tuple[int, ...], tuple[int, ...]] = (
            ((_INVERSE,), (_FORWARD,)) if key.kind == "c2c" else ((), ())
        )
        self._area = 0
        self._stream: CudaStream | None = None
        # By stream, the number of its event after the last execution there.
        self._runs: dict[CudaStream, int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past it."""
        self._runs = {
            stream: number
            for stream, number in self._runs.items()
            if not stream.is_destroyed and stream.refresh() < number
        }
        return bool(self._runs)

    def make(self, context: CudaContext) -> None:
        """Have cuFFT plan: takes up to a second, and loads kernels. The context is current."""
        key = self.key
        handle = cufft.create()
        try:
            # The work area is one for all plans.
            cufft.set_auto_allocation(handle, 0)
            self.size = cufft.make_plan_many64(
                handle,
                len(key.lengths),
                key.lengths,
                key.inembed,
                key.istride,
                key.idist,
                key.onembed,
                key.ostride,
                key.odist,
                _TYPES[key.kind, key.is_double],
                key.batch,
            )
            # Else the tables are still on their way when they are used.
            context.settle()
        except BaseException:
            with suppress(cufft.cuFFTError):
                cufft.destroy(handle)
            raise
        self._stream, self._area = None, 0
        self.handle = handle

    def execute(
        self,
        stream: CudaStream,
        area: int,
        source: int,
        out: int,
        *,
        is_forward: bool,
        offsets: tuple[tuple[int, int], ...],
    ) -> None:
        """Enqueue the transform, once for each pair of offsets."""
        for source_offset, out_offset in offsets:
            self.run(stream, area, source + source_offset, out + out_offset, is_forward=is_forward)

    def run(self, stream: CudaStream, area: int, source: int, out: int, *, is_forward: bool) -> None:
        """Enqueue the transform once."""
        handle = self.handle
        assert handle is not None
        if stream is not self._stream:
            cufft.set_stream(handle, stream.handle)
            self._stream = stream
        if area != self._area and self.size:
            cufft.set_work_area(handle, area)
            self._area = area
        self._runs[stream] = stream.timeline.sequence + 1
        self._function(handle, source, out, *self._signs[is_forward])

    def destroy(self) -> None:
        """Give it back to cuFFT, which may wait for the device."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            cufft.destroy(handle)


class Plans:
    """The plans that were used last.

    Plans are made and destroyed only where that may block. One that a stream may still execute is not
    destroyed: it has tables of its own in device memory.
    """

    def __init__(self, context: CudaContext, most: int) -> None:
        self._context = context
        self._most = most
        # Those that are made, the one that was used last at the end.
        self._made: OrderedDict[Plan, None] = OrderedDict()
        # A bound plan keeps those that it needs.
        self._by_key: WeakValueDictionary[PlanKey, Plan] = WeakValueDictionary()

    def __len__(self) -> int:
        """How many are made."""
        return len(self._made)

    def find(self, key: PlanKey) -> Plan:
        """The plan of a key, made or not."""
        plan = self._by_key.get(key)
        if plan is None:
            plan = self._by_key[key] = Plan(key)
        return plan

    def use(self, plan: Plan) -> None:
        """Note that one that is made is used now."""
        self._made.move_to_end(plan)

    def make(self, plan: Plan) -> None:
        """Make one; others have to go for it. Blocks."""
        if len(self._made) >= self._most:
            for other in [other for other in self._made if not other.is_busy]:
                del self._made[other]
                other.destroy()
                if len(self._made) < self._most:
                    break
        plan.make(self._context)
        self._made[plan] = None

    def destroy(self) -> None:
        """Destroy all: nothing of them runs any more."""
        for plan in self._made:
            plan.destroy()
        self._made.clear()

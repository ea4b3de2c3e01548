"""Parameters that several workers train at their own pace (Li et al., "Parameter Server", OSDI 2014).

A push makes new arrays, which become current when all exist. So a lost push changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import attrs
import numpy as np
import numpy.typing as npt
import trio

from ..actors import NotExecutedError, TaskLock, checked_options, must_be_count, must_be_one_of
from ..backends.base import ContextLostError, DType
from ..devices import AccelRef, Device
from ..devices.operations._operators import NAMESPACE
from ._submit import CallStatistics, TaskSubmitActor

__all__ = [
    "ParameterServer",
    "ParameterServerStatistics",
    "ParameterState",
    "Parameters",
    "Pull",
    "Push",
    "StaleGradientsError",
    "UpdateStep",
]

UpdateStep: TypeAlias = Callable[..., Awaitable[object]]
"""Changes a parameter and its slots in place: ``await step(parameter, gradient, *slots, number)``."""
_Array: TypeAlias = AccelRef | npt.NDArray[Any]
_OnNan: TypeAlias = Literal["refuse", "allow"]
# Steps are taken on copies, so a loss of the context leaves what they were made of.
_ATTEMPTS = 3
_MOST_SLOTS = 16


class StaleGradientsError(NotExecutedError):
    """The gradients belong to a version that is too old; nothing was changed. Pull, and compute them again.

    Attributes:
        version: The version of the gradients.
        current: The version of the server.
    """

    may_go_elsewhere = False

    def __init__(self, label: str, *, version: int, current: int) -> None:
        super().__init__(
            f"{label}: gradients of version {version} are too old for version {current}; pull them again"
        )
        self.version, self.current = version, current


@attrs.frozen
class Pull:
    """Request the parameters, by ``server.ask(Submit(Pull()))``. It does not wait for pushes."""


@attrs.frozen(eq=False)
class Push:
    """Request a step, by ``server.ask(Submit(Push(gradients, version)))``.

    Attributes:
        gradients: An array for each parameter by name, with its shape and dtype, on any device or the host.
        version: The version of the parameters from which they were computed.
    """

    gradients: Mapping[str, _Array]
    version: int


@attrs.frozen(eq=False)
class Parameters:
    """The reply to `Pull` and `Push`. Its arrays do not change during further steps.

    Attributes:
        version: The number of steps so far.
        arrays: The parameters by name, on the device of the server: views of one array.
    """

    version: int
    arrays: Mapping[str, AccelRef]


@attrs.frozen(kw_only=True)
class ParameterServerStatistics(CallStatistics):
    """Counts of a `ParameterServer` since its incarnation began.

    Attributes:
        version: The number of steps, including earlier incarnations.
        stale: The number of pushes refused for their age.
        repeated: The number of steps repeated after the device lost its context.
    """

    version: int
    stale: int
    repeated: int


class ParameterState:
    """Parameters and an optimizer's arrays. It survives restarts of a `ParameterServer`.

    Made by `ParameterState.put`.

    Attributes:
        device: The device of all arrays.
        version: The number of steps so far.
        flat: All parameters in one flat array.
        slots: The optimizer's arrays, with the shape of `flat`.
    """

    def __init__(self, flat: AccelRef, slots: tuple[AccelRef, ...], shapes: Mapping[str, tuple[int, ...]]):
        self.device: Device = flat.device
        self.version = 0
        self.flat, self.slots = flat, slots
        self._shapes = shapes

    @classmethod
    async def put(
        cls, device: Device, parameters: Mapping[str, npt.NDArray[Any]], *, slots: int = 0
    ) -> ParameterState:
        """Put parameters on a device, with zeros for each slot.

        Args:
            device: The device. If its context is in a worker process, the parameters survive a loss.
            parameters: Host arrays by name, of one floating dtype.
            slots: The number of the optimizer's arrays: 1 for momentum, 2 for AdamW.

        Raises:
            ValueError: `parameters` is empty, or `slots` is not from 0 to 16.
            TypeError: There are several dtypes, or the dtype is not floating.
        """
        must_be_count("ParameterState: slots", slots, minimum=0, maximum=_MOST_SLOTS)
        if not parameters:
            raise ValueError("ParameterState: there must be at least one parameter")
        arrays = {name: np.asarray(array) for name, array in parameters.items()}
        dtypes = {DType.of(array.dtype) for array in arrays.values()}
        if len(dtypes) > 1 or next(iter(dtypes)).kind != "float":
            listing = ", ".join(sorted(map(str, dtypes)))
            raise TypeError(f"ParameterState: parameters must be of one floating dtype, got {listing}")
        flat = await device.put(np.concatenate([array.ravel() for array in arrays.values()]))
        slot_arrays = [await device.zeros(flat.shape, flat.dtype) for _ in range(slots)]
        return cls(flat, tuple(slot_arrays), {name: array.shape for name, array in arrays.items()})

    def current(self) -> Parameters:
        """Return the current parameters."""
        ends = accumulate(map(math.prod, self._shapes.values()))
        arrays = {
            name: self.flat[end - math.prod(shape) : end].reshape(shape)
            for (name, shape), end in zip(self._shapes.items(), ends, strict=True)
        }
        return Parameters(self.version, MappingProxyType(arrays))

    def check(self, label: str, gradients: Mapping[str, _Array]) -> None:
        """Require an array for each parameter, of its shape and dtype.

        Raises:
            ValueError: Other names, or another shape.
            TypeError: No mapping, no array, or another dtype.
        """
        if not isinstance(gradients, Mapping):
            raise TypeError(f"{label}: gradients must be a mapping, got {type(gradients).__name__}")
        differing = gradients.keys() ^ self._shapes.keys()
        if differing:
            names = ", ".join(sorted(map(repr, differing)))
            raise ValueError(f"{label}: gradients must have the names of the parameters; {names} differ")
        for name, shape in self._shapes.items():
            array: object = gradients[name]
            prefix = f"{label}: the gradient of {name!r} must"
            if not isinstance(array, (AccelRef, np.ndarray)):
                raise TypeError(f"{prefix} be an array, got {type(array).__name__}")
            if array.dtype != self.flat.dtype:
                raise TypeError(f"{prefix} be of {self.flat.dtype}, got {array.dtype}")
            if array.shape != shape:
                raise ValueError(f"{prefix} have shape {shape}, got {array.shape}")

    async def joined(self, gradients: Mapping[str, _Array]) -> AccelRef:
        """Return the gradients as one flat array on the device."""
        arrays: list[Any] = [gradients[name] for name in self._shapes]
        if not any(isinstance(array, AccelRef) for array in arrays):
            return await self.device.put(np.concatenate([array.reshape(-1) for array in arrays]))
        for index, gradient in enumerate(arrays):
            if isinstance(gradient, AccelRef) and gradient.device is not self.device:
                arrays[index] = await gradient.copy_to(self.device)
        flat: AccelRef = await NAMESPACE[0].concat(arrays, axis=None)
        return flat

    def commit(self, flat: AccelRef, slots: tuple[AccelRef, ...]) -> None:
        """Make the arrays of a step the current ones."""
        self.flat, self.slots = flat, slots
        self.version += 1


class ParameterServer(TaskSubmitActor[Pull | Push, Parameters]):
    """Trains parameters by the gradients that workers push: a `SubmitActor` with `Parameters` as its replies.

    Steps run one after the other, each on copies. A failed push has changed nothing. If its caller is
    cancelled, either the whole step is done or nothing. If a worker is lost, only its current push is lost.
    If the context of the server's own device is lost, the step is repeated: with
    ``DeviceOptions(isolation="process")`` the arrays still exist. Its statistics are
    `ParameterServerStatistics`.

    Args:
        state: The parameters.
        step: Takes a step in place: ``await step(parameter, gradient, *slots, number)``. Step numbers begin
            with 1. An example with two slots is ``functools.partial(ta.nn.adamw, lr=1e-3)``.
        max_staleness: The maximum number of steps since the version of a push. None for any number.
        on_nan: The reaction to gradients with NaN or infinity. ``"refuse"`` raises a `ValueError`, and costs
            one more request to the device; ``"allow"`` takes the step.

    Raises:
        ValueError: `max_staleness` is below 0, or `on_nan` is invalid.
        TypeError: `state` is not a `ParameterState`, or `step` is not callable.
    """

    @checked_options
    def __init__(
        self,
        state: ParameterState,
        step: UpdateStep,
        *,
        max_staleness: int | None = None,
        on_nan: _OnNan = "refuse",
    ) -> None:
        if not isinstance(state, ParameterState):
            raise TypeError(f"ParameterServer: state must be a ParameterState, got {state!r}")
        if not callable(step):
            raise TypeError(f"ParameterServer: step must be an async function, got {step!r}")
        if max_staleness is not None:
            must_be_count("ParameterServer: max_staleness", max_staleness, minimum=0)
        must_be_one_of("ParameterServer: on_nan", on_nan, get_args(_OnNan))
        self._state, self._step = state, step
        self._most = math.inf if max_staleness is None else max_staleness
        self._refuses_nan = on_nan == "refuse"
        self._turn = TaskLock()
        self._stale = self._repeated = 0

    async def answer(self, item: Pull | Push) -> Parameters:
        """Return the parameters, or take a step.

        Raises:
            StaleGradientsError: The version of the gradients is too old.
            ValueError: Other names or shapes, a version that does not exist yet, or NaN.
            TypeError: Another dtype, or neither `Pull` nor `Push`.
            Exception: An error of the step.
        """
        if isinstance(item, Pull):
            await trio.lowlevel.checkpoint()
            return self._state.current()
        if not isinstance(item, Push):
            raise TypeError(f"ParameterServer: an item must be Pull() or Push(...), got {item!r}")
        must_be_count("ParameterServer: version", item.version, minimum=0, maximum=self._state.version)
        self._state.check("ParameterServer", item.gradients)
        self._check_age(item.version)
        gradient = await self._state.joined(item.gradients)
        if self._refuses_nan and not await NAMESPACE[0].all(NAMESPACE[0].isfinite(gradient)).item():
            raise ValueError("ParameterServer: a gradient has NaN or infinity; nothing was changed")
        async with self._turn:
            # Other pushes had their turns meanwhile.
            self._check_age(item.version)
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    await self._take(gradient)
                    break
                except ContextLostError:
                    if attempt == _ATTEMPTS:
                        raise
                    self._repeated += 1
            return self._state.current()

    async def _take(self, gradient: AccelRef) -> None:
        state = self._state
        flat, *slots = [await array.copy() for array in (state.flat, *state.slots)]
        await self._step(flat, gradient, *slots, state.version + 1)
        state.commit(flat, tuple(slots))

    def _check_age(self, version: int) -> None:
        if self._state.version - version > self._most:
            self._stale += 1
            raise StaleGradientsError("ParameterServer", version=version, current=self._state.version)

    def statistics(self) -> ParameterServerStatistics:
        """Return the counts so far."""
        return ParameterServerStatistics(
            **self._tally,
            version=self._state.version,
            stale=self._stale,
            repeated=self._repeated,
        )

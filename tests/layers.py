"""Which part of the package may import which: `tree/test_layers.py` checks it, and `rooms.py` follows it."""

from __future__ import annotations

PACKAGE = "trio_accel"

# One package per capability; none imports another, except capabilities composed of others.
CAPABILITIES = (
    "arrays",
    "collectives",
    "fft",
    "graphs",
    "jit",
    "linalg",
    "ndimage",
    "nn",
    "programs",
    "random",
    "signal",
    "sparse",
    "spatial",
    "tables",
    "tensor",
    "weights",
)
# The imports allowed to each part besides itself.
DOWNWARDS: dict[str, tuple[str, ...]] = {
    "_names": (),
    "_version": (),
    "actors": (),
    "backends.base": ("actors",),
    "backends": ("actors", "backends.base"),
    "devices": ("actors", "backends", "backends.base"),
    # Programs of gradients; `nn` has slopes of them.
    "derivatives": ("backends.base",),
    # Functions are made of expressions; capabilities are made of functions.
    "expressions": ("actors", "backends.base", "devices"),
    **dict.fromkeys(CAPABILITIES, ("actors", "backends.base", "devices", "expressions")),
    "nn": ("actors", "backends.base", "derivatives", "devices", "expressions"),
    # The steps of solvers are graphs (D166), with products and norms of dense vectors (D176).
    "sparse": ("actors", "backends.base", "devices", "expressions", "graphs", "linalg"),
    # Large windows of a network are sorted, and labels are numbered by a scan.
    "ndimage": ("actors", "arrays", "backends.base", "devices", "expressions"),
    # No libraries of their own: they are made of sorts, selections and kernels (D191).
    **dict.fromkeys(
        ("spatial", "tables"), ("actors", "backends.base", "devices", "expressions", "arrays", "jit")
    ),
    # Composed of transforms, functions of arrays, and kernels of filters.
    "signal": ("actors", "backends.base", "devices", "expressions", "arrays", "fft", "jit"),
    # The base of services, and their views: they know no capability.
    "patterns": ("actors", "backends.base", "devices"),
    # Requests of a device, asked again: it knows no capability.
    "replay": ("_version", "actors", "backends.base", "devices"),
    "telemetry": ("actors", "backends.base", "devices", "http"),
    # The edge of a service: its limits, and probes that look at devices and programs.
    "http": ("actors", "backends.base", "devices", "patterns", "programs"),
    # A blueprint: it sees the public names of its parts. A blueprint: entities of nodes are actors, with the
    # devices of their nodes. Arrays of saves are files of weights (D199).
    "cluster": ("_version", "actors", "backends", "backends.base", "devices", "weights"),
    # The parts between a model and an answer, by the public names of the rooms below.
    "agents": ("actors", "backends.base", "devices", "arrays", "linalg", "patterns", "cluster", "weights"),
    # Rules are calls of public functions.
    "gradients": (
        *("actors", "backends.base", "derivatives", "devices", "expressions"),
        *("arrays", "fft", "graphs", "linalg", "ndimage", "nn", "signal", "sparse"),
    ),
    "train": (
        *("actors", "backends.base", "devices"),
        *("arrays", "collectives", "gradients", "jit", "programs", "weights"),
    ),
}
VENDORS = ("cpu", "cuda", "opencl")
VENDOR_MAY = ("actors", "backends.base")  # never one another
# The rooms of devices and of the base of backends, and their allowed imports besides themselves: a missing
# arrow here is a change of the architecture.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "devices": {
        "base": (),
        "operations": ("base",),
        "engine": ("base", "operations"),
        "launcher": ("base",),
        "wire": ("base", "operations"),
        "worker": ("base", "operations", "engine", "wire"),
        # The two sides of a worker do not know each other.
        "dispatch": ("base", "operations", "engine", "launcher", "wire"),
        "front": ("base", "operations", "engine", "dispatch"),
    },
    "backends.base": {
        "contract": (),
        "expressions": ("contract",),
        "kit": ("contract",),
        "gpu": ("contract", "expressions", "kit"),
    },
}

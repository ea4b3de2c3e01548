"""Operation specifications: what crosses from an actor to a backend, or to a worker process."""

from . import (
    _array,
    _asker,
    _signature,
    _spec,
    arrays,
    collectives,
    dnn,
    fused,
    graphs,
    jit,
    memory,
    numeric,
    random,
    tensor,
)
from ._array import *
from ._asker import *
from ._signature import *
from ._spec import *
from .arrays import *
from .collectives import *
from .dnn import *
from .fused import *
from .graphs import *
from .jit import *
from .memory import *
from .numeric import *
from .random import *
from .tensor import *

__all__: list[str] = []
__all__ += _array.__all__
__all__ += _asker.__all__
__all__ += _signature.__all__
__all__ += _spec.__all__
__all__ += arrays.__all__
__all__ += collectives.__all__
__all__ += dnn.__all__
__all__ += fused.__all__
__all__ += graphs.__all__
__all__ += jit.__all__
__all__ += memory.__all__
__all__ += numeric.__all__
__all__ += random.__all__
__all__ += tensor.__all__

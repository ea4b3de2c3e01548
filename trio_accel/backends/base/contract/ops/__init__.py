"""Operation specifications: the messages from an actor to a backend, or to a worker process."""

from ....._names import export as _export
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
from .tensor_maps import *

_export(__name__)

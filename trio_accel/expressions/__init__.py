"""Functions of arrays that are made of expressions: the part that capabilities share.

An `Elementwise` or a `Reduction` checks its arguments, finds dtypes and the shape of the result, and makes
the message for a library actor. A capability says which actor that is.
"""

from . import _arguments, _contractions, _declared, _elementwise, _reduction, _views
from ._arguments import *
from ._contractions import *
from ._declared import *
from ._elementwise import *
from ._reduction import *
from ._views import *

__all__: list[str] = []
__all__ += _arguments.__all__
__all__ += _contractions.__all__
__all__ += _declared.__all__
__all__ += _elementwise.__all__
__all__ += _reduction.__all__
__all__ += _views.__all__

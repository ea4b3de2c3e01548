"""Functions of arrays defined by expressions: the part that capabilities share.

An `Elementwise` or a `Reduction` checks its arguments, finds dtypes and the shape of the result, and makes
the message for a library actor. The capability names that actor.
"""

from .._names import export as _export
from ._arguments import *
from ._contractions import *
from ._declared import *
from ._expression import *
from ._reduction import *
from ._scatter import *
from ._views import *

_export(__name__)

"""What a service builds around its devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Call`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from ._batch_run import BatchResults, may_be_one_request
from ._batcher import Batcher, BatcherStatistics
from ._call import Call, GetStatistics, Model, Servant, as_callable
from ._cascade import Cascade, CascadeAnswer, CascadeStatistics, NoAnswerError, Passed, Stage, StageStatistics
from ._circuit_breaker import CircuitBreaker, CircuitOpenError, CircuitState, is_failure
from ._deadline import Deadline
from ._fair_queue import Weights
from ._fair_scheduler import FairCall, FairScheduler, FairStatistics, UnknownTenantError
from ._hot_swap import (
    Deployment,
    HotSwap,
    HotSwapStatistics,
    ModelRetiredError,
    Opening,
    Probe,
    Swap,
    SwapFailedError,
    Swapped,
)
from ._moe import MoeRouter, MoeStatistics
from ._moe_results import ExpertsFailedError, Routed, RoutingStatistics
from ._outputs import ModelOutputError
from ._pool import Pool
from ._rate_limit import RateLimit, RateLimitError
from ._replica_pool import Hedge, ReplicaPool, ReplicaPoolStatistics
from ._replicas import Replica, ReplicaStatistics
from ._retry import RetryBudget, retry, was_never_executed
from ._router import NoReplicaError, Router, RouterStatistics
from ._routing import ByKey, ByLoad, Key, Routing
from ._speculative import (
    DecoderStatistics,
    DecodingStatistics,
    Generate,
    Generation,
    Score,
    SpeculativeDecoder,
)
from ._stacked import by_length, by_shape, padded, stacked
from ._tally import CallStatistics
from ._tasks import TaskServant
from ._token_stream import TokenStream, open_token_stream

__all__ = [
    "BatchResults",
    "Batcher",
    "BatcherStatistics",
    "ByKey",
    "ByLoad",
    "Call",
    "CallStatistics",
    "Cascade",
    "CascadeAnswer",
    "CascadeStatistics",
    "CircuitBreaker",
    "CircuitOpenError",
    "CircuitState",
    "Deadline",
    "DecoderStatistics",
    "DecodingStatistics",
    "Deployment",
    "ExpertsFailedError",
    "FairCall",
    "FairScheduler",
    "FairStatistics",
    "Generate",
    "Generation",
    "GetStatistics",
    "Hedge",
    "HotSwap",
    "HotSwapStatistics",
    "Key",
    "Model",
    "ModelOutputError",
    "ModelRetiredError",
    "MoeRouter",
    "MoeStatistics",
    "NoAnswerError",
    "NoReplicaError",
    "Opening",
    "Passed",
    "Pool",
    "Probe",
    "RateLimit",
    "RateLimitError",
    "Replica",
    "ReplicaPool",
    "ReplicaPoolStatistics",
    "ReplicaStatistics",
    "RetryBudget",
    "Routed",
    "Router",
    "RouterStatistics",
    "Routing",
    "RoutingStatistics",
    "Score",
    "Servant",
    "SpeculativeDecoder",
    "Stage",
    "StageStatistics",
    "Swap",
    "SwapFailedError",
    "Swapped",
    "TaskServant",
    "TokenStream",
    "UnknownTenantError",
    "Weights",
    "as_callable",
    "by_length",
    "by_shape",
    "is_failure",
    "may_be_one_request",
    "open_token_stream",
    "padded",
    "retry",
    "stacked",
    "was_never_executed",
]

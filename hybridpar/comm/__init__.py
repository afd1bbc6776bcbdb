"""Communication over one axis: functions of (tensor, axis).

On an axis of size 1 each is the identity; every other call is counted.
"""

from hybridpar.comm.autograd import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_from_,
    scatter_sequence,
    scatter_to,
)
from hybridpar.comm.collectives import (
    Parts,
    Waitable,
    Work,
    Works,
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    all_to_all,
    barrier,
    broadcast,
    gather_objects,
    reduce_scatter,
    reduce_scatter_async,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from hybridpar.comm.p2p import exchange, irecv, isend

__all__ = [
    "Parts",
    "Waitable",
    "Work",
    "Works",
    "all_gather",
    "all_gather_async",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "barrier",
    "broadcast",
    "copy_to",
    "exchange",
    "gather_from",
    "gather_objects",
    "gather_sequence",
    "irecv",
    "isend",
    "reduce_from",
    "reduce_from_",
    "reduce_scatter",
    "reduce_scatter_async",
    "scatter_sequence",
    "scatter_to",
    "start_all_gather",
    "start_all_to_all",
    "start_reduce_scatter",
]

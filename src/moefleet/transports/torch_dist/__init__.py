"""``torch_dist``: any ``torch.distributed`` process group, on one host or many.

A phase of a step is one ``all_to_all_single`` in a steady state, or two where rows are many; ``bus.py`` says how ranks
stay in step whatever each of them does. In dispatch a token crosses once to each rank that serves it, its routing
beside it, and is unpacked from local memory; in combine a rank sends one row per token that it served, and the token's
home sums.

Where rows go is computed on the host, from a copy of the ids: ``all_to_all_single`` wants its sizes there. So on a GPU
each phase waits for the stream once, and a step cannot be captured into a CUDA graph.

On GPUs a collective is a kernel that waits for the other ranks, and whatever waits for the GPU as a whole waits for
them too: taking pinned memory, loading a kernel for the first time, connecting a communicator. Two ranks that wait for
one another in such a way hang. So a Fleet has a communicator of its own, connects it while it is built, in every way
that it will use, issues its collectives in one order on all ranks, and takes memory before them, not under them. The
same goes for what users do beside it: connect their own communicators (one collective will do) before steps run, keep
one order of collectives on all ranks, and leave ``CUDA_DEVICE_MAX_CONNECTIONS=1`` and ``NCCL_LAUNCH_ORDER_IMPLICIT``
alone, under which collectives of several communicators wait for one another.

There is no fault tolerance, as a collective cannot skip a dead member.
"""

from .fleet import TorchDistFleet

__all__ = ["TorchDistFleet"]

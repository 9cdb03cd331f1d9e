"""``torch_dist``: any ``torch.distributed`` process group, on one host or many.

A phase of a step is one ``all_to_all_single`` in a steady state, and three at most; ``bus.py`` says how ranks stay in
step whatever each of them does. In dispatch a token crosses once to each rank that serves it, its routing beside it,
and is unpacked from local memory; in combine a rank sends one row per token that it served, and the token's home sums.

Where rows go is computed on the host, from a copy of the ids: ``all_to_all_single`` wants its sizes there. So on a GPU
each phase waits for the stream once, and a step cannot be captured into a CUDA graph.

There is no fault tolerance, as a collective cannot skip a dead member.
"""

from .fleet import TorchDistFleet

__all__ = ["TorchDistFleet"]

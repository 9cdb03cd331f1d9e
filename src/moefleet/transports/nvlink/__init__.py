"""``nvlink``: GPUs of one host that can map each other's memory, as NVLink lets them.

A token crosses to a rank once, whatever the layout. Rows are pushed into the sender's own region of the receiver's
memory and unpacked there; in combine a rank sums its experts' rows before it sends one home. Steps are numbered on
the GPU, so CUDA graphs of whole steps replay in any order. Needs Triton.
"""

from .fleet import NVLinkFleet
from .geometry import memory_bytes

__all__ = ["NVLinkFleet", "memory_bytes"]

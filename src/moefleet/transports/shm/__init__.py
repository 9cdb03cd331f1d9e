"""``shm``: CPU ranks of one host over shared memory, with no dependency.

Every rank writes only its own segment and reads those of the others, so a rank that is stopped, dies or wakes up in
the middle of a copy can spoil nothing but its own rows. In dispatch a rank stores its tokens and their routing once,
and each receiver gathers the rows that its experts need straight into the layout; in combine a rank stores one row
per token that it served, and the token's home rank sums them.
"""

from .fleet import ShmFleet

__all__ = ["ShmFleet"]

"""``shm``: CPU ranks of one host over shared memory, with no dependency.

In dispatch each token comes straight into the layout of the ranks that need it. Either a rank stores its tokens and
their routing once, and each receiver gathers the rows that its experts need; or, where all ranks have the compiled
helper, who brings many tokens places them in the receivers' memory. In combine a rank leaves one row per token that it
served in its own memory (or, in EXPERT_MAJOR, one for each expert), and the token's home rank sums them.

Every rank writes its own segment, and of the others' only places for received rows: in RANK_MAJOR a block that is its
own, elsewhere places that follow from the routing of all ranks. A rank that is stopped, or dies in the middle of a copy
spoils nothing but rows of a step that is flagged everywhere, since who places rows says by whose routing. When a
decision has masked a rank, which may be alive and wake up later, nobody receives in shared memory any more until all
ranks are active again, or another topology has brought fresh memory.
"""

from .fleet import ShmFleet

__all__ = ["ShmFleet"]

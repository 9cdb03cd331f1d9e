"""Start ranks on this machine and bring back what they return.

    def work(bootstrap, scale):
        return bootstrap.rank * scale

    if __name__ == "__main__":
        for result in launch(work, 4, args=(10,)):
            print(result.rank, result.value, result.error, result.exitcode)

One file per thing: ``pool.py`` what callers use, ``results.py`` what they get, ``nursery.py`` what ranks are forked
from, ``interpreter.py`` how a new Python starts, ``process.py`` the parent's side of a process, ``output.py`` what it
prints, ``stacks.py`` where it hangs, ``rank.py`` what runs in a rank's process, ``wire.py`` what the two say,
``torchrun.py`` the same calls on ranks that torchrun started, ``plain.py`` what those send without pickle,
``devices.py`` the GPU that a rank takes.

Runs on Linux and macOS. On Linux the ranks are children of the nursery: it ends with the process that started it, and
the kernel ends the ranks with it. Elsewhere, and where ranks are no forks and a thread besides the main one started
them, each rank watches for that itself, so one that is stuck in code which never releases Python's interpreter lock
outlives a parent that was killed.
"""

from .pool import RankPool, launch
from .results import RankResult

__all__ = ["RankPool", "RankResult", "launch"]

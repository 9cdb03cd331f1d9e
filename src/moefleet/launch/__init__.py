"""Start ranks on this machine and bring back what they return.

    def work(bootstrap, scale):
        return bootstrap.rank * scale

    if __name__ == "__main__":
        for result in launch(work, 4, args=(10,)):
            print(result.rank, result.value, result.error, result.exitcode)

One file per thing: ``pool.py`` what callers use, ``results.py`` what they get, ``process.py`` the parent's side of a
rank, ``output.py`` what the rank prints, ``stacks.py`` where it hangs, ``rank.py`` what runs in its process,
``wire.py`` what the two say, ``torchrun.py`` the same calls on ranks that torchrun started, ``plain.py`` what those
send without pickle, ``devices.py`` the GPU that a rank takes.

Runs on Linux and macOS. On Linux the kernel ends the ranks with the process whose main thread started them, whatever
ends it. Elsewhere, and for ranks that another thread started, each rank watches for that itself, so one that is stuck
in code which never releases Python's interpreter lock outlives a parent that was killed.
"""

from .pool import RankPool, launch
from .results import RankResult

__all__ = ["RankPool", "RankResult", "launch"]

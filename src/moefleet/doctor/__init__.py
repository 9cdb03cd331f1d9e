"""What this machine has, and what of moefleet works on it.

``machine.py`` looks at the hardware, ``versions.py`` at packages, ``backends.py`` at transports and kernels, each with
the reason where one does not work and what to install; ``diagnosis.py`` puts them together.
"""

from .backends import Backend, kernels, transports
from .diagnosis import Diagnosis, examine
from .machine import Gpu, Machine

__all__ = ["Backend", "Diagnosis", "Gpu", "Machine", "examine", "kernels", "transports"]

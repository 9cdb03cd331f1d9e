"""Where tests of the compiled helper cannot run: without a compiler, or where the helper is switched off.

Nowhere else: a compiler that refuses our sources is a failure.
"""

from __future__ import annotations

import os
import shutil

import pytest

from moefleet import native
from moefleet.native.build import COMPILERS

WHY_NOT = "no C compiler" if not any(map(shutil.which, COMPILERS)) else ""
if os.environ.get(native.SWITCH) == "0":
    WHY_NOT = f"{native.SWITCH}=0"

needs_the_helper = pytest.mark.skipif(bool(WHY_NOT), reason=f"no helper here: {WHY_NOT}")

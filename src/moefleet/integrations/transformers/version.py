"""Which transformers this works with, said before anything of it is used."""

from __future__ import annotations

import re

from ...errors import MoEEpNotBuiltError

MINIMUM = (5, 1)
"""The oldest that passes the tests. In 5.0 a Qwen3-MoE has other names in its config, and nothing on meta is tied."""
INSTALL = "pip install 'moefleet[transformers]'"


def require_transformers() -> None:
    """Raise :class:`MoEEpNotBuiltError` unless a transformers with an experts registry is installed."""
    wanted = "moefleet.integrations.transformers needs transformers {}.{} or newer".format(*MINIMUM)
    try:
        import transformers
    except ImportError as error:
        raise MoEEpNotBuiltError(f"{wanted}: {error}; {INSTALL}") from error
    if parsed(transformers.__version__) < MINIMUM:
        raise MoEEpNotBuiltError(f"{wanted}, not {transformers.__version__}; {INSTALL}")
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as _  # noqa: F401 - whether it is there
    except ImportError as error:
        raise MoEEpNotBuiltError(f"{wanted} with its experts registry: {error}; {INSTALL}") from error


def parsed(version: str) -> tuple[int, ...]:
    """``5.24.0.dev0`` as ``(5, 24)``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])

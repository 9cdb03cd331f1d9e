"""The model that ships with the package, as text sees it and as torch does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def load_model(path: Path) -> Any:
    """The model in float32, from files alone."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


class Tokenizer:
    """Text to token ids and back.

    Args:
        path: directory of the model.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with a replacement character for bytes that are none."""
        return str(self._tokenizer.decode(list(ids)))

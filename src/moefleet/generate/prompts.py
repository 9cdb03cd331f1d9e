"""Text to the tokens that a model reads, and its tokens back to text, also while they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import config_error

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Texts:
    """A checkpoint's tokenizer.

    Args:
        model: directory of the checkpoint.
        chat: wrap each prompt as the user's message of a chat.
    """

    def __init__(self, model: Path, *, chat: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise config_error(
                "--model", f"{str(model)!r} ({error})", "a directory with a model and its tokenizer"
            ) from error
        if chat and not self._tokenizer.chat_template:
            raise config_error("--chat", f"{str(model)!r}, which has no chat template", "a chat model")
        self._chat = chat

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt, at least one."""
        if self._chat:
            message = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tuple(self._tokenizer(prompt, add_special_tokens=not self._chat)["input_ids"])
        if not ids:
            raise config_error("--prompt", "an empty text", "at least one character")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class Growing:
    """A text that arrives token by token: each call returns what is new and will not change."""

    def __init__(self, texts: Texts) -> None:
        self._texts, self._shown = texts, 0
        self._ids: list[int] = []

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Append tokens; unless they are the ``last``, a character that is not complete yet is held back."""
        self._ids.extend(ids)
        text = self._texts.decode(self._ids)
        end = len(text) if last else len(text.rstrip(UNFINISHED))
        new, self._shown = text[self._shown : end], max(end, self._shown)
        return new

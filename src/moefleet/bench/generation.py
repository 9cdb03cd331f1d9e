"""What is measured of a whole model, and what a process does for it: load it, generate, time its forwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from ..config import BootstrapConfig, EpLayout
from ..errors import config_error
from ..launch.devices import take_device
from ..timing import PHASES

if TYPE_CHECKING:
    from ..integrations.transformers import ExpertParallel

ALONE = "transformers"
"""The candidate that is the unmodified model in one process."""


@dataclass(frozen=True)
class ModelCase:
    """Greedy generation of one batch.

    Args:
        model: a checkpoint's folder.
        world: ``W`` ranks, each with its part of the batch: attention is data-parallel, experts are spread.
        batch: sequences of all ranks together.
        prompt_tokens, new_tokens: of each sequence.
        layout: of the Fleet.
        dtype: of weights and rows.
        device: ``"cpu"``, or ``"cuda"``: a GPU for each rank, the first one for the unmodified model.

    Raises:
        MoEEpConfigError: a value is out of range.
    """

    model: Path
    world: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    layout: EpLayout = EpLayout.FLAT
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("prompt_tokens", 1), ("new_tokens", 2)):
            if getattr(self, name) < least:
                raise config_error(name, getattr(self, name), f"at least {least}")

    @property
    def facts(self) -> dict[str, Any]:
        """The case in the words of a record."""
        return {
            "what": "model",
            "layout": self.layout.value,
            "world": self.world,
            "tokens": self.tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "model": self.model.name,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "device": self.device,
        }

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.layout.value}, batch {self.batch}"

    @property
    def tokens(self) -> int:
        """Sequences of the rank that has most."""
        return -(-self.batch // self.world)

    def prompts(self, vocabulary: int, rank: int | None = None) -> torch.Tensor:
        """Token ids ``[B, P]`` of all ranks, or of one, which may have none: ``[0, P]``."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (self.batch, self.prompt_tokens), generator=generator)
        return ids if rank is None else ids.tensor_split(self.world)[rank]


class Text(TypedDict):
    """What one process generated: a dict, which ranks under torchrun can send as it is.

    Attributes:
        tokens: ``[B, N]`` of its sequences.
        seconds: ``[N]`` of each forward, the choice of the next token included.
        phases: ``[N, 4]`` of these the seconds in each of ``PHASES``, all blocks together; empty unless asked for.
    """

    tokens: list[list[int]]
    seconds: npt.NDArray[np.float64]
    phases: npt.NDArray[np.float64]


_alone: dict[str, Any] = {}
_spread: dict[str, ExpertParallel] = {}
"""What this process keeps from opening to closing a case."""


def open_alone(bootstrap: BootstrapConfig, case: ModelCase) -> None:
    """Load the unmodified model."""
    from ..integrations.transformers.checkpoint import model_class_of, quiet

    model_class, config = model_class_of(case.model)
    with quiet():
        model = model_class.from_pretrained(case.model, config=config, dtype=case.dtype, local_files_only=True)
    _alone[ALONE] = model.to(take_device(bootstrap, case.device).device).eval()


def generate_alone(bootstrap: BootstrapConfig, case: ModelCase) -> Text:
    """Continue all prompts with it."""
    model = _alone[ALONE]
    return _generate(lambda ids, **cache: model(input_ids=ids, **cache), case.prompts(_vocabulary(model)), case)


def open_ranks(bootstrap: BootstrapConfig, case: ModelCase, names: list[str], timeout_s: float) -> None:
    """Load this rank's share, once for each transport."""
    from ..integrations.transformers import expert_parallel

    mine = replace(take_device(bootstrap, case.device), timeout_s=timeout_s)
    for name in names:
        _spread[name] = expert_parallel(
            case.model,
            mine,
            max_tokens_per_rank=case.tokens * case.prompt_tokens,
            layout=case.layout,
            backend=name,
            dtype=case.dtype,
        )


def generate_on_rank(bootstrap: BootstrapConfig, case: ModelCase, name: str, timed: bool) -> Text:
    """Continue this rank's prompts, in lockstep with the others.

    Args:
        timed: take the time of each phase.
    """
    parallel = _spread[name]
    model, layers = parallel.model, list(parallel.layers.values())
    prompts = case.prompts(_vocabulary(model), bootstrap.rank)
    for layer in layers:
        layer.enable_timing(timed)

    def forward(ids: torch.Tensor, **cache: Any) -> Any:
        if len(ids):
            return model(input_ids=ids, **cache)
        return parallel.idle_step()

    def phases() -> list[float]:
        times = [layer.last_timings_ms for layer in layers]
        return [sum(one[phase] for one in times) / 1000 for phase in PHASES]

    parallel.idle_step()  # ends when all ranks are here
    return _generate(forward, prompts, case, phases if timed else None)


def close_case(bootstrap: BootstrapConfig) -> None:
    """Let go of all models."""
    _alone.clear()
    for parallel in _spread.values():
        parallel.destroy()
    _spread.clear()
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def _generate(
    forward: Callable[..., Any], ids: torch.Tensor, case: ModelCase, phases: Callable[[], list[float]] | None = None
) -> Text:
    """The greedy loop that both sides run, with a KV cache.

    A step ends when its tokens are there: on a GPU it waits for them, as whoever shows them or looks for an end would.
    """
    from ..integrations.transformers.greedy import cache_of

    wait = torch.cuda.synchronize if case.device == "cuda" else lambda: None
    ids = ids.to(case.device)
    cache: dict[str, Any] = {"use_cache": True}
    tokens, seconds, within = [], [], []
    wait()
    for _ in range(case.new_tokens):
        start = perf_counter()
        output = forward(ids, **cache)
        if len(ids):
            cache |= cache_of(output)
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(ids[:, :1])
        wait()
        seconds.append(perf_counter() - start)
        if phases is not None:
            within.append(phases())
    return Text(tokens=torch.cat(tokens, 1).tolist(), seconds=np.array(seconds), phases=np.array(within))


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])

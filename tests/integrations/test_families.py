"""Every family gives the logits of its unmodified model, whatever the number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch

from moefleet.config import BootstrapConfig, EpLayout, GroupedGemmConfig
from moefleet.errors import MoEEpConfigError, MoEEpNotBuiltError
from moefleet.integrations.transformers import expert_parallel, version
from moefleet.integrations.transformers.experts import find_experts
from tests.conformance.pool import shared_pool
from tests.integrations.families import FAMILIES, E, V, tiny

BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference of a logit to the unmodified model's, relative to the largest logit."""


@torch.no_grad()
def relative_errors(bootstrap: BootstrapConfig) -> dict[str, float]:
    """Of every family and type. Ranks have batches of different shapes; the last of several has none."""
    generator = torch.Generator().manual_seed(bootstrap.rank)
    ids = torch.randint(1, V, (bootstrap.rank + 1, 5), generator=generator)
    idle = 0 < bootstrap.rank == bootstrap.world_size - 1
    errors = {}
    for family in FAMILIES:
        every = family == "gpt_oss" and bootstrap.world_size == 2
        layouts = list(EpLayout) if every else [EpLayout.EXPERT_MAJOR]
        # In bfloat16 every token goes to all experts, as rounding might change a choice.
        for dtype, topk in ((torch.float32, 2), (torch.bfloat16, E)):
            whole = tiny(family, dtype, topk=topk)
            expected = whole(ids).logits.float()
            for layout in layouts:
                spread = expert_parallel(copy.deepcopy(whole), bootstrap, max_tokens_per_rank=20, layout=layout)
                with spread as parallel:
                    if idle:
                        parallel.idle_step()
                        continue
                    got = parallel.model(ids).logits.float()
                error = float((got - expected).abs().max() / expected.abs().max())
                errors[f"{family} {dtype} {layout.name}"] = error / BOUND[dtype]
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_logits_are_those_of_the_unmodified_model(world_size: int) -> None:
    results = shared_pool().run(relative_errors, world_size=world_size, timeout_s=110)
    for result in results:
        assert result.error is None, result.error
        wrong = {what: error for what, error in result.value.items() if not error <= 1}
        assert not wrong, f"rank {result.rank}: times the bound: {wrong}"
    assert len(results[0].value) == 2 * len(FAMILIES) + 4 * (world_size == 2)


def test_the_gate_of_gpt_oss_is_recognised() -> None:
    for experts in find_experts(tiny("gpt_oss")):
        assert experts.gate == GroupedGemmConfig("silu", limit=7.0, alpha=1.702, up_shift=1.0)
        assert experts.interleaved


def test_quantised_models_are_refused_by_the_name_of_the_quantisation() -> None:
    model = tiny("qwen3_moe")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(MoEEpConfigError, match="quantization_config: got weights quantised with fp8, allowed unquant"):
        expert_parallel(model, BootstrapConfig(1, 0, device="cpu"), max_tokens_per_rank=8)


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version.parsed("5.24.0.dev0") == (5, 24) > version.MINIMUM > version.parsed("4.57.1")
    monkeypatch.setattr(version, "MINIMUM", (99, 1))
    with pytest.raises(MoEEpNotBuiltError, match=r"needs transformers 99\.1 or newer, not [\d.]+.*; pip install"):
        version.require_transformers()

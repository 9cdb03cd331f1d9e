"""A model with spread experts is the same model: logits, greedy text, memory, and what it refuses."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from moefleet.config import BootstrapConfig, EpLayout
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpNotBuiltError, MoEEpPeerError
from moefleet.integrations.transformers import (
    EXPERTS_FUNCTION,
    ExpertParallel,
    expert_parallel,
    greedy,
    greedy_in_lockstep,
)
from moefleet.integrations.transformers.experts import find_experts
from moefleet.integrations.transformers.version import require_transformers
from moefleet.launch import RankPool
from tests.conformance.pool import shared_pool

E, H, INTER, V, M = 8, 32, 16, 64, 24  # experts, hidden, expert intermediate, vocabulary, most tokens
NEW = 6
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


def values(pool: RankPool, fn: Any, *args: Any, world_size: int) -> list[Any]:
    results = pool.run(fn, *args, world_size=world_size, timeout_s=110)  # a rank's first call imports transformers
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.value for result in results]


def config(topk: int = 2) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=V,
        hidden_size=H,
        moe_intermediate_size=INTER,
        num_experts=E,
        num_experts_per_tok=topk,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        norm_topk_prob=True,
        initializer_range=0.2,
    )


def tiny(dtype: torch.dtype = torch.float32, topk: int = 2) -> Any:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config(topk)).to(dtype).eval()


def alone() -> BootstrapConfig:
    return BootstrapConfig(1, 0, device="cpu")


# The same model.


@torch.no_grad()
def relative_error(bootstrap: BootstrapConfig, dtype: torch.dtype, topk: int) -> dict[str, float]:
    """By layout, of logits to the unmodified model's largest. Ranks have batches of different shapes, the last none."""
    whole = tiny(dtype, topk)
    generator = torch.Generator().manual_seed(bootstrap.rank)
    shape = (bootstrap.rank + 1, 6)
    ids = torch.randint(V, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.int64)
    mask[0, :2] = 0  # left padding: those tokens are computed too
    expected = whole(ids, attention_mask=mask).logits.float()
    errors = {}
    for layout in EpLayout:
        with expert_parallel(copy.deepcopy(whole), bootstrap, max_tokens_per_rank=M, layout=layout) as parallel:
            if 0 < bootstrap.rank == bootstrap.world_size - 1:
                parallel.idle_step()
                continue
            got = parallel.model(ids, attention_mask=mask).logits.float()
            errors[layout.name] = float((got - expected).abs().max() / expected.abs().max())
    return errors


@pytest.mark.parametrize("world_size", [2, 3, 1])  # test_families.py has 4
def test_logits_are_those_of_the_unmodified_model(pool: RankPool, world_size: int) -> None:
    # In bfloat16 every token goes to all experts, as rounding might change a choice.
    for dtype, topk, bound in ((torch.float32, 2, 1e-5), (torch.bfloat16, E, 3e-2)):
        of_ranks = values(pool, relative_error, dtype, topk, world_size=world_size)
        for errors in of_ranks[: max(1, world_size - 1)]:
            assert errors.keys() == {layout.name for layout in EpLayout}
            assert all(error <= bound for error in errors.values()), (dtype, of_ranks)


@dataclass(frozen=True)
class Memory:
    fleets: int
    shapes: set[tuple[int, ...]]
    bytes_kept: int
    parameters_left: int
    full_is_gone: bool


def memory(bootstrap: BootstrapConfig) -> Memory:
    model = tiny()
    full = [weakref.ref(plane) for e in find_experts(model) for plane in (e.module.gate_up_proj, e.module.down_proj)]
    with expert_parallel(model, bootstrap, max_tokens_per_rank=M) as parallel:
        planes = [p for layer in parallel.layers.values() for p in (layer.weights.w13, layer.weights.w2)]
        gc.collect()
        return Memory(
            len({id(layer.fleet) for layer in parallel.layers.values()} | {id(parallel.fleet)}),
            {tuple(plane.shape) for plane in planes},
            sum(plane.untyped_storage().nbytes() for plane in planes),
            sum(1 for name, _ in model.named_parameters() if ".experts." in name),
            all(plane() is None for plane in full),
        )


def test_a_rank_keeps_its_own_experts_only_and_all_blocks_share_a_fleet(pool: RankPool) -> None:
    for rank, got in enumerate(values(pool, memory, world_size=3)):
        own = (3, 3, 2)[rank]
        assert got == Memory(1, {(own, 2 * INTER, H), (own, H, INTER)}, 2 * own * 3 * INTER * H * 4, 0, True)


# Greedy text.


def write(bootstrap: BootstrapConfig, prompts: list[list[int]]) -> tuple[dict[int, list[int]], float, int]:
    """This rank's texts, the largest difference of a logit to one process, and the forwards that it took part in."""
    model = tiny()
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    steps = []
    with expert_parallel(model, bootstrap, max_tokens_per_rank=M) as parallel:
        written = greedy_in_lockstep(parallel, prompts, NEW, on_step=lambda: steps.append(1))
    worst = max([float((text.logits - expected[n].logits).abs().max()) for n, text in written.items()], default=0.0)
    return {n: text.tokens for n, text in written.items()}, worst, len(steps)


@pytest.mark.parametrize(("world_size", "prompts"), [(4, 3), (3, 4), (2, 1), (2, 4)])
def test_ranks_write_in_lockstep_what_one_process_writes(pool: RankPool, world_size: int, prompts: int) -> None:
    model = tiny()
    expected = {number: greedy(model, prompt, NEW).tokens for number, prompt in enumerate(PROMPTS[:prompts])}
    together: dict[int, list[int]] = {}
    for rank, (texts, worst, steps) in enumerate(values(pool, write, PROMPTS[:prompts], world_size=world_size)):
        assert list(texts) == list(range(rank, prompts, world_size))
        assert worst <= 1e-4
        assert steps == -(-prompts // world_size) * NEW, "idle or not"
        together |= texts
    assert together == expected


def test_greedy_is_what_transformers_generates() -> None:
    model = tiny()
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        text = greedy(model, prompt, NEW)
        assert text.tokens == ids[0, len(prompt) :].tolist()
        whole = model(torch.tensor([prompt + text.tokens])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(text.logits, whole.float(), atol=1e-4, rtol=1e-4)


def generate(bootstrap: BootstrapConfig) -> list[int]:
    with expert_parallel(tiny(), bootstrap, max_tokens_per_rank=M) as parallel:
        prompt = torch.tensor([PROMPTS[bootstrap.rank]])
        return parallel.model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, prompt.shape[1] :].tolist()


def test_generate_works_as_ever(pool: RankPool) -> None:
    model = tiny()
    assert values(pool, generate, world_size=2) == [greedy(model, prompt, NEW).tokens for prompt in PROMPTS[:2]]


# Errors on ranks.


@torch.no_grad()
def too_long(bootstrap: BootstrapConfig) -> tuple[str, str, bool]:
    with expert_parallel(tiny(), bootstrap, max_tokens_per_rank=4) as parallel:
        expected = tiny()(torch.tensor([[1, 2]])).logits
        try:
            parallel.model(torch.tensor([[1, 2, 3, 4, 5]] if bootstrap.rank == 1 else [[1]]))
        except MoEEpError as error:
            kind, said = type(error).__name__, str(error)
        after = parallel.model(torch.tensor([[1, 2]])).logits
        return kind, said, torch.allclose(after, expected, atol=1e-4)


def test_too_many_tokens_are_an_error_that_names_the_limit_and_the_next_forward_works(pool: RankPool) -> None:
    peer, culprit = values(pool, too_long, world_size=2)
    assert culprit[0] == MoEEpConfigError.__name__
    assert "5 tokens, allowed at most max_tokens_per_rank = 4" in culprit[1]
    assert peer[0] == MoEEpPeerError.__name__
    assert "rank 1" in peer[1]
    assert culprit[2] and peer[2]


# One rank, in this process.


def test_it_says_what_it_is_and_ends_with_a_clear_error() -> None:
    model = tiny()
    ids = torch.tensor([[1, 2, 3]])
    with expert_parallel(model, alone(), max_tokens_per_rank=M) as parallel:
        assert list(parallel.layers) == [f"model.layers.{n}.mlp.experts" for n in range(2)]
        assert repr(parallel).startswith("ExpertParallel(2 MoE blocks of Qwen3MoeForCausalLM; shm FLAT rank 0")
        assert "MoEEpLayer" in repr(model)
        with pytest.raises(MoEEpConfigError, match=r"model: model.layers.0.mlp.experts.gate_up_proj: got nothing"):
            expert_parallel(model, alone(), max_tokens_per_rank=M)
    parallel.destroy()
    assert repr(parallel) == "ExpertParallel(2 MoE blocks of Qwen3MoeForCausalLM; destroyed)"
    assert all(layer.weights is None for layer in parallel.layers.values())
    for call in (parallel.idle_step, lambda: model(ids)):
        with pytest.raises(MoEEpError, match=r"ExpertParallel was destroyed.* load the model anew"), torch.no_grad():
            call()


@torch.no_grad()
def test_a_model_of_the_same_config_is_left_alone() -> None:
    shared = config()
    first, second = Qwen3MoeForCausalLM(shared), Qwen3MoeForCausalLM(shared)
    second.load_state_dict(first.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    with expert_parallel(first, alone(), max_tokens_per_rank=M):
        torch.testing.assert_close(first(ids).logits, second(ids).logits, atol=1e-4, rtol=1e-4)
        first.set_experts_implementation("eager")
        torch.testing.assert_close(first(ids).logits, second(ids).logits, atol=1e-4, rtol=1e-4)
    assert EXPERTS_FUNCTION in ALL_EXPERTS_FUNCTIONS
    second(ids)


@torch.no_grad()
def test_other_architectures_need_nothing_of_their_own() -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=V,
            hidden_size=H,
            intermediate_size=INTER,
            num_local_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_act="gelu_pytorch_tanh",
            initializer_range=0.2,
        )
    ).eval()
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    with expert_parallel(model, alone(), max_tokens_per_rank=M) as parallel:
        assert len(parallel.layers) == 3
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_no_gradient_passes_and_none_is_lost_silently() -> None:
    model = tiny()
    with expert_parallel(model, alone(), max_tokens_per_rank=M):
        with pytest.raises(MoEEpConfigError, match="requires a gradient, allowed inference; run the model under"):
            model(torch.tensor([[1]]))
        model.requires_grad_(False)
        model(torch.tensor([[1]]))


def test_a_wrong_device_or_topk_is_refused_and_the_model_is_unchanged() -> None:
    model = tiny()
    with pytest.raises(MoEEpConfigError, match=r"bootstrap\.device: got cuda, allowed the experts' cpu"):
        expert_parallel(model, BootstrapConfig(1, 0, device="cuda"), max_tokens_per_rank=M)
    for bad in (0, "2"):
        with pytest.raises(MoEEpConfigError, match="topk: got"):
            expert_parallel(model, alone(), max_tokens_per_rank=M, topk=bad)  # type: ignore[arg-type]
    with pytest.raises(MoEEpConfigError, match="max_tokens_per_rank: got 0"):
        expert_parallel(model, alone(), max_tokens_per_rank=0)
    assert len(greedy(model, [1], 2).tokens) == 2


# What an experts module may be.


class Config:
    _experts_implementation = "eager"


def block(
    act: str = "silu", gate: Any = None, shape: tuple[int, int, int] = (E, 2 * INTER, H), **attributes: bool
) -> Any:
    """A model of one decorated experts module, with attributes that the decorator sets in some version."""

    class Holder(nn.Module):
        def __init__(self, _: Config) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(shape))
            self.down_proj = nn.Parameter(torch.zeros(shape[0], shape[2], shape[1] // 2))
            self.act_fn = ACT2FN[act]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    if gate is not None:
        Holder._apply_gate = gate  # type: ignore[attr-defined]
    model = nn.ModuleDict({"experts": use_experts_implementation(Holder)(Config())})
    for name, value in attributes.items():
        setattr(model["experts"], name, value)
    return model


@pytest.mark.parametrize(
    ("act", "name"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_activations_are_known_by_what_they_compute(act: str, name: str) -> None:
    assert [experts.activation for experts in find_experts(block(act))] == [name]


def limited(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return self.act_fn(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Linear(2, 2), "model: got a Linear without experts modules, allowed a MoE model"),
        (block(has_bias=True), "model: experts.gate_up_proj_bias: got nothing"),
        (block(has_gate=False), "model: experts: got experts without a gate"),
        (block(has_post_expert_norm=True), "model: experts: got a norm after each expert"),
        (
            block("tanh"),
            r"model: experts: got the gate of a Holder \(Tanh\(\)\), allowed .* silu, gelu, gelu_tanh, relu",
        ),
        (block("quick_gelu"), r"the gate of a Holder \(QuickGELU"),
        (block(gate=limited), "model: experts: got the gate of a Holder"),
        (
            nn.ModuleList([block(), block(shape=(E, 2 * INTER, 2 * H))]),
            r"model: 1.experts: got E, H, .* = 8, 64, .* 8, 32",
        ),
    ],
)
def test_what_moefleet_does_not_compute_is_refused(model: nn.Module, match: str) -> None:
    with pytest.raises(MoEEpConfigError, match=match):
        expert_parallel(model, alone(), max_tokens_per_rank=M, topk=2)


def test_an_old_transformers_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.0.0")
    with pytest.raises(MoEEpNotBuiltError, match=r"needs transformers 5\.1 or newer, not 5\.0\.0; pip install"):
        require_transformers()
    monkeypatch.setattr("transformers.__version__", "5.1.0.dev0")
    require_transformers()


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ExpertParallel.__module__.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MoEEpNotBuiltError, match=r"pip install 'moefleet\[transformers\]'"):
        importlib.import_module(name)

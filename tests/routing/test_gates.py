"""Router gates against the routers of Hugging Face transformers: the same ids and weights, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch

from moefleet import MoEEpConfigError
from moefleet.routing import Gate, GroupedGate, SigmoidGate, SoftmaxGate, TopKSoftmaxGate

EXPERTS, HIDDEN, TOPK = 16, 32, 4
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


@dataclass(frozen=True)
class Model:
    """A router of transformers, the config fields that shape it, and the gate that must equal it."""

    router: str
    gate: Callable[..., Gate]
    experts: str = "num_experts"
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.router, *(f"{name}={value}" for name, value in self.config.items())])

    def build(self, dtype: torch.dtype) -> Any:
        """The router with random weights, and a random bias where it has one."""
        family, _, name = self.router.partition(".")
        modeling = import_module(f"transformers.models.{family}.modeling_{family}")
        config = import_module(f"transformers.models.{family}.configuration_{family}")
        sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOPK, self.experts: EXPERTS}
        kind = next(value for key, value in vars(config).items() if key == name.split("Top")[0] + "Config")
        router = getattr(modeling, name)(kind(**sizes, **self.config)).to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in (*router.parameters(), *router.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return router


def softmax(norm_topk_prob: bool) -> Gate:
    return SoftmaxGate(TOPK, renormalize=norm_topk_prob, round_weights=True)


def grouped(norm_topk_prob: bool = True, **fields: Any) -> Gate:
    return GroupedGate(TOPK, renormalize=norm_topk_prob, **fields)


MODELS = [
    *(
        Model(router, softmax, config={"norm_topk_prob": norm})
        for router in ("qwen2_moe.Qwen2MoeTopKRouter", "qwen3_moe.Qwen3MoeTopKRouter", "olmoe.OlmoeTopKRouter")
        for norm in (False, True)
    ),
    Model("mixtral.MixtralTopKRouter", lambda: SoftmaxGate(TOPK, renormalize=True), "num_local_experts"),
    Model("gpt_oss.GptOssTopKRouter", lambda: TopKSoftmaxGate(TOPK), "num_local_experts"),
    *(
        Model(router, grouped, "n_routed_experts", config)
        for router in ("deepseek_v3.DeepseekV3TopkRouter", "glm4_moe.Glm4MoeTopkRouter")
        for config in (
            {"norm_topk_prob": True, **GROUPS},
            {"norm_topk_prob": False, **GROUPS},
            {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
            {"norm_topk_prob": True, "n_group": 8, "topk_group": 8, "routed_scaling_factor": 1.0},
        )
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_gate_equals_the_models_router(model: Model, tokens: int, dtype: torch.dtype) -> None:
    router = model.build(dtype)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    with torch.no_grad():
        logits, want_weights, want_ids = router(x)
    assert logits.shape == (tokens, EXPERTS)
    bias = getattr(router, "e_score_correction_bias", None)
    ids, weights = model.gate(**model.config)(logits, *([] if bias is None else [bias]))
    check(ids, weights, want_ids, want_weights, tokens)


def check(
    ids: torch.Tensor, weights: torch.Tensor, want_ids: torch.Tensor, want_weights: torch.Tensor, tokens: int
) -> None:
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert ids.shape == weights.shape == (tokens, TOPK)
    torch.testing.assert_close(ids, want_ids, rtol=0, atol=0)
    torch.testing.assert_close(weights, want_weights.float(), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [0, 37])
def test_sigmoid_equals_minimax(tokens: int) -> None:
    """Its router is given the bias, as our gate is."""
    modeling = pytest.importorskip("transformers.models.minimax_m2.modeling_minimax_m2")
    model = Model("minimax_m2.MiniMaxM2TopKRouter", SigmoidGate, "num_local_experts")
    router, generator = model.build(torch.float32), torch.Generator().manual_seed(tokens)
    assert isinstance(router, modeling.MiniMaxM2TopKRouter)
    x, bias = torch.randn(tokens, HIDDEN, generator=generator), torch.randn(EXPERTS, generator=generator)
    with torch.no_grad():
        logits, want_weights, want_ids = router(x, bias)
    check(*SigmoidGate(TOPK, renormalize=True)(logits, bias), want_ids, want_weights, tokens)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_equal_scores_are_broken_alike(model: Model) -> None:
    """Softmax underflows and sigmoids saturate, so that many experts have one score."""
    router = model.build(torch.float32)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(9)).round() * 40
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.round_()
        logits, want_weights, want_ids = router(x)
    bias = getattr(router, "e_score_correction_bias", None)
    ids, weights = model.gate(**model.config)(logits, *([] if bias is None else [bias]))
    check(ids, weights, want_ids, want_weights, 9)


def test_one_group_is_a_sigmoid_gate() -> None:
    logits, bias = torch.randn(5, EXPERTS), torch.randn(EXPERTS)
    one, plain = GroupedGate(3, renormalize=True), SigmoidGate(3, renormalize=True)
    for got, want in zip(one(logits, bias), plain(logits, bias), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(one(logits)[0], plain(logits, torch.zeros(EXPERTS))[0]), "no bias is a bias of 0"


def test_experts_stay_within_the_best_groups() -> None:
    ids, _ = GroupedGate(4, n_group=4, topk_group=2)(torch.randn(50, EXPERTS))
    assert all(len(set(row)) <= 2 for row in (ids // 4).tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxGate(0), "SoftmaxGate.topk: got 0, allowed at least 1"),
        (lambda: TopKSoftmaxGate(-1), "TopKSoftmaxGate.topk: got -1"),
        (lambda: SigmoidGate(2, routed_scaling_factor=0.0), "SigmoidGate.routed_scaling_factor: got 0.0"),
        (lambda: SigmoidGate(2, routed_scaling_factor=float("nan")), "SigmoidGate.routed_scaling_factor: got nan"),
        (lambda: GroupedGate(2, n_group=0), "GroupedGate.n_group: got 0, allowed at least 1"),
        (lambda: GroupedGate(2, n_group=2, topk_group=3), "GroupedGate.topk_group: got 3, allowed 1 to n_group = 2"),
        (lambda: SoftmaxGate(9)(torch.randn(2, 8)), "SoftmaxGate.topk: got 9, allowed at most the router's E = 8"),
        (lambda: SoftmaxGate(2)(torch.randn(8)), "router_logits: got shape"),
        (lambda: SoftmaxGate(2)(torch.ones(2, 8, dtype=torch.int64)), "router_logits: got dtype"),
        (lambda: SoftmaxGate(2)([[1.0, 2.0]]), "router_logits: got a list"),  # type: ignore[arg-type]
        (lambda: GroupedGate(2, n_group=3)(torch.randn(2, 8)), "n_group: got 3, allowed a divisor of E = 8"),
        (lambda: GroupedGate(2, n_group=8)(torch.randn(2, 8)), "n_group: got 8, allowed a divisor of E = 8"),
        (
            lambda: GroupedGate(5, n_group=4, topk_group=2)(torch.randn(2, 8)),
            "GroupedGate.topk: got 5, allowed at most 4",
        ),
        (lambda: SigmoidGate(2)(torch.randn(2, 8), torch.zeros(7)), "e_score_correction_bias: got shape"),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(MoEEpConfigError) as raised:
        make()
    assert message in str(raised.value)

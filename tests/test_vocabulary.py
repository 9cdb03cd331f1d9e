"""The vocabulary: what each value accepts, what it says when it does not, and what it means."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moefleet import config, errors, knobs
from moefleet.config import BootstrapConfig, EpAlgorithm, EpLayout, FleetParams
from moefleet.errors import MoEEpConfigError, MoEEpError, config_error
from moefleet.placement import NO_OWNER, Placement
from moefleet.routing import check_topk_ids, check_topk_weights
from moefleet.tensors import DispatchOutput, check_tensor, is_plain
from moefleet.weights import MoEWeightPack, PrequantizedMoEWeights, UnquantizedMoEWeights

CPU = torch.device("cpu")
LL, HT = EpAlgorithm.LOW_LATENCY, EpAlgorithm.HIGH_THROUGHPUT


def refused(make: Callable[[], object], *parts: object) -> None:
    """``make`` raises a MoEEpConfigError whose message holds each part: the field, what it got, what is allowed."""
    with pytest.raises(MoEEpConfigError) as caught:
        make()
    for part in parts:
        assert str(part) in str(caught.value)


def params(**changes: Any) -> FleetParams:
    return FleetParams(**{"num_experts": 8, "max_tokens_per_rank": 4, "token_hidden_size": 16, **changes})


class TestErrors:
    def test_relations(self) -> None:
        kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BaseException)]
        assert len(kinds) == 13
        assert all(issubclass(kind, MoEEpError) for kind in kinds) and issubclass(MoEEpError, RuntimeError)
        for kind, also in [
            (errors.MoEEpConfigError, ValueError),
            (errors.MoEEpUnknownBackendError, errors.MoEEpConfigError),
            (errors.MoEEpUnknownBackendError, KeyError),
            (errors.MoEEpTimeoutError, TimeoutError),
            (errors.MoEEpNotBuiltError, NotImplementedError),
            (errors.MoEEpFaultToleranceUnsupportedError, NotImplementedError),
        ]:
            assert issubclass(kind, also)

    @pytest.mark.parametrize(
        ("error", "attributes"),
        [
            (
                errors.MoEEpTransportError("mmap", 12, "mapping 4 KiB", "ENOMEM"),
                {"fn": "mmap", "code": 12, "detail": "mapping 4 KiB", "code_name": "ENOMEM"},
            ),
            (errors.MoEEpPeerError("rank 3 failed", rank=3, reason="T > M"), {"rank": 3, "reason": "T > M"}),
            (errors.MoEEpTimeoutError("rank 1 is silent", ranks=[1]), {"ranks": (1,)}),
            (
                errors.MoEEpFaultError("rank 0 is gone", step_mask=(1, 1), current_mask=(0, 1)),
                {"step_mask": [1, 1], "current_mask": [0, 1]},
            ),
            (config_error("x", 1, "2", cls=errors.MoEEpUnknownBackendError), {}),
            (errors.MoEEpStoreError("10.0.0.1:29500"), {}),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_travels_between_processes(self, error: MoEEpError, attributes: dict[str, Any]) -> None:
        there = pickle.loads(pickle.dumps(error))
        assert type(there) is type(error) and str(there) == str(error) and there.args == error.args
        for each in (error, there):
            assert {name: getattr(each, name) for name in attributes} == attributes

    def test_messages(self) -> None:
        assert str(config_error("T", 5, "at most 4", "send less")) == "T: got 5, allowed at most 4; send less"
        assert str(config_error("T", 5, "at most 4")) == "T: got 5, allowed at most 4"
        unknown = config_error("backend", "'x'", "'shm'", cls=errors.MoEEpUnknownBackendError)
        assert str(unknown) == "backend: got 'x', allowed 'shm'"  # KeyError alone would show a repr
        with pytest.raises(KeyError):
            raise unknown
        assert (
            str(errors.MoEEpTransportError("write", 5, "the header", "EIO")) == "write failed with EIO (5): the header"
        )
        assert str(errors.MoEEpTransportError("write", 5, "the header")) == "write failed with status (5): the header"
        assert str(errors.MoEEpTimeoutError("rank 1 is silent", ranks=[1])) == "rank 1 is silent"


class TestBootstrapConfig:
    def test_values(self) -> None:
        for world, rank, timeout, *parts in [
            (0, 0, 1.0, "world_size", "got 0", "at least 1"),
            (2, 2, 1.0, "rank", "got 2", "0 to 1"),
            (2, -1, 1.0, "rank", "got -1", "0 to 1"),
            (2, 0, 0.0, "timeout_s", "got 0.0", "more than 0"),
            (2, 0, float("nan"), "timeout_s", "got nan", "more than 0"),
        ]:
            refused(lambda w=world, r=rank, t=timeout: BootstrapConfig(w, r, timeout_s=t), *parts)
        assert BootstrapConfig(1, 0).auto_bootstrap

    def test_from_env(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        refused(BootstrapConfig.from_env, "from_env", "no RANK and no WORLD_SIZE", "torchrun")
        monkeypatch.setenv("RANK", "2")
        refused(BootstrapConfig.from_env, "no WORLD_SIZE")
        monkeypatch.setenv("WORLD_SIZE", "four")
        refused(BootstrapConfig.from_env, "from_env WORLD_SIZE", "got 'four'", "whole number")
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert BootstrapConfig.from_env(timeout_s=7.0) == BootstrapConfig(4, 2, timeout_s=7.0)
        assert BootstrapConfig.from_env(world_size=3).world_size == 3
        refused(lambda: BootstrapConfig.from_env(world_size=2), "rank", "got 2", "0 to 1")

    def test_device(self) -> None:
        assert config.resolve_device(BootstrapConfig(1, 0, device="cpu")) == CPU
        assert config.resolve_device(BootstrapConfig(1, 0, device="cuda:1")) == torch.device("cuda", 1)
        assert config.resolve_device(BootstrapConfig(1, 0)).type == ("cuda" if torch.cuda.is_available() else "cpu")


class TestFleetParams:
    @pytest.mark.parametrize("field", ["num_experts", "max_tokens_per_rank", "token_hidden_size", "max_topk"])
    def test_sizes(self, field: str) -> None:
        refused(lambda: params(**{field: 0}), f"FleetParams.{field}", "got 0", "at least 1")

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"dtype_bytes": 3}, ("dtype_bytes", "got 3", "1 (fp8), 2 (bfloat16, float16), 4 (float32)")),
            ({"scale_bytes_per_token": -1}, ("scale_bytes_per_token", "got -1", "0 or more")),
            ({"layout": EpLayout.FLAT}, ("layout", "FLAT with LOW_LATENCY", "EXPERT_MAJOR or RANK_MAJOR")),
            ({"algorithm": HT, "layout": EpLayout.RANK_MAJOR}, ("layout", "RANK_MAJOR with HIGH", "FLAT with HIGH")),
            ({"max_recv_tokens_per_rank": 8}, ("max_recv_tokens_per_rank", "got 8", "HIGH_THROUGHPUT only")),
            ({"algorithm": HT, "max_recv_tokens_per_rank": 0}, ("max_recv_tokens_per_rank", "got 0", "at least 1")),
            ({"algorithm": "ht"}, ("algorithm", "got 'ht'", "EpAlgorithm.LOW_LATENCY or EpAlgorithm.HIGH_THROUGHPUT")),
            ({"layout": "flat"}, ("layout", "got 'flat'", "EpLayout.EXPERT_MAJOR", "EpLayout.FLAT")),
        ],
    )
    def test_values(self, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
        refused(lambda: params(**changes), *parts)

    def test_layouts(self) -> None:
        assert params().layout is params().resolved_layout is EpLayout.EXPERT_MAJOR
        assert params(algorithm=HT).layout is EpLayout.FLAT
        assert params(layout=EpLayout.RANK_MAJOR).layout is EpLayout.RANK_MAJOR
        again = dataclasses.replace(params(algorithm=HT), max_recv_tokens_per_rank=3)
        assert again == params(algorithm=HT, max_recv_tokens_per_rank=3) and hash(again) is not None
        assert pickle.loads(pickle.dumps(again)) == again

    def test_recv_capacity(self) -> None:
        """From the tokens and the ranks alone: neither experts nor top-k make it larger (or smaller)."""
        for experts in (1, 3, 64):
            assert params(num_experts=experts, max_topk=1).recv_capacity(6) == 24
        assert params(algorithm=HT, max_recv_tokens_per_rank=10).recv_capacity(6) == 10
        assert params(algorithm=HT, max_recv_tokens_per_rank=100).recv_capacity(6) == 24


@pytest.mark.parametrize(
    "dtype_bytes, scale_bytes, quants, there, back",
    [
        (2, 0, None, 2 * 300, 2 * 300),
        (4, 8, None, 4 * 300 + 8, 4 * 300),
        (1, 12, None, 300 + 12, 2 * 300),
        (2, 0, {"FP8E4M3"}, 300 + 3 * 4, 2 * 300),
        (4, 0, {"FP8E4M3"}, 300 + 3 * 4, 4 * 300),
    ],
)
def test_what_rows_take(dtype_bytes: int, scale_bytes: int, quants: set[str] | None, there: int, back: int) -> None:
    made = params(token_hidden_size=300, dtype_bytes=dtype_bytes, scale_bytes_per_token=scale_bytes)
    chosen = [] if quants is None else [knobs.FleetAlgoKnobQuantization(frozenset(quants))]
    rows = knobs.RowFormat.of(made, chosen)
    assert (rows.sent_bytes, rows.returned_bytes) == (there, back)
    assert rows.back_bytes == made.combine_bytes and rows.quantised == bool(quants)


def test_backends_and_kernels_have_names() -> None:
    names = {each: each.name for base in (config.CommConfig, config.KernelConfig) for each in base.__subclasses__()}
    assert names[config.ShmConfig] == "shm" and names[config.GroupedGemmConfig] == "grouped_gemm"
    assert all(names.values()) and len(set(names.values())) == len(names)
    assert config.SplitConfig() == config.SplitConfig(comm="auto", kernel=config.GroupedGemmConfig("silu"))
    assert config.MegaConfig("m").quantize_input and config.MegaConfig("m").preprocess_weights


class TestKnobs:
    @pytest.mark.parametrize(
        ("make", "parts"),
        [
            (lambda: knobs.FleetAlgoKnobFaultTolerance(timeout_ms=-1), ("timeout_ms", "got -1", "0 (default)")),
            (lambda: knobs.FleetAlgoKnobFaultTolerance(reconcile_timeout_s=0), ("reconcile_timeout_s", "got 0")),
            (
                lambda: knobs.FleetAlgoKnobFaultTolerance(coordinator_takeover_s=-2),
                ("coordinator_takeover_s", "got -2"),
            ),
            (lambda: knobs.FleetAlgoKnobFaultTolerance(quorum="all"), ("quorum", "got all", '"majority" or "any"')),
            (
                lambda: knobs.FleetAlgoKnobTopologyCapacity(0),
                ("FleetAlgoKnobTopologyCapacity.n", "got 0", "at least 1"),
            ),
            (lambda: knobs.FleetAlgoKnobNumChannelsPerRank(0), ("FleetAlgoKnobNumChannelsPerRank.n", "got 0")),
            (lambda: knobs.FleetAlgoKnobNumQpsPerRank(-1), ("FleetAlgoKnobNumQpsPerRank.n", "got -1", "at least 1")),
            (lambda: knobs.FleetAlgoKnobRdmaBufferSize(0), ("FleetAlgoKnobRdmaBufferSize.bytes_", "got 0")),
            (lambda: knobs.FleetAlgoKnobQuantization("FP8E4M3"), ("FleetAlgoKnobQuantization.quants", "got 'FP8E4M3'")),
            (lambda: knobs.HandleAlgoKnobNumReceivedTokens(-1), ("target", "got -1", "0 or more")),
        ],
    )
    def test_values(self, make: Callable[[], object], parts: tuple[str, ...]) -> None:
        refused(make, *parts)

    def test_are_frozen_values(self) -> None:
        for _, kind in inspect.getmembers(knobs, inspect.isclass):
            if issubclass(kind, (knobs.FleetAlgoKnob, knobs.HandleAlgoKnob)):
                assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
        default = knobs.FleetAlgoKnobFaultTolerance()
        assert (default.enabled, default.timeout_ms, default.renormalize, default.quorum) == (
            True,
            0,
            False,
            "majority",
        )
        assert knobs.FleetAlgoKnobQuantization({"A", "B"}) == knobs.FleetAlgoKnobQuantization(frozenset("BA"))  # type: ignore[arg-type]
        assert knobs.HandleAlgoKnobNumReceivedTokens(0).target == 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            default.timeout_ms = 5  # type: ignore[misc]


class TestTensors:
    def test_check_tensor(self) -> None:
        x = torch.zeros(2, 3)
        assert check_tensor("x", x, shape=(None, 3), dtypes=(torch.float32,), device=CPU) is x
        bf16 = (torch.bfloat16, torch.float16)
        refused(lambda: check_tensor("x", [1], shape=(1,), dtypes=bf16), "x: got a list", "torch.Tensor")
        refused(lambda: check_tensor("x", x, shape=(None, 4), dtypes=bf16), "x: got shape [2, 3]", "shape [any, 4]")
        refused(lambda: check_tensor("x", x, shape=(None,), dtypes=bf16), "shape [2, 3]", "shape [any]")
        refused(
            lambda: check_tensor("x", x, shape=(2, 3), dtypes=bf16), "torch.float32", "torch.bfloat16 or torch.float16"
        )

    def test_devices(self) -> None:
        with FakeTensorMode():
            x = torch.empty(1, device="cuda:1")
        check: dict[str, Any] = {"shape": (1,), "dtypes": (torch.float32,)}
        refused(lambda: check_tensor("x", x, **check, device=CPU), "device cuda:1", "device cpu", ".to('cpu')")
        refused(lambda: check_tensor("x", x, **check, device=torch.device("cuda:0")), "device cuda:1", "device cuda:0")
        for fine in (None, torch.device("cuda"), torch.device("cuda:1")):
            assert check_tensor("x", x, **check, device=fine) is x
        assert check_tensor("x", torch.zeros(1), **check, device=torch.device("cpu:0")) is not None

    def test_what_is_plain(self) -> None:
        x, like = torch.zeros(2, 3), ((2, 3), (torch.float32,))
        with FakeTensorMode():
            elsewhere = torch.empty(2, 3, device="cuda:1")
        others = [None, [x], x[:1], x.double(), x.T.contiguous().T, x.clone().requires_grad_(), elsewhere]
        others += [torch.nn.Parameter(x), x.to("meta"), torch._neg_view(x), torch.nested.nested_tensor([x, x])]
        for cpu in (CPU, None):
            assert is_plain(x, *like, cpu)
            assert not any(is_plain(other, *like, cpu) for other in others)

    def test_get_num_tokens(self) -> None:
        rows = torch.zeros(2, 4, 3)
        assert DispatchOutput(rows, expert_counts=torch.tensor([3, 0], dtype=torch.int32)).get_num_tokens() == 3
        assert DispatchOutput(rows[0], recv_total_counter=torch.tensor([0], dtype=torch.int32)).get_num_tokens() == 0
        assert DispatchOutput(rows[:0], expert_counts=torch.zeros(0, dtype=torch.int32)).get_num_tokens() == 0
        with pytest.raises(AssertionError):
            DispatchOutput(rows).get_num_tokens()


class TestRouting:
    def test_ids(self) -> None:
        for dtype in (torch.int32, torch.int64):
            good = torch.tensor([[-1, 0], [7, 7]], dtype=dtype)
            assert check_topk_ids(good, params(), CPU) is good
        assert check_topk_ids(torch.empty(0, 2, dtype=torch.int64), params(), CPU).shape == (0, 2)
        for low_or_high in (-2, 8):
            refused(
                lambda v=low_or_high: check_topk_ids(torch.tensor([[0, v]]), params(), CPU), f"id {low_or_high}", "to 7"
            )
        refused(lambda: check_topk_ids(torch.zeros(1, 2), params(), CPU), "topk_ids", "torch.float32", "torch.int64")
        refused(lambda: check_topk_ids(torch.zeros(3, dtype=torch.int64), params(), CPU), "topk_ids", "shape [3]")
        many = torch.zeros(5, 2, dtype=torch.int64)
        refused(lambda: check_topk_ids(many, params(), CPU), "5 tokens", "max_tokens_per_rank = 4", ">= 5")
        refused(lambda: check_topk_ids(many[:1], params(max_topk=1), CPU), "K = 2", "max_topk = 1")
        refused(lambda: check_topk_ids(many[:, :0][:1], params(), CPU), "K = 0")

    def test_weights(self) -> None:
        ids = torch.zeros(2, 3, dtype=torch.int32)
        good = torch.ones(2, 3)
        assert check_topk_weights(good, ids) is good
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert check_topk_weights(good.to(dtype), ids).dtype == torch.float32
        refused(lambda: check_topk_weights(good[:, :2], ids), "TopKWeights.weights", "shape [2, 2]", "shape [2, 3]")
        refused(lambda: check_topk_weights(good.int(), ids), "TopKWeights.weights", "torch.int32", "torch.float32")


class TestWeights:
    w13, w2 = torch.zeros(3, 8, 5), torch.zeros(3, 5, 4)

    def test_pack(self) -> None:
        plain = MoEWeightPack(self.w13, self.w2)
        assert type(plain) is UnquantizedMoEWeights and plain.num_local_experts == 3
        scales = torch.ones(3, 1, 1), torch.ones(3, 1, 1)
        quantised = MoEWeightPack(self.w13, self.w2, *scales)
        assert type(quantised) is PrequantizedMoEWeights and quantised.num_local_experts == 3
        assert MoEWeightPack(self.w13[:0], self.w2[:0]).num_local_experts == 0
        refused(lambda: MoEWeightPack(self.w13, self.w2, w13_scale=scales[0]), "only w13_scale", "both scale planes")
        refused(lambda: MoEWeightPack(self.w13, self.w2, w2_scale=scales[1]), "only w2_scale", "both scale planes")

    def test_shapes(self) -> None:
        refused(lambda: MoEWeightPack(self.w13[0], self.w2), "weights.w13", "shape [8, 5]", "[L, 2*I, H]")
        refused(lambda: MoEWeightPack(self.w13[:, :7], self.w2), "weights.w13", "shape [3, 7, 5]")
        refused(lambda: MoEWeightPack(self.w13, self.w2.mT), "weights.w2", "shape [3, 4, 5]", "[3, 5, 4]")
        refused(lambda: MoEWeightPack(self.w13, self.w2[:2]), "weights.w2", "shape [2, 5, 4]", "[3, 5, 4]")
        refused(lambda: MoEWeightPack(self.w13, self.w2.double()), "weights.w2", "torch.float64 on", "torch.float32 on")


class TestPlacement:
    @pytest.mark.parametrize("experts", [1, 2, 5, 6, 7])
    @pytest.mark.parametrize("world", [1, 2, 3, 4])
    def test_contiguous(self, experts: int, world: int) -> None:
        p = Placement.contiguous(experts, world)
        assert p.world_size == world and sum(p.slots_per_rank) == experts
        assert list(p.slots_per_rank) == sorted(p.slots_per_rank, reverse=True)
        assert max(p.slots_per_rank) - min(p.slots_per_rank) <= 1
        assert [e for rank in range(world) for e in p.experts_of(rank)] == list(range(experts))
        self.check_tables(p)

    def test_any_other(self) -> None:
        p = Placement(4, (0, 3, 2), (4, -1, 0, 2))  # expert 1 without owner, slots 1 and 3 without expert
        assert [p.experts_of(rank) for rank in range(3)] == [(), (2, -1, 3), (-1, 0)]
        assert [p.owner_of(e) for e in range(4)] == [2, NO_OWNER, 1, 1] and p.owner_of(-1) == NO_OWNER
        assert [p.first_slot(rank) for rank in range(3)] == [0, 0, 3]
        assert p.local_table(1).tolist() == [-1, -1, 0, 2] and p.local_table(2).tolist() == [1, -1, -1, -1]
        self.check_tables(p)
        self.check_tables(Placement(2, (0, 0), (-1, -1)))
        assert Placement(2, (0, 0), (-1, -1)).owner_table.tolist() == [NO_OWNER, NO_OWNER]
        assert pickle.loads(pickle.dumps(p)) == p and hash(p) == hash(dataclasses.replace(p))

    def check_tables(self, p: Placement) -> None:
        """The tables, the lists and the single answers say the same."""
        assert p.physical_table.dtype == p.owner_table.dtype == torch.int64
        for rank in range(p.world_size):
            held = p.experts_of(rank)
            assert len(held) == p.num_local(rank)
            local = [held.index(e) if e in held else NO_OWNER for e in range(p.num_experts)]
            assert p.local_table(rank).tolist() == local and p.local_table(rank).dtype == torch.int64
            assert [p.owner_of(e) == rank for e in range(p.num_experts)] == [index != NO_OWNER for index in local]

    def test_values(self) -> None:
        refused(lambda: Placement(2, (3, -1)), "Placement.slots_per_rank", "got (3, -1)", "0 or more")
        refused(lambda: Placement(4, (2, 1)), "Placement.slots_per_rank", "3 slots in all", "4, one for each")
        refused(lambda: Placement(3, (2, 1), (0, 1)), "Placement.physical", "2 entries", "3")
        for bad in ((0, 1, 3), (0, 1, -2), (0, 1, 1)):
            refused(
                lambda b=bad: Placement(3, (2, 1), b), "Placement.physical", f"got {bad}", "distinct slots from 0 to 2"
            )


@pytest.mark.parametrize(
    "name", ["config", "errors", "knobs", "placement", "reference", "routing", "tensors", "weights"]
)
def test_every_public_name_is_explained(name: str) -> None:
    module = importlib.import_module(f"moefleet.{name}")
    assert module.__doc__
    unexplained = []
    for label, value in vars(module).items():
        if (
            label.startswith("_")
            or getattr(value, "__module__", "") != module.__name__
            or not hasattr(value, "__name__")
        ):
            continue
        if not value.__doc__ or value.__doc__.startswith(f"{label}("):  # what a dataclass writes on its own
            unexplained.append(label)
        if inspect.isclass(value) and not issubclass(value, enum.Enum):
            for member, code in vars(value).items():
                function = getattr(code, "fget", getattr(code, "func", getattr(code, "__func__", code)))
                if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                    unexplained.append(f"{label}.{member}")
    assert not unexplained

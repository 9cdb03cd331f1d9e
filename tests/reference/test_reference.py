"""The reference against literal values, against itself along its two paths, and against the NumPy oracle."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefleet.config import EpLayout
from moefleet.errors import MoEEpConfigError
from moefleet.placement import NO_OWNER, Placement
from moefleet.reference import (
    ACTIVATIONS,
    combine,
    compute,
    dispatch,
    expert_mlp,
    forward,
    identity_forward,
    tolerance,
)
from moefleet.tensors import DispatchOutput
from tests.strategies import LAYOUTS, SPECIALS, Problem, make_placement, make_problem, problems

ORACLE = Path(__file__).resolve().parents[2] / "../shared/oracle/oracle.py"
NAN = float("nan")
EM, RM, FLAT = EpLayout.EXPERT_MAJOR, EpLayout.RANK_MAJOR, EpLayout.FLAT
PROPERTY = settings(max_examples=60, derandomize=True, deadline=None, database=None)

# world, experts, topk, tokens: even and uneven blocks, ranks without experts, ranks without tokens, one rank
SHAPES = [(1, 3, 2, [4]), (2, 4, 2, [3, 0]), (3, 7, 4, [5, 0, 3]), (4, 3, 1, [2, 1, 0, 3]), (2, 5, 3, [0, 0])]
CASES = [(shape, special) for shape in SHAPES for special in SPECIALS]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are tiny; threads only get in the way of others on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    if not ORACLE.is_file():
        pytest.skip("the NumPy oracle is not beside this checkout")
    spec = importlib.util.spec_from_file_location("moefleet_oracle", ORACLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem_of(shape: tuple[int, int, int, list[int]], special: str, **changes: Any) -> Problem:
    world, experts, topk, tokens = shape
    return make_problem(3, world, experts, 4, topk, tokens, special=special, **changes)


def arrays(tensors: Any) -> list[np.ndarray]:
    return [t.numpy() for t in tensors]


def masks(world: int) -> list[list[int] | None]:
    """None, everybody, all but the last, only the middle one."""
    return [None, [1] * world, [1] * (world - 1) + [0], [int(r == world // 2) for r in range(world)]]


def rows_of(
    outs: list[DispatchOutput], w13: torch.Tensor, w2: torch.Tensor, placement: Placement
) -> list[torch.Tensor]:
    """Each rank's experts applied to what it received, NaN past the counts."""
    rows = []
    for rank, out in enumerate(outs):
        held = placement.experts_of(rank)
        rows.append(compute(out, lambda x, i, held=held: expert_mlp(x, w13[held[i]], w2[held[i]]), fill=NAN))
    return rows


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestLiteral:
    """Two ranks with two experts each; rank 0 brings two tokens, rank 1 one. Every row written out."""

    xs = (torch.tensor([[1.0, 10.0], [2.0, 20.0]]), torch.tensor([[3.0, 30.0]]))
    ids = (torch.tensor([[2, 0, 2], [3, -1, 2]]), torch.tensor([[1, 1, -1]]))
    weights = (torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), torch.tensor([[64.0, 128.0, 256.0]]))
    problem = Problem(2, 4, 2, 3, xs, ids, weights)
    home = (torch.tensor([[7.0, 70.0], [80.0, 800.0]]), torch.tensor([[576.0, 5760.0]]))

    def received(self, layout: EpLayout) -> list[DispatchOutput]:
        return dispatch(self.xs, self.ids, self.weights, self.problem.params(layout), fill=-5.0)

    def test_expert_major(self) -> None:
        a, b = self.received(EM)
        pad = [-5.0, -5.0]
        assert a.expert_tensors.tolist() == [[[1, 10], pad, pad, pad], [[3, 30], pad, pad, pad]]
        assert b.expert_tensors.tolist() == [[[1, 10], [2, 20], pad, pad], [[2, 20], pad, pad, pad]]
        for out, counts in ((a, [1, 1]), (b, [2, 1])):
            assert out.expert_counts is not None
            assert out.expert_counts.tolist() == counts and out.expert_counts.dtype == torch.int32
            assert out.recv_topk_idx is out.recv_topk_weights is out.recv_total_counter is out.expert_scales is None

    def test_rank_major(self) -> None:
        a, b = self.received(RM)
        pad, none, nil = [-5.0, -5.0], [-1, -1, -1], [0, 0, 0]
        assert a.expert_tensors.tolist() == [[[1, 10], pad], [[3, 30], pad]]
        assert b.expert_tensors.tolist() == [[[1, 10], [2, 20]], [pad, pad]]
        assert a.recv_topk_idx.tolist() == [[[-1, 0, -1], none], [[1, 1, -1], none]]
        assert b.recv_topk_idx.tolist() == [[[0, -1, 0], [1, -1, 0]], [none, none]]
        assert a.recv_topk_weights.tolist() == [[[0, 2, 0], nil], [[64, 128, 0], nil]]
        assert b.recv_topk_weights.tolist() == [[[1, 0, 4], [8, 0, 32]], [nil, nil]]
        for out, counts in ((a, [1, 1]), (b, [2, 0])):
            assert out.expert_counts.tolist() == counts and out.expert_counts.dtype == torch.int32
            assert out.recv_topk_idx.dtype == torch.int64 and out.recv_topk_weights.dtype == torch.float32
            assert out.recv_total_counter is None

    def test_flat(self) -> None:
        a, b = self.received(FLAT)
        pad = [-5.0, -5.0]
        assert a.expert_tensors.tolist() == [[1, 10], [3, 30], pad, pad]
        assert b.expert_tensors.tolist() == [[1, 10], [2, 20], pad, pad]
        assert a.recv_topk_idx.tolist() == [[-1, 0, -1], [1, 1, -1], [-1, -1, -1], [-1, -1, -1]]
        assert b.recv_topk_weights.tolist() == [[1, 0, 4], [8, 0, 32], [0, 0, 0], [0, 0, 0]]
        for out in (a, b):
            assert out.recv_total_counter.tolist() == [2] and out.recv_total_counter.dtype == torch.int32
            assert out.expert_counts is None

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_identity_comes_home(self, layout: EpLayout) -> None:
        rows = [compute(out, lambda x, _: x) for out in self.received(layout)]
        assert same(combine(rows, self.ids, self.weights, self.problem.params(layout)), list(self.home))
        assert same(identity_forward(self.xs, self.ids, self.weights, 4, dtype=torch.float32), list(self.home))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_weights_are_applied_where_the_layout_says(self, layout: EpLayout) -> None:
        """Rows that come home unweighted show what combine does: weigh in EXPERT_MAJOR, only add elsewhere."""
        rows = [torch.ones_like(out.expert_tensors) for out in self.received(layout)]
        got = combine(rows, self.ids, self.weights, self.problem.params(layout))
        want = [[7.0, 40.0], [192.0]] if layout is EM else [[2.0, 1.0], [1.0]]
        assert [[row[0] for row in y.tolist()] for y in got] == want

    def test_masks(self) -> None:
        out = dispatch(self.xs, self.ids, self.weights, self.problem.params(EM), mask=[1, 0])
        assert [o.get_num_tokens() for o in out] == [1, 0]
        y, gone = identity_forward(self.xs, self.ids, self.weights, 4, mask=[1, 0])
        assert gone is None and y.tolist() == [[2, 20], [0, 0]]
        y, _ = identity_forward(self.xs, self.ids, self.weights, 4, mask=torch.tensor([1, 0]), renormalize=True)
        assert y.tolist() == [[7, 70], [0, 0]]  # 2 * (7 / 2); a token that lost everything is 0


@pytest.mark.parametrize(("shape", "special"), CASES)
class TestOracle:
    """Where the oracle is present, everything that it says."""

    def test_dispatch(self, oracle: ModuleType, shape: Any, special: str) -> None:
        p = problem_of(shape, special)
        xs, ids, weights = arrays(p.xs), arrays(p.topk_ids), arrays(p.topk_weights)
        for mask in masks(p.world_size):
            kwargs = {"mask": mask, "fill": NAN}
            by_expert = oracle.dispatch_expert_major(xs, ids, p.num_experts, mask)
            for out, (blocks, counts) in zip(
                dispatch(p.xs, *p.routing, p.params(EM), **kwargs), by_expert, strict=True
            ):
                assert out.expert_counts.tolist() == counts.tolist()
                assert out.expert_tensors.shape == (len(blocks), p.params().recv_capacity(p.world_size), p.hidden)
                for block, rows in zip(out.expert_tensors, blocks, strict=True):
                    np.testing.assert_array_equal(block[: len(rows)], rows)
                    assert block[len(rows) :].isnan().all()
            by_rank = oracle.dispatch_rank_major(xs, ids, weights, p.num_experts, mask)
            for out, parts in zip(dispatch(p.xs, *p.routing, p.params(RM), **kwargs), by_rank, strict=True):
                assert out.expert_counts.tolist() == [len(rows) for rows, _, _ in parts]
                for src, part in enumerate(parts):
                    check_packed(out, src, part)
            flat = oracle.dispatch_flat(xs, ids, weights, p.num_experts, mask)
            for out, part in zip(dispatch(p.xs, *p.routing, p.params(FLAT), **kwargs), flat, strict=True):
                assert out.recv_total_counter.tolist() == [len(part[0])] == [out.get_num_tokens()]
                check_packed(out, ..., part)

    def test_forward(self, oracle: ModuleType, shape: Any, special: str) -> None:
        p = problem_of(shape, special)
        w13, w2 = p.weights()
        args = arrays(p.xs), arrays(p.topk_ids), arrays(p.topk_weights)
        for mask in masks(p.world_size):
            for renormalize in (False, True):
                want = oracle.moe_forward(*args, w13.numpy(), w2.numpy(), mask, renormalize)
                got = forward(p.xs, *p.routing, w13, w2, mask=mask, renormalize=renormalize)
                check_close(got, want)
            want = oracle.identity_forward(*args, p.num_experts, mask)
            check_close(identity_forward(p.xs, *p.routing, p.num_experts, mask=mask), want)

    def test_random_problems_of_a_kind(self, oracle: ModuleType, shape: Any, special: str) -> None:
        world, experts, topk, tokens = shape
        for seed in range(3):
            p = make_problem(seed + 10, world, experts, 3, topk, tokens[::-1], special=special)
            w13, w2 = p.weights(4, seed)
            want = oracle.moe_forward(*map(arrays, (p.xs, *p.routing)), w13.numpy(), w2.numpy())
            check_close(forward(p.xs, *p.routing, w13, w2), want)


def check_packed(out: DispatchOutput, where: Any, part: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """The rows, ids and weights of one block, and what follows them."""
    rows, ids, weights = part
    count = len(rows)
    np.testing.assert_array_equal(out.expert_tensors[where][:count], rows)
    np.testing.assert_array_equal(out.recv_topk_idx[where][:count], ids)
    np.testing.assert_array_equal(out.recv_topk_weights[where][:count], weights)
    assert out.expert_tensors[where][count:].isnan().all()
    assert (out.recv_topk_idx[where][count:] == -1).all() and (out.recv_topk_weights[where][count:] == 0).all()


def check_close(got: list[torch.Tensor | None], want: list[np.ndarray | None], atol: float = 1e-10) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a.double(), b, rtol=1e-10, atol=atol)


def test_tolerance() -> None:
    """Two ranks: four roundings of at most half 2 ** -7 each; four slots: sixteen float32 steps."""
    assert tolerance(torch.bfloat16, 2, 4, 3.0) == tolerance(torch.float16, 2, 4, 3.0) == 3 * (2.0**-6 + 2.0**-19)
    assert tolerance(torch.float32, 2, 4, 3.0) == 3 * (2.0**-21 + 2.0**-19)


def test_tolerance_is_the_oracles(oracle: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert tolerance(dtype, 3, 4, 2.5) == oracle.tolerance(dtype.itemsize, 3, 4, 2.5)


class TestPathsAgree:
    """dispatch, compute and combine give what forward gives: these hold without the oracle."""

    @PROPERTY
    @given(problems(dtypes=(torch.float32, torch.bfloat16, torch.float16)), st.data())
    def test_split_path_is_forward(self, p: Problem, data: st.DataObject) -> None:
        placement = Placement.contiguous(p.num_experts, p.world_size)
        if data.draw(st.booleans(), "awkward placement"):
            placement = make_placement(data.draw(st.integers(0, 999)), p.num_experts, p.world_size)
        mask = data.draw(st.lists(st.integers(0, 1), min_size=p.world_size, max_size=p.world_size), "mask")
        signed = any((w < 0).any() for w in p.topk_weights)  # what nearly cancels, renormalize blows up
        check_paths(p, placement, mask, not signed and data.draw(st.booleans(), "renormalize"))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_adversarial(self, shape: Any, dtype: torch.dtype) -> None:
        for special in SPECIALS:
            p = problem_of(shape, special, dtype=dtype)
            check_paths(p, Placement.contiguous(p.num_experts, p.world_size), [1] * p.world_size, False)

    @PROPERTY
    @given(problems(), st.integers(0, 999))
    def test_an_expert_without_owner_is_no_expert(self, p: Problem, seed: int) -> None:
        placement = make_placement(seed, p.num_experts, p.world_size)
        w13, w2 = p.weights()
        owned = [torch.where((ids >= 0) & (placement.owner_table[ids] != NO_OWNER), ids, -1) for ids in p.topk_ids]
        for renormalize in (False, True):
            got = forward(p.xs, *p.routing, w13, w2, placement=placement, renormalize=renormalize)
            assert same(got, forward(p.xs, owned, p.topk_weights, w13, w2))

    @PROPERTY
    @given(problems(), st.sampled_from(LAYOUTS), st.data())
    def test_buffers(self, p: Problem, layout: EpLayout, data: st.DataObject) -> None:
        """Counts, and that rows lie in order, for any mask."""
        mask = data.draw(st.lists(st.integers(0, 1), min_size=p.world_size, max_size=p.world_size))
        placement = Placement.contiguous(p.num_experts, p.world_size)
        tokens = [torch.full_like(x, rank * 100) + torch.arange(len(x))[:, None] for rank, x in enumerate(p.xs)]
        outs = dispatch(tokens, *p.routing, p.params(layout), mask=mask, fill=NAN)
        for dst, out in enumerate(outs):
            names: list[list[float]] = []  # expected first element of each row, by block
            held = placement.experts_of(dst)
            if layout is EM:
                names = [named(p, mask, dst, {expert}) for expert in held]
            else:
                sources = range(p.world_size) if layout is RM else [None]
                names = [named(p, mask, dst, set(held), src) for src in sources]
            blocks = out.expert_tensors[None] if layout is FLAT else out.expert_tensors
            assert [b[~b.isnan().any(1), 0].tolist() for b in blocks] == names
            assert [b[: len(n), 0].tolist() for b, n in zip(blocks, names)] == names
            assert out.get_num_tokens() == sum(map(len, names))


def check_paths(p: Problem, placement: Placement, mask: list[int], renormalize: bool) -> None:
    w13, w2 = p.weights()
    live: dict[str, Any] = {"placement": placement, "mask": mask}
    want = forward(p.xs, *p.routing, w13, w2, **live, renormalize=renormalize)
    x_NH, weights_NK = torch.cat(p.xs), torch.cat(p.topk_weights)
    row = max([0.0, *(expert_mlp(x_NH, *pair).abs().max().item() for pair in zip(w13, w2) if len(x_NH))])
    bound = tolerance(w13.dtype, p.world_size, p.topk, row * max([1.0, *weights_NK.abs().sum(1).tolist()]))
    for layout in LAYOUTS:
        outs = dispatch(p.xs, *p.routing, p.params(layout), **live, fill=NAN)
        rows = rows_of(outs, w13, w2, placement)
        for rank, active in enumerate(mask):
            if not active:  # its rows are never read
                rows[rank].fill_(NAN)
        got = combine(rows, *p.routing, p.params(layout), **live, renormalize=renormalize)
        assert [y is not None for y in got] == [y is not None for y in want] == [bool(m) for m in mask]
        for y, exact, ids in zip(got, want, p.topk_ids, strict=True):
            if y is not None and exact is not None:
                assert y.dtype == w13.dtype and y.shape == exact.shape
                assert ((y.double() - exact).abs() <= bound).all()
                assert (y[(ids == -1).all(1)] == 0).all()


def named(p: Problem, mask: list[int], dst: int, experts: set[int], only: int | None = None) -> list[float]:
    """Names (source * 100 + token) of the tokens that go to ``dst`` for one of these experts."""
    return [
        float(src * 100 + token)
        for src, ids in enumerate(p.topk_ids)
        if mask[src] and mask[dst] and only in (None, src)
        for token, row in enumerate(ids.tolist())
        if experts & set(row)
    ]


class TestForward:
    def test_activations(self) -> None:
        """``w2 @ (act(gate) * up)``, term by term; gelu is the one with erf."""
        p = make_problem(0, 1, 1, 3, 1, [4])
        w13, w2 = p.weights(2)
        formulas = {
            "silu": lambda v: v / (1 + math.exp(-v)),
            "gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
            "gelu_tanh": lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
            "relu": lambda v: max(v, 0.0),
        }
        assert set(formulas) == set(ACTIVATIONS)
        ids, ones = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        for name, act in formulas.items():
            want = []
            for x in p.xs[0].double():
                gate_up = [float(row @ x) for row in w13[0].double()]
                inner = torch.tensor([act(gate_up[i]) * gate_up[2 + i] for i in range(2)], dtype=torch.float64)
                want.append(w2[0].double() @ inner)
            (got,) = forward(p.xs, [ids], [ones], w13, w2, activation=name)
            assert got is not None and got.dtype == torch.float64
            torch.testing.assert_close(got, torch.stack(want), rtol=1e-12, atol=1e-12)

    def test_rounds_once_at_the_end(self) -> None:
        p = problem_of(SHAPES[2], "random", dtype=torch.bfloat16)
        w13, w2 = p.weights()
        exact = forward(p.xs, *p.routing, w13, w2)
        assert same(forward(p.xs, *p.routing, w13, w2, dtype=torch.bfloat16), [y.bfloat16() for y in exact])

    def test_renormalize(self) -> None:
        """Weights that cancel exactly, tokens that lost nothing, something, everything; two ranks, rank 1 masked."""
        ids = torch.tensor([[0, 1], [0, 2], [0, 2], [2, 3], [-1, 2], [0, -1]])
        weights = torch.tensor([[0.3, 0.5], [0.25, 0.75], [0.0, 1.0], [0.5, 0.5], [1.0, 1.0], [0.1, 9.0]])
        x = torch.arange(1.0, 7)[:, None]
        call: dict[str, Any] = {"mask": [1, 0], "renormalize": True}
        (y, gone) = identity_forward([x, x], [ids, ids], [weights, weights], 4, **call)
        assert gone is None and y[1:5].squeeze(1).tolist() == [2.0, 0.0, 0.0, 0.0]
        plain = identity_forward([x, x], [ids, ids], [weights, weights], 4, mask=[1, 0])
        assert plain[0] is not None and torch.equal(y[[0, 5]], plain[0][[0, 5]])
        p = make_problem(0, 2, 4, 3, 2, [1, 1])
        ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, -0.5]])  # sum to 0 too, but nothing is lost
        kept = forward(p.xs, [ids, ids], [weights, weights], *p.weights(), **call)
        assert kept[0] is not None and kept[0].any()
        ids, weights = torch.tensor([[0, 1, 2]]), torch.tensor([[0.5, -0.5, 1.0]])  # live weights sum to 0
        wild = [torch.full((1, 1), math.inf)] * 2
        y, _ = identity_forward(wild, [ids, ids], [weights, weights], 4, **call)
        assert y.tolist() == [[0.0]]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_renormalize_in_combine(self, layout: EpLayout) -> None:
        p = problem_of(SHAPES[2], "signed", dtype=torch.float32)
        p = replace(p, xs=tuple(x.round() for x in p.xs))  # small integers and weights in halves: sums are exact
        call: dict[str, Any] = {"mask": [1, 1, 0]}
        rows = [compute(out, lambda x, _: x) for out in dispatch(p.xs, *p.routing, p.params(layout), **call)]
        got = combine(rows, *p.routing, p.params(layout), **call, renormalize=True)
        want = identity_forward(p.xs, *p.routing, p.num_experts, **call, renormalize=True)
        plain = combine(rows, *p.routing, p.params(layout), **call)
        assert not same(got, plain)
        for y, exact in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=0)
            assert (y[exact == 0] == 0).all()

    def test_a_dead_experts_weights_are_never_touched(self) -> None:
        p = problem_of(SHAPES[2], "random")
        w13, w2 = p.weights()
        dead = Placement.contiguous(p.num_experts, 3).experts_of(2)
        for tensor in (w13, w2):
            tensor[list(dead)] = NAN
        assert not any(y is not None and y.isnan().any() for y in forward(p.xs, *p.routing, w13, w2, mask=[1, 1, 0]))


@pytest.mark.parametrize("layout", LAYOUTS)
class TestEveryLayout:
    def test_id_types_and_strides_change_no_bit(self, layout: EpLayout) -> None:
        p = problem_of(SHAPES[2], "random")
        strided = [torch.stack([x, x * 0 + 7], 1)[:, 0] for x in p.xs]
        ids = [ids.int().T.contiguous().T for ids in p.topk_ids]
        a = dispatch(p.xs, *p.routing, p.params(layout))
        b = dispatch(strided, ids, [w.double() for w in p.topk_weights], p.params(layout))
        for x, y in zip(a, b, strict=True):
            for field in vars(x):
                left, right = getattr(x, field), getattr(y, field)
                assert left is right is None or (left.dtype == right.dtype and torch.equal(left, right))
        buffers = [out.expert_tensors for out in a]
        wide = [torch.stack([rows, rows * 0 + 7], -1)[..., 0] for rows in buffers]
        one = combine(buffers, *p.routing, p.params(layout))
        assert same(one, combine(wide, ids, p.topk_weights, p.params(layout)))

    def test_ranks_without_experts_and_without_tokens(self, layout: EpLayout) -> None:
        p = make_problem(0, 4, 2, 3, 2, [0, 2, 0, 1], special="distinct")
        outs = dispatch(p.xs, *p.routing, p.params(layout))
        empty = {EM: (0, 8, 3), RM: (4, 2, 3), FLAT: (8, 3)}[layout]
        for out in outs[2:]:
            assert out.expert_tensors.shape == empty and out.get_num_tokens() == 0
        ys = combine([out.expert_tensors for out in outs], *p.routing, p.params(layout))
        assert [tuple(y.shape) for y in ys] == [(0, 3), (2, 3), (0, 3), (1, 3)]

    @pytest.mark.parametrize("special", ["one_expert", "one_rank", "duplicates"])
    def test_everything_to_one_place_fits(self, layout: EpLayout, special: str) -> None:
        p = make_problem(0, 3, 6, 2, 4, [5, 5, 5], special=special)
        outs = dispatch(p.xs, *p.routing, p.params(layout, max_tokens_per_rank=5))
        assert sum(out.get_num_tokens() for out in outs) >= 15
        if special == "one_expert":
            assert [out.get_num_tokens() for out in outs] == [0, 0, 15]

    def test_a_named_twice_expert_has_one_row_and_both_weights(self, layout: EpLayout) -> None:
        x, ids, weights = [torch.ones(1, 2)], [torch.tensor([[1, 1, 0]])], [torch.tensor([[2.0, 3.0, 10.0]])]
        params = Problem(1, 2, 2, 3, tuple(x), tuple(ids), tuple(weights)).params(layout)
        (out,) = dispatch(x, ids, weights, params)
        assert out.get_num_tokens() == (2 if layout is EM else 1)
        assert combine([compute(out, lambda x, i: x * (i + 1))], ids, weights, params)[0].tolist() == [[20.0, 20.0]]

    def test_scales_travel_with_their_tokens(self, layout: EpLayout) -> None:
        p = problem_of(SHAPES[2], "sparse", dtype=torch.float8_e4m3fn)
        for dtype, nothing in ((torch.float32, NAN), (torch.uint8, 0), (torch.float8_e8m0fnu, NAN)):
            size = dtype.itemsize
            scales = [
                torch.arange(1, 1 + 2 * t).reshape(t, 2).to(torch.float32 if size == 4 else torch.uint8)
                for t in p.tokens
            ]
            scales = scales if size == 4 else [s.view(dtype) for s in scales]
            params = p.params(layout, scale_bytes_per_token=2 * size)
            outs = dispatch(p.xs, *p.routing, params, scales=scales, fill=NAN)
            as_tokens = dispatch(
                [s.float() for s in scales], *p.routing, p.params(layout, token_hidden_size=2, dtype_bytes=4)
            )
            for out, want in zip(outs, as_tokens, strict=True):
                assert out.expert_scales is not None and out.expert_scales.dtype == dtype
                got, past = out.expert_scales.float(), out.expert_tensors.float().isnan().any(-1)
                assert torch.equal(got[~past], want.expert_tensors[~past])
                torch.testing.assert_close(got[past], torch.full_like(got[past], nothing), equal_nan=True)
            assert all(o.expert_scales is None for o in dispatch(p.xs, *p.routing, params))
            dispatch(p.xs, *p.routing, params, scales=scales)  # e8m0 has no zero to fill with

    def test_partial_sums_are_rounded_once_per_rank(self, layout: EpLayout) -> None:
        """A rank's own terms meet in float32: bfloat16 would lose each ``tiny`` beside 1, and keeps both together."""
        tiny = 2.0**-8  # half a step of bfloat16 above 1
        x = (torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(0, 1, dtype=torch.bfloat16))
        weights = (torch.tensor([[1.0, tiny, tiny]]), torch.empty(0, 3))
        for experts, want in (([0, 1, 1], 1 + 2 * tiny), ([0, 2, 3], 1 + 2 * tiny), ([0, 1, 2], 1.0)):
            ids = (torch.tensor([experts]), torch.empty(0, 3, dtype=torch.int64))
            params = Problem(2, 4, 1, 3, x, ids, weights).params(layout)
            rows = [compute(out, lambda x, _: x) for out in dispatch(x, ids, weights, params)]
            assert combine(rows, ids, weights, params)[0].item() == want, experts


class TestWrongArguments:
    p = make_problem(0, 2, 4, 3, 2, [2, 1])
    w13, w2 = p.weights()

    def calls(self, **changes: Any) -> list[Any]:
        """Each function on the same problem, with arguments replaced."""
        a: dict[str, Any] = {"xs": self.p.xs, "ids": self.p.topk_ids, "weights": self.p.topk_weights} | changes
        xs, ids, weights = a.pop("xs"), a.pop("ids"), a.pop("weights")
        rows = [torch.zeros(2, 4, 3)] * 2
        return [
            lambda: dispatch(xs, ids, weights, self.p.params(), **a),
            lambda: forward(xs, ids, weights, self.w13, self.w2, **a),
            lambda: identity_forward(xs, ids, weights, 4, **a),
            lambda: combine(rows, ids, weights, self.p.params(), **a),
        ]

    @pytest.mark.parametrize("bad", [-2, 4, 99])
    def test_ids(self, bad: int) -> None:
        for call in self.calls(ids=[self.p.topk_ids[0], torch.tensor([[0, bad]])]):
            with pytest.raises(MoEEpConfigError, match=rf"topk_ids: got expert id {bad}, allowed -1 .* to 3"):
                call()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"ids": [torch.zeros(2, 2), torch.zeros(1, 2)]}, "topk_ids.*float32.*int32 or torch.int64"),
            ({"ids": [p.topk_ids[0], torch.tensor([[0, 1, 2]])]}, "topk_ids.*K = "),
            ({"ids": []}, "one each per rank"),
            ({"weights": p.topk_weights[:1]}, "topk_weights: got 1 for 2"),
            ({"weights": [p.topk_weights[0], torch.ones(1, 3)]}, r"weights.*\[1, 3\].*\[1, 2\]"),
            ({"mask": [1]}, "mask.*2 values"),
            ({"mask": [1, 2]}, "mask.*0 .* or 1"),
            ({"placement": Placement.contiguous(4, 3)}, "placement: got 4 experts on 3 ranks, allowed 4 experts on 2"),
            ({"placement": Placement.contiguous(5, 2)}, "placement: got 5 experts"),
        ],
    )
    def test_routing(self, changes: Any, message: str) -> None:
        for call in self.calls(**changes):
            with pytest.raises(MoEEpConfigError, match=message):
                call()

    @pytest.mark.parametrize(
        ("xs", "message"),
        [
            (p.xs[:1], "xs: got 1 tensors, allowed 2"),
            ([p.xs[0], torch.ones(2, 3)], r"xs\[1\].*\[2, 3\].*\[1, "),
            ([p.xs[0], p.xs[1].double()], r"xs\[1\].*float64.*float32"),
            ([p.xs[0], torch.ones(1, 4)], r"xs\[1\].*\[1, 4\]"),
        ],
    )
    def test_tokens(self, xs: Any, message: str) -> None:
        for call in self.calls(xs=xs)[:3]:
            with pytest.raises(MoEEpConfigError, match=message):
                call()

    def test_sizes_of_the_fleet(self) -> None:
        params, routing = self.p.params(), self.p.routing
        scales = [torch.ones(2, 2), torch.ones(1, 2)]
        for wrong, message, more in [
            ({"max_tokens_per_rank": 1}, "topk_ids: got 2 tokens, allowed at most max_tokens_per_rank = 1", {}),
            ({"max_topk": 1}, "K = 2, allowed 1 to max_topk = 1", {}),
            ({"token_hidden_size": 5}, r"xs\[0\].*\[2, 3\].*\[2, 5\]", {}),
            ({"dtype_bytes": 2}, r"xs\[0\].*12 bytes, allowed 6", {}),
            ({"scale_bytes_per_token": 9}, r"scales\[0\].*8 bytes, allowed 9", {"scales": scales}),
            ({"scale_bytes_per_token": 8}, "scales: got 1 tensors", {"scales": scales[:1]}),
        ]:
            with pytest.raises(MoEEpConfigError, match=message):
                dispatch(self.p.xs, *routing, replace(params, **wrong), **more)

    def test_more_rows_than_declared(self) -> None:
        p = make_problem(0, 3, 3, 2, 1, [2, 2, 1], special="one_expert")  # 5 rows for rank 2
        fits = dispatch(p.xs, *p.routing, p.params(FLAT, max_recv_tokens_per_rank=5))
        assert fits[2].expert_tensors.shape == (5, 2) and fits[2].recv_topk_idx.shape == (5, 1)
        assert dispatch(p.xs, *p.routing, p.params(FLAT, max_recv_tokens_per_rank=99))[0].expert_tensors.shape == (6, 2)
        small = p.params(FLAT, max_recv_tokens_per_rank=4)
        message = "max_recv_tokens_per_rank: got 4, allowed at least 5, the rows that rank 2 receives"
        with pytest.raises(MoEEpConfigError, match=message):
            dispatch(p.xs, *p.routing, small)
        with pytest.raises(MoEEpConfigError, match=message):
            combine([torch.zeros(4, 2)] * 3, *p.routing, small)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_rows(self, layout: EpLayout) -> None:
        params = self.p.params(layout)
        rows = [out.expert_tensors for out in dispatch(self.p.xs, *self.p.routing, params)]
        for bad, message in [
            (rows[:1], "rows: got 1 tensors, allowed 2"),
            ([rows[0], rows[1][..., :2]], r"rows\[1\].*shape"),
            ([rows[0], rows[1].bfloat16()], r"rows\[1\].*bfloat16.*float32"),
        ]:
            with pytest.raises(MoEEpConfigError, match=message):
                combine(bad, *self.p.routing, params)

    def test_experts(self) -> None:
        with pytest.raises(MoEEpConfigError, match="activation: got 'swish', allowed 'silu'"):
            forward(self.p.xs, *self.p.routing, self.w13, self.w2, activation="swish")
        with pytest.raises(MoEEpConfigError, match="w2"):
            forward(self.p.xs, *self.p.routing, self.w13, self.w2[..., :2])
        with pytest.raises(MoEEpConfigError, match=r"tolerance.dtype: got torch.float8_e4m3fn.*bfloat16"):
            tolerance(torch.float8_e4m3fn, 2, 2, 1.0)

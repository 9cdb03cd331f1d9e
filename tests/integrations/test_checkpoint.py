"""From a directory: what a rank reads, what it holds, and that the model is the same."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OlmoeForCausalLM

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpPeerError
from moefleet.integrations.transformers import expert_parallel, predict_memory
from moefleet.integrations.transformers.checkpoint import ONE_BY_ONE
from moefleet.integrations.transformers.files import Tensors
from moefleet.placement import Placement
from tests.conformance.pool import shared_pool
from tests.integrations.families import FAMILIES, E, tiny

M = 8
IDS = [[1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of each family in bfloat16, in several files."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        model = tiny(family, torch.bfloat16, topk=E, tie_word_embeddings=family == "qwen3_moe")
        model.save_pretrained(root / family, max_shard_size="40KB")
        assert len(list((root / family).glob("*.safetensors"))) > 1
    yield root


def values(fn: Any, *args: Any, world_size: int) -> list[Any]:
    results = shared_pool().run(fn, *args, world_size=world_size, timeout_s=100)
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.value for result in results]


@torch.no_grad()
def load(bootstrap: BootstrapConfig, root: Path, families: list[str]) -> dict[str, Any]:
    """By family: logits, tensors read, bytes predicted and measured."""
    got = {}
    for family in families:
        size = (bootstrap.world_size, bootstrap.rank)
        predicted = predict_memory(root / family, *size, max_tokens_per_rank=M)
        with expert_parallel(root / family, bootstrap, max_tokens_per_rank=M) as parallel:
            logits = parallel.model(torch.tensor(IDS)).logits.float()
            mapped = sum(is_mapped(parameter) for parameter in parallel.model.parameters())
            got[family] = (logits, parallel.tensors_read, astuple(predicted), astuple(parallel.memory()), mapped)
    return got


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in a mapped safetensors file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(".safetensors")
    return False


def expert_of(name: str) -> int | None:
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


@pytest.mark.parametrize("world_size", [3, 1])
@torch.no_grad()
def test_a_rank_reads_its_own_experts_and_the_rest_once(directory: Path, world_size: int) -> None:
    of_ranks = values(load, directory, list(FAMILIES), world_size=world_size)
    for family in FAMILIES:
        expected = tiny(family, torch.bfloat16, topk=E, tie_word_embeddings=family == "qwen3_moe")
        logits = expected(torch.tensor(IDS)).logits.float()
        files = [load_file(file) for file in sorted((directory / family).glob("*.safetensors"))]
        names = sorted(name for file in files for name in file)
        for rank, got in enumerate(of_ranks):
            result, read, predicted, measured, mapped = got[family]
            assert float((result - logits).abs().max() / logits.abs().max()) <= 3e-2, family
            own = Placement.contiguous(E, world_size).experts_of(rank)
            assert sorted(read) == [name for name in names if expert_of(name) in (None, *own)], family
            assert predicted == measured, family
            assert mapped >= 10, (family, mapped)


def test_ranks_without_experts_load_too(directory: Path) -> None:
    model = tiny("qwen3_moe", topk=2, num_experts=2)
    model.save_pretrained(directory / "few")
    _, (_, read, _, (_, experts, _), _) = (got["few"] for got in values(load, directory, ["few"], world_size=3)[1:])
    assert experts == 0
    assert not [name for name in read if expert_of(name) is not None]


@torch.no_grad()
def test_a_dtype_is_converted_and_generation_config_is_read(directory: Path) -> None:
    alone = BootstrapConfig(1, 0, device="cpu")
    with expert_parallel(directory / "olmoe", alone, max_tokens_per_rank=M, dtype=torch.float32) as parallel:
        assert parallel.model.dtype is torch.float32
        assert type(parallel.model).__name__ == "OlmoeForCausalLM"
        whole = OlmoeForCausalLM.from_pretrained(directory / "olmoe", dtype=torch.float32)
        expected = whole(torch.tensor(IDS)).logits
        torch.testing.assert_close(parallel.model(torch.tensor(IDS)).logits, expected, atol=1e-4, rtol=1e-4)
        assert parallel.model.generation_config.pad_token_id == 0
        assert not parallel.model.training


def load_alone(bootstrap: BootstrapConfig, root: Path) -> Exception:
    """Rank 1 finds nothing to load; the others have long loaded, and wait."""
    directory = root / ("nothing" if bootstrap.rank == 1 else "olmoe")
    with pytest.raises(MoEEpError) as caught:
        expert_parallel(directory, bootstrap, max_tokens_per_rank=M)
    return caught.value


def test_a_rank_that_cannot_load_tells_the_others(directory: Path) -> None:
    errors = values(load_alone, directory, world_size=3)
    culprit = errors.pop(1)
    assert isinstance(culprit, MoEEpConfigError)
    for error in errors:
        assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
        assert error.reason == f"MoEEpConfigError: {culprit}"


def test_experts_are_read_into_memory_of_their_own_one_block_after_the_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that neither the page cache nor the allocator holds them twice; transformers would read all at once."""
    alive: list[weakref.ref[Any]] = []
    most_alive: list[int] = []
    load = Tensors.load

    def counted(self: Tensors, *args: Any) -> Any:
        memory = load(self, *args)
        alive.append(weakref.ref(memory))
        most_alive.append(sum(ref() is not None for ref in alive))
        return memory

    monkeypatch.setattr(Tensors, "load", counted)
    monkeypatch.setenv(ONE_BY_ONE, "")
    with expert_parallel(directory / "olmoe", BootstrapConfig(1, 0, device="cpu"), max_tokens_per_rank=M) as parallel:
        planes = [plane for layer in parallel.layers.values() for plane in layer.weights.planes]
        assert not any(map(is_mapped, planes))
    assert len(alive) == 2 * 3 * E
    assert max(most_alive) <= 2 * E, "one block's gate and up matrices"
    assert os.environ[ONE_BY_ONE] == ""


def test_an_expert_tensor_has_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    whole = torch.randn(5, 3, 4).to(torch.bfloat16)
    save_file({"other": torch.ones(7), "mlp.experts.down_proj": whole}, tmp_path / "model.safetensors")
    stored = Tensors(tmp_path)
    tensor = stored.wanted(range(1, 4))["mlp.experts.down_proj"]
    assert (tensor.get_shape(), tensor.get_dtype(), stored.read) == ([3, 3, 4], "BF16", [])
    assert torch.equal(tensor[...], whole[1:4]) and torch.equal(tensor[1:2], whole[2:3])
    assert stored.wanted([]).keys() == {"other"}
    save_file({"mlp.experts.down_proj": whole + 1}, tmp_path / "model.safetensors")
    assert torch.equal(Tensors(tmp_path).wanted(range(5))["mlp.experts.down_proj"][...], whole + 1)


def copied(directory: Path, tmp_path: Path) -> Path:
    for file in (directory / "olmoe").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edited(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def without_experts(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[-1]
    save_file({"other": torch.zeros(1)}, file)
    (path / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda path: edited(path, quantization_config={"quant_method": "mxfp4"}), "weights quantised with mxfp4"),
        (lambda path: edited(path, quantization_config={"bits": 4}), "weights quantised with of an unnamed kind"),
        (lambda path: edited(path, architectures=["NoSuchModel"]), r"architectures: got \['NoSuchModel'\]"),
        (lambda path: (path / "config.json").unlink(), "allowed a directory with config.json"),
        (lambda path: sorted(path.glob("*.safetensors"))[0].unlink(), "allowed all files that the index names"),
        (without_experts, "got no tensors for .* allowed a complete checkpoint"),
        (
            lambda path: [file.unlink() for file in path.glob("model*")],
            r"got no \*.safetensors files",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(directory: Path, tmp_path: Path, change: Any, match: str) -> None:
    path = copied(directory, tmp_path)
    change(path)
    with pytest.raises(MoEEpConfigError, match=match):
        expert_parallel(path, BootstrapConfig(1, 0, device="cpu"), max_tokens_per_rank=M)

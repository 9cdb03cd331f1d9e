"""Sizes of tensors from headers alone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from moefleet.errors import MoEEpConfigError
from moefleet.plan import read_checkpoint, read_model
from tests.plan.folders import write_index, write_weights
from tests.plan.test_configs import TINY

EACH = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": [4, 8] for e in range(3)}
DENSE = {"model.embed_tokens.weight": [10, 8], "model.layers.0.mlp.shared_experts.up_proj.weight": [4, 8]}


def test_experts_by_name(tmp_path: Path) -> None:
    extra = {"model.layers.1.block_sparse_moe.experts.2.w1.weight": [2, 8]}
    write_weights(tmp_path / "model.safetensors", {**EACH, **DENSE, **extra})
    found = read_checkpoint(tmp_path, 3, 2)
    assert found is not None
    assert found.expert_bytes == (64, 64, 64 + 32)
    assert (found.dense_bytes, found.unused_bytes) == (160 + 64, 0)


def test_experts_in_one_tensor_and_layers_beyond_the_config(tmp_path: Path) -> None:
    write_index(
        tmp_path,
        {
            "a.safetensors": {"model.layers.0.mlp.experts.gate_up_proj": [3, 8, 8], **DENSE},
            "b.safetensors": {"model.layers.0.mlp.experts.down_proj": [3, 4, 8], "model.layers.2.x.weight": [5]},
        },
    )
    found = read_checkpoint(tmp_path, 3, 2)
    assert found is not None
    assert found.expert_bytes == (128 + 64,) * 3
    assert (found.dense_bytes, found.unused_bytes) == (224, 10)


def test_the_shipped_model_is_what_its_config_says() -> None:
    shape = read_model(TINY)
    found = read_checkpoint(TINY, shape.experts, shape.layers)
    assert found is not None and shape.dense_parameters is not None
    assert found.expert_bytes == (shape.moe_layers * shape.expert_parameters * shape.dtype_bytes,) * 16
    assert found.dense_bytes == pytest.approx(shape.dense_parameters * shape.dtype_bytes, rel=0.01)
    files = sum(path.stat().st_size for path in TINY.glob("*.safetensors"))
    assert 0 < files - sum(found.expert_bytes) - found.dense_bytes < 100_000, "the rest is the header"


def test_no_weights_or_not_all_of_them(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path, 3, 2) is None
    write_index(tmp_path, {"a.safetensors": EACH, "b.safetensors": DENSE})
    (tmp_path / "b.safetensors").unlink()
    assert read_checkpoint(tmp_path, 3, 2) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234",
        b"version https://git-lfs.github.com/spec/v1\n",
        struct.pack("<Q", 9) + b"{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
    ],
)
def test_a_file_that_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(MoEEpConfigError, match=r"model\.safetensors: got no safetensors header .*download it again"):
        read_checkpoint(tmp_path, 3, 2)


def test_an_index_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(MoEEpConfigError, match="no readable weight_map"):
        read_checkpoint(tmp_path, 3, 2)


def test_an_expert_that_the_config_does_not_know(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", EACH)
    with pytest.raises(MoEEpConfigError, match="got expert 2, allowed 0 to 1"):
        read_checkpoint(tmp_path, 2, 2)

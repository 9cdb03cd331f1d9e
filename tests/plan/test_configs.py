"""Configs of several families as shapes, and what is said about the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moefleet.errors import MoEEpConfigError
from moefleet.plan import read_model
from moefleet.plan.configs import moe_layers, shape_of
from tests.plan.folders import DEEPSEEK, MIXTRAL, SMALL, write_config

TINY = Path(__file__).parents[2] / "src" / "moefleet" / "assets" / "tiny-moe"


def test_mixtral(tmp_path: Path) -> None:
    shape = read_model(write_config(tmp_path, MIXTRAL))
    assert (shape.experts, shape.topk, shape.hidden, shape.intermediate) == (8, 2, 4096, 14336)
    assert (shape.layers, shape.moe_layers, shape.dtype, shape.quantized) == (32, 32, "bfloat16", "")
    assert shape.dense_parameters is not None
    # 46.7 B parameters, as its authors say.
    assert shape.dense_parameters + 32 * 8 * shape.expert_parameters == pytest.approx(46.70e9, rel=1e-3)


def test_deepseek(tmp_path: Path) -> None:
    shape = read_model(write_config(tmp_path, DEEPSEEK) / "config.json")
    assert (shape.experts, shape.topk, shape.intermediate) == (256, 8, 2048)
    assert (shape.layers, shape.moe_layers, shape.quantized) == (61, 58, "fp8")
    assert shape.dense_parameters is not None
    # 671 B parameters, as its authors say.
    assert shape.dense_parameters + 58 * 256 * shape.expert_parameters == pytest.approx(671.0e9, rel=1e-3)


def test_the_shipped_model() -> None:
    shape = read_model(TINY)
    assert (shape.name, shape.experts, shape.topk, shape.hidden, shape.intermediate) == ("qwen3_moe", 16, 4, 128, 96)
    assert (shape.layers, shape.moe_layers, shape.dtype) == (4, 4, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [True] * 6),
        ({"decoder_sparse_step": 2}, [False, True] * 3),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, [False, True, True, True, True, False]),
        ({"first_k_dense_replace": 2}, [False, False, True, True, True, True]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [False, False, True, False, True, False]),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 1]}, [False, True, True, False, False, True]),
        ({"interleave_moe_layer_step": 3}, [False, False, True] * 2),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], expected: list[bool]) -> None:
    assert moe_layers({"num_hidden_layers": 6, **fields}) == expected


def test_experts_of_the_text_part() -> None:
    shape = shape_of({"model_type": "outer", "dtype": "torch.float16", "text_config": SMALL})
    assert (shape.name, shape.experts, shape.dtype) == ("small", 3, "float16")


def test_dense_weights_are_unknown_where_the_config_lacks_a_size() -> None:
    assert shape_of(SMALL).dense_parameters is None
    full = {**SMALL, "vocab_size": 10, "num_attention_heads": 2, "shared_expert_intermediate_size": 5}
    # Two tables, four projections of 8 x 8, a router of 3 and a shared expert of 5, in each of two layers.
    assert shape_of(full).dense_parameters == 2 * 10 * 8 + 2 * (4 * 64 + 3 * 8 + 3 * 8 * 5)
    tied = {**full, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 2}
    assert shape_of(tied).dense_parameters == 10 * 8 + 2 * (2 * 8 * 2 * (2 + 1) + 3 * 8 + 3 * 8 * 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "experts: got none of num_local_experts, num_experts, n_routed_experts"),
        ({"num_experts": "many"}, "num_experts: got 'many', allowed a whole number of at least 1"),
        ({"num_experts": [64, 64]}, "num_experts: got"),
        ({"num_experts": True}, "num_experts: got True"),
        ({"num_experts": 0}, "num_experts: got 0"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: got none of"),
        ({"num_experts_per_tok": 4}, "plan topk: got 4, allowed 1 to 3, the number of experts"),
        ({"hidden_size": None}, "hidden_size: got nothing, allowed a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got nothing"),
        (
            {"moe_intermediate_size": None},
            "moe_intermediate_size: got none of moe_intermediate_size, intermediate_size",
        ),
        ({"mlp_only_layers": [0, 1]}, "layers: got 2 dense ones and none with experts"),
        ({"mlp_only_layers": 1}, "mlp_only_layers: got 1, allowed a list"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: got -1"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq: got 1 entries, allowed 2"),
        (
            {"dtype": "int4"},
            "plan dtype: got 'int4', allowed float32, bfloat16, float16, float8; name one of these with",
        ),
    ],
)
def test_an_odd_config_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(MoEEpConfigError) as caught:
        read_model(write_config(tmp_path, {**SMALL, **change}))
    assert said in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_type_given_replaces_that_of_the_config(tmp_path: Path) -> None:
    assert read_model(write_config(tmp_path, {**SMALL, "dtype": "int4"}), "float32").dtype == "float32"
    assert read_model(write_config(tmp_path, {**SMALL, "dtype": "float8_e4m3fn"})).dtype == "float8"


@pytest.mark.parametrize(
    ("text", "said"), [(None, "a folder with a config.json"), ("{", "no readable JSON"), (json.dumps([1]), "a list")]
)
def test_a_folder_without_a_config(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(MoEEpConfigError, match=said):
        read_model(tmp_path)

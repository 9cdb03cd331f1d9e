"""Load a random Mixtral of 2 GB over four ranks and compare each rank's peak memory with what was predicted.

    python benchmarks/checkpoint_memory.py
    python benchmarks/checkpoint_memory.py --layers 2 --world 2 --json memory.json

Predicted is what ``predict_memory`` says before anything is read: dense weights, this rank's experts, the Fleet's
buffers. Measured is by how much the rank's resident memory (VmHWM of /proc/self/status) rose at most from right before
``expert_parallel`` until all of the model's weights have been used; the code has run before, on a tiny model. Dense
weights are mapped from the files: they count in full on each rank, though the ranks share them. The column "shared" is
what of a rank's memory is such pages.

Exits with 1 where a rank took more than 10% more than was predicted. Needs Linux, and 2 GB of disk for a while.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from moefleet import BootstrapConfig
from moefleet.launch import launch

ALLOWED = 1.1
EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 8, 1024, 3584, 32000, 16, 4
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""A quarter of Mixtral-8x7B in each direction."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        dense, experts, buffers: predicted.
        loading: how much resident memory rose at most until the model was loaded.
        measured: the same until all weights have been used.
        shared: pages of files among it.
    """

    rank: int
    dense: int
    experts: int
    buffers: int
    loading: int
    measured: int
    shared: int

    @property
    def predicted(self) -> int:
        return self.dense + self.experts + self.buffers

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def measure(bootstrap: BootstrapConfig, folder: Path, most_tokens: int) -> RankMemory:
    """Load this rank's share and use it, and watch this process's memory."""
    from moefleet.integrations.transformers import expert_parallel, predict_memory

    bootstrap = replace(bootstrap, device="cpu")
    sizes = (bootstrap.world_size, bootstrap.rank)
    memory = predict_memory(folder, *sizes, max_tokens_per_rank=most_tokens, device="cpu")
    with expert_parallel(
        tiny_model(), BootstrapConfig(1, 0, device="cpu"), max_tokens_per_rank=most_tokens
    ) as parallel:
        use(parallel.model, most_tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, files_before = resident("VmRSS"), resident("RssFile")
    with expert_parallel(folder, bootstrap, max_tokens_per_rank=most_tokens) as parallel:
        loading = resident("VmHWM")
        use(parallel.model, most_tokens)
        used, files = resident("VmHWM"), resident("RssFile")
        parallel.idle_step()  # all ranks hold theirs until here
    parts = (memory.dense, memory.experts, memory.buffers)
    return RankMemory(bootstrap.rank, *parts, loading - before, used - before, files - files_before)


def tiny_model() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    return MixtralForCausalLM(MixtralConfig(**(CONFIG | sizes))).to(torch.bfloat16).eval()


@torch.no_grad()
def use(model: torch.nn.Module, tokens: int) -> None:
    """Run a forward, and read every weight outside the experts."""
    model(torch.arange(tokens)[None])
    for parameter in model.parameters():
        parameter.view(torch.uint8).amax()


def resident(name: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write a checkpoint in Mixtral's own words, a file for each layer. Returns its bytes."""
    weight_map, size = {}, 0
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    generator = torch.Generator().manual_seed(0)
    for number in range(layers + 1):
        shapes = dict(_of_layer(number) if number < layers else _around_layers())
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=generator)
            for name, shape in shapes.items()
        }
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def _of_layer(number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer, width = f"model.layers.{number}", HIDDEN // HEADS * KV_HEADS
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}.{name}.weight", (HIDDEN,)
    for name, rows in (("q_proj", HIDDEN), ("k_proj", width), ("v_proj", width), ("o_proj", HIDDEN)):
        yield f"{layer}.self_attn.{name}.weight", (rows, HIDDEN)
    yield f"{layer}.block_sparse_moe.gate.weight", (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for name, shape in (
            ("w1", (INTERMEDIATE, HIDDEN)),
            ("w2", (HIDDEN, INTERMEDIATE)),
            ("w3", (INTERMEDIATE, HIDDEN)),
        ):
            yield f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight", shape


def _around_layers() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def show(ranks: list[RankMemory]) -> None:
    """A table in MB."""
    names = ("dense", "experts", "buffers", "predicted", "loading", "measured", "shared")
    print("rank" + "".join(f"{name:>11}" for name in names) + "      ratio   (MB)")
    for of_rank in ranks:
        print(f"{of_rank.rank:>4}" + "".join(f"{getattr(of_rank, name) / 1e6:>11.1f}" for name in names), end="")
        print(f"{of_rank.ratio:>11.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=10, help="190 MB each (10)")
    parser.add_argument("--world", type=int, default=4, help="ranks (4)")
    parser.add_argument("--tokens", type=int, default=16, help="max_tokens_per_rank (16)")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), options.layers)
        print(f"{size / 1e9:.2f} GB in {options.layers + 1} files, {options.world} ranks")
        arguments = (Path(folder), options.tokens)
        results = launch(measure, options.world, args=arguments, timeout_s=600, threads_per_rank=1)
    for result in results:
        if result.error is not None:
            raise result.error
    ranks = [result.value for result in results]
    show(ranks)
    if options.json:
        rows = [{**asdict(r), "predicted": r.predicted, "ratio": round(r.ratio, 4)} for r in ranks]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if max(of_rank.ratio for of_rank in ranks) > ALLOWED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Train the byte-level tiny-moe language model from the public-domain text in ``examples/data``.

The script is self-contained: it needs torch, transformers, tokenizers, matplotlib, typer and rich, and no network.
"""

import csv
import json
import lzma
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

DATA = Path(__file__).parent / "data" / "king-james-bible.txt.xz"
BYTES = 256
EPILOG = """
Examples:\n
  python examples/train_tiny_moe.py --out build/tiny-moe\n
  python examples/train_tiny_moe.py --out build/quick --minutes 2\n
  python examples/train_tiny_moe.py --out build/smoke --steps 20 --batch-size 4\n
  python examples/train_tiny_moe.py --out build/tiny-moe --resume
"""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
console = Console()


@dataclass(frozen=True)
class Architecture:
    """Shape of the model; every layer is a sparse MoE layer."""

    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    moe_intermediate_size: int = 96
    num_experts: int = 16
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 1024


@dataclass(frozen=True)
class Training:
    """Everything that decides the result of a run; the same values and seed repeat it."""

    steps: int = 4000
    minutes: float | None = None
    batch_size: int = 8
    sequence_length: int = 256
    learning_rate: float = 3e-3
    final_lr_fraction: float = 0.02
    warmup_steps: int = 150
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    grad_clip: float = 1.0
    aux_loss_coef: float = 0.01
    seed: int = 1611
    threads: int = 2
    eval_every: int = 150
    eval_windows: int = 64
    validation_stride: int = 20
    architecture: Architecture = field(default_factory=Architecture)


@dataclass
class Record:
    """What a run has measured so far."""

    step: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def load_text(path: Path, stride: int) -> tuple[Tensor, Tensor]:
    """Return (train, validation) bytes; every ``stride``-th chapter (blank-line separated) is held out."""
    chapters = lzma.decompress(path.read_bytes()).split(b"\n\n")
    held_out = [chapter for i, chapter in enumerate(chapters) if i % stride == stride - 1]
    kept = [chapter for i, chapter in enumerate(chapters) if i % stride != stride - 1]
    train, validation = (
        torch.frombuffer(bytearray(b"\n\n".join(part)), dtype=torch.uint8).long() for part in (kept, held_out)
    )
    return train, validation


def build_model(cfg: Training) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(cfg.seed)
    config = Qwen3MoeConfig(
        vocab_size=BYTES,
        intermediate_size=cfg.architecture.moe_intermediate_size * cfg.architecture.num_experts_per_tok,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=cfg.aux_loss_coef,
        **asdict(cfg.architecture),
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Switch-style balance loss, summed over layers: 1.0 for each layer whose experts share the load evenly."""
    total = torch.zeros(())
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        load = expert_load(logits, top_k)
        total = total + logits.shape[-1] * (load * probs.mean(0)).sum()
    return total


def expert_load(logits: Tensor, top_k: int) -> Tensor:
    """Fraction of the (token, choice) pairs that go to each expert."""
    chosen = logits.topk(top_k, dim=-1).indices.flatten()
    return torch.bincount(chosen, minlength=logits.shape[-1]) / chosen.numel()


def forward(model: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Mean cross-entropy in nats per byte, and each layer's router logits."""
    out = model.model(ids[:, :-1], output_router_logits=True, use_cache=False)
    logits = model.lm_head(out.last_hidden_state)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), out.router_logits


def draw_batch(text: Tensor, cfg: Training, step: int) -> Tensor:
    """Random windows that depend on (seed, step) alone, so that a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(cfg.seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - cfg.sequence_length, (cfg.batch_size,), generator=generator)
    return text[starts[:, None] + torch.arange(cfg.sequence_length + 1)]


def windows(text: Tensor, cfg: Training, limit: int | None = None) -> Iterator[Tensor]:
    """Batches of back-to-back windows over ``text``, spread evenly over it when ``limit`` leaves some out."""
    rows = text.unfold(0, cfg.sequence_length + 1, cfg.sequence_length)
    if limit is not None and limit < len(rows):
        rows = rows[torch.linspace(0, len(rows) - 1, limit).long()]
    yield from torch.split(rows, 16)


@torch.no_grad()
def evaluate(model: Any, text: Tensor, cfg: Training, limit: int | None = None) -> tuple[float, Tensor]:
    """Bits per byte, and the load of each expert as [layer, expert] fractions."""
    model.eval()
    nats, count = 0.0, 0
    loads: list[Tensor] = []
    for batch in windows(text, cfg, limit):
        loss, router_logits = forward(model, batch)
        nats += loss.item() * len(batch)
        count += len(batch)
        per_layer = [expert_load(logits, cfg.architecture.num_experts_per_tok) for logits in router_logits]
        loads.append(torch.stack(per_layer) * len(batch))
    model.train()
    return nats / count / math.log(2), torch.stack(loads).sum(0) / count


def learning_rate(cfg: Training, step: int, progress: float) -> float:
    """Linear warmup, then cosine decay over ``progress`` in 0..1."""
    warmup = min(1.0, (step + 1) / cfg.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return cfg.learning_rate * warmup * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * cosine)


def build_optimizer(model: Any, cfg: Training) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=cfg.betas, fused=True)


def save_tokenizer(out: Path) -> None:
    """A tokenizer whose token id is the byte value, for every one of the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for U+0100 onwards.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(BYTES) if byte not in printable]
    vocab = {chr(byte if byte in printable else 0x100 + others.index(byte)): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.model_max_length = Architecture().max_position_embeddings
    wrapped.save_pretrained(out)


def save_model(model: Any, out: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer."""
    from transformers import GenerationConfig, Qwen3MoeForCausalLM

    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    stored = Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
    stored.load_state_dict(state)
    stored.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    stored.save_pretrained(out)
    save_tokenizer(out)


def save_curve(record: Record, out: Path) -> None:
    """Write training_curve.csv and training_curve.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (out / "training_curve.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(record.curve[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(record.curve)
    million_bytes = [row["bytes"] / 1e6 for row in record.curve]
    figure, axes = plt.subplots(figsize=(6, 3.4), dpi=90)
    axes.plot(million_bytes, [row["train_bpb"] for row in record.curve], label="train (running mean)")
    axes.plot(million_bytes, [row["val_bpb"] for row in record.curve], label="held-out chapters")
    axes.set(xlabel="bytes seen (millions)", ylabel="bits per byte", title="tiny-moe training")
    axes.set_ylim(1.2, 3.0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "training_curve.png")
    plt.close(figure)


def save_checkpoint(path: Path, model: Any, optimizer: torch.optim.AdamW, record: Record) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "record": asdict(record)}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: Any, optimizer: torch.optim.AdamW) -> Record:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Record(**state["record"])


def train(cfg: Training, data: Path, out: Path, resume: bool) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(cfg.threads)
    torch.set_flush_denormal(True)  # the unused bytes' Adam moments would decay into slow denormals
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    text, held_out = load_text(data, cfg.validation_stride)
    model = build_model(cfg)
    optimizer = build_optimizer(model, cfg)
    record = load_checkpoint(checkpoint, model, optimizer) if resume and checkpoint.exists() else Record()
    cpu_start = time.process_time() - record.cpu_seconds
    wall_start = time.perf_counter() - record.wall_seconds
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters, {len(text):,} training bytes, {len(held_out):,} held-out bytes")

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    columns.append(TextColumn("train {task.fields[train]:.3f} val {task.fields[val]:.3f} bits/byte"))
    losses: list[float] = []
    last = record.curve[-1] if record.curve else {"train_bpb": math.nan, "val_bpb": math.nan}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "training", total=cfg.steps, completed=record.step, train=last["train_bpb"], val=last["val_bpb"]
        )
        while record.step < cfg.steps:
            done = record.step / cfg.steps
            if cfg.minutes is not None:
                done = max(done, (time.perf_counter() - wall_start) / (60 * cfg.minutes))
            rate = learning_rate(cfg, record.step, done)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, router_logits = forward(model, draw_batch(text, cfg, record.step))
            balance = balance_loss(router_logits, cfg.architecture.num_experts_per_tok)
            torch.autograd.backward(loss + cfg.aux_loss_coef * balance)
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item() / math.log(2))
            record.step += 1
            finished = record.step == cfg.steps or done >= 1
            if record.step % cfg.eval_every == 0 or finished:
                val, load = evaluate(model, held_out, cfg, cfg.eval_windows)
                record.cpu_seconds = time.process_time() - cpu_start
                record.wall_seconds = time.perf_counter() - wall_start
                row = {
                    "step": record.step,
                    "bytes": record.step * cfg.batch_size * cfg.sequence_length,
                    "learning_rate": round(rate, 7),
                    "train_bpb": round(sum(losses) / len(losses), 4),
                    "val_bpb": round(val, 4),
                    "balance_loss": round(balance.item() / len(router_logits), 4),
                    "max_expert_load": round(load.max().item() * load.shape[1], 3),
                    "cpu_seconds": round(record.cpu_seconds, 1),
                }
                record.curve.append(row)
                losses.clear()
                save_checkpoint(checkpoint, model, optimizer, record)
                save_model(model, out)
                save_curve(record, out)
                progress.update(task, train=row["train_bpb"], val=row["val_bpb"])
            progress.update(task, completed=record.step)
            if finished:
                break
    report(text, held_out, cfg, record, out)
    checkpoint.unlink(missing_ok=True)


def report(text: Tensor, held_out: Tensor, cfg: Training, record: Record, out: Path) -> None:
    """Measure the stored weights on all held-out text and on a sample of the training text; print and save it."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(out, dtype=torch.float32)
    val, load = evaluate(model, held_out, cfg)
    train_bpb, _ = evaluate(model, text, cfg, limit=512)
    relative = load * load.shape[1]
    summary = {
        "train_bits_per_byte": round(train_bpb, 4),
        "val_bits_per_byte": round(val, 4),
        "expert_load_relative_to_even": [
            {"layer": i, "min": round(row.min().item(), 3), "max": round(row.max().item(), 3)}
            for i, row in enumerate(relative)
        ],
        "steps": record.step,
        "bytes_seen": record.step * cfg.batch_size * cfg.sequence_length,
        "cpu_minutes": round(record.cpu_seconds / 60, 1),
        "wall_minutes": round(record.wall_seconds / 60, 1),
        "training": asdict(cfg),
    }
    (out / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print_json(data=summary)


@app.command(epilog=EPILOG)
def main(
    out: Annotated[Path, typer.Option(help="Directory to write the model to.")] = Path("build/tiny-moe"),
    data: Annotated[
        Path,
        typer.Option(
            help="Training text, xz-compressed, chapters split by blank lines.", show_default=f"data/{DATA.name}"
        ),
    ] = DATA,
    steps: Annotated[int, typer.Option(help="Optimizer steps; the learning rate decays over them.")] = Training.steps,
    minutes: Annotated[
        float | None, typer.Option(help="Wall-clock budget: decay faster and stop early to keep it.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows of text per step.")] = Training.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = Training.learning_rate,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the batches.")] = Training.seed,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = Training.threads,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in the output directory.")
    ] = False,
) -> None:
    """Train tiny-moe, a 2.6 million parameter Qwen3-MoE language model over bytes, on CPU."""
    cfg = Training(
        steps=steps,
        minutes=minutes,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
    )
    train(cfg, data, out, resume)


if __name__ == "__main__":
    app()

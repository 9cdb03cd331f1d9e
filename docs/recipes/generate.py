"""A checkpoint continues texts, its experts spread over all ranks of a job: each rank writes its share of them."""

from __future__ import annotations

import argparse

import torch
from job import bootstrap_of_job
from transformers import AutoTokenizer

from moefleet.integrations.transformers import expert_parallel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder with config.json, safetensors files and a tokenizer")
parser.add_argument("prompts", nargs="+")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--max-tokens-per-rank", type=int, default=128)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--transport", default="auto")
options = parser.parse_args()

bootstrap = bootstrap_of_job(options.device)
tokenizer = AutoTokenizer.from_pretrained(options.model)
sizes = {"max_tokens_per_rank": options.max_tokens_per_rank, "backend": options.transport}
with expert_parallel(options.model, bootstrap, **sizes) as parallel, parallel.serving(), torch.inference_mode():
    for number in range(bootstrap.rank, len(options.prompts), bootstrap.world_size):
        prompt = tokenizer(options.prompts[number], return_tensors="pt").to(bootstrap.device)
        written = parallel.model.generate(**prompt, max_new_tokens=options.max_new_tokens, do_sample=False)
        text = tokenizer.decode(written[0], skip_special_tokens=True)
        # A line in one write: ranks share the output.
        print(f"text {number} by rank {bootstrap.rank}: {text!r}\n", end="", flush=True)

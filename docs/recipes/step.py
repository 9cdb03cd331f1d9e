"""One MoE layer over all ranks of a job: which transport it takes, and whether rows come back right."""

from __future__ import annotations

import argparse

import torch
from job import bootstrap_of_job

import moefleet as m

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--transport", default="auto")
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--hidden", type=int, default=256)
options = parser.parse_args()

bootstrap = bootstrap_of_job(options.device)
params = m.FleetParams(
    num_experts=8 * bootstrap.world_size,
    max_tokens_per_rank=options.tokens,
    token_hidden_size=options.hidden,
    dtype_bytes=4,
)
backend = m.SplitConfig(comm=options.transport, kernel="identity")
with m.MoEEpLayer(bootstrap, params, None, backend=backend) as layer:
    tokens = torch.randn(options.tokens, options.hidden, device=bootstrap.device)
    weights, ids = torch.rand(options.tokens, params.num_experts, device=bootstrap.device).topk(8)
    out = layer(m.MoEEpTensors(tokens, ids, weights))
    torch.testing.assert_close(out, tokens * weights.sum(1, keepdim=True))
    print(f"right: {layer.fleet.describe()}\n", end="", flush=True)  # a line in one write: ranks share the output

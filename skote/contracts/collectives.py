"""E06: collectives of a decode step, in our engine and under Transformers' own tensor parallel plan.

The plan runs on two processes that talk over gloo (torchrun starts them), from `collectives_rank`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from skote.contracts.check import Figures, Subject, greedy, prompts
from skote.contracts.ops import count_ops
from skote.engines.published_environment import default_environment, find_environment
from skote.types import EngineError

RANKS = 2
PROMPT_TOKENS = 8
STEPS = 4


def collectives(subject: Subject) -> Figures:
    """`per_token`: of a decode step in Skotergy. `tensor_parallel_per_layer`: of one layer under the plan.

    `tensor_parallel_ends`: those before the first and after the last layer. `logits_difference`: the plan's largest
    difference from one process, as a share of the largest logit: the counter-arm computes the same thing.

    Raises:
        UsageError: accelerate, which Transformers' plan asks for, is not there.
        EngineError: the two processes failed.
    """
    from skote.model.causal_lm import load_module
    from skote.runtime.engine import SkotergyEngine

    engine = SkotergyEngine(**subject.options(max_model_len=32))
    counts = count_ops(partial(greedy, engine, prompts(engine.facts.vocab, (PROMPT_TOKENS,)), STEPS))
    module = load_module(
        Path(subject.model["local_dir"]),
        dtype=torch.float32,
        device=torch.device("cpu"),
        random_seed=subject.model["random_seed"],
        layers=subject.model["layers"],
    )
    prompt = list(prompts(engine.facts.vocab, (PROMPT_TOKENS,))[0])
    with torch.no_grad():
        alone = module(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    folder = subject.directory / "tensor_parallel"
    module.save_pretrained(folder)
    plan = _run_plan(folder, prompt)
    split = torch.tensor(plan["logits"])
    layers = module.config.num_hidden_layers
    return {
        "per_token": sum(count for name, count in counts.items() if "c10d" in name) / STEPS,
        "tensor_parallel_per_layer": plan["in_layers"] / layers,
        "tensor_parallel_ends": plan["total"] - plan["in_layers"],
        "logits_difference": float((split - alone).abs().max() / alone.abs().max()),
    }


def _run_plan(folder: Path, prompt: list[int]) -> dict[str, float]:
    """What rank 0 wrote: see `collectives_rank`."""
    environment = find_environment(default_environment())
    out = folder / "counts.json"
    script = Path(__file__).with_name("collectives_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    arguments = [str(script), str(folder), str(environment), json.dumps(prompt), str(out)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode or not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"Transformers' tensor parallel plan on two processes failed: {last}")
    found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return found

"""The baseline arm against a bare Transformers script: `python benchmarks/bare_generate.py CHECKPOINT_DIR`.

Both answer the same requests, one at a time, in alternating order, each in a process of its own with all cores; bare is
`model.generate` and nothing else around it. The arm's time is dispatch to last token, the script's the call. Exits with
1 where the medians differ by more than 5 %: then the baseline would not be what a user has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skote.engines.transformers import TransformersEngine
from skote.eval.workload import build_workload
from skote.eval.workload_config import WorkloadConfig
from skote.flags import flags_for, set_flags
from skote.runtime.devices import threads_per_replica
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.runtime.text import load_tokenizer
from skote.types import EngineSpec, Request

LIMIT = 0.05


def bare_ms(model: Any, request: Request) -> float:  # noqa: ANN401 (Transformers' models are untyped)
    """Milliseconds of `model.generate` on `request`."""
    ids = torch.tensor([request.input_ids])
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.max_new_tokens,
        pad_token_id=0,
    )
    elapsed = time.perf_counter() - started
    assert output.shape[1] == len(request.input_ids) + request.max_new_tokens
    return elapsed * 1e3


def arm_ms(dispatcher: ReplicaDispatcher, request: Request) -> float:
    """Milliseconds of `request` through the baseline arm, from dispatch to last token.

    Raises:
        SystemExit: the arm failed on it.
    """
    completion = dispatcher.dispatch(request).result()
    if completion.status != "ok":
        sys.exit(f"The baseline arm failed: {completion.error}")
    return (completion.chunks[-1].t_ns - completion.dispatched_ns) / 1e6


def measure(
    checkpoint: Path, requests: Sequence[Request], warmup: Sequence[Request]
) -> tuple[list[float], list[float]]:
    """The times of the arm and of the bare script, in the order of `requests`."""
    threads = threads_per_replica(["cpu"])
    setup = partial(set_flags, flags_for("fp32", threads))
    setup()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as many tokens as the arm, whose timed requests ignore it
    target = f"{TransformersEngine.__module__}.{TransformersEngine.__qualname__}"
    options = {"local_dir": str(checkpoint), "device": "cpu", "dtype": "fp32", "threads": threads}
    arm: list[float] = []
    bare: list[float] = []
    with (
        Replica(EngineSpec(target, options), index=0, device="cpu", setup=setup) as replica,
        ReplicaDispatcher([replica], "round_robin") as dispatcher,
    ):
        replica.wait_ready(300.0)
        for request in warmup:
            arm_ms(dispatcher, request)
            bare_ms(model, request)
        for index, request in enumerate(requests):
            if index % 2:
                bare.append(bare_ms(model, request))
                arm.append(arm_ms(dispatcher, request))
            else:
                arm.append(arm_ms(dispatcher, request))
                bare.append(bare_ms(model, request))
    return arm, bare


def main() -> None:
    """Measure, print both medians and their ratio, and judge it."""
    parser = argparse.ArgumentParser(description="The baseline arm against a bare Transformers generate, fp32, CPU.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint directory with its tokenizer")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=16)
    given = parser.parse_args()
    config = WorkloadConfig(blocks=1, requests_per_block=given.requests, max_new_tokens=given.new_tokens)
    workload = build_workload(config, load_tokenizer(given.checkpoint), seed=0)
    arm, bare = measure(given.checkpoint, workload.requests, workload.warmup)
    ratio = statistics.median(arm) / statistics.median(bare)
    paired = statistics.median(a / b for a, b in zip(arm, bare, strict=True))
    print(
        f"baseline arm {statistics.median(arm):.0f} ms, bare generate {statistics.median(bare):.0f} ms (medians of "
        f"{given.requests} requests of {given.new_tokens} tokens), ratio {ratio:.3f}, median of the pairs' {paired:.3f}"
    )
    sys.exit(0 if abs(ratio - 1.0) <= LIMIT else 1)


if __name__ == "__main__":
    main()

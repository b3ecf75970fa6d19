"""One of the processes of `collectives`: a script that torchrun starts, with the ranks in its environment.

Arguments: the model's folder, a folder that holds accelerate, the prompt's ids as JSON, and the file that rank 0
writes: `in_layers` and `total` collectives of one decode step, and the prompt's last `logits`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode


def main() -> None:
    """Load by the plan, run the prompt, count one step."""
    folder, environment, prompt, out = sys.argv[1:]
    sys.path.append(environment)  # behind everything that is installed: of it only accelerate is wanted
    warnings.simplefilter("ignore")
    import transformers

    torch.set_num_threads(1)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    with torch.no_grad():
        first = model(torch.tensor([json.loads(prompt)]), use_cache=True)
        layers = model.model.layers
        with CommDebugMode() as step:  # type: ignore[no-untyped-call]
            before: list[int] = []
            hooks = [
                layers[0].register_forward_pre_hook(lambda *_: before.append(step.get_total_counts())),
                layers[-1].register_forward_hook(lambda *_: before.append(step.get_total_counts())),
            ]
            model(torch.tensor([[json.loads(prompt)[0]]]), past_key_values=first.past_key_values, use_cache=True)
            for hook in hooks:
                hook.remove()
        in_layers = before[1] - before[0]
    if dist.get_rank() == 0:
        found = {
            "in_layers": in_layers,
            "total": step.get_total_counts(),
            "logits": first.logits[0, -1].tolist(),
        }
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

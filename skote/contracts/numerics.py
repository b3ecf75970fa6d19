"""E17 to E20: the norm off CUDA, TF32 and what it costs, cuDNN's autotune, and the matmul precision."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from skote.contracts.check import REPEATS, Figures, Subject, greedy, need_cuda, prompts
from skote.contracts.ops import count_ops
from skote.flags import applied, flags_for, read_flags
from skote.kernels.rms_norm import Paths, rms_norm
from skote.types import Request

SIZES = (96, 576, 4096, 5120, 8192)
TOKENS = 32


def norm(subject: Subject) -> Figures:
    """Our RMSNorm against torch's own in fp32, at five widths, on the subject's device.

    `largest_error` relative to the largest value; `reference_calls`: how many of the five took the framework's ops.
    """
    paths: Paths = Paths()
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for hidden in SIZES:
        x = (torch.randn(7, hidden, generator=generator) * 3).to(subject.device)
        weight = torch.randn(hidden, generator=generator).to(subject.device)
        wanted = F.rms_norm(x, (hidden,), weight, 1e-5)
        worst = max(worst, float((rms_norm(x, weight, 1e-5, paths) - wanted).abs().max() / wanted.abs().max()))
    return {"largest_error": worst, "reference_calls": paths["rms_norm", "reference"]}


def flags(subject: Subject) -> Figures:
    """The flags of a process for dtype=tf32: precision "high", TF32 on, cuDNN's autotune off; 1 for yes."""
    del subject
    with applied(flags_for("tf32")):
        found = read_flags()
    return {
        "precision_high": int(found.matmul_precision == "high"),
        "tf32": int(found.tf32),
        "cudnn_autotune": int(found.cudnn_autotune),
    }


def convolutions(subject: Subject) -> Figures:
    """`calls`: of a convolution, the only thing that cuDNN's autotune tunes, in a request of each engine."""
    from skote.engines.transformers import TransformersEngine
    from skote.runtime.engine import SkotergyEngine

    calls = ops = 0
    for engine in (SkotergyEngine(**subject.options(max_model_len=64)), TransformersEngine(**subject.options())):
        counts = count_ops(partial(greedy, engine, prompts(256, (9,)), 4))
        calls += sum(count for name, count in counts.items() if "conv" in name)
        ops += counts.total()
    return {"calls": calls, "ops": ops}


def tf32(subject: Subject) -> Figures:
    """TF32 products against exact fp32, on CUDA: what is gained, and what the outputs lose.

    `speedup` of a 4096-wide matrix product. `agreement_pct`: of the tokens that exact fp32 chooses for four prompts,
    those that TF32 chooses after the same ones. `perplexity_pct`: by how much the perplexity of those tokens differs.
    """
    need_cuda("tf32", subject)
    from skote.runtime.engine import SkotergyEngine

    scores: list[torch.Tensor] = []
    chosen: list[list[int]] = []
    asked = prompts(256, (24, 40, 64, 96))
    for name in ("fp32", "tf32"):
        with applied(flags_for(name)):
            engine = SkotergyEngine(**subject.options(dtype=name, max_model_len=256))
            chosen = chosen or [greedy(engine, [prompt], TOKENS)[0] for prompt in asked]
            rows = [
                engine.score(Request("scored", prompt, TOKENS), ids) for prompt, ids in zip(asked, chosen, strict=True)
            ]
            scores.append(torch.cat([torch.from_numpy(row) for row in rows]))
    forced = torch.tensor([token for ids in chosen for token in ids])
    losses = [float(F.cross_entropy(logits, forced)) for logits in scores]
    return {
        "speedup": [_product_s("fp32", subject) / _product_s("tf32", subject) for _ in range(REPEATS)],
        "agreement_pct": 100 * float((scores[1].argmax(-1) == scores[0].argmax(-1)).float().mean()),
        "perplexity_pct": 100 * abs(float(torch.tensor(losses[1] - losses[0]).exp()) - 1),
    }


def _product_s(dtype: str, subject: Subject) -> float:
    """Seconds of a 4096-wide matrix product under the flags of `dtype`."""
    from skote.kernels.read_bandwidth import replayed

    with applied(flags_for(dtype)), torch.cuda.device(subject.device):
        matrix, *copies = (torch.randn(4096, 4096, device=subject.device) for _ in range(5))
        return replayed(lambda copy: copy @ matrix, copies)

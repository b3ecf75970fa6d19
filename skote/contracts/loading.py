"""E09 and E10: loading by the modern keyword and the older one, and embeddings that grow for a padding token alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from skote.contracts.check import Figures, Subject, prompts
from skote.types import Request

DTYPES = ("fp32", "bf16", "fp16")


def loading(subject: Subject) -> Figures:
    """`dtypes_as_asked`: of fp32, bf16 and fp16, in how many all parameters are what was asked for.

    `falls_back`: 1 where a loader that knows only `torch_dtype` gets it after it has refused `dtype`.
    """
    import torch

    from skote.flags import TORCH_DTYPES
    from skote.model.causal_lm import load_causal_lm, load_module

    as_asked = 0
    for name in DTYPES:
        dtype: torch.dtype = getattr(torch, TORCH_DTYPES[name])
        module = load_module(
            Path(subject.model["local_dir"]),
            dtype=dtype,
            device=torch.device(subject.device),
            random_seed=subject.model["random_seed"],
            layers=subject.model["layers"],
        )
        as_asked += {parameter.dtype for parameter in module.parameters()} == {dtype}

    def older(source: str, **options: object) -> tuple[str, object]:
        if "dtype" in options:
            raise TypeError("LlamaForCausalLM.__init__() got an unexpected keyword argument 'dtype'")
        return source, options["torch_dtype"]

    fell_back = load_causal_lm(older, "source", torch.bfloat16) == ("source", torch.bfloat16)
    return {"dtypes_as_asked": as_asked, "falls_back": int(fell_back)}


def pad_token(subject: Subject) -> Figures:
    """A padding id within the vocabulary, and one just beyond it.

    `rows_added_within` and `rows_added_beyond`: rows that the embedding gained. `logits_difference`: the largest
    difference of the engine's logits over the shared vocabulary between no padding id and the one beyond.
    """
    import torch

    from skote.model.causal_lm import add_token, load_module
    from skote.runtime.engine import SkotergyEngine

    plain = SkotergyEngine(**subject.options(max_model_len=32))
    vocab = plain.facts.vocab
    added = []
    for pad_id in (vocab - 1, vocab):
        module = load_module(
            Path(subject.model["local_dir"]),
            dtype=torch.float32,
            device=torch.device(subject.device),
            random_seed=subject.model["random_seed"],
            layers=subject.model["layers"],
        )
        with torch.no_grad():
            add_token(module, pad_id)
        added.append(module.get_input_embeddings().weight.shape[0] - vocab)
    padded = SkotergyEngine(**subject.options(max_model_len=32, pad_id=vocab))
    request = Request("scored", prompts(vocab, (9,))[0], 4)
    with_pad, without = (engine.score(request, (5, 6, 7, 8))[:, :vocab] for engine in (padded, plain))
    return {
        "rows_added_within": added[0],
        "rows_added_beyond": added[1],
        "logits_difference": float(np.abs(with_pad - without).max()),
    }

"""E26: the entry points and the Python signatures that the document lists, called."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from skote.contracts.check import Figures, Subject, differing
from skote.types import UsageError

ENTRY_POINTS = ("skote.runtime.generate:main", "skote.runtime.router:main", "skote.eval.command:main")
SIGNATURES = {
    "skote.runtime.generate:generate": ("local_dir", "prompt", "max_new_tokens", "greedy"),
    "skote.runtime.router:Router": ("local_dir", "devices", "dtype", "policy", "max_concurrency_per_device"),
    "skote.runtime.router:Router.submit": ("text", "max_new_tokens", "greedy"),
    "skote.runtime.router:Router.submit_many": ("texts", "max_new_tokens", "greedy"),
}
TEXTS = ("The capital of France is", "One, two, three,")


def surface(subject: Subject) -> Figures:
    """`entry_points` that can be called, `parameters_missing` from the signatures.

    `answers_differing`: of two texts, those to which `generate`, `Router.submit` and `Router.submit_many` do not give
    one and the same answer.

    Raises:
        UsageError: the model has no tokenizer.
    """
    if subject.model["random_seed"] is not None:
        raise UsageError("The check 'surface' needs a model with a tokenizer, such as model=smollm2_135m.")
    from skote.runtime.generate import generate
    from skote.runtime.router import Router

    entries: list[Callable[..., Any]] = [pkgutil.resolve_name(name) for name in ENTRY_POINTS]
    missing = 0
    for name, wanted in SIGNATURES.items():
        missing += len(set(wanted) - set(inspect.signature(pkgutil.resolve_name(name)).parameters))
    directory = subject.model["local_dir"]
    alone = [generate(directory, text, max_new_tokens=6, greedy=True) for text in TEXTS]
    with Router(directory, devices=[subject.device], dtype="fp32", log_dir=subject.directory) as router:
        one_by_one = [router.submit(text, max_new_tokens=6, greedy=True) for text in TEXTS]
        together = router.submit_many(TEXTS, max_new_tokens=6, greedy=True)
    answers = [[a, b] for a, b in zip(one_by_one, together, strict=True)]
    return {
        "entry_points": sum(callable(entry) for entry in entries),
        "parameters_missing": missing,
        "answers_differing": differing(answers, [[text, text] for text in alone]),
    }

"""Parity where an arm hands over no logits, and may tell no ids, as servers: what can be judged all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skote.eval.parity import Logits, are_choices, token_parity

SERVER_ERROR = 3.0
"""How far a server's logits may lie off the fp32 reference, as a multiple of the other arm's, which has the same dtype:
the divergences of two engines from it were seen to differ sevenfold, and go with the square of that."""
_SHOWN = 40


def are_likely_choices(reference: Logits, own: Logits, ids: Sequence[int], dtype: str) -> bool:
    """Whether a greedy server of `dtype` may have chosen `ids`, judged by an fp32 reference and an engine of `dtype`.

    Args:
        reference, own: logits of `ids` fed one by one, `[len(ids), vocab]`, in fp32 and of the engine in `dtype`. A
            token may trail the reference's best by two of the server's errors, each `SERVER_ERROR` of the engine's.
    """
    chosen, best = reference[np.arange(len(ids)), np.asarray(ids)], reference.max(-1)
    errors: Logits = SERVER_ERROR * np.abs(own - reference).max(-1)
    return bool(np.isfinite(errors).all()) and are_choices(chosen, best, dtype, errors)


def choice_parity(unlikely: Sequence[str], judged: int, checked: int, equal: int) -> dict[str, Any]:
    """The manifest's parity entry of a server that tells its tokens' ids, in another dtype than fp32.

    Args:
        unlikely: "arm request_id" of each output that its arm would not have chosen.
        judged: requests whose output of the server was held against the reference.
        checked: outputs of the other arm that were held against its own logits.
        equal: of the judged requests, those whose outputs are the same in both arms.
    """
    sentence = (
        f"Held against an fp32 reference, {judged} outputs of the arm that hands over no logits are what an "
        f"engine of this dtype may choose; all {checked} outputs of the other arm are what its own logits choose."
    )
    if unlikely:
        sentence = f"{len(unlikely)} output(s) are not what their arm would choose, first {unlikely[0]}."
    return token_parity(judged, []) | {
        "mode": "reference_choices",
        "passed": not unlikely,
        "checked": checked,
        "equal": equal,
        "sentence": sentence,
    }


def text_parity(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, Any]:
    """The manifest's parity entry in fp32, where an arm tells no ids: the arms' texts, by request, must be equal.

    White space around a text, and a character that it ends in the middle of, are left out: servers differ there.
    """
    texts = [{request_id: _plain(text) for request_id, text in arm.items()} for arm in (first, second)]
    differing = [request_id for request_id in texts[0] if texts[0][request_id] != texts[1][request_id]]
    equal = len(texts[0]) - len(differing)
    sentence = f"An arm tells no ids; the texts of greedy answers are equal on {equal} of {len(texts[0])} requests."
    if differing:
        one, other = (arm[differing[0]] for arm in texts)
        start = next((i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), None)
        start = min(len(one), len(other)) if start is None else start
        shown = (text[start : start + _SHOWN] for text in (one, other))
        sentence += f" First difference: request {differing[0]}, character {start}, {' and '.join(map(repr, shown))}."
    return token_parity(len(texts[0]), []) | {
        "mode": "text_equal",
        "passed": not differing,
        "equal": equal,
        "sentence": sentence,
    }


def unjudged_parity(why: str) -> dict[str, Any]:
    """The manifest's parity entry of arms whose outputs nothing could judge; `passed` is None."""
    return token_parity(0, []) | {
        "mode": "not_judged",
        "passed": None,
        "sentence": f"The arms' outputs were not judged: {why}",
    }


def _plain(text: str) -> str:
    return text.strip("\N{REPLACEMENT CHARACTER} \t\r\n")

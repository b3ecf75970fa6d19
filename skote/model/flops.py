"""The operations that a prefill takes, whatever computes it."""

from __future__ import annotations

from skote.model.facts import ModelFacts
from skote.model.spec import DecoderSpec


def prefill_flops(facts: ModelFacts) -> dict[str, int] | None:
    """Operations (two for a multiplication with its addition) that a prompt of P tokens and its first new token take.

    They are `fixed` + `per_token` x P + `per_pair` x P (P + 1) / 2: what no exact engine can leave out. In all layers
    but the last every token goes through every matrix, and each of the pairs of a token and one before it (or itself)
    through the two products of attention. In the last layer only k and v of all tokens are needed, for the steps to
    come; the rest, and the lm_head, is due for the last token alone. Norms, rotations and activations count nothing.
    None for a model without adapter, whose matrices are not known by name.
    """
    if not isinstance(facts, DecoderSpec):
        return None
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    keys_values = 2 * kv * facts.hidden
    fed = (facts.up_rows + facts.intermediate) * facts.hidden
    if facts.experts is not None:
        fed = facts.experts.chosen * fed + facts.experts.count * facts.hidden
    rest = 2 * q * facts.hidden + fed
    pair = 2 * q  # q . k, and its weight times v: a multiplication and an addition for each of q's values, both times
    whole = sum(window is None for window in facts.layer_windows[:-1])  # a window's pairs are not counted
    return {
        "fixed": 2 * (rest + facts.vocab * facts.hidden),
        "per_token": 2 * (facts.layers * keys_values + (facts.layers - 1) * rest)
        + (2 * pair if facts.layer_windows[-1] is None else 0),
        "per_pair": 2 * pair * whole,
    }

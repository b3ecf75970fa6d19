"""Whether an arm answers in the token ids of the model that both arms are to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skote.eval.parity import Ids, token_parity
from skote.types import InvalidRunError


class OtherVocabularyError(InvalidRunError):
    """An arm's tokens or logits are not those of the model's vocabulary, so that they cannot be compared."""


def check_ids(arm: str, outputs: Mapping[str, Ids], vocab: int) -> None:
    """Check the token ids that `arm` answered each request with.

    Raises:
        OtherVocabularyError: one lies outside of 0 to `vocab` - 1.
    """
    for request_id, ids in outputs.items():
        foreign = next((token for token in ids if not 0 <= token < vocab), None)
        if foreign is not None:
            raise OtherVocabularyError(
                f"The {arm} answered request {request_id} with token {foreign}, and the model's vocabulary is 0 to "
                f"{vocab - 1}: it does not run this model. Compare it with an engine that answers alike, or set "
                "compare=none."
            )


def check_width(arm: str, width: int, vocab: int) -> None:
    """Check how many tokens `arm` scored at a position.

    Raises:
        OtherVocabularyError: they are not `vocab`.
    """
    if width != vocab:
        raise OtherVocabularyError(
            f"The {arm} scored {width} tokens a position, and the model's vocabulary has {vocab}: it does "
            "not run this model. Compare it with an engine that answers alike, or set compare=none."
        )


def vocabulary_parity(error: OtherVocabularyError, dtype: str, compared: int) -> dict[str, Any]:
    """The manifest's parity entry of arms in `dtype` that cannot be compared for what `error` says."""
    mode = "token_equal" if dtype == "fp32" else "teacher_forced"
    return token_parity(compared, []) | {
        "mode": mode,
        "passed": False,
        "equal": 0,
        "checked": 0,
        "sentence": str(error),
    }

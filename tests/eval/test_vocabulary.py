"""Arms that answer in other token ids than the model's: found, named, and no reason to fall over."""

from __future__ import annotations

import pytest

from skote.eval.vocabulary import OtherVocabularyError, check_ids, check_width, vocabulary_parity
from skote.types import UNKNOWN_ID


def test_ids_of_the_vocabulary_pass():
    check_ids("candidate", {"a": (0, 511), "b": ()}, 512)


@pytest.mark.parametrize("token", [512, UNKNOWN_ID])
def test_an_id_beyond_the_vocabulary_is_a_sentence_about_its_arm(token):
    said = f"The candidate answered request b with token {token}, and the model's vocabulary is 0 to 511"
    with pytest.raises(OtherVocabularyError, match=said):
        check_ids("candidate", {"a": (1,), "b": (2, token)}, 512)


def test_logits_of_another_width_are_a_sentence_about_their_arm():
    check_width("candidate", 512, 512)
    with pytest.raises(OtherVocabularyError, match=r"The candidate scored 100 tokens a position, and .* has 512"):
        check_width("candidate", 100, 512)


def test_the_entry_failed_and_has_the_keys_of_every_other_one():
    from skote.eval.parity import token_parity

    entry = vocabulary_parity(OtherVocabularyError("So it is."), "fp32", 7)

    assert set(entry) == set(token_parity(0, []))
    assert (entry["passed"], entry["compared"], entry["sentence"]) == (False, 7, "So it is.")
    assert vocabulary_parity(OtherVocabularyError("So it is."), "bf16", 7)["mode"] == "teacher_forced"

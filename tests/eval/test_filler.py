from __future__ import annotations

import zlib
from collections import Counter

import pytest

from skote.eval.codec import HashCodec
from skote.eval.filler import Filler
from skote.types import UsageError

SENTENCES = ["The sea is calm.", "A boat came in at noon, late.", "Nobody waited.", "It rained on the pier all day."]


class Marked:
    """An id a word, and 1 in front of every text, as a tokenizer with a beginning-of-sequence token."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> tuple[int, ...]:
        self.encoded += 1
        return (1, *(2 + zlib.crc32(word.encode()) for word in text.split()))

    def encode_chat(self, text: str) -> tuple[int, ...]:
        return self.encode(text)


def filler(seed: int = 0, shared_prefix: float = 0.0) -> Filler:
    return Filler(SENTENCES, Marked(), seed, shared_prefix)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 512, 3000])
def test_a_prompt_has_exactly_the_length_that_was_asked_for(length):
    made = filler(shared_prefix=0.3)
    ids = [made.prompt(length), made.other_prompt(length), made.of_blocks([4, 9, 4, 7, 8, 3], 512, length)]
    assert {len(each) for each in ids} == {length}
    assert all(each[0] == 1 and 1 not in each[1:] for each in ids)


def test_no_two_prompts_are_equal_and_no_token_fills_one():
    made = filler()
    prompts = [made.prompt(40) for _ in range(200)] + [made.other_prompt(40) for _ in range(200)]
    assert len({ids[:2] for ids in prompts}) == 400  # they part at once: the number comes first
    assert all(Counter(ids).most_common(1)[0][1] < 20 for ids in prompts)


def test_a_stated_share_of_the_prompts_is_the_same_in_all_of_them():
    made = filler(shared_prefix=0.25)
    long, short, other = made.prompt(200), made.prompt(40), made.other_prompt(200)
    assert long[:50] == other[:50]
    assert long[:10] == short[:10]
    assert long[50] != other[50]
    assert long[10] != short[10]


def test_equal_hash_ids_are_equal_blocks_and_others_part_at_once():
    made = filler()
    first, second = made.of_blocks([7, 8, 9], 16, 48), made.of_blocks([7, 8, 5], 16, 40)
    assert first[:32] == second[:32]
    assert first[32] != second[32]
    assert made.of_blocks([9], 16, 16)[1:] == first[33:]  # but for the first token of all prompts
    assert filler().of_blocks([7, 8, 9], 16, 48) == first
    assert filler(seed=1).of_blocks([7, 8, 9], 16, 48) != first


def test_what_is_not_measured_changes_nothing_of_what_is():
    alone, beside = filler(), filler()
    wanted = [alone.prompt(30) for _ in range(3)]
    got = []
    for _ in range(3):
        beside.other_prompt(25)
        got.append(beside.prompt(30))
    assert got == wanted


def test_text_is_encoded_once_and_not_once_a_prompt():
    codec = Marked()
    made = Filler(SENTENCES, codec, 0)
    before = codec.encoded
    for _ in range(10):
        made.prompt(2000)
    assert codec.encoded - before == 10  # the numbers


def test_sentences_without_tokens_are_refused():
    with pytest.raises(UsageError, match=r"workload\.prompts has no tokens"):
        Filler([""], HashCodec(100), 0)

"""Pieces of text: joined they are the text of all tokens, whatever the tokenizer and wherever they are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from skote.runtime.detokenizer import WINDOW, Detokenizer

TEXTS = [
    "naïve — 日本語のテキスト",
    "👩‍👩‍👧 and 🇨🇭, e\u0301",
    "x²≥0 → ∞;  two  spaces\n\n\ttab ",
    "\N{REPLACEMENT CHARACTER} as such",
]


@cache
def byte_level() -> Any:
    """A byte-level BPE that has seen some of the characters: the others are bytes, one a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the text and naïve tests", *TEXTS[:1] * 3], trainer)
    return tokenizer


@cache
def byte_fallback() -> Any:
    """As Llama 2's: a space is part of a token, that of the first one is dropped, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁text", "s", "é"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.add(chunk) for chunk in chunks), detokenizer.finish()]


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token] for token in ids]


def cut(ids: Sequence[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    chunks, rest = [], list(ids)
    while rest:
        size = draw.randint(1, 4)
        chunks.append(rest[:size])
        rest = rest[size:]
    return chunks


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_a_text_of_any_characters_comes_back(text: str, seed: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    for chunks in (one_by_one(ids), cut(ids, seed)):
        got = pieces(Detokenizer(tokenizer.decode), chunks)
        assert "".join(got) == text


def test_no_piece_has_half_a_character() -> None:
    tokenizer = byte_level()
    got = pieces(Detokenizer(tokenizer.decode), one_by_one(tokenizer.encode(TEXTS[1]).ids))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(got)
    assert "👩" in got  # four bytes, four tokens, one piece
    assert got.count("") >= 3


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_give_the_text_of_them_all(seed: int) -> None:
    """Among them special ones, which are no text, and bytes that make no character."""
    tokenizer = byte_level()
    draw = random.Random(seed)
    ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(100)]
    for chunks in (one_by_one(ids), cut(ids, seed)):
        assert "".join(pieces(Detokenizer(tokenizer.decode), chunks)) == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(10))
def test_bytes_in_a_row_make_characters_and_the_first_space_is_dropped_once(seed: int) -> None:
    tokenizer = byte_fallback()
    draw = random.Random(seed)
    space, a, text, s, known = (tokenizer.token_to_id(each) for each in ("▁", "▁a", "▁text", "s", "é"))
    ids: list[int] = []
    for _ in range(30):
        word = draw.choice([[a], [text, s], [known], [0], [space], [1 + byte for byte in "€🙂".encode()]])
        ids.extend(word)
    want = tokenizer.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in want
    for chunks in (one_by_one(ids), cut(ids, seed)):
        assert "".join(pieces(Detokenizer(tokenizer.decode), chunks)) == want


def test_a_text_goes_on_from_its_prompt() -> None:
    tokenizer = byte_fallback()
    a, text, s = (tokenizer.token_to_id(each) for each in ("▁a", "▁text", "s"))
    assert pieces(Detokenizer(tokenizer.decode, [a] * 20), [[text], [s]]) == [" text", "s", ""]
    assert pieces(Detokenizer(tokenizer.decode), [[text], [s]]) == ["text", "s", ""]


def test_it_decodes_a_few_tokens_a_time_however_long_the_text_is() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return "".join(map(chr, ids))

    detokenizer = Detokenizer(decode)
    assert "".join(detokenizer.add([ord("x")]) for _ in range(1000)) == "x" * 1000
    assert max(sizes) <= WINDOW + 1
    assert len(sizes) < 1100  # hardly more than one call a token

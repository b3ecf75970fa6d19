"""Stop strings over texts cut in every way: where a text ends does not depend on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skote.runtime.stop_strings import StopStrings


def run(stops: Sequence[str], texts: Sequence[str]) -> tuple[str, bool]:
    stop_strings = StopStrings(stops)
    out = ""
    for text in texts:
        out += stop_strings.add(text)
        if stop_strings.found:
            break
    return out + stop_strings.finish(), stop_strings.found


@pytest.mark.parametrize(
    ("stops", "text", "want"),
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo"),
        (["STOP"], "a STO, an ST and no more", None),
        (["ab", "abc"], "xxabcd", "xx"),
        (["bcde", "cd"], "abcdef", "ab"),  # cd ends first
        (["cd", "bcd"], "abcdef", "a"),  # both end there: the longer one
        (["aab"], "aaaab", "aa"),
        (["日本"], "これは日本語", "これは"),
        (["x"], "", None),
        (["end"], "the en", None),
        ([], "anything", None),
    ],
)
def test_the_outcome_does_not_depend_on_the_pieces(stops: list[str], text: str, want: str | None) -> None:
    expected = (text, False) if want is None else (want, True)
    for mask in range(2 ** max(0, len(text) - 1)) if len(text) < 10 else [0, 2 ** len(text) - 1, 0b1010101010]:
        parts = [""]
        for index, letter in enumerate(text):
            parts[-1] += letter
            if mask >> index & 1:
                parts.append("")
        assert run(stops, parts) == expected


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stop_strings = StopStrings(["</s>", "\n\n"])
    assert [stop_strings.add(text) for text in ("a", "<", "/", "b\n", "c")] == ["a", "", "", "</b", "\nc"]

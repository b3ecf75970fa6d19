"""Stops: which token ends an answer, in both arms the same, however many tokens an engine hands over at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skote.runtime.router import Router
from skote.runtime.stops import AnswerText, Stopping, Stops
from skote.types import CheckpointError, EngineSpec, Request, RequestError, Sampling

PROMPT = (1, 20, 33, 4)
SPECIAL = (0, 1, 2, 3, 95)  # no words of their own
BYTES = "日本"  # three bytes each


def letters(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def stops(*, ids: tuple[int, ...] = (), strings: tuple[str, ...] = ()) -> Stops:
    asked = Request("a", (1,), 100, stop_ids=ids, stop_strings=strings)
    return Stops(asked, letters if strings else None)


@pytest.mark.parametrize(
    ("options", "text", "end"),
    [
        ({"strings": ("c", "xy")}, "abxcd", 4),
        ({"strings": ("xy",)}, "abxcd", None),
        ({"strings": ("bc",)}, "abcd", 3),  # the token that completes it counts
        ({"ids": (ord("b"),)}, "abcd", 2),
        ({"ids": (ord("d"),), "strings": ("bc",)}, "abcd", 3),
        ({"ids": (ord("b"),), "strings": ("bc",)}, "abcd", 2),
        ({"ids": (ord("c"),), "strings": ("bc",)}, "abcd", 3),
        ({"strings": ("本",)}, f"a{BYTES}b", 7),  # its third byte
        ({"strings": ("\x00\t",)}, "a\x00\tb", 3),
    ],
)
def test_the_end_does_not_depend_on_how_many_tokens_come_at_once(
    options: dict[str, Any], text: str, end: int | None
) -> None:
    tokens = list(text.encode())
    for size in range(1, len(tokens) + 1):
        looking, seen, found = stops(**options), 0, None
        while found is None and seen < len(tokens):
            within = looking.end(tokens[seen : seen + size])
            found = None if within is None else seen + within
            seen += size
        assert found == end


def test_text_goes_out_up_to_the_stop_string_and_no_further() -> None:
    text = AnswerText(letters, ["bc"])
    assert text.add(b"ab") == ("a", 2)  # b may begin it
    assert text.add(b"cde") == ("", 1)
    assert (text.is_stopped, text.finish()) == (True, "")
    text = AnswerText(letters, ["bc"])
    assert text.add(b"ab\xe6") == ("a", 3)
    assert (text.finish(), text.is_stopped) == ("b\N{REPLACEMENT CHARACTER}", False)


def test_requests_without_stops_are_not_looked_at() -> None:
    assert Stopping(None).watch(Request("a", (1,), 4)) is None
    assert Stopping(None).watch(Request("a", (1,), 4, stop_ids=(3,))) is not None


def test_stop_strings_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    asked = Request("a", (1,), 4, stop_strings=("x",))
    with pytest.raises(RequestError, match=r"^Stop strings need the model's tokenizer, .* use stop_ids\.$"):
        Stopping(None).watch(asked)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Stopping(str(tmp_path)).watch(asked)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stop_ids": (-1,)}, "stop_ids must be a tuple of token ids"),
        ({"stop_ids": [1]}, "stop_ids must be a tuple of token ids"),
        ({"stop_strings": ("",)}, "stop_strings must be a tuple of texts that are not empty"),
        ({"stop_strings": "end"}, "stop_strings must be a tuple"),
    ],
)
def test_stops_of_the_wrong_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        Request("a", (1,), 4, **options)


SKOTERGY = "skote.runtime.engine.SkotergyEngine"
ENGINES = {
    "alone": EngineSpec(SKOTERGY, {"compile": False}),
    "in flight": EngineSpec(SKOTERGY, {"compile": False, "max_batch": 4}),
    "transformers": EngineSpec("skote.engines.transformers.TransformersEngine", {}),
}


@pytest.fixture(params=list(ENGINES))
def router(
    request: pytest.FixtureRequest, copy_checkpoint: Callable[..., Path], write_tokenizer: Callable[..., None]
) -> Iterator[Router]:
    directory = copy_checkpoint(eos_token_id=None)
    write_tokenizer(directory)
    window = {"microbatch_window_ms": 50.0} if request.param == "transformers" else {}
    with Router(directory, "cpu", engine=ENGINES[request.param], max_concurrency_per_device=4, **window) as opened:
        yield opened


def test_all_engines_end_at_the_same_token(router: Router, make_checkpoint: Any, reference_ids: Any) -> None:
    """Alone and among others; an answer that goes on is the one without stops."""
    whole = reference_ids(make_checkpoint(), PROMPT, 24)
    shown = [each not in SPECIAL for each in whole]
    at = next(index for index in range(4, 20) if all(shown[index : index + 2]) and whole[index] not in whole[:index])
    absent = next(each for each in range(96) if each not in whole)
    word = f"w{whole[at]}"
    before = " ".join(f"w{each}" for each in whole[:at] if each not in SPECIAL)
    futures = [
        router.submit_ids(PROMPT, max_new_tokens=24, sampling=Sampling(), ignore_eos=True, **options)
        for options in ({}, {"stop_ids": [whole[at]]}, {"stop_strings": [f"{word} ", "never"]}, {"stop_ids": [absent]})
    ]
    plain, by_id, by_string, goes_on = (future.result() for future in futures)
    assert plain.output_ids == goes_on.output_ids == tuple(whole)
    assert by_id.output_ids == tuple(whole[: at + 1])
    # The space after the word shows with the next token.
    assert by_string.output_ids == tuple(whole[: at + 2])
    reasons = [each.finish_reason for each in (plain, by_id, by_string, goes_on)]
    assert reasons == ["length", "stop", "stop", "length"]
    assert {each.status for each in (plain, by_id, by_string, goes_on)} == {"ok"}
    for each in (by_id, by_string):
        assert sum(chunk.n_tokens for chunk in each.chunks) == len(each.output_ids)
    prompt = " ".join(["<s>", "w20", "w33", "w4"])
    stopped = router.submit(prompt, max_new_tokens=24, stop_strings=[f" {word}"])
    assert stopped == before
    assert router.submit_many([prompt], max_new_tokens=24, stop_strings=[f" {word}"]) == [stopped]

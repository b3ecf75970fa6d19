from __future__ import annotations

import dataclasses

import pytest

from skote.eval.cross_check import cross_differences
from skote.eval.record import read_run


@pytest.fixture
def run(synthetic, timeline):
    """Two blocks of two requests of 4 tokens in 2 chunks, and one request that failed without a chunk."""

    def choose(arm, block, request):
        ok = (arm, block, request) != ("baseline", 1, 0)
        return timeline(0.2, 10, [5], output=(1, 2, 3, 4), tokens_per_chunk=2, ok=ok)

    return read_run(synthetic(blocks=2, requests=2, tokens=4).write(choose))


def changed(run, change):
    """`run` with its frames changed by `change(requests, tokens)`; what it returns takes the place of `tokens`."""
    requests, tokens = run.requests.copy(), run.tokens.copy()
    replaced = change(requests, tokens)
    return dataclasses.replace(run, requests=requests, tokens=tokens if replaced is None else replaced)


def measured(frame, arm, block, request):
    mine = (frame.phase == "measure") & (frame.arm == arm) & (frame.block == block)
    return frame.index[mine & (frame.request_id == request)]


def test_a_run_agrees_with_itself_whatever_the_order_of_its_chunks(run):
    assert list(cross_differences(run)) == []
    assert list(cross_differences(changed(run, lambda requests, tokens: tokens.iloc[::-1]))) == []


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("last_token_ns", -1_000_000, ""),
        ("first_token_ns", -1_000_000, ""),
        ("output_tokens", 1, ": 5, and there 4."),
        ("first_chunk_tokens", -1, ": 1, and there 2."),
    ],
)
def test_each_figure_that_a_request_shares_with_its_chunks(run, name, by, said):
    def change(requests, tokens):
        requests.loc[measured(requests, "candidate", 1, "chat-01"), name] += by

    (sentence,) = cross_differences(changed(run, change))
    assert sentence.startswith(
        f"requests.parquet: {name} of 1 request is not what tokens.parquet has, first chat-01 of the candidate in "
        "block 1: "
    )
    assert sentence.endswith(said)


def test_a_request_that_failed_and_claims_tokens(run):
    def change(requests, tokens):
        requests.loc[measured(requests, "baseline", 1, "chat-00"), "output_tokens"] = 4

    (sentence,) = cross_differences(changed(run, change))
    assert sentence.endswith("first chat-00 of the baseline in block 1: 4, and there 0.")


def test_chunks_that_are_missing(run):
    def change(requests, tokens):
        return tokens.drop(index=measured(tokens, "candidate", 0, "chat-01")[:1])

    found = list(cross_differences(changed(run, change)))
    assert found[0] == "tokens.parquet: chunks of 1 request are missing, first chat-01 of the candidate in block 0."
    assert [sentence.split()[1] for sentence in found[1:]] == ["first_token_ns", "output_tokens"]


def test_a_row_that_is_missing_or_stands_there_twice(run):
    row = measured(run.requests, "candidate", 0, "chat-01")
    lost = dataclasses.replace(run, requests=run.requests.drop(index=row))
    twice = dataclasses.replace(run, requests=run.requests.loc[[*run.requests.index, *row]])
    assert list(cross_differences(lost)) == [
        "tokens.parquet: chunks of 1 request without a row, first chat-01 of the candidate in block 0."
    ]
    assert list(cross_differences(twice)) == [
        "requests.parquet: 1 request stand there twice, first chat-01 of the candidate in block 0."
    ]


def test_a_run_without_a_request(run):
    empty = dataclasses.replace(run, requests=run.requests.iloc[:0], tokens=run.tokens.iloc[:0])
    assert list(cross_differences(empty)) == []

"""Whether requests.parquet and tokens.parquet tell the same: each measured request against its own chunks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from skote.eval.derive import KEYS, in_request_order, measured_rows, request_starts
from skote.eval.finding import requests
from skote.eval.record import Run

FROM_CHUNKS = ("first_token_ns", "last_token_ns", "output_tokens", "first_chunk_tokens")


def cross_differences(run: Run) -> Iterator[str]:
    """Where a measured request and its chunks disagree, a sentence for each column.

    The stamps of a request are those of its first and last chunk, its output tokens the sum over all of them. Warm-up
    is left out: every replica gets the same requests there, and a chunk does not say which replica it is from.
    """
    rows = measured_rows(run.requests)[[*KEYS, *FROM_CHUNKS]]
    twice = rows.duplicated(KEYS)
    if twice.any():
        yield f"requests.parquet: {requests(int(twice.sum()))} stand there twice, first {_name(rows[twice])}."
        return
    chunks = _from_chunks(measured_rows(run.tokens))
    text = {"arm": object, "request_id": object}
    both = rows.astype(text).merge(chunks.astype(text), "outer", KEYS, suffixes=("", "_found"), indicator=True)
    lost = both["_merge"] == "right_only"
    if lost.any():
        yield f"tokens.parquet: chunks of {requests(int(lost.sum()))} without a row, first {_name(both[lost])}."
    broken = both["unbroken"] == False  # noqa: E712 (missing where a request has no chunk)
    if broken.any():
        yield f"tokens.parquet: chunks of {requests(int(broken.sum()))} are missing, first {_name(both[broken])}."
    both = both.fillna({"output_tokens_found": 0, "first_chunk_tokens_found": 0})
    for name in FROM_CHUNKS:
        said, found = both[name], both[f"{name}_found"]
        differ = both[~lost & (said != found) & ~(said.isna() & found.isna())]
        if len(differ):
            yield (
                f"requests.parquet: {name} of {requests(len(differ))} is not what tokens.parquet has, first "
                f"{_name(differ)}: {_shown(differ, name)}, and there {_shown(differ, f'{name}_found')}."
            )


def _from_chunks(tokens: pd.DataFrame) -> pd.DataFrame:
    """A row a request: `KEYS`, `FROM_CHUNKS`, and `unbroken`, whether its chunks count up from 0."""
    tokens = in_request_order(tokens)
    starts = np.flatnonzero(request_starts(tokens))
    ends = np.append(starts[1:], len(tokens))[: starts.size]
    stamps, counts, index = (tokens[name].to_numpy() for name in ("t_ns", "n_tokens", "index"))
    chunks = tokens.loc[starts, KEYS]
    return chunks.assign(
        first_token_ns=stamps[starts],
        last_token_ns=stamps[ends - 1],
        output_tokens=np.add.reduceat(counts, starts) if starts.size else counts,
        first_chunk_tokens=counts[starts],
        unbroken=(index[starts] == 0) & (index[ends - 1] == ends - starts - 1),
    )


def _name(rows: pd.DataFrame) -> str:
    row = rows.iloc[0]
    return f"{row['request_id']} of the {row['arm']} in block {row['block']}"


def _shown(rows: pd.DataFrame, name: str) -> str:
    value = rows[name].iloc[0]
    return "none" if pd.isna(value) else f"{value:.0f}"

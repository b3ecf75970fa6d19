"""The formats of rows: recognised by the keys of a record, or named; each a function from a record to a `Row`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from skote.eval.sources.row import Row, RowError
from skote.types import RequestError, Sampling, UsageError, is_whole

Record = Mapping[str, Any]

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash_ids stands for."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def recognise(record: Record, path: Path) -> str:
    """The format of a file, by its first record.

    Raises:
        UsageError: it is none that is known.
    """
    keys = record.keys() | _asked(record).keys()
    for name, needed in _KEYS.items():
        if needed <= keys:
            return name
    shown = ", ".join(list(record)[:12]) or "none"
    raise UsageError(
        f"workload.source.path={path} has rows of no format that is known (keys: {shown}): name it with "
        f"workload.source.format, one of {', '.join(FORMATS)}."
    )


def azure(place: str, record: Record) -> Row:
    """Azure's LLM inference traces: TIMESTAMP (date and time), ContextTokens, GeneratedTokens."""
    return Row(
        place,
        at_ns=_moment_ns(record, "TIMESTAMP"),
        input_tokens=_count(record, "ContextTokens"),
        output_tokens=_count(record, "GeneratedTokens"),
    )


def burstgpt(place: str, record: Record) -> Row:
    """BurstGPT: Timestamp in seconds, Request tokens, Response tokens, which are 0 where the service failed."""
    return Row(
        place,
        at_ns=_ns(record, "Timestamp", 9),
        input_tokens=_count(record, "Request tokens"),
        output_tokens=_count(record, "Response tokens"),
    )


def mooncake(place: str, record: Record) -> Row:
    """Mooncake: timestamp in milliseconds, input_length, output_length, and a hash id for each 512 tokens."""
    length = _count(record, "input_length")
    hashes = record.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
        raise RowError("hash_ids must be a list of whole numbers")
    if hashes and len(hashes) != -(-length // MOONCAKE_BLOCK):
        raise RowError(f"it has {len(hashes)} hash_ids, and {length} tokens are {-(-length // MOONCAKE_BLOCK)} blocks")
    return Row(
        place,
        at_ns=_ns(record, "timestamp", 6),
        input_tokens=length,
        output_tokens=_count(record, "output_length"),
        hash_ids=tuple(hashes),
    )


def lengths(place: str, record: Record) -> Row:
    """Lengths alone: input_tokens, output_tokens, and a timestamp in seconds where there is one."""
    return Row(
        place,
        at_ns=_ns(record, "timestamp", 9) if record.get("timestamp") not in (None, "") else None,
        input_tokens=_count(record, "input_tokens"),
        output_tokens=_count(record, "output_tokens"),
    )


def prompts(place: str, record: Record) -> Row:
    """A prompt a row (also vLLM's custom data set): prompt or text, and what `_options` reads."""
    content = _asked(record)
    text = content.get("prompt", content.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise RowError("its prompt is no text, or an empty one")
    return Row(place, turns=(text,), **_options(content))


def messages(place: str, record: Record) -> Row:
    """The OpenAI chat format: messages up to the answer, tools, and what `_options` reads; or a batch's `body`."""
    content = _asked(record)
    said, tools = (_decoded(content.get(key)) for key in ("messages", "tools"))
    if not isinstance(said, list) or not said or not all(isinstance(each, dict) and "role" in each for each in said):
        raise RowError("its messages are no list of mappings with a role")
    if not isinstance(tools or [], list):
        raise RowError("its tools are no list")
    replies: tuple[str, ...] = ()
    if said[-1]["role"] == "assistant":  # what a data set for training ends with
        replies = (spoken(said[-1]),)
        said = said[:-1]
        if not said:
            raise RowError("its messages are an answer alone")
    return Row(place, messages=tuple(said), tools=tuple(tools or ()), replies=replies, **_options(content))


def spec_bench(place: str, record: Record) -> Row:
    """Spec-Bench and MT-Bench: turns, what a user says one after the other."""
    turns = _decoded(record.get("turns"))
    if not isinstance(turns, list) or not turns or not all(isinstance(each, str) and each.strip() for each in turns):
        raise RowError("its turns are no list of texts")
    return Row(place, turns=tuple(turns), **_options(record))


def sharegpt(place: str, record: Record) -> Row:
    """ShareGPT: conversations of `from` and `value`; what people say, and the answers to it for their lengths."""
    said = _decoded(record.get("conversations"))
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        raise RowError("its conversations are no list of mappings")
    people = [(str(each.get("from", each.get("role"))), each.get("value", each.get("content"))) for each in said]
    if not all(isinstance(text, str) for _, text in people):
        raise RowError("what is said in its conversations is not text throughout")
    asked: list[str] = []
    replies: list[str] = []
    for who, text in people:
        if who in ("human", "user"):
            asked.append(str(text))
            replies.append("")
        elif who in ("gpt", "assistant", "chatgpt", "bing", "bard") and replies:
            replies[-1] += str(text)
    if not asked or not asked[0].strip():
        raise RowError("nobody asks anything in its conversations")
    return Row(place, turns=tuple(asked), replies=tuple(replies), **_options(record))


def spoken(message: Record) -> str:
    """What an assistant's message says, its calls of tools as JSON."""
    calls = message.get("tool_calls")
    return str(message.get("content") or "") + (json.dumps(calls) if calls else "")


def replay(place: str, record: Record) -> Row | None:
    """A row of a recorded run's requests.parquet: when it was scheduled, and its lengths.

    None for warm-up, and for the second time, through the other arm, of what was asked in the first.
    """
    if record.get("phase", "measure") != "measure" or record.get("arm", "candidate") != "candidate":
        return None
    return Row(
        place,
        at_ns=_count(record, "scheduled_ns"),
        input_tokens=_count(record, "input_tokens"),
        output_tokens=_count(record, "output_tokens"),
    )


FORMATS: Mapping[str, Callable[[str, Record], Row | None]] = {
    "azure": azure,
    "burstgpt": burstgpt,
    "mooncake": mooncake,
    "replay": replay,
    "sharegpt": sharegpt,
    "messages": messages,
    "spec_bench": spec_bench,
    "prompts": prompts,
    "lengths": lengths,
}

_KEYS: Mapping[str, set[str]] = {
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
    "mooncake": {"timestamp", "input_length", "output_length"},
    "replay": {"run_id", "scheduled_ns", "input_tokens", "output_tokens"},
    "sharegpt": {"conversations"},
    "messages": {"messages"},
    "spec_bench": {"turns"},
    "prompts": {"prompt"},
    "lengths": {"input_tokens", "output_tokens"},
}


def _asked(record: Record) -> Record:
    """What a request asks for: in a row of an OpenAI batch file that is its `body`."""
    body = record.get("body")
    return body if isinstance(body, dict) else record


def _options(record: Record) -> dict[str, Any]:
    """What a row with text may say of its answer and its time, in the OpenAI API's names and vLLM's."""
    limits = [record[key] for key in ("max_completion_tokens", "max_tokens", "output_tokens") if record.get(key)]
    sampling = {key: record[key] for key in ("temperature", "top_p", "top_k", "seed") if record.get(key) is not None}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0  # vLLM's name for no limit
    try:
        Sampling(**sampling)
    except RequestError as error:
        raise RowError(str(error).rstrip(".")) from None
    return {
        "at_ns": _ns(record, "timestamp", 9) if record.get("timestamp") is not None else None,
        "output_tokens": _count({"max_tokens": limits[0]}, "max_tokens") if limits else None,
        "sampling": sampling,
        "think_ns": _thinking(record.get("think_ms")),
        **_stops(record),
    }


def _thinking(value: Any) -> tuple[int, ...]:  # noqa: ANN401 (what a record holds)
    """A list of milliseconds, one for each further turn, as nanoseconds."""
    times = _decoded(value)
    if times is None:
        return ()
    if not isinstance(times, list):
        raise RowError(f"think_ms must be a list of milliseconds, one for each further turn, got {value!r}")
    found = tuple(_ns({"think_ms": each}, "think_ms", 6) for each in times)
    if min(found, default=0) < 0:
        raise RowError(f"think_ms must be 0 or more, got {value!r}")
    return found


def _stops(record: Record) -> dict[str, Any]:
    """OpenAI's `stop`, a text or a list of them, and vLLM's `stop_token_ids`."""
    strings, ids = record.get("stop") or [], _decoded(record.get("stop_token_ids")) or []
    if isinstance(strings, str):
        strings = listed if _are_texts(listed := _decoded(strings)) else [strings]  # a column of text holds JSON
    if not _are_texts(strings):
        raise RowError("its stop is neither a text nor a list of texts")
    if not isinstance(ids, list) or not all(is_whole(each) and each >= 0 for each in ids):
        raise RowError("its stop_token_ids are no list of token ids")
    return {"stop_strings": tuple(strings), "stop_ids": tuple(ids)}


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each for each in value)


def _decoded(value: Any) -> Any:  # noqa: ANN401 (what a record holds)
    """A list as it is, or out of the JSON that a column of text holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _count(record: Record, key: str) -> int:
    """A whole number of at least 1, as a number or as text."""
    value = record.get(key)
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:
        raise RowError(f"{key} must be a whole number, got {value!r}") from None
    if isinstance(value, bool) or not number.is_finite() or number != int(number):
        raise RowError(f"{key} must be a whole number, got {value!r}")
    if number < 1:
        raise RowError(f"{key} is {int(number)}, and a request has at least one token of each kind")
    return int(number)


def _ns(record: Record, key: str, digits: int) -> int:
    """A time as nanoseconds, of a number in a unit of 10^`digits` of them."""
    value = record.get(key)
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:
        raise RowError(f"{key} must be a number, got {value!r}") from None
    if isinstance(value, bool) or not number.is_finite():
        raise RowError(f"{key} must be a finite number, got {value!r}")
    return int((number * 10**digits).to_integral_value())


def _moment_ns(record: Record, key: str) -> int:
    """A date and time, to the last digit of its fraction, as nanoseconds since 1970; without a zone it is UTC."""
    text = str(record.get(key)).strip()
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError:
        raise RowError(f"{key} must be a date and a time, got {text!r}") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 10**9 + int(digits.ljust(9, "0")[:9])

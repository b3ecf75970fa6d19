"""Keeps a server busy with patient, impatient and broken clients, and looks for what they leave behind.

`python tools/soak.py --seconds 600 model.path=DIR devices=2`: the keys are `skote-serve`'s. The server is started, a
number of clients ask it for so long, each time as another kind of client, and then all that they held must be free
again: requests, file descriptors, threads, processes. Prints a table; exits with 1 where something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

START_S = 600.0
IDLE_S = 1.0
"""How soon a slot has to be free, and what else an answer holds."""
KEPT_ALIVE_S = 8.0
"""An idle connection is closed after five seconds."""
EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of asyncio.to_thread, which starts them one by one and keeps them."""
WORDS = ("the", "quick", "brown", "fox", "sees", "naïve", "日本語", "🙂", "\n")


@dataclass(slots=True)
class Tally:
    """What clients saw: how often each kind asked, the statuses, and sentences about what must not be."""

    asked: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Held:
    """What the server holds at a moment."""

    requests: int
    descriptors: int
    threads: int
    processes: int
    rss_mb: float


class Client:
    """One that asks again and again, each time as somebody else."""

    def __init__(self, port: int, seed: int, most_tokens: int, tally: Tally) -> None:
        self._port = port
        self._most_tokens = most_tokens
        self._draw = random.Random(seed)  # noqa: S311 - which client comes next is no secret
        self._tally = tally
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self.streams, self.streams, self.waits, self.leaves, self.breaks_off, self.hangs_up_while_waiting,
            self.stops_reading, self.stops_sending, self.sends_rubbish, self.asks_wrongly,
        ]  # fmt: skip

    async def run(self, until: float) -> None:
        """Ask until then."""
        while time.monotonic() < until:
            kind = self._draw.choice(self._kinds)
            self._tally.asked[kind.__name__] += 1
            await kind()

    async def streams(self) -> None:
        """To the end, which has to be one."""
        reader, writer = await self._ask(self._body(stream=True))
        text = await _rest(reader)
        await _close(writer)
        if self._status(text) == 200 and b"data: [DONE]" not in text:
            self._tally.wrong.append(f"A stream ended without its end: {text[-200:]!r}")

    async def waits(self) -> None:
        """For a whole answer."""
        reader, writer = await self._ask(self._body(stream=False))
        answer = await _rest(reader)
        await _close(writer)
        if self._status(answer) == 200 and b'"usage":{' not in answer:
            self._tally.wrong.append(f"An answer was not whole: {answer[-200:]!r}")

    async def leaves(self) -> None:
        """In the middle of a stream."""
        reader, writer = await self._ask(self._body(stream=True))
        await reader.read(self._draw.choice([1, 200, 2000]))
        await _close(writer)

    async def breaks_off(self) -> None:
        """As one whose machine is gone: without a word."""
        reader, writer = await self._ask(self._body(stream=True))
        await reader.read(self._draw.choice([1, 200, 2000]))
        self._reset(writer)
        await _close(writer)

    async def hangs_up_while_waiting(self) -> None:
        """For a whole answer that is on its way."""
        _, writer = await self._ask(self._body(stream=False))
        await asyncio.sleep(self._draw.random() / 10)
        if self._draw.random() < 0.5:
            self._reset(writer)
        await _close(writer)

    async def stops_reading(self) -> None:
        """A stream that is long enough to fill buffers; then goes."""
        _, writer = await self._ask(self._body(stream=True, return_token_ids=True))
        await asyncio.sleep(self._draw.random() * 2)
        await _close(writer)

    async def stops_sending(self) -> None:
        """In the head, or in the body."""
        request = _post(self._body(stream=True))
        _, writer = await self._send(request[: self._draw.randrange(1, len(request))])
        await asyncio.sleep(self._draw.random())
        await _close(writer)

    async def sends_rubbish(self) -> None:
        """Bytes that are no HTTP, or a body that is no JSON."""
        rubbish = self._draw.randbytes(self._draw.randint(1, 5000))
        request = rubbish + b"\r\n\r\n" if self._draw.random() < 0.5 else _post(rubbish)
        reader, writer = await self._send(request)
        self._status(await _rest(reader))
        await _close(writer)

    async def asks_wrongly(self) -> None:
        """What has to be refused."""
        wrong: dict[str, Any] = self._draw.choice(
            [{"max_tokens": -1}, {"temperature": 1e9}, {"prompt": []}, {"logprobs": 3}, {"modle": "x"}, {"prompt": 7}]
        )
        reader, writer = await self._ask({**self._body(stream=False), **wrong})
        if self._status(await _rest(reader)) != 400:
            self._tally.wrong.append(f"{wrong} was not refused.")
        await _close(writer)

    def _body(self, *, stream: bool, **further: bool) -> dict[str, Any]:
        words = self._draw.choices(WORDS, k=self._draw.randint(1, 20))
        body = {"prompt": " ".join(words), "max_tokens": self._draw.randint(1, self._most_tokens), "stream": stream}
        return {**body, "ignore_eos": True, "temperature": self._draw.choice([0, 1]), **further}

    async def _ask(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._send(_post(body))

    async def _send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**14)
        writer.write(data)
        return reader, writer

    def _status(self, answer: bytes) -> int:
        match = re.match(rb"HTTP/1.1 (\d+)", answer)
        status = int(match.group(1)) if match else 0
        self._tally.statuses[status] += 1
        if status >= 500 and status != 503:
            self._tally.wrong.append(f"The server failed: {answer[:500]!r}")
        return status

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _post(body: dict[str, Any] | bytes) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(content)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + content


async def _rest(reader: asyncio.StreamReader) -> bytes:
    got = bytearray()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := await reader.read(2**14):
            got += data
    return bytes(got)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Served:
    """`skote-serve` in a process of its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "skote.serve.command", "port=0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port = self._port()
        self.seen = psutil.Process(self.process.pid)
        self.replicas = self.seen.children(recursive=True)

    def _port(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            sys.stderr.write(line)
            match = re.search(r"is served at http://\S+:(\d+)", line)
            if match:
                return int(match.group(1))
        raise SystemExit(f"The server ended with {self.process.wait()}.")

    def end(self) -> int:
        """Tell it to end; its exit code, once it and its replicas are gone. A replica that stays is killed: code -9."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(START_S)
        _, left = psutil.wait_procs(self.replicas, timeout=10.0)
        for each in left:
            each.kill()
        return -signal.SIGKILL if left else code

    def log(self) -> None:
        """Read what the server logs, so that it never waits for a reader, and show all but what is usual."""
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                if " INFO " not in line and "Invalid HTTP request" not in line:
                    sys.stderr.write(line)

    async def held(self) -> Held:
        """What it holds now."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        text = (await _rest(reader)).decode()
        await _close(writer)
        counts = re.findall(r'^skote_requests_(?:running|waiting)\{replica="\d+"\} ([\d.e+]+)', text, re.MULTILINE)
        with self.seen.oneshot():
            return Held(
                sum(int(float(count)) for count in counts),
                self.seen.num_fds(),
                self.seen.num_threads(),
                len(self.seen.children(recursive=True)),
                self.seen.memory_info().rss / 2**20,
            )


async def _soak(
    served: Served, seconds: float, clients: int, most_tokens: int, tally: Tally
) -> tuple[Held, Held, Held, Held]:
    """What it held before, at most, and `IDLE_S` and `KEPT_ALIVE_S` after the last client."""

    async def ask(seconds: float, first_seed: int) -> None:
        until = time.monotonic() + seconds
        asking = [Client(served.port, first_seed + each, most_tokens, tally) for each in range(clients)]
        await asyncio.gather(*(client.run(until) for client in asking))

    await ask(min(3.0, seconds), 0)  # what is opened at first use, is
    await asyncio.sleep(KEPT_ALIVE_S)
    before = peak = await served.held()
    running = asyncio.create_task(ask(seconds, clients))
    while not running.done():
        await asyncio.wait([running], timeout=1.0)
        now = await served.held()
        peak = _most(peak, now)
    await running
    await asyncio.sleep(IDLE_S)
    soon = await served.held()
    await asyncio.sleep(KEPT_ALIVE_S)
    return before, peak, soon, await served.held()


def _most(one: Held, other: Held) -> Held:
    return Held(
        max(one.requests, other.requests),
        max(one.descriptors, other.descriptors),
        max(one.threads, other.threads),
        max(one.processes, other.processes),
        max(one.rss_mb, other.rss_mb),
    )


def _row(held: Held) -> tuple[int, int, int, int, float]:
    return held.requests, held.descriptors, held.threads, held.processes, held.rss_mb


def judge(before: Held, soon: Held, after: Held, tally: Tally) -> list[str]:
    """A sentence for each thing that was lost, or that went wrong."""
    found = list(tally.wrong)
    if soon.requests:
        found.append(f"{soon.requests} requests still ran {IDLE_S:g} s after the last client.")
    if after.descriptors > before.descriptors:
        found.append(f"The server had {before.descriptors} file descriptors before, and has {after.descriptors} now.")
    if after.processes != before.processes:
        found.append(f"The server had {before.processes} processes before, and has {after.processes} now.")
    if after.threads > before.threads + EXECUTOR_THREADS:
        found.append(f"The server had {before.threads} threads before, and has {after.threads} now.")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Soak a server; 0 where nothing was lost, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("arguments", nargs="+", metavar="KEY=VALUE", help="of skote-serve")
    options = parser.parse_args(argv)
    served = Served(options.arguments)
    log = threading.Thread(target=served.log)
    log.start()
    tally = Tally()
    try:
        before, peak, soon, after = asyncio.run(
            _soak(served, options.seconds, options.clients, options.max_tokens, tally)
        )
    finally:
        code = served.end()
        log.join()
    found = judge(before, soon, after, tally)
    if code:
        found.append(f"The server ended with {code}, not with 0.")
    print(_table(before, peak, soon, after))
    print(f"\n{sum(tally.asked.values())} requests of {options.clients} clients in {options.seconds:g} s:", end=" ")
    print(", ".join(f"{count} {name}" for name, count in tally.asked.most_common()))
    print(
        "Statuses (0: hung up without one):",
        ", ".join(f"{count} x {each}" for each, count in sorted(tally.statuses.items())),
    )
    print("\n".join(found) if found else "Nothing was lost.")
    return 1 if found else 0


def _table(*held: Held) -> str:
    columns = ("before", "at most", f"{IDLE_S:g} s after", f"{IDLE_S + KEPT_ALIVE_S:g} s after")
    names = ("requests at replicas", "file descriptors", "threads", "processes of replicas", "memory, MB")
    rows = zip(names, *map(_row, held), strict=True)
    lines = [f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |" for name, *values in rows]
    return "\n".join([f"| | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|", *lines])


if __name__ == "__main__":
    sys.exit(main())

"""What the client of a server as an arm adds to a token: `python benchmarks/endpoint_overhead.py [STREAMS [SECONDS]]`.

A server in a process of its own plays STREAMS (200) answers back at once, 50 tokens a second each, at moments drawn
before it starts, and writes into each chunk, as its token's id, when it sent it. They are asked through a dispatcher
and a replica as in a run; added is the time from there to the token's stamp: loopback, the event loop, reading the
chunk. How late the server itself sent says whether the machine was fit to ask. Exits with 1 beyond the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import Completion, EngineSpec, Request

STREAMS, SECONDS, TOKENS_PER_S = 200, 10, 50
P99_LIMIT_MS = 2.0
SEED = 0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"


class PlayingServer:
    """Answers POSTs with a stream of tokens whose moments are a stream's own, and GETs with the list of models."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._rng = random.Random(SEED)  # noqa: S311 - the same moments each time
        self.late_ms: list[float] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its client closes it."""
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
                if head.startswith(b"GET"):
                    writer.write(HEAD % b"application/json" + _chunk(b'{"data": [{"id": "played"}]}') + b"0\r\n\r\n")
                else:
                    await self._play(writer)

    async def _play(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % b"text/event-stream")
        moment = time.monotonic() + self._rng.uniform(0.2, 0.2 + 1 / TOKENS_PER_S)
        for index in range(self._tokens):
            await asyncio.sleep(moment + index / TOKENS_PER_S - time.monotonic())
            self.late_ms.append(1e3 * (time.monotonic() - moment - index / TOKENS_PER_S))
            reason = "length" if index + 1 == self._tokens else None
            choice = {"text": "x", "token_ids": [time.monotonic_ns()], "finish_reason": reason}
            writer.write(_chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def serve(pipe: Connection, tokens: int) -> None:
    """Play until `pipe` says something, having told it the port; then tell it how late each token was sent, in ms."""
    asyncio.run(_serve(pipe, tokens))


async def _serve(pipe: Connection, tokens: int) -> None:
    playing = PlayingServer(tokens)
    server = await asyncio.start_server(playing.answer, "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(pipe.recv)
    server.close()
    pipe.send(playing.late_ms)


def added_ms(completions: list[Completion]) -> Iterator[float]:
    """Of each token the time from the server's write to its stamp."""
    for completion in completions:
        sent = iter(completion.output_ids)
        for chunk in completion.chunks:
            yield from ((chunk.t_ns - next(sent)) / 1e6 for _ in range(chunk.n_tokens))


def measure(streams: int, seconds: int) -> tuple[list[float], list[float]]:
    """What the client adds to each token, and how late the server sent each: both in ms.

    Raises:
        RuntimeError: an answer failed.
    """
    tokens = seconds * TOKENS_PER_S
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, tokens), daemon=True)
    server.start()
    spec = EngineSpec("skote.engines.endpoint.EndpointEngine", {"url": f"http://127.0.0.1:{pipe.recv()}/v1"})
    requests = [Request(str(number), tuple(range(1, 129)), tokens, ignore_eos=True) for number in range(streams)]
    with (
        Replica(spec, index=0, device="cpu") as replica,
        ReplicaDispatcher([replica], max_concurrency_per_device=streams) as dispatcher,
    ):
        replica.wait_ready(60.0)
        completions = [future.result() for future in [dispatcher.dispatch(each) for each in requests]]
    pipe.send(None)
    late = pipe.recv()
    server.join()
    failed = [completion.error for completion in completions if completion.status != "ok"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {streams} answers failed, first: {failed[0]}")
    return list(added_ms(completions)), late


def main() -> None:
    """Measure, print the figures, and judge them."""
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else STREAMS
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    added, late = measure(streams, seconds)
    print(f"{streams} streams of {TOKENS_PER_S} tokens/s, {len(added)} tokens")
    for name, values in (("added_ms", added), ("server_late_ms", late)):
        p50, p99, most = np.percentile(values, [50, 99, 100])
        print(f"{name} p50 {p50:.3f} p99 {p99:.3f} max {most:.3f}")
    p99 = float(np.percentile(added, 99))
    print(f"p99 added {p99:.2f} ms (limit {P99_LIMIT_MS:g})")
    sys.exit(0 if p99 <= P99_LIMIT_MS else 1)


if __name__ == "__main__":
    main()

"""What a replica's process was asked and has not answered yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, cast

from skote.runtime.answers import Answer
from skote.runtime.launch_rows import Part
from skote.types import Chunk, Completion, Emit, Request, SkoteError


class Call:
    """A question to the worker whose answer, or error, goes to `future` as it is."""

    def __init__(self) -> None:
        self.future: Answer[Any] = Answer()

    def hear(self, row: int, token_ids: Sequence[int]) -> None:
        """Take new tokens of a row; only a launch has any."""

    def resolve(self, result: object) -> None:
        """Answer it."""
        self.future.set_result(result)

    def fail(self, error: SkoteError) -> None:
        """Answer it with an error."""
        self.future.set_exception(error)

    def lose(self, error: SkoteError, status: Literal["error", "cancelled"], *, begun: bool) -> None:
        """Answer it where its replica has ended, of whose calls this one may have `begun`."""
        del status, begun  # an exception says enough
        self.future.set_exception(error)


class LaunchCall(Call):
    """A generate call, whose errors are completions too; `hear` is told its tokens as they come."""

    def __init__(self, requests: tuple[Request, ...], replica: int, device: str, hear: Emit | None) -> None:
        super().__init__()
        self.requests = requests
        self._replica = replica
        self._device = device
        self._hear = hear
        self._dispatched_ns = time.monotonic_ns()

    def hear(self, row: int, token_ids: Sequence[int]) -> None:
        """As `Call.hear`."""
        if self._hear is not None:
            self._hear(row, token_ids)

    def resolve(self, result: object) -> None:
        """As `Call.resolve`."""
        end_ns = time.monotonic_ns()
        parts = cast("list[Part]", result)
        self.future.set_result(
            [
                Completion(
                    request_id=request.request_id,
                    input_tokens=len(request.input_ids),
                    output_ids=part.output_ids,
                    chunks=tuple(map(Chunk, part.chunk_ns, part.chunk_tokens)),
                    dispatched_ns=self._dispatched_ns,
                    admitted_ns=part.admitted_ns,
                    end_ns=end_ns,
                    status="error" if part.error else "cancelled" if part.cancelled else "ok",
                    finish_reason=part.finish_reason,
                    error=part.error or ("The request was cancelled." if part.cancelled else None),
                    replica=self._replica,
                    device=self._device,
                    cached_tokens=part.cached_tokens,
                )
                for request, part in zip(self.requests, parts, strict=True)
            ]
        )

    def fail(self, error: SkoteError) -> None:
        """As `Call.fail`."""
        self.lose(error, "error", begun=True)

    def lose(self, error: SkoteError, status: Literal["error", "cancelled"], *, begun: bool) -> None:
        """As `Call.lose`, with `status`."""
        end_ns = time.monotonic_ns()
        self.future.set_result(
            [
                Completion(
                    request_id=request.request_id,
                    input_tokens=len(request.input_ids),
                    output_ids=(),
                    chunks=(),
                    dispatched_ns=self._dispatched_ns,
                    admitted_ns=None,
                    end_ns=end_ns,
                    status=status,
                    error=str(error),
                    replica=self._replica,
                    device=self._device,
                    untouched=status == "error" and not begun,
                )
                for request in self.requests
            ]
        )

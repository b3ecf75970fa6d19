"""What a replica's process was asked and has not answered yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, cast

from skote.runtime.answers import Answer
from skote.runtime.launch_rows import Part
from skote.types import Chunk, Completion, Emit, Request, RowEnded, SkoteError


class Call:
    """A question to the worker whose answer, or error, goes to `future` as it is."""

    def __init__(self) -> None:
        self.future: Answer[Any] = Answer()

    def hear(self, row: int, token_ids: Sequence[int]) -> None:
        """Take new tokens of a row; only a launch has any."""

    @property
    def rows_left(self) -> int:
        """Answers that it waits for."""
        return 1

    def end_row(self, row: int, part: Part) -> None:
        """Take what became of a row; only a launch has any."""

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
    """A generate call, whose errors are completions too; `hear` is told its tokens as they come.

    `ended` is told of each row that ends before the last one.
    """

    def __init__(
        self, requests: tuple[Request, ...], replica: int, device: str, hear: Emit | None, ended: RowEnded | None
    ) -> None:
        super().__init__()
        self._ended = ended
        self._completions: dict[int, Completion] = {}
        self.requests = requests
        self._replica = replica
        self._device = device
        self._hear = hear
        self._dispatched_ns = time.monotonic_ns()

    def hear(self, row: int, token_ids: Sequence[int]) -> None:
        """As `Call.hear`."""
        if self._hear is not None:
            self._hear(row, token_ids)

    @property
    def rows_left(self) -> int:
        """As `Call.rows_left`."""
        return len(self.requests) - len(self._completions)

    def end_row(self, row: int, part: Part) -> None:
        """As `Call.end_row`; the last one answers the call."""
        completion = self._completions[row] = self._completion(self.requests[row], part)
        if not self.rows_left:
            self.future.set_result([self._completions[each] for each in range(len(self.requests))])
        elif self._ended is not None:
            self._ended(row, completion)

    def resolve(self, result: object) -> None:
        """As `Call.resolve`."""
        self.future.set_result(list(map(self._completion, self.requests, cast("list[Part]", result))))

    def fail(self, error: SkoteError) -> None:
        """As `Call.fail`."""
        self.lose(error, "error", begun=True)

    def lose(self, error: SkoteError, status: Literal["error", "cancelled"], *, begun: bool) -> None:
        """As `Call.lose`, with `status`."""
        end_ns = time.monotonic_ns()
        self.future.set_result(
            [
                self._completions.get(row)
                or Completion(
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
                for row, request in enumerate(self.requests)
            ]
        )

    def _completion(self, request: Request, part: Part) -> Completion:
        return Completion(
            request_id=request.request_id,
            input_tokens=len(request.input_ids),
            output_ids=part.output_ids,
            chunks=tuple(map(Chunk, part.chunk_ns, part.chunk_tokens)),
            dispatched_ns=self._dispatched_ns,
            admitted_ns=part.admitted_ns,
            end_ns=time.monotonic_ns(),
            status="error" if part.error else "cancelled" if part.cancelled else "ok",
            finish_reason=part.finish_reason,
            error=part.error or ("The request was cancelled." if part.cancelled else None),
            replica=self._replica,
            device=self._device,
            cached_tokens=part.cached_tokens,
        )

"""What a server's answers leave open, in sentences: counts that are guessed, prompts that became others."""

from __future__ import annotations

from skote.engines.endpoint_events import TokenCount
from skote.types import Request


class Caveats:
    """Counts the answers that need a word. `extensions` as `skote.engines.endpoint_body.BodyWriter`."""

    def __init__(self, *, extensions: bool) -> None:
        self._extensions = extensions
        self._answers = 0
        self._other_prompt: list[tuple[int, int]] = []
        self._without_ids = 0
        self._by_chunk = 0
        self._larger_chunks = 0
        self._contradicted = 0
        self._ended_early = 0

    def note(self, request: Request, count: TokenCount) -> None:
        """Take note of an answer that has ended."""
        self._answers += 1
        if count.prompt_tokens not in (None, len(request.input_ids)):
            self._other_prompt.append((len(request.input_ids), count.prompt_tokens or 0))
        self._without_ids += not count.ids_known
        self._by_chunk += count.by_chunk > 0 and count.reported is None
        self._larger_chunks += 0 < count.by_chunk < (count.reported or 0)
        self._contradicted += count.reported is not None and count.reported != count.total
        ends_early = count.total < request.max_new_tokens
        self._ended_early += ends_early and request.ignore_eos and not self._extensions

    def sentences(self) -> list[str]:
        """One for each thing that is open."""
        of = f"of {self._answers} answers"
        said = []
        if self._other_prompt:
            sent, counted = self._other_prompt[0]
            said.append(
                f"The server counts other prompts than were meant, in {len(self._other_prompt)} {of}: first {counted} "
                f"tokens in place of {sent}."
            )
        if self._without_ids:
            said.append(f"The server does not tell the ids of its tokens, in {self._without_ids} {of}.")
        if self._by_chunk:
            said.append(
                f"Tokens were counted by chunk in {self._by_chunk} {of}: the server tells neither ids nor counts."
            )
        if self._larger_chunks:
            said.append(
                f"Some chunks hold several tokens, in {self._larger_chunks} {of}: all beyond one a chunk are counted "
                "at the end, and times between tokens are those between chunks."
            )
        if self._contradicted:
            said.append(f"The server reports other numbers of tokens than it sent, in {self._contradicted} {of}.")
        if self._ended_early:
            said.append(
                f"ignore_eos was not sent, and answers ended early, in {self._ended_early} {of}: set "
                "endpoint.extensions=true where the server knows it."
            )
        return said

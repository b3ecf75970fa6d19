"""The memory that a worker shares with its parent, as two holders of one file see it."""

from __future__ import annotations

from pathlib import Path

from skote.runtime.worker_progress import PROGRESS_BYTES, WorkerProgress


def test_one_side_reads_what_the_other_has_noted(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(PROGRESS_BYTES))
    with path.open("r+b") as file:
        mine, theirs = WorkerProgress(file.fileno()), WorkerProgress(file.fileno())
    assert (mine.ticks, mine.begun, mine.kept_tokens) == (0, 0, 0)
    for call_id in (3, 7, 5):  # a batch may begin one later that came before
        theirs.begin(call_id)
    theirs.tick()
    theirs.tick()
    theirs.keep(512)
    theirs.keep(256)
    assert (mine.ticks, mine.begun, mine.kept_tokens) == (2, 7, 256)
    theirs.close()
    assert mine.begun == 7
    mine.close()

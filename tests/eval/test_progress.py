from __future__ import annotations

import io

from rich.console import Console

from skote.eval.progress import RunProgress


def test_plain_lines_where_there_is_no_terminal():
    """Brackets are text, no line is wrapped, and the last request is reported with both medians."""
    out = io.StringIO()
    with RunProgress(Console(file=out, width=40)) as progress:
        progress.say("a line with [brackets] that is longer than the forty columns of this console")
        progress.start(3)
        progress.advance("candidate", 0, 10.0)
        progress.advance("baseline", 0, None)
        progress.advance("candidate", 1, 30.0)

    lines = [line for line in out.getvalue().splitlines() if line]
    assert lines[0] == "a line with [brackets] that is longer than the forty columns of this console"
    assert lines[-1] == "  3/3 requests, block 2, 0 s left, candidate p50 20 ms"

"""tools/soak.py, for a few seconds: it finds nothing where nothing is lost, and what is lost where something is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    """The script, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("soak", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "soak", module)  # where its dataclasses look for their own names
        spec.loader.exec_module(module)
        yield module


@pytest.mark.slow
def test_nothing_is_lost(
    soak: Any,
    make_checkpoint: Callable[..., Path],
    write_tokenizer: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soak, "KEPT_ALIVE_S", 0.0)  # these clients keep nothing alive
    monkeypatch.setattr(soak, "WORDS", ["w7", "w8", "w9"])
    model = make_checkpoint(max_position_embeddings=2048)
    write_tokenizer(model, chat=True)
    arguments = [f"model.path={model}", "engine.compile=false", "engine.max_batch=4", "limits.upload_s=1"]
    code = soak.main(["--seconds", "2", "--clients", "6", "--max-tokens", "20", *arguments])
    out = capsys.readouterr().out
    assert out.endswith("Nothing was lost.\n")
    assert code == 0
    assert " x 200" in out
    assert " x 400" in out


def test_what_is_lost_is_found(soak: Any) -> None:
    before = soak.Held(requests=0, descriptors=10, threads=5, processes=2, rss_mb=100.0)
    tally = soak.Tally()
    assert soak.judge(before, before, before, tally) == []
    soon = soak.Held(requests=1, descriptors=11, threads=5, processes=2, rss_mb=100.0)
    after = soak.Held(requests=0, descriptors=11, threads=99, processes=1, rss_mb=100.0)
    tally.wrong.append("The server failed.")
    assert soak.judge(before, soon, after, tally) == [
        "The server failed.",
        "1 requests still ran 1 s after the last client.",
        "The server had 10 file descriptors before, and has 11 now.",
        "The server had 2 processes before, and has 1 now.",
        "The server had 5 threads before, and has 99 now.",
    ]

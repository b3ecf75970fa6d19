"""The door of the command, while what is behind it is still being imported."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skote.eval import command


def test_ctrl_c_during_the_imports_ends_with_130_and_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def interrupted(name: str, *args: Any, **options: Any) -> Any:
        if name == "hydra":
            raise KeyboardInterrupt
        return real(name, *args, **options)

    monkeypatch.delitem(sys.modules, "skote.eval.runner", raising=False)
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main()

    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_the_door_itself_imports_nothing_that_takes_long() -> None:
    """Else the first seconds would pass in front of it."""
    code = "import sys, skote.eval.command; print({'torch', 'hydra', 'numpy', 'skote.eval.runner'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

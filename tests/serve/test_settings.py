"""The keys of `skote-serve`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skote.runtime.engine import SkotergyEngine
from skote.serve.command import main
from skote.serve.settings import Engine, Limits, keys, parse_settings
from skote.types import ExitCode, UsageError

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def test_a_directory_is_enough() -> None:
    settings = parse_settings(["model.path=some/model"])
    assert (settings.model.path, settings.name, settings.host, settings.port) == (
        Path("some/model"), "model", "127.0.0.1", 8000
    )  # fmt: skip
    assert (settings.devices, settings.dtype, settings.router.policy) == ("1", "fp32", "least_work")
    assert settings.limits == Limits()


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("devices=2", "devices", "2"),
        ("devices=[cuda:0,cuda:2]", "devices", ["cuda:0", "cuda:2"]),
        ("engine.max_batch=16", "engine.max_batch", 16),
        ("engine.compile=false", "engine.compile", False),
        ("engine.max_model_len=auto", "engine.max_model_len", "auto"),
        ("engine.max_model_len=512", "engine.max_model_len", 512),
        ("engine.warmup_buckets=[128,1024]", "engine.warmup_buckets", [128, 1024]),
        ("engine.warmup_buckets=[]", "engine.warmup_buckets", []),
        ("router.hang_s=null", "router.hang_s", None),
        ("limits.queue_s=2.5", "limits.queue_s", 2.5),
        ("model.name=a=b {c}", "model.name", "a=b {c}"),
        ("host=::1", "host", "::1"),
    ],
)
def test_values_have_their_kinds(argument: str, key: str, value: Any) -> None:
    node: Any = parse_settings(["model.path=x", argument])
    for name in key.split("."):
        node = getattr(node, name)
    assert node == value
    assert type(node) is type(value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "model.path=DIR is missing: skote-serve model.path=DIR; see skote-serve --help."),
        (["model.name=x"], "model.path is missing"),
        (["--port", "80"], "'--port' is not KEY=VALUE; see skote-serve --help."),
        (["model=x"], "model=x: "),
        (["model=x", "model.path=y"], "model.path: model is no group of keys"),
        (["model.path=x", "max_batch=4"], "There is no key max_batch; see skote-serve --help."),
        (["model.path=x", "engine.max_bach=4"], "There is no key engine.max_bach; see"),
        (["model.path=x", "engine.max_batch=129"], "engine.max_batch=129: Input should be less than or equal to 128"),
        (["model.path=x", "engine.max_batch=many"], "engine.max_batch=many: Input should be a valid integer"),
        (["model.path=x", "engine.max_model_len=long"], "engine.max_model_len=long: "),
        (["model.path=x", "engine.warmup_buckets=[a"], "engine.warmup_buckets=[a is not a list such as [a,b]."),
        (["model.path=x", "dtype=int8"], "dtype=int8: Input should be 'fp32', 'tf32', 'bf16' or 'fp16'"),
        (["model.path=x", "limits.queue_s=nan"], "limits.queue_s=nan: "),
        (["model.path=x", "port=70000"], "port=70000: "),
        (["model.path=x", "host=0.0.0.0"], "host=0.0.0.0 can be reached by others: give api_key_file=FILE"),
        (["model.path=x", "host=example.org"], "host=example.org can be reached by others"),
    ],
)
def test_wrong_usage_gets_a_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_settings(arguments)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert parse_settings(["model.path=x", f"host={host}"]).is_loopback


def test_the_engines_options_are_the_engines() -> None:
    import inspect

    parameters = inspect.signature(SkotergyEngine).parameters
    defaults = {name: parameters[name].default for name in Engine.model_fields}
    assert defaults == Engine().model_dump()


def test_help_and_the_page_have_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert shown.startswith("usage: skote-serve model.path=DIR [KEY=VALUE ...]\n")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(key, f"`{default}`" if default else "", what) for key, default, what in keys()]
    assert all(f"{key}={default}" in shown and what in shown for key, default, what in keys())


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from skote.serve.command import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        4, "skote-serve: skote-serve needs the package uvicorn: pip install 'skotergy[serve]'.\n"
    )  # fmt: skip


def test_no_model_is_told_before_anything_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"model.path={tmp_path}"]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"skote-serve: {tmp_path}")

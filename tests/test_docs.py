"""What docs/ci.md and CONTRIBUTING.md tell people to paste and to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir

from skote.config import CONF_DIR, register_schema, to_settings
from skote.eval.check import check_limits

CI = (Path(__file__).parent.parent / "docs" / "ci.md").read_text(encoding="utf-8")


def test_the_workflow_is_yaml_whose_command_composes():
    (block,) = re.findall(r"```yaml\n(.*?)```", CI, re.DOTALL)
    (job,) = yaml.safe_load(block)["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if "skote-eval" in step.get("run", "")]
    program, *overrides = shlex.split(command.replace("\\\n", " "))
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        settings = to_settings(compose("config", overrides))

    assert program == "skote-eval"
    assert (settings.check.name, settings.check.p50_delta_max) == ("ci", -20.0)
    check_limits(settings.check, two_arms=True)


def test_the_table_has_every_limit_with_its_default():
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        limits = asdict(to_settings(compose("config", ["check=ci"])).check)
    del limits["name"]
    table = re.findall(r"^\| `check\.(\w+)` \| (\S+) \|", CI, re.MULTILINE)
    assert {name: yaml.safe_load(default) for name, default in table} == limits


def test_the_adapter_that_contributors_are_shown_is_the_one_that_runs():
    from tests.model import tiny_families

    root = Path(__file__).parent.parent
    adapter, entry = re.findall(r"```python\n(.*?)```", (root / "CONTRIBUTING.md").read_text(), re.DOTALL)

    assert adapter == (root / "skote" / "model" / "families" / "mistral.py").read_text()
    assert entry in Path(tiny_families.__file__).read_text()

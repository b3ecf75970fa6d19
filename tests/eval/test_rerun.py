from __future__ import annotations

import shlex

import pytest

from skote.eval.report import main
from skote.eval.rerun import rerun_command


@pytest.mark.parametrize(
    ("command", "overrides", "expected"),
    [
        ("run.py", [], "python run.py"),
        ("run.py workload=chat hydra.run.dir=run", ["workload=chat"], "python run.py workload=chat"),
        ("skote-eval -m dtype=fp32,bf16", ["dtype=bf16"], "skote-eval dtype=bf16"),
        ("runner.py seed=3", ["seed=3"], "python -m skote.eval.runner seed=3"),
        (
            "run.py -cd experiments --config-name=E01 -m seed=1,2",
            ["seed=2"],
            "python run.py -cd experiments --config-name=E01 seed=2",
        ),
        ("run.py 'model.path=a b'", ["model.path='a b'"], """python run.py 'model.path='"'"'a b'"'"''"""),
    ],
)
def test_the_command_is_that_of_the_job_alone(command, overrides, expected):
    printed = rerun_command({"command": command, "overrides": overrides})
    assert printed == expected
    assert shlex.split(printed)[-len(overrides) :] == overrides or not overrides


def test_it_is_printed(synthetic, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rerun", str(synthetic(requests=1).write())])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "python run.py workload=chat\n"


def test_a_directory_without_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rerun", str(tmp_path)])
    assert ended.value.code == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["verify"], ["rerun"], []])
def test_no_directory_is_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 4
    assert "RUN_DIR" in capsys.readouterr().err

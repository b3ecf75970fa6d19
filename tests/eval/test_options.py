from __future__ import annotations

from skote.eval.options import differing_options, leaves


def run(overrides=(), **config):
    base = {
        "model": {"name": "tiny", "path": None},
        "engine": {"name": "simulated", "_target_": "a.B"},
        "compare": {"name": ""},
        "workload": {"name": "chat", "blocks": 6, "output_mix": [1.0]},
        "devices": 1,
    }
    return {"config": base | config, "overrides": list(overrides)}


def test_options_go_by_dotted_keys_and_lists_of_mappings_by_numbers():
    tree = {"a": {"b": 1, "c": [{"d": 2}]}, "e": [3], "f": {}, "g": [{"h": 4}]}

    assert dict(leaves(tree, whole={"g"})) == {"a.b": 1, "a.c.0.d": 2, "e": [3], "f": {}, "g": [{"h": 4}]}


def test_runs_that_are_alike_differ_in_nothing():
    assert differing_options([run(), run(["seed=0"])]) == [[], []]


def test_an_option_is_named_with_each_runs_own_value():
    runs = [run(), run(devices=2), run(workload={"name": "chat", "blocks": 6, "output_mix": [0.5, 1.0]})]

    assert differing_options(runs) == [
        ["devices=1", "workload.output_mix=[1.0]"],
        ["devices=2", "workload.output_mix=[1.0]"],
        ["devices=1", "workload.output_mix=[0.5,1.0]"],
    ]


def test_another_choice_of_a_group_stands_for_what_comes_with_it():
    other = {"name": "skotergy", "_target_": "c.D", "max_batch": 1}

    assert differing_options([run(), run(engine=other)]) == [["engine=simulated"], ["engine=skotergy"]]


def test_what_was_overridden_within_another_choice_is_named_too():
    other = {"name": "skotergy", "_target_": "c.D", "max_batch": 4, "compile": True}
    runs = [run(), run(["engine=skotergy", "engine.max_batch=4"], engine=other)]

    assert differing_options(runs) == [
        ["engine.max_batch=(unset)", "engine=simulated"],
        ["engine.max_batch=4", "engine=skotergy"],
    ]


def test_an_option_of_one_engine_alone_is_named():
    slow = {"name": "simulated", "_target_": "a.B", "token_ms": 5.0}

    assert differing_options([run(), run(engine=slow)]) == [["engine.token_ms=(unset)"], ["engine.token_ms=5.0"]]


def test_no_second_arm_reads_as_on_the_command_line():
    runs = [run(), run(compare={"name": "baseline"})]

    assert differing_options(runs) == [["compare=none"], ["compare=baseline"]]


def test_an_option_that_an_older_run_does_not_have_is_no_difference():
    assert differing_options([run(), run(against=None)]) == [[], []]

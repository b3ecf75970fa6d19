from __future__ import annotations

import random
import statistics
from itertools import islice

import pytest

from skote.eval.codec import HashCodec
from skote.eval.sources.lengths import LengthConfig, check_lengths, drawn_lengths
from skote.eval.sources.source_config import SourceConfig, check_source
from skote.eval.workload import build_workload
from skote.eval.workload_config import WorkloadConfig
from skote.types import CapacityError, UsageError

NORMAL = {"mean": 100, "sd": 20, "min": 50, "max": 160}


class Uniforms(random.Random):
    """Gives the numbers that it was told, one after the other."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


def drawn(uniforms: list[float], known=(), **options) -> list[int]:
    config = LengthConfig(**options)
    check_lengths("input", config)
    return list(islice(drawn_lengths(config, Uniforms(*uniforms), known), len(uniforms)))


def test_fixed_is_one_length():
    assert drawn([0.0, 0.7], distribution="fixed", mean=12) == [12, 12]


def test_uniform_has_both_ends_in_and_all_lengths_equally_often():
    # 5 lengths, a fifth of [0, 1) each.
    assert drawn([0.0, 0.19, 0.2, 0.5, 0.999], distribution="uniform", min=3, max=7) == [3, 3, 4, 5, 7]
    assert drawn([0.999], distribution="uniform", min=9, max=9) == [9]


def test_normal_has_its_quantiles_cut_at_its_ends():
    # 0.8413447 is one standard deviation above the mean, 0.0013499 three below, 0.9986501 three above.
    assert drawn([0.5, 0.8413447, 0.0013499, 0.9986501, 0.0], distribution="normal", **NORMAL) == [
        100,
        120,
        50,
        160,
        50,
    ]


def test_lognormal_has_the_mean_and_the_spread_of_the_lengths_themselves():
    # sd = mean: the logarithms spread by sqrt(ln 2) around ln(mean) - ln(2) / 2, so the median is mean / sqrt(2).
    assert drawn([0.5], distribution="lognormal", mean=1000, sd=1000, min=1, max=99999) == [707]
    config = LengthConfig("lognormal", mean=1000, sd=500, min=1, max=10**9)
    many = list(islice(drawn_lengths(config, random.Random(1)), 20_000))
    assert statistics.mean(many) == pytest.approx(1000, rel=0.02)
    assert statistics.stdev(many) == pytest.approx(500, rel=0.05)


def test_empirical_draws_what_is_known_each_equally_often():
    assert drawn([0.0, 0.3, 0.5, 0.99], known=[1, 1, 8, 9], distribution="empirical", path="x") == [1, 1, 8, 9]


def built(source: SourceConfig, size: int = 6, positions: int | None = None, **options):
    config = WorkloadConfig(prompts="sentences", blocks=2, requests_per_block=size, source=source, **options)
    return build_workload(config, HashCodec(49152), 0, 0, positions)


def test_requests_have_the_lengths_that_were_drawn_and_prompts_of_their_own():
    source = SourceConfig(
        input=LengthConfig("uniform", min=20, max=22), output=LengthConfig("uniform", min=3, max=5), shared_prefix=0.25
    )
    workload = built(source, size=40)
    assert {len(request.input_ids) for request in workload.requests} == {20, 21, 22}
    assert {request.max_new_tokens for request in workload.requests} == {3, 4, 5}
    assert len({request.input_ids for request in workload.requests}) == 80
    assert len({request.input_ids[:5] for request in workload.requests}) == 1
    assert workload.describe()["source"]["format"] == "drawn"


def test_answers_change_nothing_of_the_prompts_and_may_be_left_out():
    prompt = LengthConfig("uniform", min=20, max=60)
    alone, beside = (
        built(SourceConfig(input=prompt, output=output)) for output in (LengthConfig(), LengthConfig("fixed", mean=3))
    )
    assert [each.input_ids for each in alone.requests] == [each.input_ids for each in beside.requests]
    assert {each.max_new_tokens for each in alone.requests} == {16}


def test_lengths_of_a_file_are_drawn_without_its_times(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,30,4\n2023-11-16 18:17:04,40,7\n")
    lengths = LengthConfig("empirical", path=str(path))
    workload = built(SourceConfig(input=lengths, output=lengths), size=20)
    assert {len(each.input_ids) for each in workload.requests} == {30, 40}
    assert {each.max_new_tokens for each in workload.requests} == {4, 7}
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(UsageError, match=r"azure\.csv has no row that states input_tokens"):
        built(SourceConfig(input=lengths))


def test_lengths_beyond_the_context_are_refused_or_drawn_again():
    wide = LengthConfig("uniform", min=10, max=100)
    with pytest.raises(CapacityError, match=r"The drawn request \d+: its prompt has \d+ tokens, and 34 fit"):
        built(SourceConfig(input=wide), size=20, positions=50)
    dropped = built(SourceConfig(input=wide, too_long="drop"), size=20, positions=50)
    assert max(len(each.input_ids) for each in dropped.requests) <= 34
    with pytest.raises(UsageError, match=r"0 of 101 fit into the model's context"):
        built(SourceConfig(input=LengthConfig("fixed", mean=100), too_long="drop"), positions=50)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"distribution": "zipf"}, r"input\.distribution must be one of fixed, uniform, .*, or null, got 'zipf'"),
        ({"distribution": "uniform", "min": 3}, r"input\.distribution=uniform needs input\.max"),
        ({"distribution": "normal", "mean": 3, "sd": 1}, r"input\.distribution=normal needs input\.min"),
        ({"distribution": "fixed", "mean": 3, "sd": 1}, r"input\.sd has no effect with input\.distribution=fixed"),
        ({"mean": 3}, r"input\.mean has no effect with input\.distribution=None"),
        ({"distribution": "uniform", "min": 5, "max": 3}, r"input\.min=5 is above input\.max=3"),
        ({"distribution": "uniform", "min": 0, "max": 3}, r"input\.min must be at least 1, got 0"),
        ({"distribution": "normal", **NORMAL, "sd": 0.0}, r"input\.sd must be above 0, got 0"),
        ({"distribution": "empirical"}, r"needs input\.path"),
    ],
)
def test_a_wrong_option_is_named(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_lengths("input", LengthConfig(**options))


def test_lengths_stand_in_for_a_file_and_not_beside_it():
    fixed = LengthConfig("fixed", mean=3)
    with pytest.raises(UsageError, match=r"workload\.source\.path has lengths of its own"):
        check_source(SourceConfig(path="x.csv", input=fixed))
    with pytest.raises(UsageError, match=r"workload\.source\.output needs workload\.source\.input"):
        check_source(SourceConfig(output=fixed))

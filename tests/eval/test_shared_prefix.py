from __future__ import annotations

import random

import pytest

from skote.eval.derive import Measured
from skote.eval.findings import find
from skote.eval.record import read_run
from skote.eval.shared_prefix import SharedPrefix, shared_prefix, shared_prefixes


def test_an_example():
    """The third shares two tokens with the first; the fourth repeats the second; the last begins the first."""
    prompts = [(1, 2, 3, 4), (5, 6), (1, 2, 9, 9), (5, 6), (1, 2, 3)]

    assert shared_prefixes(prompts) == [0, 0, 2, 2, 3]
    assert shared_prefix(prompts) == SharedPrefix(tokens=2, share=0.5)


def test_an_earlier_prompt_shares_nothing_with_a_later_one():
    assert shared_prefixes([(1, 2, 3), (1, 2, 3)]) == [0, 3]
    assert shared_prefixes([(1,)]) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_every_pair_says_the_same(seed):
    rng = random.Random(seed)
    prompts = [tuple(rng.choices((0, 1), k=rng.randint(1, 7))) for _ in range(rng.randint(1, 16))]

    def common(left, right):
        return max(n for n in range(len(left) + 1) if left[:n] == right[:n] and n <= len(right))

    expected = [
        max((common(prompt, other) for other in prompts[:index]), default=0) for index, prompt in enumerate(prompts)
    ]
    assert shared_prefixes(prompts) == expected


@pytest.mark.parametrize(("share", "cached", "codes"), [
    (0.39, {}, ["shared_prefix"]),
    (0.1, {}, []),
    (None, {}, []),
    (0.39, {"candidate": 0, "baseline": 0}, []),
    (0.39, {"candidate": 4, "baseline": 0}, ["warm_cache"]),
    (0.39, {"candidate": 0}, ["shared_prefix"]),
])  # fmt: skip
def test_prefixes_that_nobody_counts(synthetic, share, cached, codes):
    run = read_run(synthetic().write())
    for arm, tokens in cached.items():
        run.requests.loc[run.requests["arm"] == arm, "cached_tokens"] = tokens
    workload = run.manifest["workload"] | ({} if share is None else {"shared_prefix_share": share})
    findings = find(Measured(run), run.manifest | {"workload": workload})

    assert [each.code for each in findings] == codes
    if codes == ["shared_prefix"]:
        arms = "baseline" if cached else "candidate and the baseline"
        assert findings[0].severity == "info"
        assert findings[0].sentence == (
            "A prompt shares 39% of its tokens with an earlier one (median), and cached tokens are not counted in the "
            f"{arms} arm: a prefix cache that is not declared would not be seen."
        )

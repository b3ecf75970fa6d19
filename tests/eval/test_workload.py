from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import skote.eval.workload as module
from skote.eval.arrivals import NEEDED
from skote.eval.codec import HashCodec
from skote.eval.prompts import load_held_out, load_prompts
from skote.eval.workload import Workload, build_workload, check_fits
from skote.eval.workload_config import WorkloadConfig, check_config
from skote.types import CapacityError, RequestError, UsageError

CONF = Path(module.__file__).parents[2] / "conf" / "workload"
OPTIONS = sorted(path.stem for path in CONF.glob("*.yaml"))
CODEC = HashCodec(49152)


class LetterCodec:
    """One id a letter, so that lengths can be read off the texts; a chat turn puts one id in front."""

    vocab_size = 1000

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in text)

    def encode_chat(self, text: str) -> tuple[int, ...]:
        return (999, *self.encode(text))


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Enough rows for the option `trace` and its spare blocks."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [
        f"2023-11-16 18:{index // 60:02d}:{index % 60:02d}.0,{20 + index % 90},{2048 - index % 7}"
        for index in range(2600)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return str(path)


def option(name: str, trace_file: str | None = None) -> WorkloadConfig:
    schema = OmegaConf.structured(WorkloadConfig)
    config = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(CONF / f"{name}.yaml")))
    assert isinstance(config, WorkloadConfig)
    if name == "trace":
        config.source.path = trace_file
    return config


def words(tmp_path: Path, *texts: str) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return str(path)


def lengths(workload: Workload) -> list[list[int]]:
    return [sorted(len(request.input_ids) for request in block) for block in workload.blocks]


def test_there_is_an_option_for_every_scenario():
    assert OPTIONS == [
        "burst16x64", "chat", "concurrency", "decode_256", "mixed_burst", "poisson", "prefill_longcontext", "synthetic",
        "trace",
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_option_states_every_key_and_its_own_name(name):
    stated = OmegaConf.load(CONF / f"{name}.yaml")
    clocked = {"arrivals": stated.load in NEEDED, "source": name in ("synthetic", "trace")}
    unused = {key for key, used in clocked.items() if not used}
    assert set(stated) == {field.name for field in dataclasses.fields(WorkloadConfig)} - unused
    for key in clocked.keys() - unused:
        assert set(stated[key]) == {field.name for field in dataclasses.fields(getattr(WorkloadConfig(), key))}
    assert stated.name == name


@pytest.mark.parametrize("codec", [CODEC, HashCodec(64)], ids=["large vocabulary", "tiny vocabulary"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_builds_distinct_requests_within_the_vocabulary(name, codec, trace_file):
    config = option(name, trace_file)
    workload = build_workload(config, codec, seed=0)
    assert len(workload.blocks) == config.blocks
    assert all(len(block) == config.requests_per_block for block in workload.blocks)
    assert len({request.input_ids for request in workload.requests}) == len(workload.requests)
    assert len({request.request_id for request in workload.requests}) == len(workload.requests)
    assert all(0 <= token < codec.vocab_size for request in workload.requests for token in request.input_ids)
    assert all(request.ignore_eos and request.sampling.greedy for request in workload.requests)
    assert max(request.max_new_tokens for request in workload.requests) == config.max_new_tokens


def test_default_config_is_the_chat_option():
    assert option("chat") == WorkloadConfig()


def test_chat_uses_all_72_prompts_once_in_blocks_of_similar_length():
    workload = build_workload(option("chat"), CODEC, seed=3)
    expected = {CODEC.encode_chat(text) for text in load_prompts("chat")}
    assert len(expected) == 72
    assert {request.input_ids for request in workload.requests} == expected
    # Blocks take one of every 6 neighbours in length, so their totals lie no further apart than two prompts.
    totals = [sum(block) for block in lengths(workload)]
    every = list(itertools.chain(*lengths(workload)))
    assert max(totals) - min(totals) <= max(every) - min(every)


def test_mixed_burst_holds_every_pair_of_lengths_in_every_block():
    workload = build_workload(option("mixed_burst"), CODEC, seed=0)
    pairs = set(itertools.product((32, 64, 128, 512), (4, 8, 16, 32)))
    for block in workload.blocks:
        assert Counter((len(request.input_ids), request.max_new_tokens) for request in block) == Counter(pairs)
    orders = {tuple(len(request.input_ids) for request in block) for block in workload.blocks}
    assert len(orders) > 1
    assert (workload.load, workload.concurrency) == ("burst", 16)


def test_output_mix_is_used_in_full_with_a_single_prompt_length(tmp_path):
    config = WorkloadConfig(
        blocks=1, requests_per_block=4, max_new_tokens=8, output_mix=[0.5, 1.0], prompts=words(tmp_path, *"abcd")
    )
    workload = build_workload(config, LetterCodec(), seed=0)
    assert Counter(request.max_new_tokens for request in workload.requests) == {4: 2, 8: 2}


def test_documents_have_the_exact_length_and_early_differences():
    workload = build_workload(option("prefill_longcontext"), CODEC, seed=0)
    assert {len(request.input_ids) for request in workload.requests} == {1024}
    assert len({request.input_ids[:3] for request in workload.requests}) == len(workload.requests)


def test_blocks_are_dealt_by_length(tmp_path):
    texts = [letter * length for length in (1, 2, 3) for letter in "abcd"]
    config = WorkloadConfig(blocks=4, requests_per_block=3, prompts=words(tmp_path, *texts))
    workload = build_workload(config, LetterCodec(), seed=0)
    assert lengths(workload) == [[2, 3, 4]] * 4  # one more for the turn's mark


def test_fewer_requests_than_prompts_are_spread_over_the_lengths(tmp_path):
    texts = ["x" * length for length in range(1, 9)]
    config = WorkloadConfig(blocks=2, requests_per_block=2, prompts=words(tmp_path, *texts))
    workload = build_workload(config, LetterCodec(), seed=0)
    assert sorted(itertools.chain(*lengths(workload))) == [2, 4, 6, 8]


def test_more_requests_than_prompts_number_the_repeats(tmp_path):
    config = WorkloadConfig(blocks=1, requests_per_block=5, prompts=words(tmp_path, "ab", "cd"))
    workload = build_workload(config, LetterCodec(), seed=0)
    texts = {"".join(map(chr, request.input_ids[1:])) for request in workload.requests}
    assert texts == {"ab", "cd", "(2) ab", "(2) cd", "(3) ab"}


def test_same_arguments_give_the_same_workload():
    first, second = (build_workload(option("mixed_burst"), CODEC, seed=5) for _ in range(2))
    assert first == second


def test_hash_is_sha256_of_the_work_written_out(tmp_path):
    config = WorkloadConfig(blocks=1, requests_per_block=1, max_new_tokens=3, prompts=words(tmp_path, "ab"))
    written = (
        '{"blocks":[[{"ignore_eos":true,"input_ids":[999,97,98],"max_new_tokens":3,"seed":0,"temperature":0.0,"top_k":0,"top_p":1.0}]],'
        '"concurrency":1,"load":"closed"}'
    )
    workload = build_workload(config, LetterCodec(), seed=0)
    assert workload.sha256 == hashlib.sha256(written.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 17},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.9},
        {"respect_eos": True},
        {"concurrency": 2},
        {"load": "burst", "concurrency": None},
        {"blocks": 5},
        {"prompts": "short"},
    ],
    ids=str,
)
def test_hash_covers_whatever_changes_the_work(change):
    base = build_workload(WorkloadConfig(), CODEC, seed=0)
    assert build_workload(dataclasses.replace(WorkloadConfig(), **change), CODEC, seed=0).sha256 != base.sha256
    assert build_workload(WorkloadConfig(), CODEC, seed=1).sha256 != base.sha256  # another order
    assert build_workload(WorkloadConfig(name="other"), CODEC, seed=0).sha256 == base.sha256


def test_sampled_requests_have_seeds_of_their_own_that_follow_the_run_seed():
    config = WorkloadConfig(temperature=0.8, top_k=40, top_p=0.9)
    first, again, other = (build_workload(config, CODEC, seed) for seed in (1, 1, 2))
    seeds = [request.sampling.seed for request in first.requests]
    assert len(set(seeds)) == 72
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert [request.sampling.seed for request in again.requests] == seeds
    assert not {request.sampling.seed for request in other.requests} & set(seeds)
    sampling = [request.sampling for request in first.requests]
    assert {(each.temperature, each.top_k, each.top_p) for each in sampling} == {(0.8, 40, 0.9)}
    assert not first.greedy


def test_respect_eos_reaches_the_requests_but_not_the_warmup():
    workload = build_workload(WorkloadConfig(respect_eos=True), CODEC, seed=0)
    assert not any(request.ignore_eos for request in workload.requests)
    assert all(request.ignore_eos for request in workload.warmup)


@pytest.mark.parametrize("name", OPTIONS)
def test_warmup_has_measured_shapes_and_no_measured_prompt(name, trace_file):
    workload = build_workload(option(name, trace_file), CODEC, seed=0)
    shapes = {(len(request.input_ids), request.max_new_tokens) for request in workload.requests}
    warm = [(len(request.input_ids), request.max_new_tokens) for request in workload.warmup]
    assert len(warm) == len(set(warm)) <= 6
    assert set(warm) <= shapes
    assert min(shapes) in warm
    assert max(shapes) in warm
    assert max(new for _, new in warm) == max(new for _, new in shapes)
    measured = {request.input_ids for request in workload.requests}
    assert not measured & {request.input_ids for request in workload.warmup + workload.probe}
    assert {request.sampling for request in workload.warmup} == {workload.requests[0].sampling}


def test_describe_is_the_manifest_entry():
    workload = build_workload(option("burst16x64"), CODEC, seed=0)
    assert workload.describe() == {
        "name": "burst16x64",
        "sha256": workload.sha256,
        "load": "burst",
        "concurrency": 16,
        "blocks": 5,
        "requests_per_block": 16,
        "repeated_prompts": 8,
        "shared_prefix_tokens": workload.prefix.tokens,
        "shared_prefix_share": workload.prefix.share,
        "max_new_tokens": 64,
        "greedy": True,
        "respect_eos": False,
    }


def test_hash_codec_is_stable_and_causal():
    codec = HashCodec(1000)
    # First 8 bytes of sha256(b"Hello"), little-endian, modulo 1000: 185f8db32271fe25 -> 0x25fe7122b38d5f18.
    assert codec.encode("Hello")[0] == 0x25FE7122B38D5F18 % 1000
    assert len(codec.encode("Hello, old friend.")) == 5
    assert codec.encode("one two three")[:2] == codec.encode("one two four")[:2]
    assert codec.encode("one two three")[2] != codec.encode("two one three")[2]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"blocks": 0}, r"workload\.blocks must be at least 1, got 0"),
        ({"requests_per_block": 0}, r"workload\.requests_per_block"),
        ({"max_new_tokens": 0}, r"workload\.max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": -3}, r"workload\.max_new_tokens must be at least 1, got -3"),
        ({"prompt_tokens": 0}, r"workload\.prompt_tokens"),
        ({"concurrency": 0}, r"workload\.concurrency must be at least 1"),
        ({"concurrency": None}, r"workload\.concurrency must be at least 1"),
        ({"concurrency": 13}, r"raise workload\.requests_per_block"),
        ({"load": "fast"}, r"workload\.load must be one of closed, burst, constant, .*, got 'fast'"),
        ({"load": "poisson", "concurrency": None}, r"workload\.load=poisson needs workload\.arrivals\.rate"),
        ({"load": "poisson"}, r"waits for no answer: set workload\.concurrency=null"),
        ({"load": "burst"}, r"workload\.concurrency=null"),
        ({"temperature": -1.0}, r"workload\.temperature"),
        ({"temperature": float("nan")}, r"workload\.temperature"),
        ({"top_k": -1}, r"workload\.top_k must be 0"),
        ({"top_p": 0.0}, r"workload\.top_p"),
        ({"output_mix": []}, r"workload\.output_mix"),
        ({"output_mix": [0.5, 1.5]}, r"workload\.output_mix"),
        ({"prompt_mix": [0.5, 1.0]}, r"workload\.prompt_mix needs workload\.prompt_tokens"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_by_name(change, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_config(dataclasses.replace(WorkloadConfig(), **change))


def test_user_prompts_as_lines_and_as_yaml(tmp_path):
    lines = tmp_path / "mine.txt"
    lines.write_text("First {one}.\n\n  Second: x  \n", encoding="utf-8")
    assert load_prompts(str(lines)) == ("First {one}.", "Second: x")
    listed = tmp_path / "mine.yaml"
    listed.write_text('- "Say ${x} {y}."\n- {text: "A {slot}!", fillings: [b, c]}\n', encoding="utf-8")
    assert load_prompts(str(listed)) == ("Say ${x} {y}.", "A b!", "A c!")
    assert load_held_out(str(listed)) == load_held_out(str(lines)) == ()


def test_held_out_fillings_are_not_timed(tmp_path):
    listed = tmp_path / "mine.yaml"
    listed.write_text("- {text: 'A {slot}!', fillings: [b, c], held_out: [d, e]}\n", encoding="utf-8")
    assert load_prompts(str(listed)) == ("A b!", "A c!")
    assert load_held_out(str(listed)) == ("A d!", "A e!")

    workload = build_workload(WorkloadConfig(blocks=1, requests_per_block=2, prompts=str(listed)), LetterCodec(), 0)
    said = [{"".join(map(chr, each.input_ids[1:])) for each in some} for some in (workload.requests, workload.probe)]
    assert said == [{"A b!", "A c!"}, {"A d!", "A e!"}]


def test_without_held_out_texts_others_of_the_list_are_and_then_what_a_further_block_would_have(tmp_path):
    config = WorkloadConfig(blocks=1, requests_per_block=2, prompts=words(tmp_path, *"abc"))
    workload = build_workload(config, LetterCodec(), seed=0)
    timed, held = (
        {"".join(map(chr, each.input_ids[1:])) for each in some} for some in (workload.requests, workload.probe)
    )
    assert len(timed) == len(held) == 2
    assert held - {"(2) a", "(2) b", "(2) c"} == set("abc") - timed


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"\n \n", "holds no prompt"),
        ("twice.txt", b"a\nb\na\n", "holds a prompt twice, 'a'"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8 text"),
        ("broken.yaml", b"- 'a\n", "is not valid YAML"),
        ("number.yaml", b"- a\n- 3\n", "entry 2 is neither"),
        ("held.yaml", b"- {text: 'a {slot}', fillings: [b], held_out: c}\n", "entry 1 is neither"),
        ("held2.yaml", b"- {text: 'a {slot}', fillings: [b], held_out: [b]}\n", "holds a prompt twice, 'a b'"),
        ("noslot.yaml", b"- {text: a, fillings: [b]}\n", "entry 1 is neither"),
        ("extra.yaml", b"- {text: 'a {slot}', fillings: [b], slot: c}\n", "entry 1 is neither"),
        ("mapping.yaml", b"a: b\n", "entry 1 is neither"),
        ("empty.yaml", b"[]\n", "holds no prompt"),
    ],
)
def test_unusable_prompts_file_is_refused_by_name(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence) as caught:
        load_prompts(str(path))
    assert str(path) in str(caught.value)


def test_missing_prompts_file_names_the_packaged_lists(tmp_path):
    with pytest.raises(UsageError, match="neither one of chat, sentences, short nor a readable file"):
        load_prompts(str(tmp_path / "none.txt"))
    with pytest.raises(UsageError, match="Is a directory"):
        load_prompts(str(tmp_path))


def test_prompts_that_encode_alike_are_refused(tmp_path):
    config = WorkloadConfig(blocks=1, requests_per_block=12, prompts="sentences", prompt_tokens=1)
    with pytest.raises(UsageError, match=r"raise workload\.prompt_tokens"):
        build_workload(config, CODEC, seed=0)


def test_prompt_without_tokens_is_refused(tmp_path):
    class Deaf(LetterCodec):
        def encode_chat(self, text: str) -> tuple[int, ...]:
            return ()

    config = WorkloadConfig(blocks=1, requests_per_block=1, prompts=words(tmp_path, "a"))
    with pytest.raises(RequestError, match="empty prompt"):
        build_workload(config, Deaf(), seed=0)


def test_context_is_checked_request_by_request(tmp_path):
    config = WorkloadConfig(blocks=1, requests_per_block=2, max_new_tokens=4, prompts=words(tmp_path, "a", "bbbbbb"))
    workload = build_workload(config, LetterCodec(), seed=0)  # 2 + 4 and 7 + 4 tokens
    longer = next(request.request_id for request in workload.requests if len(request.input_ids) == 7)
    check_fits(workload, 11)
    with pytest.raises(CapacityError, match=rf"{longer} needs 7 prompt \+ 4 new tokens.* to 3 or"):
        check_fits(workload, 10)
    with pytest.raises(CapacityError, match=f"{longer} has a prompt longer than the context: 7 tokens"):
        check_fits(workload, 7)


@pytest.mark.parametrize("prompt_tokens", [None, 24])
def test_the_probe_is_made_like_a_block_and_of_other_prompts(prompt_tokens):
    config = WorkloadConfig(blocks=2, requests_per_block=4, prompts="sentences", prompt_tokens=prompt_tokens)
    workload = build_workload(config, LetterCodec(), seed=1)

    measured = {request.input_ids for request in workload.requests}
    assert [request.request_id for request in workload.probe] == ["p00", "p01", "p02", "p03"]
    assert not measured & {request.input_ids for request in workload.probe}
    assert {request.max_new_tokens for request in workload.probe} == {config.max_new_tokens}
    if prompt_tokens is not None:
        assert {len(request.input_ids) for request in workload.probe} == {prompt_tokens}


@pytest.mark.parametrize("name", OPTIONS)
def test_spare_blocks_follow_without_changing_the_planned_ones(name, trace_file):
    config = option(name, trace_file)
    planned, longer, longest = (build_workload(config, CODEC, seed=4, max_blocks=blocks) for blocks in (0, 13, 25))

    assert planned.blocks == longer.blocks == longest.blocks
    assert planned.sha256 == longer.sha256 == longest.sha256
    assert planned.spare == ()
    assert longer.spare == longest.spare[: 13 - config.blocks]
    assert len({request.input_ids for request in longest.possible}) == 25 * config.requests_per_block
    assert len({request.request_id for request in longest.possible}) == 25 * config.requests_per_block
    shapes = {(len(request.input_ids), request.max_new_tokens) for request in longest.possible}
    assert {(len(each.input_ids), each.max_new_tokens) for each in longest.warmup} <= shapes


def test_the_hash_covers_the_blocks_that_were_added():
    workload = build_workload(WorkloadConfig(), CODEC, seed=0, max_blocks=10)
    longer = workload.extended(2)

    assert longer.blocks == workload.blocks + workload.spare[:2]
    assert longer.spare == workload.spare[2:]
    assert longer.sha256 not in (workload.sha256, workload.extended(3).sha256)
    assert longer.extended(1).sha256 == workload.extended(3).sha256
    assert longer.describe()["blocks"] == 8
    assert longer.describe()["sha256"] == longer.sha256


def test_a_budget_below_the_plan_leaves_the_plan():
    assert build_workload(WorkloadConfig(), CODEC, seed=0, max_blocks=2) == build_workload(WorkloadConfig(), CODEC, 0)


def test_new_prompts_come_before_repeats_and_repeats_are_counted(tmp_path):
    """Five prompts, two a block: each of the five once, then "(2) ..." of each."""
    config = WorkloadConfig(blocks=1, requests_per_block=2, prompts=words(tmp_path, *"abcde"))
    workload = build_workload(config, LetterCodec(), seed=0, max_blocks=5)
    texts = [{"".join(map(chr, request.input_ids[1:])) for request in block} for block in workload.extended(4).blocks]

    assert set.union(*texts) == {*"abcde", *(f"(2) {letter}" for letter in "abcde")}
    assert set.union(*texts[:2]) < set("abcde")
    assert [workload.extended(more).repeated_prompts for more in range(5)] == [0, 0, 1, 3, 5]
    assert [workload.extended(more).prefix.tokens for more in (0, 4)] == [0.5, 1]  # 0, 1; the repeats 1, 5, 5, 5, 5


def test_documents_are_never_repeats():
    config = option("prefill_longcontext")
    workload = build_workload(dataclasses.replace(config, prompt_tokens=32), CODEC, seed=0, max_blocks=20)

    assert workload.extended(14).repeated_prompts == 0
    assert {len(request.input_ids) for request in workload.possible} == {32}


def test_a_spare_block_must_fit_too(tmp_path):
    config = WorkloadConfig(blocks=1, requests_per_block=1, max_new_tokens=4, prompts=words(tmp_path, "a"))
    check_fits(build_workload(config, LetterCodec(), seed=0), 8)
    with pytest.raises(CapacityError, match="Request b01-r00 needs 6 prompt"):
        check_fits(build_workload(config, LetterCodec(), seed=0, max_blocks=2), 8)

"""`generate` and the command `skote-generate`, with a tiny model and a tokenizer whose ids show in the text."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skote.flags import read_flags
from skote.runtime import generate as module
from skote.runtime.engine import SkotergyEngine
from skote.runtime.generate import TextStream, generate, main
from skote.runtime.text import load_tokenizer
from skote.types import CapacityError, CheckpointError, ExitCode, Request, RequestError, Sampling

IDS = (7, 8, 9, 10)
PROMPT = "w7 w8 w9 w10"
SPECIAL = (1, 2, 95, 96)  # <s>, </s> and padding, which are no text


def text_of(ids: Sequence[int]) -> str:
    return " ".join({0: "<unk>", 3: "user"}.get(token, f"w{token}") for token in ids if token not in SPECIAL)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine without a compiler, which would take seconds a test, on the CPU of any machine."""
    monkeypatch.setattr(module, "SkotergyEngine", partial(SkotergyEngine, compile=False))
    monkeypatch.setattr(module, "resolve_devices", lambda devices: ["cpu"])


@pytest.fixture
def model(copy_checkpoint: Callable[..., Path], write_tokenizer: Callable[..., None]) -> Path:
    directory = copy_checkpoint(eos_token_id=None)  # so that every output is as long as it may be
    write_tokenizer(directory, pad=False, chat=True)
    return directory


@pytest.fixture
def greedy_text(model: Path, reference_ids: Callable[..., list[int]]) -> Callable[..., str]:
    return lambda ids, n: text_of(reference_ids(model, ids, n))


class TestFunction:
    def test_it_is_the_text_of_transformers_greedy_tokens(self, model: Path, greedy_text: Callable[..., str]) -> None:
        assert generate(str(model), PROMPT, max_new_tokens=12, greedy=True) == greedy_text(IDS, 12)

    def test_not_greedy_is_temperature_one_with_the_default_seed(self, model: Path) -> None:
        engine = SkotergyEngine(local_dir=str(model), device="cpu", dtype="fp32", pad_id=96, compile=False)
        ids: list[int] = []
        engine.generate([Request("r", IDS, 12, Sampling(temperature=1.0))], lambda _, new: ids.extend(new))

        assert generate(str(model), PROMPT, max_new_tokens=12, greedy=False) == text_of(ids)

    def test_the_flags_are_restored(self, model: Path) -> None:
        before = read_flags()
        generate(str(model), PROMPT, max_new_tokens=1, greedy=True)

        assert read_flags() == before

    def test_bad_input(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="empty prompt"):
            generate(str(model), "", max_new_tokens=3, greedy=True)
        with pytest.raises(RequestError, match="at least 1, got 0"):
            generate(str(model), PROMPT, max_new_tokens=0, greedy=True)
        with pytest.raises(CapacityError, match="holds 64"):
            generate(str(model), PROMPT, max_new_tokens=62, greedy=True)
        with pytest.raises(CheckpointError, match="no model directory"):
            generate(str(tmp_path / "nowhere"), PROMPT, max_new_tokens=3, greedy=True)


class TestCommand:
    def test_a_prompt_by_option(
        self, model: Path, greedy_text: Callable[..., str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(model), "--prompt", PROMPT, "--max-new-tokens", "12"]) == ExitCode.DONE

        assert capsys.readouterr().out == greedy_text(IDS, 12) + "\n"

    def test_prompts_by_line_from_standard_input(
        self,
        model: Path,
        greedy_text: Callable[..., str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\nw5\n"))

        assert main([str(model), "--max-new-tokens", "6"]) == ExitCode.DONE

        assert capsys.readouterr().out == f"{greedy_text(IDS, 6)}\n{greedy_text((5,), 6)}\n"

    def test_chat_uses_the_template(
        self, model: Path, greedy_text: Callable[..., str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([str(model), "--prompt", "w5", "--chat", "--max-new-tokens", "6"])

        assert capsys.readouterr().out == greedy_text((1, 3, 5, 9), 6) + "\n"

    def test_sampling_follows_its_seed(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        outputs = []
        for seed in ("1", "1", "2"):
            main([str(model), "--prompt", PROMPT, "--max-new-tokens", "20", "--temperature", "1.5", "--seed", seed])
            outputs.append(capsys.readouterr().out)

        assert outputs[0] == outputs[1] != outputs[2]

    def test_an_answer_ends_where_the_first_stop_string_begins(
        self, model: Path, greedy_text: Callable[..., str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = greedy_text(IDS, 12).split(" ")
        third = f" {words[2]}"
        main([str(model), "--prompt", PROMPT, "--max-new-tokens", "12", "--stop", "never", "--stop", third])

        want = " ".join(words).partition(third)[0]
        assert capsys.readouterr().out == want + "\n"
        assert generate(str(model), PROMPT, max_new_tokens=12, stop_strings=[third]) == want

    def test_the_likeliest_token_alone_is_greedy(
        self, model: Path, greedy_text: Callable[..., str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([str(model), "--prompt", PROMPT, "--max-new-tokens", "6", "--temperature", "5", "--top-k", "1"])

        assert capsys.readouterr().out == greedy_text(IDS, 6) + "\n"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--prompt", PROMPT, "--max-new-tokens", "0"], "'0' is not a whole number of at least 1"),
            (["--prompt", PROMPT, "--max-new-tokens", "-3"], "-3"),
            (["--prompt", PROMPT, "--max-new-tokens", "62"], "the context holds 64"),
            (["--prompt", PROMPT, "--dtype", "fp8"], "dtype 'fp8' is not known"),
            (["--prompt", PROMPT, "--temperature", "-1"], "temperature must be 0"),
            (["--prompt", PROMPT, "--top-p", "0", "--temperature", "1"], "top_p must lie in"),
            (["--prompt", PROMPT, "--top-k", "-1", "--temperature", "1"], "top_k must be a whole number"),
            (["--prompt", PROMPT, "--nonsense"], "--nonsense"),
            (["--prompt", PROMPT, "--stop", ""], "texts that are not empty"),
            (["--prompt", ""], "empty prompt"),
            ([], "There is no prompt"),
        ],
    )
    def test_bad_input_is_one_sentence_and_exit_4(
        self,
        model: Path,
        arguments: list[str],
        sentence: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))

        assert main([str(model), *arguments]) == ExitCode.USAGE

        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("skote-generate: ")
        assert sentence in err
        assert err.count("\n") == 1

    def test_a_missing_directory(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(tmp_path / "nowhere"), "--prompt", PROMPT]) == ExitCode.USAGE
        assert "no model directory" in capsys.readouterr().err

    def test_two_devices(
        self, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "resolve_devices", lambda devices: ["cpu", "cpu"])

        assert main([str(model), "--prompt", PROMPT, "--device", "2"]) == ExitCode.USAGE
        assert "takes one" in capsys.readouterr().err

    def test_an_interrupt_is_said_and_keeps_what_was_written(
        self, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Interrupted:
            def __init__(self, **_: Any) -> None: ...

            def describe(self) -> dict[str, Any]:
                return {"tier": 1}

            def generate(self, requests: Sequence[Request], emit: Callable[[int, Sequence[int]], None]) -> None:
                emit(0, (7,))
                emit(0, (8,))
                raise KeyboardInterrupt

        monkeypatch.setattr(module, "SkotergyEngine", Interrupted)

        assert main([str(model), "--prompt", PROMPT]) == ExitCode.INTERRUPTED
        assert tuple(capsys.readouterr()) == ("w7 w8", "skote-generate: interrupted.\n")


def test_a_model_that_is_not_run_in_tier_1_is_told_why(
    module_directory: Path, tmp_path: Path, write_tokenizer: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    for file in module_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_tokenizer(tmp_path)

    assert main([str(tmp_path), "--prompt", PROMPT, "--max-new-tokens", "3"]) == ExitCode.DONE
    printed = capsys.readouterr()
    assert printed.err.startswith("skote-generate: tier 3: SeedOssForCausalLM of Transformers ")
    assert printed.err.endswith("no tier 1, because model_type 'seed_oss' has no adapter in skote.model.families.\n")
    assert printed.out.strip()


class TestStream:
    def test_text_is_written_as_it_is_completed(self, model: Path) -> None:
        pieces: list[str] = []
        stream = TextStream(load_tokenizer(model), pieces.append)

        for token in (7, 2, 8):
            stream.emit(0, (token,))

        assert pieces == ["w7", "", " w8"]
        assert stream.finish() == "w7 w8"
        assert "".join(pieces) == "w7 w8"

    def test_an_incomplete_character_is_held_back_until_it_is_whole_or_the_text_ends(self) -> None:
        class Bytes:
            def decode(self, ids: Sequence[int]) -> str:
                return bytes(ids).decode("utf-8", errors="replace")

        pieces: list[str] = []
        stream = TextStream(Bytes(), pieces.append)  # type: ignore[arg-type]
        for byte in "aé€".encode():
            stream.emit(0, (byte,))
        assert [piece for piece in pieces if piece] == ["a", "é", "€"]

        stream.emit(0, (0xE2,))
        assert "".join(pieces) == "aé€"
        assert stream.finish() == "aé€\N{REPLACEMENT CHARACTER}"
        assert "".join(pieces) == "aé€\N{REPLACEMENT CHARACTER}"

"""Text to ids and back with a word-level tokenizer, whose ids can be read off the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skote.runtime.text import PAD_TOKEN, load_tokenizer
from skote.types import CheckpointError, RequestError

Write = Callable[..., None]


def test_a_complete_tokenizer_is_used_as_it_is(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, pad=True, chat=True)

    codec = load_tokenizer(tmp_path)

    assert (codec.pad_id, codec.pad_added, codec.notes) == (95, False, [])
    assert codec.encode("w7 w8 nonsense w9") == (7, 8, 0, 9)


def test_padding_is_added_after_the_vocabulary_and_said(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, pad=False, chat=True)

    codec = load_tokenizer(tmp_path)

    assert (codec.pad_id, codec.pad_added) == (96, True)
    assert codec.notes == [f"The tokenizer has no padding token: {PAD_TOKEN} was added."]
    assert codec.encode("w7") == (7,)
    assert codec.decode([7, 96]) == "w7"


def test_the_chat_template_puts_the_text_in_a_user_turn(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, chat=True)

    # "<s> user w7 w8 " and "w9" where the answer starts.
    assert load_tokenizer(tmp_path).encode_chat("w7 w8") == (1, 3, 7, 8, 9)


def test_a_conversation_goes_through_the_template(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, chat=True)
    turns = [{"role": "user", "content": "w7"}, {"role": "w5", "content": "w8"}]

    assert load_tokenizer(tmp_path).encode_messages(turns) == (1, 3, 7, 1, 5, 8, 9)


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with_a_beginning"])
def test_the_text_of_a_prompt_gives_its_ids_again(tmp_path: Path, write_tokenizer: Write, begins: bool) -> None:
    """Special tokens are in it, but for one that the tokenizer puts in front by itself."""
    from tokenizers import Tokenizer, processors

    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(file))
    codec = load_tokenizer(tmp_path)

    assert codec.encode("w7") == ((1, 7) if begins else (7,))
    for ids in ((1, 3, 7, 2, 8), (1, 1, 7), (1,)):
        assert codec.encode(codec.prompt_text(ids)) == ids


def test_a_template_that_refuses_a_conversation_says_why(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, chat=True)
    file = tmp_path / "chat_template.jinja"
    codecs = []
    for template in ("{{ raise_exception('Roles must alternate.') }}", "{{ messages[5].role.upper() }}"):
        file.write_text(template, encoding="utf-8")
        codecs.append(load_tokenizer(tmp_path))
    write_tokenizer(tmp_path / "plain")
    turns = [{"role": "user", "content": "w7"}]

    with pytest.raises(RequestError, match=r"chat template refuses a conversation: Roles must alternate\.$"):
        codecs[0].encode_messages(turns)
    with pytest.raises(RequestError, match="chat template refuses a conversation: "):
        codecs[1].encode_messages(turns)
    with pytest.raises(RequestError, match="The model has no chat template, which messages need"):
        load_tokenizer(tmp_path / "plain").encode_messages(turns)


def test_without_a_template_chat_is_plain_text_and_this_is_said(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, chat=False)

    codec = load_tokenizer(tmp_path)

    assert not codec.has_chat_template
    assert codec.encode_chat("w7 w8") == codec.encode("w7 w8") == (7, 8)
    assert codec.notes == ["The tokenizer has no chat template: prompts are used as plain text."]


def test_special_tokens_are_left_out_of_the_text(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path)

    assert load_tokenizer(tmp_path).decode((1, 7, 0, 8, 2, 95)) == "w7 w8"


def test_the_hash_follows_the_tokenizers_files_alone(tmp_path: Path, write_tokenizer: Write) -> None:
    hashes = []
    for name, chat in (("a", True), ("b", True), ("c", False)):
        directory = tmp_path / name
        write_tokenizer(directory, chat=chat)
        (directory / "config.json").write_text(f'{{"model_type": "llama", "vocab_size": {len(hashes) + 1}}}')
        hashes.append(load_tokenizer(directory).sha256)
    (tmp_path / "c" / "tokenizer_config.json").write_text("{}")

    assert hashes[0] == hashes[1]
    assert load_tokenizer(tmp_path / "c").sha256 != hashes[2]


def test_no_directory_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model directory .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"version": "1.0", "model": {"type": "Nothing"}}', "\x00"])
def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, write_tokenizer: Write, content: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)


def test_messages_go_through_the_template_and_need_one(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, chat=True)
    said = [{"role": "user", "content": "w7"}]
    assert load_tokenizer(tmp_path).encode_messages(said) == load_tokenizer(tmp_path).encode_chat("w7")
    strict = load_tokenizer(tmp_path)
    strict._tokenizer.chat_template = "{{ raise_exception('Only users speak.') }}"
    with pytest.raises(RequestError, match=r"chat template refuses a conversation: Only users speak\.$"):
        strict.encode_messages(said)
    with pytest.raises(RequestError, match=r"chat template refuses several turns: Only users speak\.$"):
        strict.encode_next_turn(said)

    write_tokenizer(tmp_path / "plain", chat=False)
    with pytest.raises(RequestError, match="no chat template, which messages need"):
        load_tokenizer(tmp_path / "plain").encode_messages(said)


def test_a_next_turn_is_what_the_template_puts_behind_an_answer(tmp_path: Path, write_tokenizer: Write) -> None:
    write_tokenizer(tmp_path, chat=True)
    codec = load_tokenizer(tmp_path)
    said = [("user", "w7"), ("assistant", "w8"), ("user", "w9")]
    whole = codec.encode_messages([{"role": role, "content": text} for role, text in said])
    answer = whole.index(8)
    assert whole[: answer + 1] + codec.encode_next_turn([{"role": "user", "content": "w9"}]) == whole

    write_tokenizer(tmp_path / "plain", chat=False)
    assert load_tokenizer(tmp_path / "plain").encode_next_turn([{"role": "tool", "content": "w9"}]) == (9,)

"""The prompts that come with Skotergy, and how a user's own list of prompts is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from skote.types import UsageError

PROMPTS_DIR = Path(__file__).parent
SLOT = "{slot}"


def load_prompts(source: str) -> tuple[str, ...]:
    """The texts of `workload.prompts`, in order; the names in `prompts/` go before files of the same name.

    Raises:
        UsageError: no such file, not readable as text or YAML, empty, or the same prompt twice.
    """
    return _load(source)[0]


def load_held_out(source: str) -> tuple[str, ...]:
    """The texts of that list that are not to be timed (`held_out`, beside `fillings`); none in a file of lines.

    Raises:
        UsageError: as `load_prompts`.
    """
    return _load(source)[1]


def _load(source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    packaged = {path.stem: path for path in PROMPTS_DIR.iterdir() if path.suffix in (".yaml", ".txt")}
    path = packaged.get(source, Path(source))
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"workload.prompts={source} is neither one of {', '.join(sorted(packaged))} nor a readable file "
            f"({error.strerror})."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"workload.prompts={source} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    if path.suffix in (".yaml", ".yml"):
        texts, held_out = _yaml_prompts(source, content)
    else:
        texts, held_out = [line.strip() for line in content.splitlines() if line.strip()], []
    if not texts:
        raise UsageError(f"workload.prompts={source} holds no prompt: give it at least one.")
    seen: set[str] = set()
    for text in (*texts, *held_out):
        if text in seen:
            raise UsageError(f"workload.prompts={source} holds a prompt twice, {text[:40]!r}: remove one of them.")
        seen.add(text)
    return tuple(texts), tuple(held_out)


def _yaml_prompts(source: str, content: str) -> tuple[list[str], list[str]]:
    try:
        entries = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UsageError(f"workload.prompts={source} is not valid YAML: {str(error).splitlines()[0]}.") from error
    texts: list[str] = []
    held_out: list[str] = []
    for position, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        match entry:
            case str() if entry.strip():
                texts.append(entry)
            case {"text": str(text), "fillings": [*fillings], **rest} if (
                SLOT in text
                and fillings
                and rest.keys() <= {"held_out"}
                and _are_texts(fillings, rest.get("held_out", []))
            ):
                texts.extend(text.replace(SLOT, filling) for filling in fillings)
                others: Any = rest.get("held_out", [])
                held_out.extend(text.replace(SLOT, filling) for filling in others)
            case _:
                raise UsageError(
                    f"workload.prompts={source}: entry {position + 1} is neither a text nor a mapping of `text` (with "
                    f"{SLOT} in it) and `fillings` (a list of texts; another may be `held_out`, which is not timed)."
                )
    return texts, held_out


def _are_texts(*lists: Any) -> bool:  # noqa: ANN401 (what YAML holds)
    return all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists)

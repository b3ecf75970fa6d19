"""The prompts that come with Skotergy, and how a user's own list of prompts is read."""

from __future__ import annotations

from pathlib import Path

import yaml

from skote.types import UsageError

PROMPTS_DIR = Path(__file__).parent
SLOT = "{slot}"


def load_prompts(source: str) -> tuple[str, ...]:
    """The texts of `workload.prompts`, in order; the names in `prompts/` go before files of the same name.

    Raises:
        UsageError: no such file, not readable as text or YAML, empty, or the same prompt twice.
    """
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
        texts = _yaml_prompts(source, content)
    else:
        texts = [line.strip() for line in content.splitlines() if line.strip()]
    if not texts:
        raise UsageError(f"workload.prompts={source} holds no prompt: give it at least one.")
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            raise UsageError(f"workload.prompts={source} holds a prompt twice, {text[:40]!r}: remove one of them.")
        seen.add(text)
    return tuple(texts)


def _yaml_prompts(source: str, content: str) -> list[str]:
    try:
        entries = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UsageError(f"workload.prompts={source} is not valid YAML: {str(error).splitlines()[0]}.") from error
    texts: list[str] = []
    for position, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        match entry:
            case str() if entry.strip():
                texts.append(entry)
            case {"text": str(text), "fillings": [*fillings], **rest} if (
                not rest and SLOT in text and fillings and all(isinstance(filling, str) for filling in fillings)
            ):
                texts.extend(text.replace(SLOT, filling) for filling in fillings)
            case _:
                raise UsageError(
                    f"workload.prompts={source}: entry {position + 1} is neither a text nor a mapping of `text` (with "
                    f"{SLOT} in it) and `fillings` (a list of texts)."
                )
    return texts

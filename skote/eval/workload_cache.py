"""Large workloads on disk, by the hash of all that they are made of, so that each is made once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import platform
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skote.eval.shared_prefix import SharedPrefix
from skote.eval.workload import Workload
from skote.eval.workload_config import WorkloadConfig
from skote.types import Request, Sampling

LEAST_TOKENS = 1_000_000
"""Of all prompts together: a smaller workload is made in a second."""
MOST_FILES = 8
"""What is kept beyond these is removed, the oldest first."""
_GROUPS = ("warmup", "probe")
_NUMBERS = ("times", "turns", "think_ns")
_PLAIN = ("name", "load", "concurrency", "max_new_tokens", "greedy", "respect_eos", "sha256", "source")


class WorkloadCache:
    """Workloads in `directory`. What cannot be read there is made again, what cannot be written is said.

    Args:
        say: told, in a sentence, where a workload came from.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory, self._say = directory, say

    def workload(self, made_of: dict[str, Any], build: Callable[[], Workload]) -> Workload:
        """The workload that `build` makes of what `made_of` (JSON values) says; see `ingredients`."""
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        path = self._directory / f"{key[:32]}.npz"
        found = _read(path)
        if found is not None:
            self._say(f"The workload was made before: {path}")
            return found
        workload = build()
        if workload.listed is None and sum(len(each.input_ids) for each in workload.possible) >= LEAST_TOKENS:
            try:
                self._write(path, workload)
            except OSError as error:
                self._say(f"The workload could not be kept in {self._directory}: {error.strerror or error}.")
        return workload

    def _write(self, path: Path, workload: Workload) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._directory.glob("*.npz"), key=lambda each: each.stat().st_mtime)[: -MOST_FILES + 1]:
            old.unlink(missing_ok=True)
        groups = [*workload.blocks, *workload.spare, *(getattr(workload, name) for name in _GROUPS)]
        header = {
            **{name: getattr(workload, name) for name in _PLAIN},
            "blocks": len(workload.blocks),
            "groups": [[_rest(request) for request in group] for group in groups],
            **{name: getattr(workload, name) for name in _NUMBERS},
            "prefix": asdict(workload.prefix),
        }
        every = itertools.chain.from_iterable(groups)
        ids = np.concatenate([np.array(request.input_ids, dtype=np.int32) for request in every])
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, ids=ids, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))
        part.replace(path)  # another process sees all of it, or nothing


def ingredients(
    config: WorkloadConfig, codec: str, seed: int, max_blocks: int, max_positions: int | None
) -> dict[str, Any]:
    """All that a workload depends on, as JSON values: options, tokenizer (`codec` names it), files, and our own code.

    A file that cannot be read has no hash: whoever builds says so.
    """
    named = (config.source.path, config.source.input.path, config.source.output.path)
    files = [Path(name) for name in named if name is not None]
    prompts = Path(config.prompts)
    return {
        "config": asdict(config),
        "codec": [codec, *(importlib.metadata.version(name) for name in ("transformers", "tokenizers"))],
        "numbers": [seed, max_blocks, max_positions],
        "files": [_sha256(path) for path in (*files, *([prompts] if prompts.is_file() else []))],
        "code": [_sha256(path) for path in sorted(Path(__file__).parent.rglob("*")) if path.suffix in (".py", ".yaml")],
        "python": platform.python_version(),
    }


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _rest(request: Request) -> list[Any]:
    """A request without its ids, whose number stands in their place."""
    return [
        request.request_id,
        len(request.input_ids),
        request.max_new_tokens,
        asdict(request.sampling),
        request.ignore_eos,
        request.stop_ids,
        request.stop_strings,
    ]


def _read(path: Path) -> Workload | None:
    """The workload in a file; None where there is none, or a damaged one."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            ids, header = content["ids"], json.loads(content["header"].tobytes())
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    ints = list(range(int(ids.max()) + 1))  # one object a token id: a hundred million of them are gigabytes
    requests = _requests(header["groups"], ids, ints)
    groups = [tuple(itertools.islice(requests, len(group))) for group in header["groups"]]
    planned, given = header["blocks"], len(groups) - len(_GROUPS)
    fields: dict[str, Any] = {name: header[name] for name in _PLAIN}
    fields |= zip(_GROUPS, groups[given:], strict=True)
    fields |= {name: tuple(map(tuple, header[name])) for name in _NUMBERS}
    prefix = SharedPrefix(**header["prefix"])
    return Workload(
        blocks=tuple(groups[:planned]), spare=tuple(groups[planned:given]), listed=None, prefix=prefix, **fields
    )


def _requests(groups: Sequence[Sequence[Any]], ids: NDArray[np.int32], ints: Sequence[int]) -> Iterator[Request]:
    start = 0
    for name, length, new, sampling, ignore_eos, stop_ids, stop_strings in itertools.chain.from_iterable(groups):
        yield Request(
            name,
            tuple(map(ints.__getitem__, ids[start : start + length].tolist())),
            new,
            Sampling(**sampling),
            ignore_eos=ignore_eos,
            stop_ids=tuple(stop_ids),
            stop_strings=tuple(stop_strings),
        )
        start += length

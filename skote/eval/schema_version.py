"""The version of a run's files, and how the manifest of an older one becomes one of today.

The parquet files have had the same columns in every version; what a version changed is a step in `STEPS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skote.types import RecordError

Manifest = dict[str, Any]

SCHEMA_VERSION = 2


def _blocks_may_be_added(manifest: Manifest) -> Manifest:
    """1 to 2: why no more blocks were measured, and how many prompts were repeated for them.

    Until then the number of blocks was fixed, and nobody counted.
    """
    return manifest | {"stop": None, "workload": {"repeated_prompts": None} | manifest["workload"]}


STEPS: dict[int, Callable[[Manifest], Manifest]] = {1: _blocks_may_be_added}


def migrate(manifest: Manifest, name: str) -> Manifest:
    """`manifest` as this version writes it; `name` says whose it is.

    Raises:
        RecordError: it states no version that there was so far.
    """
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION and version not in STEPS:
        raise RecordError(
            f"{name} has schema version {version}, and this Skotergy reads {min(STEPS)} to {SCHEMA_VERSION}: use the "
            "Skotergy that wrote it, or a newer one."
        )
    for each in range(version, SCHEMA_VERSION):
        manifest = STEPS[each](manifest)
    return manifest | {"schema_version": SCHEMA_VERSION}

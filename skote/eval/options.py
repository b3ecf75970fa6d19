"""The options of a configuration by their dotted keys, and in which of them several runs differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

GROUPS = ("model", "dtype", "engine", "compare", "workload", "check")
"""The groups whose options have a name: another name stands for all that comes with it."""
FREE_KEYED = ("engine.", "compare.")
"""Where an option may be there in one run and not in another: elsewhere a run that lacks one is an older one."""
UNSET = "(unset)"


def leaves(node: Any, prefix: str = "", whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Every option below `node` (a part of a configuration) by its dotted key; those in `whole` are taken as they are.

    A list of mappings, such as rules, goes by their numbers.
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key), whole)
    elif isinstance(node, list) and node and isinstance(node[0], Mapping) and prefix not in whole:
        for index, value in enumerate(node):
            yield from leaves(value, f"{prefix}.{index}", whole)
    else:
        yield prefix, node


def differing_options(manifests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each run the options that not all runs have alike, as one would write them: "engine=skotergy", "devices=2".

    Where a group's name differs it stands for what the group's file says; what was overridden is named beside it.
    """
    trees = [dict(leaves(manifest["config"])) for manifest in manifests]
    keys = sorted(set().union(*trees))
    shared = [key for key in keys if key.startswith(FREE_KEYED) or all(key in tree for tree in trees)]
    differing = [key for key in shared if len({_text(tree, key) for tree in trees}) > 1]
    named = [group for group in GROUPS if f"{group}.name" in differing]
    overridden = {_key(override) for manifest in manifests for override in manifest["overrides"]}
    shown = [
        key
        for key in differing
        if key in overridden or key.removesuffix(".name") in named or key.partition(".")[0] not in named
    ]
    return [[f"{key.removesuffix('.name')}={_text(tree, key)}" for key in shown] for tree in trees]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _text(tree: Mapping[str, Any], key: str) -> str:
    if key not in tree:
        return UNSET
    value = tree[key]
    if key.endswith(".name") and value == "":
        return "none"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))

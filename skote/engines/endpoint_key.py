"""The key that a server asks for: from a file, or from the environment variable that the configuration names."""

from __future__ import annotations

import os
from pathlib import Path

from skote.types import UsageError


def read_key(file: str | None, variable: str | None) -> str | None:
    """The key: the first line of `file`, or the value of `variable`; None where neither is given.

    Raises:
        UsageError: both are given, or what is given has no key.
    """
    if file is not None and variable is not None:
        raise UsageError("endpoint.key_file and endpoint.key_variable both say where the key is: give one.")
    if file is not None:
        try:
            key = Path(file).expanduser().read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"endpoint.key_file={file} cannot be read: {error}.") from error
        if not key:
            raise UsageError(f"endpoint.key_file={file} begins with an empty line: put the key there.")
        return key
    if variable is not None:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise UsageError(
                f"endpoint.key_variable={variable}: the environment has no such variable, or an empty one."
            )
        return key
    return None

"""Clocks, power, load and memory of the measured window, sampled by a process of its own, as telemetry.parquet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skote.eval.nvml import PACKAGE
from skote.eval.record import TELEMETRY_SCHEMA, replace_file
from skote.eval.telemetry_process import PERIOD_S
from skote.types import RecordError

FILE = "telemetry.parquet"
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from skote.eval.telemetry_process import main
main(sys.argv[2:])
"""
_STOP_S = 10.0


class Telemetry:
    """Samples from entry to exit; `flush` writes what has come so far.

    `gpus` holds the UUID of each CUDA device of the run by its name; `package` is the module with NVML's functions.
    """

    def __init__(self, directory: Path, gpus: Mapping[str, str], package: str = PACKAGE) -> None:
        self._directory = directory
        self._arguments = [json.dumps(dict(gpus)), package, str(os.getpid())]
        self._lines = directory / ".telemetry.jsonl"
        self._read_bytes = 0
        self._rows: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {
            "gpus": dict(gpus),
            "period_s": PERIOD_S,
            "driver": None,
            "instant_power": {},
            "unavailable": None,
            "cpu_share": None,
            "error": None,
        }

    def __enter__(self) -> Telemetry:
        """Start the process, and wait until it is about to sample.

        Raises:
            RecordError: it cannot be started.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(self._lines), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's alone
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RecordError(f"The telemetry process could not be started: {self._last_words()}.")
        self._facts |= json.loads(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._last_words()
        if self._process.returncode:
            self._facts["error"] = f"The telemetry process ended before the run did: {reason}."
        self.flush()
        self._lines.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        """The id of the process that samples."""
        return self._process.pid

    def flush(self) -> None:
        """Write telemetry.parquet, whole, with every sample so far.

        Raises:
            RecordError: it could not be written.
        """
        with self._lines.open("rb") as lines:
            lines.seek(self._read_bytes)
            new = lines.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        for content in map(json.loads, complete.splitlines()):
            if "t_ns" in content:
                self._rows.append(content)
            else:
                self._facts["cpu_share"] = content["cpu_s"] / content["wall_s"]
        table = pa.Table.from_pylist(self._rows, schema=TELEMETRY_SCHEMA)
        replace_file(self._directory / FILE, partial(pq.write_table, table))

    def describe(self) -> dict[str, Any]:
        """The manifest's entry: `gpus`, UUIDs by device; `driver`; `unavailable`, why they were not read.

        `instant_power` says for each GPU whether its power is the instant's; `error` what ended sampling early;
        `cpu_share` is what it took of one core, known after the exit.
        """
        return dict(self._facts)

    def _last_words(self) -> str:
        """Let the process end, and say how it did."""
        try:
            _, errors = self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, errors = self._process.communicate()
        return (errors.strip().splitlines() or [f"exit status {self._process.returncode}"])[-1].rstrip(".")

"""A run whose other arm is `skote-serve`, started by the run: the documented line."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

RUN = Path(__file__).parent.parent.parent / "run.py"
WAIT_S = 120.0


@pytest.fixture
def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.slow
def test_our_own_server_as_the_other_arm(tmp_path, make_checkpoint, write_tokenizer, free_port):
    model = make_checkpoint(max_position_embeddings=2048, eos_token_id=None)
    write_tokenizer(model, chat=True)
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("".join(f"- w{4 + i} w{50 + i} w{20 + i}\n" for i in range(40)), encoding="utf-8")
    serve = [sys.executable, "-m", "skote.serve.command", f"model.path={model}", f"port={free_port}"]
    done = subprocess.run(
        [
            *(sys.executable, RUN, "engine=skotergy", "compare=endpoint", "model=local", f"model.path={model}"),
            *(f"endpoint.url=http://127.0.0.1:{free_port}/v1", "engine.compile=false"),
            f"endpoint.command='{shlex.join([*serve, 'engine.compile=false'])}'",
            *(f"workload.prompts={prompts}", "workload.blocks=2", "workload.requests_per_block=3"),
            *("workload.max_new_tokens=8", "measure.harness_overhead=false", "report=none", "hydra.run.dir=run"),
        ],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(RUN.parent)}, text=True, capture_output=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["parity"]["mode"], manifest["parity"]["passed"]) == ("token_equal", True)
    (info,) = [each["info"] for each in manifest["arms"]["baseline"]["replicas"]]
    assert info["caveats"] == []
    rows = pd.read_parquet(tmp_path / "run" / "requests.parquet").query("phase == 'measure'")
    assert rows.groupby("arm").size().to_dict() == {"candidate": 6, "baseline": 6}
    assert (rows.output_tokens == 8).all()
    assert rows.groupby("request_id").output_sha256.nunique().eq(1).all()
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["verdict"]["valid"]
    assert [each.pid for each in psutil.process_iter(["cmdline"]) if str(model) in (each.info["cmdline"] or [])] == []
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", free_port)) != 0

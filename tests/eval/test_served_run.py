"""One command, four arms, one page: the engine in process and served, the baseline, and Transformers' own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
WAIT_S = 600.0


@pytest.mark.slow
def test_four_arms_in_one_comparison(tmp_path, make_checkpoint, write_tokenizer):
    """Each server is started and ended by the run, told the same prompts, and its answers are judged."""
    model = make_checkpoint(max_position_embeddings=2048)
    write_tokenizer(model, chat=True)
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("".join(f"- w{4 + i} w{50 + i} w{20 + i}\n" for i in range(40)), encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "run.py", "-cd", ROOT / "experiments", "-cn", "served"),
            *("model=local", f"model.path={model}", "engine.compile=false", "devices=cpu"),
            *(f"workload.prompts={prompts}", "workload.blocks=2", "workload.requests_per_block=3"),
            *("workload.max_new_tokens=8", "measure.harness_overhead=false", "hydra.sweep.dir=runs"),
        ],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "runs" / "comparison.html").read_text(encoding="utf-8")
    modes = {}
    for directory in sorted(tmp_path.glob("runs/[0-9]")):
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        metrics = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
        other = manifest["arms"]["baseline"]["engine"]
        modes[other] = manifest["parity"]["mode"]
        assert f"against {other}" in page
        assert (metrics["verdict"]["valid"], manifest["parity"]["passed"]) == (True, True)
        assert manifest["parity"]["equal"] == manifest["parity"]["compared"] > 0
        rows = pd.read_parquet(directory / "requests.parquet").query("phase == 'measure'")
        assert rows.groupby("arm").size().to_dict() == {"candidate": 6, "baseline": 6}
        assert (rows.output_tokens == 8).all()
        caveats = manifest["arms"]["baseline"]["replicas"][0]["info"].get("caveats", [])
        if other == "transformers_serve":  # it tells no ids, and counts the very prompts that were meant
            assert [each for each in caveats if "other prompts" in each] == []
            assert [each for each in caveats if "does not tell the ids" in each] != []
        else:
            assert caveats == []
            assert rows.groupby("request_id").output_sha256.nunique().eq(1).all()
    assert modes == {"baseline": "token_equal", "skotergy_served": "token_equal", "transformers_serve": "text_equal"}
    assert [each.pid for each in psutil.process_iter(["cmdline"]) if str(model) in str(each.info["cmdline"])] == []

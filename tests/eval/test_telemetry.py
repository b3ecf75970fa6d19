from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest

from skote.eval import nvml_gpu, telemetry_process
from skote.eval.nvml import open_nvml
from skote.eval.nvml_gpu import descends_from
from skote.eval.record import TELEMETRY_SCHEMA
from skote.eval.telemetry import Telemetry
from skote.eval.telemetry_process import Host, sample

FAKE = '''
"""NVML's functions for one GPU that takes 300 W; it has no temperature sensor, and this process computes on it.

FIELDS are those that its driver knows: the power of the instant.
"""
import os, time
from types import SimpleNamespace

NVML_SUCCESS = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
START = time.monotonic()
FIELDS = {186: 300_500}

class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlSystemGetDriverVersion():
    return "580.65.06"

def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != b"GPU-1":
        raise NVMLError("Not Found")
    return "handle"

def nvmlDeviceGetClockInfo(handle, kind):
    return {1: 1980, 2: 3201}[kind]

def nvmlDeviceGetPowerUsage(handle):
    return 300_000

def nvmlDeviceGetTotalEnergyConsumption(handle):
    return int(300_000 * (time.monotonic() - START))

def nvmlDeviceGetFieldValues(handle, fields):
    if not FIELDS:
        raise NVMLError("Function Not Found")
    return [
        SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=FIELDS[field]))
        if field in FIELDS
        else SimpleNamespace(nvmlReturn=3, valueType=0, value=SimpleNamespace(dVal=0.0))
        for field in fields
    ]

def nvmlDeviceGetTemperature(handle, sensor):
    raise NVMLError("Not Supported")

def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return 4

def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=10, free=3, used=7)

def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)]
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The name of a module with NVML's functions, importable here and in a process that gets this one's path."""
    (tmp_path / "fake_nvml.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "fake_nvml"
    sys.modules.pop("fake_nvml", None)


@pytest.fixture
def module(fake):
    """The fake itself, whose FIELDS a test may change."""
    return importlib.import_module(fake)


def opened(fake):
    return open_nvml({"cuda:0": "GPU-1", "cuda:1": "GPU-2"}, os.getpid(), fake)


def test_a_gpu_s_row(fake):
    gpus = opened(fake)

    assert gpus.unavailable == "GPU telemetry is not available for cuda:1: NVML does not know the device."
    assert gpus.instant_power == {"cuda:0": True}
    [row] = gpus.read(slow=True, rare=True)
    assert row.pop("energy_j") == pytest.approx(0.0, abs=300)
    slow = {
        "memory_clock_mhz": 3201,
        "temperature_c": None,  # not told, and not zero
        "memory_used_bytes": 7,
        "foreign_processes": 1,
    }
    fast = {"device": "cuda:0", "sm_clock_mhz": 1980, "power_w": 300.5, "throttle_reasons": 4}
    assert row == fast | slow
    assert gpus.read(slow=True, rare=False) == [fast | slow]
    assert gpus.read(slow=False, rare=False) == [fast]


@pytest.mark.parametrize("fields", [{}, {83: 0}], ids=["no fields", "other fields"])
def test_a_driver_without_the_power_of_the_instant(fake, module, fields):
    module.FIELDS = fields
    gpus = opened(fake)

    assert gpus.instant_power == {"cuda:0": False}
    assert gpus.read(slow=False, rare=False)[0]["power_w"] == 300.0


def test_a_field_that_fails_for_once_is_null(fake, module):
    gpus = opened(fake)
    module.FIELDS.clear()

    assert gpus.read(slow=False, rare=False)[0]["power_w"] is None


def test_process_ids_of_another_namespace_tell_nothing(fake, monkeypatch):
    """In a container NVML lists the host's ids, among which is none of ours."""
    gpus = open_nvml({"cuda:0": "GPU-1"}, os.getpid(), fake)
    monkeypatch.setattr(nvml_gpu, "descends_from", lambda pid, root: False)

    assert gpus.read(slow=True, rare=False)[0]["foreign_processes"] is None


def test_descendants():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert descends_from(child.pid, os.getpid())
        assert not descends_from(os.getpid(), child.pid)
        child.communicate(b"\n")
    assert not descends_from(child.pid, os.getpid())


def test_a_machine_without_nvml_says_so(fake):
    assert "install nvidia-ml-py" in open_nvml({"cuda:0": "GPU-1"}, 1, "no_such_module")

    import fake_nvml

    fake_nvml.nvmlInit = lambda: (_ for _ in ()).throw(fake_nvml.NVMLError("Driver Not Loaded"))
    assert open_nvml({"cuda:0": "GPU-1"}, 1, fake) == "GPU telemetry is not available: NVML says Driver Not Loaded."


def test_the_functions_are_those_of_the_package():
    """Every function and constant that the fake has is NVML's own."""
    pynvml = pytest.importorskip("pynvml")
    names = {name for name in compile(FAKE, "fake", "exec").co_names if name.lower().startswith("nvml")}

    assert names
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert (pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT) == (186, 1)


def test_host_row(monkeypatch):
    times = iter([(10.0, 40.0), (13.0, 44.0)])
    monkeypatch.setattr(telemetry_process, "cpu_seconds", lambda: next(times))
    slow = Host().read()

    assert slow["cpu_busy_share"] == 3 / 4
    assert slow["load_1m"] == pytest.approx(os.getloadavg()[0], abs=1)
    assert 0 < slow["memory_used_bytes"] < psutil.virtual_memory().total
    assert abs(slow["wall_offset_ns"] - (time.time_ns() - time.monotonic_ns())) < 1e8


def test_a_late_sample_is_not_made_up_for(monkeypatch):
    """Samples are taken at 0, 0.35, 0.44 and 0.53 s: those that were due from 0.09 to 0.27 s are not made up for."""
    clock = SimpleNamespace(now=0.0)
    waits = []

    def select(readable, _writable, _exceptional, timeout):
        waits.append(round(timeout, 6))
        clock.now += timeout if len(waits) != 1 else 0.35
        return ([readable[0]] if len(waits) == 3 else [], [], [])

    monkeypatch.setattr(telemetry_process, "PERIOD_S", 0.09)
    monkeypatch.setattr(telemetry_process, "select", SimpleNamespace(select=select))
    fake_time = SimpleNamespace(monotonic=lambda: clock.now, monotonic_ns=lambda: int(clock.now * 1e9))
    monkeypatch.setattr(telemetry_process, "time", fake_time)
    gpus = SimpleNamespace(read=lambda slow, rare: [{"device": "cuda:0", "parts": (slow, rare)}])
    out = io.StringIO()
    sample(out, gpus, SimpleNamespace(read=lambda: {"device": "host"}), stop=0)
    rows = [row for row in map(json.loads, out.getvalue().splitlines()) if row["device"] == "cuda:0"]

    assert waits == [0.09, 0.09, 0.09]
    assert [round(row["t_ns"] / 1e6) for row in rows] == [0, 350, 440, 530]
    assert [row["parts"] for row in rows] == [[True, True], [False, False], [False, False], [True, True]]


def sampled_for(seconds, tmp_path, fake):
    """The frame, the facts, and the first and last moment of the window that telemetry covered."""
    with Telemetry(tmp_path, {"cuda:0": "GPU-1", "cuda:1": "GPU-2"}, fake) as telemetry:
        start = time.monotonic_ns()
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)
        end = time.monotonic_ns()
        telemetry.flush()
        assert telemetry.describe()["cpu_share"] is None
    return pd.read_parquet(tmp_path / "telemetry.parquet"), telemetry.describe(), start, end


def test_samples_from_another_process(fake, tmp_path):
    frame, facts, start, end = sampled_for(0.5, tmp_path, fake)

    assert list(frame.columns) == TELEMETRY_SCHEMA.names
    assert frame["t_ns"].min() <= start + 1e8
    assert frame["t_ns"].max() >= end
    assert set(frame["device"]) == {"host", "cuda:0"}
    gpu = frame[frame["device"] == "cuda:0"]
    assert len(gpu) >= 5
    assert set(gpu["sm_clock_mhz"]) == {1980}
    counter = gpu[gpu["energy_j"].notna()]
    assert counter["t_ns"].tolist() == [gpu["t_ns"].min(), gpu["t_ns"].max()]
    joules = counter["energy_j"].iloc[-1] - counter["energy_j"].iloc[0]
    assert joules == pytest.approx(300 * (gpu["t_ns"].max() - gpu["t_ns"].min()) / 1e9, rel=0.05)
    assert gpu["temperature_c"].isna().all()
    assert facts["unavailable"] == "GPU telemetry is not available for cuda:1: NVML does not know the device."
    assert facts["driver"] == "580.65.06"
    assert facts["instant_power"] == {"cuda:0": True}
    assert facts["error"] is None
    assert not (tmp_path / ".telemetry.jsonl").exists()


@pytest.mark.slow
def test_sampling_costs_next_to_nothing(fake, tmp_path):
    """A guard against a busy loop. What it costs on a machine, 0.06 to 0.23 % of a core here, every run measures and
    says where it is above 0.2 %."""
    assert 0 < min(sampled_for(4.0, tmp_path, fake)[1]["cpu_share"] for _ in range(2)) <= 0.01


def test_a_run_without_gpus_samples_the_host_alone(tmp_path):
    with Telemetry(tmp_path, {}) as telemetry:
        pass
    frame = pd.read_parquet(tmp_path / "telemetry.parquet")

    assert set(frame["device"]) == {"host"}
    assert frame["power_w"].isna().all()
    assert telemetry.describe()["unavailable"] is None


def test_a_process_that_ends_early_is_named(tmp_path):
    with Telemetry(tmp_path, {}) as telemetry:
        psutil.Process(telemetry.pid).kill()
    assert telemetry.describe()["error"] == "The telemetry process ended before the run did: exit status -9."


def test_it_ends_with_the_run_s_process(tmp_path):
    """A run that is killed leaves no process behind: the sampler's standard input ends with it."""
    script = (
        "import sys, os, pathlib; from skote.eval.telemetry import Telemetry;"
        "telemetry = Telemetry(pathlib.Path(sys.argv[1]), {}); telemetry.__enter__();"
        "print(telemetry.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)

    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

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

FIELDS and SAMPLED say what the driver tells in one call and what it notes by itself: power, energy and counters of
throttled time; the SM clock, every 20 ms.
"""
import os, time
from types import SimpleNamespace

NVML_SUCCESS = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
NVML_PROCESSOR_CLK_SAMPLES, NVML_MEMORY_CLK_SAMPLES = 5, 6
START = time.monotonic()
FIELDS = {186: 300_500, 74: 0, 76: 0, 269: 0, 270: 0, 271: 0, 83: None}
SAMPLED = {5: 1965}
KEPT = 120

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
    told = FIELDS | {83: nvmlDeviceGetTotalEnergyConsumption(handle)} if 83 in FIELDS else FIELDS
    return [
        SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=told[field], uiVal=-1))
        if field in told
        else SimpleNamespace(nvmlReturn=3, valueType=0, value=SimpleNamespace(dVal=0.0))
        for field in fields
    ]

def nvmlDeviceGetSamples(handle, kind, after_us):
    if kind not in SAMPLED:
        raise NVMLError("Not Supported")
    newest = time.time_ns() // 20_000_000
    stamps = [20_000 * (newest - back) for back in range(KEPT)]  # the newest first, and KEPT of them
    found = [stamp for stamp in stamps if stamp > after_us]
    if not found:
        raise NVMLError("Not Found")
    value = SimpleNamespace(uiVal=SAMPLED[kind])
    return 1, [SimpleNamespace(timeStamp=stamp, sampleValue=value) for stamp in found]

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


BY_CALLS = {
    "sm_clock_mhz": "nvmlDeviceGetClockInfo",
    "memory_clock_mhz": "nvmlDeviceGetClockInfo",
    "power_w": "nvmlDeviceGetPowerUsage",
    "energy_j": "nvmlDeviceGetTotalEnergyConsumption",
    "throttle_reasons": "nvmlDeviceGetCurrentClocksEventReasons",
}


@pytest.fixture
def module(fake):
    """The fake itself, whose FIELDS and SAMPLED a test may change before it opens it."""
    return importlib.import_module(fake)


def opened(fake):
    return open_nvml({"cuda:0": "GPU-1", "cuda:1": "GPU-2"}, os.getpid(), fake)


def test_a_gpu_s_row_from_a_call_for_each_column(fake, module):
    """An older driver knows none of the fields, and notes nothing by itself."""
    module.FIELDS.clear()
    module.SAMPLED.clear()
    gpus = opened(fake)

    assert gpus.unavailable == "GPU telemetry is not available for cuda:1: NVML does not know the device."
    assert gpus.sources == {"cuda:0": BY_CALLS}
    [row] = gpus.read(slow=True)
    assert row.pop("energy_j") == pytest.approx(0.0, abs=300)
    assert row == {
        "device": "cuda:0",
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_w": 300.0,
        "temperature_c": None,  # not told, and not zero
        "throttle_reasons": 4,
        "memory_used_bytes": 7,
        "foreign_processes": 1,
    }
    [row] = gpus.read(slow=False)
    assert set(row) == {"device", "sm_clock_mhz", "power_w", "energy_j", "throttle_reasons"}


def test_one_call_a_sample_where_the_driver_knows_the_fields(fake, module, monkeypatch):
    gpus = opened(fake)
    calls = []
    for name in [each for each in vars(module) if each.startswith("nvmlDevice")]:
        function = vars(module)[name]
        monkeypatch.setattr(module, name, lambda *args, n=name, f=function: (calls.append(n), f(*args))[1])
    monkeypatch.delattr(module, "nvmlDeviceGetPowerUsage")

    assert gpus.sources == {
        "cuda:0": {
            "sm_clock_mhz": "samples",
            "memory_clock_mhz": "nvmlDeviceGetClockInfo",
            "power_w": "field",
            "energy_j": "field",
            "throttle_reasons": "field",
        }
    }
    [row] = gpus.read(slow=False)
    assert calls == ["nvmlDeviceGetFieldValues", "nvmlDeviceGetTotalEnergyConsumption"]  # the fake's own, in a field
    assert row.pop("energy_j") == pytest.approx(300 * (time.monotonic() - module.START), abs=30)
    assert row == {"device": "cuda:0", "power_w": 300.5, "throttle_reasons": 0}


@pytest.mark.parametrize(("field", "bit"), [(74, 0x4), (76, 0x10), (269, 0x20), (270, 0x40), (271, 0x80)])
def test_counters_of_throttled_time_tell_the_reasons_since_the_last_sample(fake, module, field, bit):
    module.FIELDS[field] = 5_000  # before the run
    gpus = opened(fake)
    seen = [gpus.read(slow=False)[0]["throttle_reasons"]]
    module.FIELDS[field] += 1
    seen += [gpus.read(slow=False)[0]["throttle_reasons"] for _ in range(2)]

    assert seen == [0, bit, 0]


def test_reasons_are_asked_for_where_a_counter_is_missing(fake, module):
    """A driver without the counter of the power brake would never tell of it."""
    del module.FIELDS[271], module.FIELDS[186]
    gpus = opened(fake)

    assert gpus.sources["cuda:0"]["throttle_reasons"] == "nvmlDeviceGetCurrentClocksEventReasons"
    [row] = gpus.read(slow=False)
    assert (row["throttle_reasons"], row["power_w"]) == (4, 300.0)
    assert gpus.sources["cuda:0"]["energy_j"] == "field"


def test_fields_that_fail_for_once_are_null(fake, module):
    gpus = opened(fake)
    module.FIELDS.clear()

    assert gpus.read(slow=False) == [{"device": "cuda:0", "power_w": None, "energy_j": None, "throttle_reasons": None}]


def test_clocks_that_the_driver_noted_come_with_its_stamps(fake, module, monkeypatch):
    """It notes one every 20 ms, of which one in 80 ms is kept; what it noted before the run is left out."""
    wall = SimpleNamespace(ns=1_700_000_000_000_000_000)
    clock = SimpleNamespace(time_ns=lambda: wall.ns, monotonic_ns=lambda: wall.ns - 10**18, monotonic=lambda: 0.0)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(nvml_gpu, "time", clock)
    module.START = 0.0
    gpus = opened(fake)

    assert len(gpus.read(slow=True)) == 1
    wall.ns += 390_000_000
    noted = gpus.read(slow=True)[1:]
    assert [row["t_ns"] - (1_700_000_000_000_000_000 - 10**18) for row in noted] == [
        80_000_000, 160_000_000, 240_000_000, 320_000_000,
    ]  # fmt: skip
    assert {(row["device"], row["sm_clock_mhz"]) for row in noted} == {("cuda:0", 1965)}
    assert set(noted[0]) == {"t_ns", "device", "sm_clock_mhz"}
    wall.ns += 10_000_000
    [row] = gpus.read(slow=True)[1:]
    assert row["t_ns"] == 1_700_000_000_000_000_000 - 10**18 + 400_000_000


@pytest.mark.parametrize(
    ("kept", "spread", "behind_s"),
    [(60, 1, 0), (120, 6, 0), (120, 1, 5), (1, 1, 0)],
    ids=["it forgets within 2 s", "less than 10 Hz", "another clock", "a single one"],
)
def test_a_buffer_that_does_not_serve(fake, module, monkeypatch, kept, spread, behind_s):
    module.KEPT = kept
    honest = module.nvmlDeviceGetSamples

    def samples(handle, kind, after_us):
        value_type, found = honest(handle, kind, after_us)
        newest = found[0].timeStamp
        for each in found:
            each.timeStamp = newest - spread * (newest - each.timeStamp) - behind_s * 1_000_000
        return value_type, found

    monkeypatch.setattr(module, "nvmlDeviceGetSamples", samples)

    gpus = opened(fake)
    assert gpus.sources["cuda:0"]["sm_clock_mhz"] == "nvmlDeviceGetClockInfo"
    assert [row["sm_clock_mhz"] for row in gpus.read(slow=True)] == [1980]


def test_process_ids_of_another_namespace_tell_nothing(fake, monkeypatch):
    """In a container NVML lists the host's ids, among which is none of ours."""
    gpus = open_nvml({"cuda:0": "GPU-1"}, os.getpid(), fake)
    monkeypatch.setattr(nvml_gpu, "descends_from", lambda pid, root: False)

    assert gpus.read(slow=True)[0]["foreign_processes"] is None


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
    fields = {
        "POWER_INSTANT": 186,
        "TOTAL_ENERGY_CONSUMPTION": 83,
        "CLOCKS_EVENT_REASON_SW_POWER_CAP": 74,
        "CLOCKS_EVENT_REASON_SYNC_BOOST": 76,
        "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": 269,
        "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": 270,
        "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": 271,
    }
    assert {name: vars(pynvml)[f"NVML_FI_DEV_{name}"] for name in fields} == fields
    types = ["DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG", "SIGNED_LONG_LONG", "SIGNED_INT"]
    assert [vars(pynvml)[f"NVML_VALUE_TYPE_{name}"] for name in types] == list(range(6))


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

    monkeypatch.setattr(telemetry_process, "select", SimpleNamespace(select=select))
    fake_time = SimpleNamespace(monotonic=lambda: clock.now, monotonic_ns=lambda: int(clock.now * 1e9))
    monkeypatch.setattr(telemetry_process, "time", fake_time)
    gpus = SimpleNamespace(read=lambda slow: [{"device": "cuda:0", "slow": slow}])
    out = io.StringIO()
    sample(out, gpus, SimpleNamespace(read=lambda: {"device": "host"}), stop=0)
    rows = [row for row in map(json.loads, out.getvalue().splitlines()) if row["device"] == "cuda:0"]

    assert waits == [0.09, 0.09, 0.09]
    assert [round(row["t_ns"] / 1e6) for row in rows] == [0, 350, 440, 530]
    assert [row["slow"] for row in rows] == [True, False, False, True]


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
    noted = gpu[gpu["sm_clock_mhz"].notna()]
    assert set(noted["sm_clock_mhz"]) == {1965}
    assert len(noted) >= 4
    assert noted["t_ns"].between(start - 1e8, frame["t_ns"].max()).all()
    asked = gpu[gpu["energy_j"].notna()]
    assert len(asked) >= 5
    joules = asked["energy_j"].iloc[-1] - asked["energy_j"].iloc[0]
    assert joules == pytest.approx(300 * (asked["t_ns"].iloc[-1] - asked["t_ns"].iloc[0]) / 1e9, rel=0.05)
    assert gpu["temperature_c"].isna().all()
    assert facts["unavailable"] == "GPU telemetry is not available for cuda:1: NVML does not know the device."
    assert facts["driver"] == "580.65.06"
    assert facts["sources"]["cuda:0"]["sm_clock_mhz"] == "samples"
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

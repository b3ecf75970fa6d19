from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple

import psutil
import pytest

from skote.eval.noise import CpuMeter, CpuNoise, CpuSample, cpu_noise, sample_cpu

BURN = "import time\nwhile time.process_time() < 0.15: pass\n"


def test_shares_by_hand():
    # Two CPUs for 10 s: 20 s offered, 12 busy of which 9 ours, 1 stolen.
    before = CpuSample(total=100.0, busy=40.0, steal=2.0, own=5.0)
    after = CpuSample(total=120.0, busy=52.0, steal=3.0, own=14.0)
    assert cpu_noise(before, after) == CpuNoise(foreign_cpu_share=3 / 20, steal_share=1 / 20, idle_arm_share=0.0)


def test_the_time_of_an_arm_that_should_be_idle_is_ours_and_told_apart():
    before = CpuSample(total=100.0, busy=40.0, steal=0.0, own=5.0, idle_arm=1.0)
    after = CpuSample(total=120.0, busy=52.0, steal=0.0, own=17.0, idle_arm=6.0)
    assert cpu_noise(before, after) == CpuNoise(foreign_cpu_share=0.0, steal_share=0.0, idle_arm_share=5 / 20)


def test_own_time_ahead_of_the_machine_counter_is_no_foreign_time():
    before = CpuSample(total=0.0, busy=0.0, steal=None, own=0.0)
    assert cpu_noise(before, CpuSample(total=2.0, busy=1.0, steal=None, own=1.01)) == CpuNoise(0.0, None, 0.0)


def test_counters_that_stand_still_tell_nothing():
    sample = CpuSample(total=0.0, busy=0.0, steal=0.0, own=1.0)
    assert cpu_noise(sample, sample) == CpuNoise(None, None, None)


def test_sample_of_a_linux_machine(monkeypatch):
    fields = "user nice system idle iowait irq softirq steal guest guest_nice"
    times = namedtuple("scputimes", fields)(
        10.0, 1.0, 5.0, 70.0, 4.0, 0.5, 1.5, 8.0, 3.0, 0.5
    )  # user holds the guest's
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    sample = sample_cpu()
    assert (sample.total, sample.busy, sample.steal) == (100.0, 18.0, 8.0)


def test_sample_of_a_machine_that_counts_no_steal(monkeypatch):
    monkeypatch.setattr(
        psutil, "cpu_times", lambda: namedtuple("scputimes", "user nice system idle")(3.0, 0.0, 1.0, 6.0)
    )
    sample = sample_cpu()
    assert (sample.total, sample.busy, sample.steal) == (10.0, 4.0, None)


def test_own_time_counts_this_process():
    before = sample_cpu().own
    start = time.process_time()
    while time.process_time() < start + 0.1:
        pass
    assert sample_cpu().own - before == pytest.approx(time.process_time() - start, abs=0.05)


def test_own_time_counts_descendants_that_live_and_that_have_ended():
    # The child burns as long as the grandchild that it waits for, says so, and stays until its input closes.
    script = f"{BURN}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}], check=True)\n"
    script += "print('burnt', flush=True)\nsys.stdin.read()\n"
    before = sample_cpu().own
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "burnt\n"
        alive = sample_cpu().own
        child.communicate()
    assert alive - before >= 0.25
    assert sample_cpu().own >= alive - 0.05  # the counters tick at 10 ms


def test_process_that_vanishes_while_it_is_read_is_left_out(monkeypatch):
    class Vanished:
        def cpu_times(self):
            raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [Vanished()])
    assert sample_cpu().own > 0.0


def test_meter_gives_shares_of_the_machine():
    noise = CpuMeter().read()
    for share in (noise.foreign_cpu_share, noise.steal_share):
        assert share is None or 0.0 <= share <= 1.0


def test_a_pass_shorter_than_the_counters_can_tell_has_no_shares():
    before = CpuSample(total=0.0, busy=0.0, steal=0.0, own=0.0)
    assert cpu_noise(before, CpuSample(total=0.99, busy=0.5, steal=0.0, own=0.2, idle_arm=0.2)) == CpuNoise(
        None, None, None
    )

"""What the doctor says of machines laid out as files, and of this one."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from plait.platform.cli.main import app
from plait.platform.machine import diagnosis, probing, system_facts
from plait.platform.machine.diagnosis import Probes
from plait.platform.machine.probing import Barrier, Reach, Reached


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def probes(*, best=20.0, usual=19.0, barrier=None) -> Probes:
    one = Reached(
        num_threads=1,
        read_gb_per_s=Reach(best=best, median=usual),
        gop_per_s={"int8": Reach(best=200.0, median=200.0)},
    )
    both = Reached(
        num_threads=2,
        read_gb_per_s=Reach(best=2 * best, median=2 * usual),
        gop_per_s={"int8": Reach(best=400.0, median=400.0)},
    )
    return Probes(one=one, all=both, barrier=barrier)


def advice(findings):
    return {finding.subject: finding.advice for finding in findings if finding.advice}


def test_a_quota_below_the_threads_is_said(tmp_path):
    machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        },
    )
    assert system_facts.core_quota(tmp_path) == 1.5
    assert "--threads 1" in advice(diagnosis.threads((0, 1), probes(), tmp_path))["quota"]
    assert not advice(diagnosis.threads((0,), probes(), tmp_path))


def test_the_older_cgroups_quota_counts_too(tmp_path):
    files = {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}
    machine(tmp_path, {f"sys/fs/cgroup/cpu/{name}": text for name, text in files.items()})
    assert system_facts.core_quota(tmp_path) == 2.5


def test_the_tightest_memory_limit_counts(tmp_path):
    machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "9000\n",
            "sys/fs/cgroup/a/memory.current": "8000\n",
            "sys/fs/cgroup/a/b/memory.max": "5000\n",
            "sys/fs/cgroup/a/b/memory.current": "100\n",
        },
    )
    limit = system_facts.memory_limit(tmp_path)
    assert limit is not None
    assert (limit.limit_bytes, limit.left_bytes) == (9000, 1000)


def test_threads_of_one_physical_core_are_named(tmp_path):
    listed = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    names = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    machine(tmp_path, {names.format(core): text for core, text in listed.items()})
    assert system_facts.shared_cores((0, 1, 2, 3), tmp_path) == [(0, 2), (1, 3)]
    assert system_facts.shared_cores((0, 1), tmp_path) == []
    assert "--threads 2" in advice(diagnosis.threads((0, 1, 2, 3), probes(), tmp_path))["siblings"]


def test_huge_pages_that_nobody_may_have_are_said(tmp_path):
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    machine(tmp_path, {name: "always madvise [never]\n"})
    assert "madvise" in advice(diagnosis.memory(tmp_path))["huge pages"]
    machine(tmp_path, {name: "always [madvise] never\n"})
    assert "huge pages" not in advice(diagnosis.memory(tmp_path))


def test_a_machine_that_tells_nothing_is_no_error(tmp_path):
    assert system_facts.core_quota(tmp_path) is None
    assert system_facts.memory_limit(tmp_path) is None
    assert system_facts.huge_pages(tmp_path) is None
    assert system_facts.processor(tmp_path) is None
    assert diagnosis.examine(probes(), (0, 1), tmp_path)


def test_slow_meetings_and_a_busy_machine_are_said():
    slow = Barrier(p50_us=0.1, p99_us=8000.0, longest_us=9000.0)
    assert "--threads 1" in advice(diagnosis.threads((0, 1), probes(barrier=slow)))["meeting"]
    quick = Barrier(p50_us=0.1, p99_us=0.3, longest_us=9000.0)
    assert "meeting" not in advice(diagnosis.threads((0, 1), probes(barrier=quick)))
    assert advice(diagnosis.speeds(probes(best=20, usual=8)))
    assert not advice(diagnosis.speeds(probes(best=20, usual=18)))
    assert any("40 by all" in finding.said for finding in diagnosis.speeds(probes()))


def test_an_instruction_set_that_was_chosen_is_said(monkeypatch):
    monkeypatch.delenv("PLAIT_CPU_ISA", raising=False)
    assert "kernels" not in advice(diagnosis.kernels())
    monkeypatch.setenv("PLAIT_CPU_ISA", "generic")
    assert "PLAIT_CPU_ISA=generic" in advice(diagnosis.kernels())["kernels"]


def test_packed_weights_that_are_kept_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "plait.platform.starting.cache_folder.cache_folder", lambda name: tmp_path / name
    )
    (finding,) = diagnosis.cache()
    assert finding.said == f"none kept in {tmp_path / 'weights'}"
    machine(tmp_path, {"weights/a.weights": "x" * (1 << 20)})
    with (tmp_path / "weights/a.weights").open("r+b") as file:
        file.truncate(1 << 30)
    (finding,) = diagnosis.cache()
    assert finding.said.startswith("1.0 GiB kept in")
    assert finding.advice is None


def test_probing_gives_rates_and_ends(monkeypatch):
    monkeypatch.setattr(probing, "_MEGABYTES", 4)
    monkeypatch.setattr(probing, "_ROUNDS", 100)
    threads = torch.get_num_threads()
    found = probing.reached([0, 0], seconds=0.01)  # two threads that share a core
    assert found.num_threads == 2
    assert 0 < found.read_gb_per_s.median <= found.read_gb_per_s.best
    assert set(found.gop_per_s) == {"float32", "bfloat16", "int8"}
    assert all(0 < reach.median <= reach.best for reach in found.gop_per_s.values())
    assert torch.get_num_threads() == threads
    assert probing.barrier([0]) is None


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_command_says_what_was_found(arguments, monkeypatch):
    monkeypatch.setattr(diagnosis, "probe", lambda cores: probes())
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    if arguments:
        report = json.loads(result.stdout)
        assert report["probes"]["one"]["read_gb_per_s"]["best"] == 20.0
        assert {"processor", "kernels", "threads", "free memory"} <= {
            finding["subject"] for finding in report["findings"]
        }
    else:
        assert "20 GB/s by one core, 40 by all" in result.stdout

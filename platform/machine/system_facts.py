"""What the operating system says of this machine: cores, quotas, memory, pages. Linux says most.

Everything is read from files below a root, so that tests can lay out another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


def processor(root: Path = ROOT) -> str | None:
    """The processor's name."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def instructions(root: Path = ROOT) -> frozenset[str]:
    """Names of the instruction sets that the processor has."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def shared_cores(cores: tuple[int, ...], root: Path = ROOT) -> list[tuple[int, ...]]:
    """Those of `cores` that are threads of one physical core, and so share its arithmetic."""
    groups = {}
    for core in cores:
        name = f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        together = tuple(c for c in _cores(_read(root / name)) if c in cores)
        if len(together) > 1:
            groups[together] = True
    return list(groups)


def core_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the cgroup and those above it allow; None: no limit."""
    quotas = []
    for folder in _cgroups(root):
        first, _, period = _read(folder / "cpu.max").partition(" ")
        if first.isdigit() and period.strip().isdigit():
            quotas.append(int(first) / int(period))
    version_1 = root / "sys/fs/cgroup/cpu"
    quota, period = (
        _read(version_1 / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    )
    if quota.isdigit() and period.isdigit():
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A cgroup's bound on memory."""

    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        """What may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest of the cgroup's bounds and those above it; None where there is none."""
    found = []
    for folder in _cgroups(root):
        limit, used = (_read(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if limit.isdigit():
            found.append(
                MemoryLimit(limit_bytes=int(limit), used_bytes=int(used) if used.isdigit() else 0)
            )
    return min(found, key=lambda one: one.left_bytes, default=None)


def huge_pages(root: Path = ROOT) -> str | None:
    """Whether memory gets huge pages by itself: always, madvise (where asked for) or never."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] or None


def _cgroups(root: Path) -> list[Path]:
    """The process's cgroup (version 2) and all above it."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            own = top / line[3:].strip().lstrip("/")
            return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return [top]


def _cores(text: str) -> list[int]:
    """The numbers of a list such as "0-3,8"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""Cores: what is seen, less what a container's quota takes away, in both versions of control groups."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbkit.system import cores, memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 cores, and a function that writes what its control groups say."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "MOUNT", tmp_path / "mount")

    def write(group: str, **files: str) -> None:
        (tmp_path / "cgroup").write_text(group, errors="surrogateescape")
        for name, text in files.items():
            path = tmp_path / "mount" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    return write


def test_without_control_groups_all_that_are_seen_are_usable(machine):
    assert cores.usable_cores() == 16


@pytest.mark.parametrize("quota, expected", [
    ("max 100000", 16), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 16),
    ("9900000 100000", 16), ("", 16), ("0 0", 16), ("100000 abc", 16), ("abc", 16)])
def test_a_containers_quota(machine, quota, expected):
    machine("0::/\n", cpu_dot_max=quota)
    assert cores.usable_cores() == expected


V1 = {"cpu__docker__1__cpu_dot_cfs_period_us": "100000"}


@pytest.mark.parametrize("group, expected, files", [
    ("0::/user.slice/work\n", 3, {"user_dot_slice__work__cpu_dot_max": "800000 100000",
                                  "user_dot_slice__cpu_dot_max": "300000 100000"}),
    ("0::/kubepods/pod1/abc\n", 2, {"cpu_dot_max": "200000 100000"}),
    ("0::/../../other\n", 2, {"cpu_dot_max": "200000 100000"}),
    ("5:memory:/m\n4:cpu,cpuacct:/docker/1\n0::/\n", 16, {**V1, "cpu__docker__1__cpu_dot_cfs_quota_us": "-1"}),
    ("5:memory:/m\n4:cpu,cpuacct:/docker/1\n0::/\n", 3, {**V1, "cpu__docker__1__cpu_dot_cfs_quota_us": "300000"}),
    ("1:cpu:/\n0::/\n", 5, {"cpu__cpu_dot_cfs_quota_us": "-1", "cpu__cpu_dot_cfs_period_us": "100000",
                            "unified__cpu_dot_max": "500000 100000"}),
    ("\n\nnonsense\n0::/a\x0bb\n", 2, {"cpu_dot_max": "200000 100000"}),
    ("0::/\udcff\n", 2, {"cpu_dot_max": "200000 100000"})],
    ids=["a slice of systemd and all above it", "a group that the container doesn't see", "one above its root",
         "version 1 without a quota", "version 1", "version 2 beside version 1", "lines that no kernel writes",
         "bytes that are no text"])
def test_control_groups(machine, group, expected, files):
    machine(group, **files)
    assert cores.usable_cores() == expected


@pytest.mark.parametrize("group, files", [
    ("0::/kubepods/pod1/abc\n", {"memory_dot_max": "1000000", "memory_dot_current": "300000",
                                 "memory_dot_stat": "anon 5\ninactive_file 100000"}),
    ("3:memory:/docker/abc\n", {"memory__memory_dot_limit_in_bytes": "1000000", "memory__memory_dot_stat":
                                "total_inactive_file 100000", "memory__memory_dot_usage_in_bytes": "300000"})])
def test_the_memory_of_a_container_is_bounded_by_its_root(machine, group, files):
    machine(group, **files)
    assert (memory.total(), memory.available()) == (1_000_000, 800_000)
    machine("0::/\n", memory_dot_max="max")
    if "memory_dot_max" in files:
        assert memory.total() > 1_000_000


def test_a_library_is_asked_for_fewer_threads_than_the_machine_has_cores(machine, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert cores.thread_limit() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert cores.thread_limit() is None
    machine("0::/\n", cpu_dot_max="200000 100000")
    assert cores.thread_limit() == 2
    machine("0::/\n", cpu_dot_max="max 100000")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 4, 5})
    assert cores.thread_limit() == 3


@given(st.lists(st.tuples(st.integers(1, 10**8), st.integers(1000, 10**6)), min_size=1, max_size=5))
def test_the_least_quota_of_all_groups_counts(quotas):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.sched_getaffinity", lambda process: set(range(64)), raising=False)
        patched.setattr(cores, "quotas", lambda: (quota / period for quota, period in quotas))
        least = min(quota / period for quota, period in quotas)
        assert cores.usable_cores() == max(1, min(64, math.floor(least)))


def test_torch_starts_no_more_threads_than_the_quota_pays_for(machine, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine("0::/\n", cpu_dot_max="100000 100000")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        cores.limit_torch_threads()
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        cores.limit_torch_threads()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("omp, ranks_here, inside", [(None, None, 4), ("", "2", 2), ("1", None, 1), (None, "8", 1)])
def test_an_evaluation_uses_the_cores_that_its_rank_has_unless_the_user_sets_threads(
        monkeypatch, omp, ranks_here, inside):
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    for name, value in {"OMP_NUM_THREADS": omp, "LOCAL_WORLD_SIZE": ranks_here}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cores.all_cores():
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@given(st.integers(1, 128), st.none() | st.integers(1, 16), st.none() | st.integers(1, 16))
def test_layouts_to_try_use_no_more_cores_than_there_are_unless_asked_to(count, ranks, threads):
    layouts = cores.layouts_on(count, ranks, threads)
    assert layouts and len(layouts) == len(set(layouts)) <= 2 * count.bit_length() + 2
    assert [layout.ranks for layout in layouts] == sorted(layout.ranks for layout in layouts)
    for layout in layouts:
        assert ranks in (None, layout.ranks) and threads in (None, layout.threads)
        assert layout.ranks * layout.threads <= max(count, ranks or 1, threads or 1, (ranks or 1) * (threads or 1))
    if ranks is threads is None:
        assert cores.Layout(1, 1) in layouts and cores.Layout(1, count) in layouts and cores.Layout(count, 1) in layouts

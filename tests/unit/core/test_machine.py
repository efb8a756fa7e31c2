from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from furlong import machine
from furlong.errors import ConfigError
from furlong.machine import (
    DETERMINISTIC_ENVIRONMENT,
    MemoryUse,
    Threads,
    available_memory,
    choose_threads,
    cpu_quota,
    deterministic_kernels,
    keep_compile_caches,
    raise_open_file_limit,
    set_gloo_interface,
    set_threads,
)


def cgroup(tmp_path, *, v2=None, v1=None):
    if v2 is not None:
        (tmp_path / "cpu.max").write_text(v2)
    if v1 is not None:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(str(v1[0]))
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text(str(v1[1]))
    return tmp_path


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"v2": "max 100000\n"}, None),
        ({"v2": "250000 100000\n"}, 2.5),
        ({"v1": (-1, 100000)}, None),
        ({"v1": (300000, 100000)}, 3.0),
    ],
    ids=str,
)
def test_cgroup_cpu_quota(files, quota, tmp_path):
    assert cpu_quota(cgroup(tmp_path, **files)) == quota


def test_memory_use_of_the_control_group_or_the_machine(tmp_path):
    for limit in ["1000\n", "max\n", None]:
        for name, text in (
            ("memory.max", limit),
            ("memory.current", "600\n"),
            ("memory.stat", "anon 9\ninactive_file 100\n"),
        ):
            if limit is not None:
                (tmp_path / name).write_text(text)
        (tmp_path / "meminfo").write_text("MemTotal:  400 kB\nMemFree:  9 kB\nMemAvailable:  300 kB\n")
        memory = MemoryUse.of_machine(tmp_path, tmp_path / "meminfo")
        assert memory is not None
        is_group = limit == "1000\n"
        assert (memory.share, memory.whose) == ((0.5, "the control group") if is_group else (0.25, "the machine"))
        assert MemoryUse.of_machine(tmp_path / "none", tmp_path / "none") is None
        assert available_memory(tmp_path, tmp_path / "meminfo") == (500 if is_group else 300 * 1024)
        assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_memory_use_of_the_process():
    memory = MemoryUse.of_process()
    assert memory is not None
    assert 1 << 20 < memory.used < memory.limit


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_omp_num_threads_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    threads = choose_threads(None, num_parts=2, cgroup=tmp_path, load=0.0, cpus=64)
    assert (threads.count, threads.reason) == (5, "OMP_NUM_THREADS")


def test_num_threads_takes_precedence(tmp_path):
    threads = choose_threads(3, num_parts=2, cgroup=tmp_path, load=99.0, cpus=1)
    assert (threads.count, threads.reason) == (3, "--num-threads")


def test_threads_are_chosen_from_cpus_quota_and_load(tmp_path):
    for cpus, quota, load, parts, count in [
        (8, "max 100000", 0.0, 1, 8),
        (8, "max 100000", 0.0, 2, 4),
        (8, "max 100000", 3.2, 1, 5),
        (8, "250000 100000", 0.0, 1, 2),
        (8, "50000 100000", 0.0, 1, 1),
        (2, "max 100000", 7.0, 2, 1),
        (64, "1600000 100000", 4.0, 3, 4),
    ]:
        threads = choose_threads(None, num_parts=parts, cgroup=cgroup(tmp_path, v2=quota), load=load, cpus=cpus)
        assert threads.count == count
        assert f"{cpus} CPUs" in threads.reason


def test_deterministic_settings_are_restored(monkeypatch):
    for name in DETERMINISTIC_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NCCL_ALGO"] == "Tree"  # the user's
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_open_file_limit_is_raised_up_to_the_hard_limit():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = limits[1] if limits[1] != resource.RLIM_INFINITY else 1 << 20
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        raise_open_file_limit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        raise_open_file_limit(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 16)
        if limits[1] != resource.RLIM_INFINITY:
            with pytest.raises(ConfigError, match="ulimit -n"):
                raise_open_file_limit(limits[1] + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


ARENAS = """
import ctypes, os, sys, threading
from furlong.machine import limit_malloc_arenas

limit_malloc_arenas()
together = threading.Barrier(65)

def allocate():
    buffer = bytes(50_000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(64)]
for thread in threads:
    thread.start()
together.wait()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not the GNU C library")
@pytest.mark.parametrize("variable", [None, "1"])
def test_the_c_library_has_at_most_one_heap_per_cpu(variable):
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    environment |= {} if variable is None else {"MALLOC_ARENA_MAX": variable}
    shown = subprocess.run([sys.executable, "-c", ARENAS], env=environment, capture_output=True, text=True, check=True)
    heaps = shown.stdout.count("<heap nr=")
    assert 1 <= heaps <= (1 if variable else max(2, len(os.sched_getaffinity(0))))


def test_gloo_uses_the_interface_of_the_address_unless_one_is_set(monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        name: [SimpleNamespace(address=address)] for name, address in {"lo": "127.0.0.1", "eth1": "10.0.0.7"}.items()
    })  # fmt: skip
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")  # so that what is set here is undone
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for nothing_said in ("127.0.0.1", "10.9.9.9"):  # this machine alone, and an address that is forwarded to it
        set_gloo_interface(nothing_said)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    set_gloo_interface("10.0.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    set_gloo_interface("10.0.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_nondeterministic_cublas_workspace_is_rejected(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r":4096:8 or :16:8"), deterministic_kernels():
        pass


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize(("several_s", "count"), [(0.5, 2), (0.9, 1), (2.0, 1)])
def test_several_threads_have_to_pay(monkeypatch, several_s, count):
    monkeypatch.setattr(machine, "_matmul_seconds", lambda threads: 1.0 if threads == 1 else several_s)
    chosen = set_threads(Threads(2, "2 CPUs"))
    assert chosen.count == torch.get_num_threads() == count
    assert (f"{several_s:.2f}" in chosen.reason) == (count == 1)


@pytest.mark.usefixtures("restore_threads")
def test_explicit_thread_count_is_not_tuned(monkeypatch):
    monkeypatch.setattr(machine, "_matmul_seconds", lambda _: pytest.fail("tried"))
    assert set_threads(Threads(2, "--num-threads", is_given=True)).count == 2


@pytest.mark.usefixtures("restore_threads")
def test_the_trial_measures_time():
    assert 0 < machine._matmul_seconds(1) < 10


def test_compiled_kernels_are_kept_in_the_folder_that_the_user_gives(tmp_path, monkeypatch):
    environment = {"TRITON_CACHE_DIR": "/mine"}
    monkeypatch.setattr(machine.os, "environ", environment)
    keep_compile_caches(None)
    assert environment == {"TRITON_CACHE_DIR": "/mine"}
    keep_compile_caches(str(tmp_path))
    assert environment["TRITON_CACHE_DIR"] == "/mine"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")

"""Gloo groups that share the thread of this process."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from furlong.training.ranks import share_gloo_thread

FORKS = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from furlong.training.ranks import share_gloo_thread

def summed():
    group = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return tensor.tolist()

share_gloo_thread()
assert summed() == [1.0] * 3
if (pid := os.fork()) == 0:
    assert summed() == [1.0] * 3
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.setattr(c10d, "ProcessGroupGloo", c10d.ProcessGroupGloo)  # restored after the test
    share_gloo_thread()


@pytest.mark.parametrize("options", ["default", "timeout", "keyword", "options"])
@pytest.mark.usefixtures("shared")
def test_groups_are_created_with_the_arguments_of_torchs_class(options):
    limit = timedelta(seconds=7)
    arguments = {
        "default": ((), {}),
        "timeout": ((limit,), {}),
        "keyword": ((), {"timeout": limit}),
        "options": ((_options(limit),), {}),
    }[options]
    group = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, *arguments[0], **arguments[1])
    assert isinstance(group, c10d.ProcessGroupGloo)
    assert group.options._timeout == (c10d.default_pg_timeout if options == "default" else limit)
    tensor = torch.arange(4.0)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.slow
def test_a_fork_creates_groups_and_ends():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr


def _options(limit):
    options = c10d.ProcessGroupGloo._Options()
    options._devices, options._timeout = [c10d.ProcessGroupGloo.create_default_device()], limit
    return options

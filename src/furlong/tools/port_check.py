"""GPU03: whether a port that a flag fixes is free, and who has it."""

from __future__ import annotations

import contextlib
import errno
import socket

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.inference.supervisor.host import holder


def taken_port(flag: str, host: str, port: int) -> Diagnosis | None:
    """The process that listens on a port, as a diagnosis; None if the port can be had. Port 0 is any free one."""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            cause = "Ports below 1024 belong to the administrator."
            return diagnosis("GPU03", f"{flag} {port}: {error}", cause=cause, remedy=f"{flag} 0 takes a free port")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                cause = "It is no address of this machine."
                remedy = "--host 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
                return diagnosis("GPU03", f"--host {host}: {error.strerror}", cause=cause, remedy=remedy)
            who, pid = holder(port)
            return diagnosis(
                "GPU03",
                f"{flag} {port}: cannot listen on {host}:{port} ({error.strerror}); {who} has it",
                remedy=f"end that process, or {flag} 0 for a free port",
                evidence={"host": host, "port": port, "pid": pid},
            )
    return None

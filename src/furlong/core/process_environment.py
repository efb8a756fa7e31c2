"""Installed packages, the stream of the log, and the variables that processes get: API keys, those of agents."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import TextIO

SESSIONS_KEY_VARIABLE = "FURLONG_SESSIONS_KEY"  # that applications send to take sessions
API_KEY_VARIABLE = "FURLONG_API_KEY"  # passed in the environment: other users can read command lines with `ps`
KEY = "{KEY}"  # in a command line, for the key in API_KEY_VARIABLE

# Variables of programs whose text a policy may write. Others, such as tokens and keys, are passed by name.
AGENT_VARIABLES = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM PYTHONPATH PYTHONHOME PYTHONUNBUFFERED VIRTUAL_ENV "
    "CONDA_PREFIX LD_LIBRARY_PATH OMP_NUM_THREADS CUDA_VISIBLE_DEVICES NODE_PATH NVM_DIR JAVA_HOME SSL_CERT_FILE "
    "SSL_CERT_DIR REQUESTS_CA_BUNDLE NODE_EXTRA_CA_CERTS HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SESSIONS_KEY", re.I)

_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


def api_key_environment(key: str | None) -> dict[str, str]:
    """Return the environment variables that pass the API key to a child process."""
    return {API_KEY_VARIABLE: key} if key else {}


def agent_environment(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """Return the variables that an agent gets: those of programs in general, and those passed by name.

    A proxy with a password in its address is passed by name only.

    >>> agent_environment({"PATH": "/bin", "HF_TOKEN": "hf", "MODE": "a", "https_proxy": "http://me:pw@p"}, ["MODE"])
    {'PATH': '/bin', 'MODE': 'a'}
    """

    def is_general(name: str, value: str) -> bool:
        is_proxy = name.upper().endswith("_PROXY")
        known = name.upper() if is_proxy else name
        return (known in AGENT_VARIABLES.split() or name.startswith(("LC_", "XDG_"))) and not (
            is_proxy and "@" in value
        )

    return {name: value for name, value in environment.items() if name in passed or is_general(name, value)}


def is_secret(name: str) -> bool:
    """Whether the name of a variable is that of a secret.

    >>> is_secret("HF_TOKEN"), is_secret("FURLONG_API_KEY"), is_secret("TOKENIZERS_PARALLELISM"), is_secret("HF_HOME")
    (True, True, False, False)
    """
    return bool(SECRET.search(name.upper().replace("TOKENIZER", "")))


def log_stream() -> TextIO:
    """Return the stream of log lines: stderr, but stdout in a notebook, which shows stderr as an error."""
    return sys.stdout if "ipykernel" in sys.modules else sys.stderr


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None.

    Faster than `importlib.metadata.version`, which parses the whole metadata, including the package's readme.

    >>> installed_version("no-such-package")
    """
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    match = _VERSION.search(text)
    return match[1] if match else None

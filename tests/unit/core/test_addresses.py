from __future__ import annotations

import socket

import pytest

from furlong.core.addresses import bracketed, host_and_port, is_loopback, socket_for, split_port


def test_a_joined_address_splits_again():
    for host in ["127.0.0.1", "::1", "fd00::7", "node-3", "localhost"]:
        assert split_port(host_and_port(host, 30000)) == (host, "30000")
        assert host_and_port(bracketed(host), 30000) == host_and_port(host, 30000)


def test_an_address_without_a_port_has_no_host():
    assert split_port("auto") == ("", "auto")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("10.0.0.7", False), ("fd00::7", False), ("node-3", False), ("0.0.0.0", False), ("::", False)],
)  # fmt: skip
def test_loopback_addresses_of_both_families(host, expected):
    assert is_loopback(host) is expected


def test_a_socket_has_the_family_of_its_host():
    for host, family in [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("[::1]", socket.AF_INET6)]:
        opened, address = socket_for(host, 0)
        with opened:
            assert (opened.family, opened.type, opened.proto) == (family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            assert address[:2] == (host.strip("[]"), 0)

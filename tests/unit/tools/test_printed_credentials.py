"""What commands print."""

from __future__ import annotations

from furlong.commands.output import show


def test_credentials_in_urls_are_not_printed(capsys):
    show("--rm-url http://me:secret@host/score?api_key=hidden cannot connect")
    assert capsys.readouterr().out == "--rm-url http://***@host/score?api_key=*** cannot connect\n"

"""The pages about hooks name every hook with the signature that is checked at the start of a run."""

from __future__ import annotations

from pathlib import Path

from furlong.config.hooks import HOOKS

PAGE = (Path(__file__).parents[3] / "docs/reference/hooks.md").read_text()


def test_extending_page_shows_the_hook_with_its_signature():
    for name in HOOKS:
        hook = HOOKS[name]
        assert f"| `{hook.flag}` | `{hook.signature}` |" in PAGE


def test_extending_page_shows_no_hook_that_there_is_not():
    shown = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `--")}
    assert shown == {hook.flag for hook in HOOKS.values()}

"""Readers of text that arrives in pieces: each reads a piece once and returns what later text cannot change.

A whole reply is one piece, so streamed and complete replies are read by the same code, in time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

THINK, END_THINK = "<think>", "</think>"


class UntilSign:
    """Passes text on until one of `signs`, and holds back an end that may be the beginning of one."""

    def __init__(self, *signs: str) -> None:
        self._beginnings = {sign[:n] for sign in signs for n in range(1, len(sign))}
        self._pattern = re.compile("|".join(map(re.escape, signs)))
        self._longest = max(map(len, signs))
        self.held = ""

    def feed(self, piece: str) -> tuple[str, str | None, str]:
        """Return the text before a sign, the sign (None if there is none so far) and what follows it."""
        text = self.held + piece
        self.held = ""
        if (match := self._pattern.search(text)) is not None:
            return text[: match.start()], match[0], text[match.end() :]
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._beginnings:
                self.held = text[at:]
                return text[:at], None, ""
        return text, None, ""


class HeldEnd:
    """Passes text on, and holds back the characters `chars` (None for whitespace) at its end until other text follows.

    skips_start: such characters at the beginning are dropped.
    """

    def __init__(self, chars: str | None, *, skips_start: bool = False) -> None:
        self._chars, self._skips = chars, skips_start
        self._held: list[str] = []

    def feed(self, piece: str) -> str:
        """Return what is certain to be followed by other text."""
        if self._skips:
            piece = piece.lstrip(self._chars)
            self._skips = not piece
        kept = piece.rstrip(self._chars)
        if not kept:
            self._held.append(piece)
            return ""
        text = "".join([*self._held, kept])
        self._held = [piece[len(kept) :]]
        return text


class ReasoningSplit:
    """Splits a reply into reasoning and content. opened: the prompt ends with an open `<think>`.

    A thought that does not end is all reasoning.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened = opened
        self._start: list[str] = []  # until the first characters show whether a thought begins
        self._state: Literal["start", "thought", "content"] = "start"
        self._until = UntilSign(END_THINK)
        self._thought = HeldEnd("\n", skips_start=True)
        self._skips_newlines = False
        self.has_reasoning = False

    def feed(self, piece: str) -> tuple[str, str]:
        """Return new reasoning and new content."""
        if self._state == "start":
            self._start.append(piece)
            if not piece or piece.isspace():
                return "", ""
            piece = "".join(self._start)
            begin = piece.lstrip()
            if len(begin) < len(THINK) and THINK.startswith(begin):
                self._start = [piece]
                return "", ""
            self._start = []
            self._begin(begins=begin.startswith(THINK))
            piece = begin[len(THINK) :] if begin.startswith(THINK) else piece
        reasoning = ""
        if self._state == "thought":
            thought, closed, piece = self._until.feed(piece)
            reasoning = self._thought.feed(thought)
            if closed is None:
                return reasoning, ""
            self._state, self._skips_newlines = "content", True
        if self._skips_newlines:
            piece = piece.lstrip("\n")
            self._skips_newlines = not piece
        return reasoning, piece

    def _begin(self, *, begins: bool) -> None:
        self.has_reasoning = begins or self._opened
        self._state = "thought" if self.has_reasoning else "content"

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and content that were held back at the end of the reply."""
        if self._state == "start":
            text = "".join(self._start)
            self._begin(begins=text.lstrip() == THINK)
            return (self._thought.feed(text), "") if self.has_reasoning else ("", text)
        return (self._thought.feed(self._until.held), "") if self._state == "thought" else ("", "")


ChannelEvent = tuple[Literal["outside", "begin", "text", "end"], str]


class Channels:
    """Reads the messages of a gpt-oss reply: `<|start|>HEAD<|channel|>CHANNEL<|message|>TEXT<|end|>`.

    Events: the text `outside` of messages; the `begin` of one with its head; its `text`; its `end` with the sign.
    """

    _ENDS = ("<|end|>", "<|return|>", "<|call|>")

    def __init__(self) -> None:
        self._until = UntilSign("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *self._ENDS)
        self._head: list[str] = []
        self._has_channel = self._is_inside = False

    def feed(self, piece: str) -> Iterator[ChannelEvent]:
        """Yield the events of more text."""
        sign: str | None = ""
        while sign is not None:
            text, sign, piece = self._until.feed(piece)
            if not self._is_inside:
                self._head.append(text)
                if sign is not None:
                    yield from self._head_sign(sign)
                continue
            if sign in self._ENDS:
                yield "text", text
                self._is_inside = False
                yield "end", sign or ""
            elif text or sign:
                yield "text", text + (sign or "")

    def _head_sign(self, sign: str) -> Iterator[ChannelEvent]:
        if sign == "<|message|>" and self._has_channel:
            yield "begin", "".join(self._head)
            self._head, self._has_channel, self._is_inside = [], False, True
            return
        if sign == "<|start|>" or (sign == "<|channel|>" and self._has_channel):
            yield from self._outside()
        self._head.append(sign)
        self._has_channel = self._has_channel or sign == "<|channel|>"
        if sign in self._ENDS:
            yield from self._outside()

    def _outside(self) -> Iterator[ChannelEvent]:
        if text := "".join(self._head):
            yield "outside", text
        self._head, self._has_channel = [], False

    def finish(self) -> Iterator[ChannelEvent]:
        """Yield the events of the end of the reply."""
        if self._is_inside:
            yield "text", self._until.held
            yield "end", ""
        else:
            self._head.append(self._until.held)
            yield from self._outside()

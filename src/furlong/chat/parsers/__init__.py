"""Parsers of replies: the text of a completion to content, reasoning and tool calls, one parser per model family."""

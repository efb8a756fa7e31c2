"""Stand-in of strands_sglang's parsers."""

from __future__ import annotations


class HermesToolParser:
    pass

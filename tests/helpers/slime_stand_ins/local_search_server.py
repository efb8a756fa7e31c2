"""Stand-in of a local search server's client: finds one document."""

from __future__ import annotations


async def local_search(url, query, top_k, timeout=60, proxy=None):
    return [{"document": {"contents": f"title\n{query[:4]} is 42"}}]

"""Monitors: each reads a run's steps or events and says when something is wrong, while the run goes on.

`table.MONITORS` has one row each; `watch.Watch` is what a run attaches, `reading.Reading` applies the rows.
"""

"""Engines: implementations of `furlong.interfaces.Engine`. `embedded` runs in process or as a server."""

"""The training loop on Ray: session, GPU placement, one actor per training rank, hosts for engine servers.

Nothing here is imported before `session.open_session` has run: Ray reads its environment when it is imported.
"""

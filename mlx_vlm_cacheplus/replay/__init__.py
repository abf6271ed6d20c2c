"""Replay recorded agent sessions against a server and count what it read again.

A session file holds what the client says; the model's own replies go back into the history as the server returned
them.  ``docs/REPLAY.md`` has the format, the commands and the definitions.
"""

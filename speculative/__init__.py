"""Speculation: draft sources, the draft budget, acceptance statistics.

This part owns where draft tokens come from and how many a step may verify. Until the draft source
that a request names can be served here, the request is refused by an error that names the source;
the setting is never ignored.
"""

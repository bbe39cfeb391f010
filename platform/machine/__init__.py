"""The machine: its `cores`, what its system says (`system_facts`), what it reaches (`probing`).

`diagnosis` says what Plait will use of it, and what to change.
"""

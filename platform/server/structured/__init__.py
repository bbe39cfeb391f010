"""Constrained replies and tool calls over HTTP: compiling, and reading what comes back."""

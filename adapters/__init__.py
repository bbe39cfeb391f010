"""Adapters: the PEFT format, the registry of generations, the memory pool, segments, load reports.

This part owns everything about LoRA adapters, from reading an untrusted folder to the rows of a
batch that an adapter changes. Until a request's adapter can be served here, the request is refused
by an error that names the adapter; it never gets the base model's output instead.
"""

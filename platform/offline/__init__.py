"""The engine in the caller's process: `LLM`, for batches and scripts, without a server.

`llm` is what users call. `options`, `prompts`, `sight`, `structured` and `adapters` read what they
give; `running` steps the engine for all of them, and `outputs` is what they get.
"""

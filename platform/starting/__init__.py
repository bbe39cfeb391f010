"""Parts of a start, which `platform.start` leads from options to a running engine.

`draft_loading`, `head_loading` and `speculation` put together what drafts tokens. The others make
starts short: `light_torch` and `light_imports` leave out what serving never uses, `notes` keep what
one start found out in the `cache_folder` for the next.
"""

"""Speculation: where draft tokens come from, and how many of them a step verifies.

`speculator` is what the engine asks before each plan. `candidates` asks the sources: `lookup` and
`recent` (text), `draft_model`, `eagle` (by `model_drafts`); grammars say what they force. `economy`
chooses among what they offer, by `acceptance`, `cost`, `budget` and `ledger`; `tally` counts what
became of it. Model and head choose tokens as the target would (`choice`). Verification is in
the common step (`platform.sampling`), so nothing in here can change a token: what is wrong or
fails here costs time, and never an answer.
"""

"""The parts of the scheduler: which sequences there are, and who of them computes what in a step.

`admission` refuses what can never be served; `open_requests` and `open_sequences` hold what is not
finished, `fairness` those that wait, by their `ordering`. `planner` fills the `choices` of a step,
where `unbroken` says which rows stay together. `prompt_rows` keeps which logprobs of prompts were
given; `stopping` says when a sequence ends. `platform.scheduler` is the door to all of them.
"""

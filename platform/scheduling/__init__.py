"""The parts of the scheduler: which sequences there are, and who of them computes what in a step.

`admission` refuses what can never be served; `open_requests` and `open_sequences` hold what is not
finished, `fairness` those that wait. `planner` fills the `choices` of a step. `prompt_rows` keeps
which logprobs of prompts were given. `platform.scheduler` is the door to all of them.
"""

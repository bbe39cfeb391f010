"""What happens to a row of logits on its way to a token; `platform.sampling` calls it in order.

`penalties` change logits, `token_filters` say which tokens stay, `noise` draws among them, and
`rejecting` verifies drafts that a model drew. `logprobs` are those of the logits as they came.
"""

"""Structure: schema soundness, grammar backends, the compile pool, masks, tool calls.

This part owns what keeps a sequence inside a schema or a grammar. Until the constraint that a
request brings can be enforced here, the request is refused by an error that names it; output is
never left unconstrained.
"""

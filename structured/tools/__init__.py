"""Tool calls: what clients ask for, how models write them, and reading them back.

`request.py` checks a client's tools, `formats.py` knows the markup of each family of models,
`prompt.py` tells the model of its tools, `parser.py` reads calls out of growing text. The grammar
that holds the model to the markup is in `plait.structured.outline`.
"""

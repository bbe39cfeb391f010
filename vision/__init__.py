"""Vision: safe image decoding, processors, the encoder cache, placeholders and positions.

This part owns the way of an image from a client's bytes to embedding rows in a step. In the process
that answers clients: `parts` finds images in messages, `preparation` fetches and decodes them,
`processor` makes tensors and prompt tokens of them, `placing` says where they are in the prompt.
"""

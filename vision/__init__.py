"""Vision: the way of an image from a client's bytes to rows of embeddings in a step.

In the process that answers clients, `parts` finds images in messages, `preparation` fetches and
decodes them within bounds, `processor` makes tensors and prompt text of them, and `placing` says
where they are in the prompt. In the engine's process, `strand` decides with each step which of
them are encoded and holds what that needs in `encoder_cache`; the tower itself is the model's.
"""

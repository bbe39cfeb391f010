"""Vision: safe image decoding, processors, the encoder cache, placeholders and positions.

This part owns the way of an image from a client's bytes to embedding rows in a step. Until a
request's images can be served here, the request is refused by an error that names the image
content; the images are never dropped.
"""

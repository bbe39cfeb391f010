"""Between text and token ids: tokenizers, chat templates, and text that comes token by token.

`tokenizer` is what others use; `tokenizer_files` finds what it is made of, `gguf_tokenizer` makes
one from a GGUF file's `gguf_metadata`, `added_tokens` one with an adapter's own tokens.
`chat_template` turns messages into text. `token_bytes` knows the bytes of each token, of which
`output` makes whole characters and cuts stop strings.
"""

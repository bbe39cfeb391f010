"""What makes an adapter the one it is: its bytes. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from plait.adapters.files import BUNDLE, CONFIG, TOKENIZER_CONFIG, WEIGHTS

DRAFT = "draft"  # stands for the draft model's adapter, see `draft_adapter`
_DOMAIN = b"plait.adapter.1"


def generation_of(digests: Mapping[str, str]) -> str:
    """The generation of files, given the SHA-256 (hex) of each that there is, by name.

    That of `DRAFT` is the generation of the files of the draft model's adapter.
    """
    whole = sha256(_DOMAIN)
    for name in (CONFIG, WEIGHTS, BUNDLE, TOKENIZER_CONFIG, DRAFT):
        if name in digests:
            whole.update(len(name).to_bytes(4, "little") + name.encode())
            whole.update(bytes.fromhex(digests[name]))
    return whole.hexdigest()

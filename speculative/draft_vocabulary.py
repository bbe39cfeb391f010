"""Whether two models speak in the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.platform.errors import ConfigError

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer

_MAX_SHOWN = 40  # bytes of a token in a message


def check_vocabulary(target: Tokenizer, draft: Tokenizer, *, target_name: str, name: str) -> None:
    """Raise `ConfigError` unless ids mean the same in both, wherever both have a token.

    One may end earlier: a trimmed vocabulary lacks the last tokens, a padded one has more. What
    the draft model lacks it never drafts.
    """
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_bytes(token_id), draft.token_bytes(token_id)
        if ours and theirs and ours != theirs:
            raise ConfigError(
                f"--draft {name} has another tokenizer than {target_name}: token {token_id} is "
                f"{_shown(theirs)} there and {_shown(ours)} here. A draft model needs the "
                "target's own tokens: use a smaller model of the same family, or leave --draft out",
                param="draft_model",
            )


def _shown(token: bytes) -> str:
    return repr(token[:_MAX_SHOWN].decode("utf-8", "replace"))

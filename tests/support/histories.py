"""What K and V of a token depend on, as a trie, and a model that is a function of it alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from plait.platform.core import AdapterUse, FinishReason, Request, Sequence

STOP_TOKEN = 0
VOCAB_SIZE = 12


def next_token(seed: int, tokens: list[int]) -> int:
    """The model: one token after any history, not often the one that stops."""
    return crc32(repr((seed, tokens)).encode()) % VOCAB_SIZE


def answer(sequence: Sequence) -> list[int]:
    """The output of a sequence, had it been alone."""
    tokens = list(sequence.request.prompt_token_ids)
    while len(tokens) < sequence.max_total_tokens:
        tokens.append(next_token(sequence.seed, tokens))
        if stop(sequence, tokens[-1]):
            break
    return tokens[sequence.num_prompt_tokens :]


def stop(sequence: Sequence, token: int) -> tuple[FinishReason, int] | None:
    ends = token == STOP_TOKEN and not sequence.request.params.ignore_eos
    return (FinishReason.STOP, token) if ends else None


@dataclass
class Histories:
    """A trie of what K and V depend on, token by token; a node stands for all that came before.

    That is salt, token, and of each adapter that is active there and can change K or V at all the
    content that does so, with its scale; of an image its content and the place in it; and in a
    span of tokens that see each other all that the whole span depends on.
    """

    children: dict[tuple[object, object], int] = field(default_factory=dict)
    parents: list[object] = field(default_factory=list)

    def path(self, request: Request, tokens: list[int]) -> list[int]:
        """The node of each token."""
        node: object = request.cache_salt
        uses = [use for use in request.adapters if use.kv_digest]
        nodes = []
        for position, token in enumerate(tokens):
            active = tuple((u.kv_digest, u.scale) for u in uses if u.active_from <= position)
            step = (token, active, self._beside(request, uses, position))
            child = self.children.get((node, step))
            if child is None:
                child = self.children[node, step] = len(self.parents)
                self.parents.append(node)
            nodes.append(child)
            node = child
        return nodes

    def _beside(self, request: Request, uses: list[AdapterUse], position: int) -> object:
        """What K and V at a position depend on beside what came before; None: nothing."""
        spans = [span for span in request.spans if span[0] <= position < span[1]]
        if not spans:
            return self._image(request, position)
        tokens = request.prompt_token_ids
        return tuple(
            (
                tokens[place],
                tuple((u.kv_digest, u.scale) for u in uses if u.active_from <= place),
                self._image(request, place),
            )
            for place in range(*spans[0])
        )

    @staticmethod
    def _image(request: Request, place: int) -> object:
        """The image at a place: its content, the place in it, and what adapters did to it."""
        for item in request.images:
            if item.start <= place < item.start + item.num_tokens:
                towers = [u for u in request.adapters if u.active_from <= item.start]
                made = tuple((u.tower_digest, u.scale) for u in towers if u.tower_digest)
                return (item.key, place - item.start, made)
        return None

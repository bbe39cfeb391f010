"""Builds a tokenizer from a GGUF file's metadata: the byte-level BPE and SentencePiece kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.errors import ModelUnsupported
from plait.platform.text.gguf_metadata import read_gguf_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"

# How text is cut before BPE, by `tokenizer.ggml.pre`: each pattern isolates its matches in what
# the patterns before it left over. Patterns are those of the models' own tokenizer.json.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS_GPT2 = (r"\p{N}", *_GPT2)
_LLAMA3 = (rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}",)
_QWEN2 = (rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_TAIL}",)
_QWEN35 = (
    (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_TEKKEN = (rf"{_CASED % ('', '')}|\p{{N}}|{_SLASH_TAIL}",)
_GPT4O = (rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SLASH_TAIL}",)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral")
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "trillion"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_GPT2,
    ),
    **dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
# Whole words of the vocabulary are taken before merges; and bos is added unless the file says no.
_IGNORE_MERGES = _ADD_BOS = frozenset({*_LLAMA3_NAMES, "tekken"})
# Control tokens that end a turn. Older files name only the end of the document as eos.
_TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endofturn|>",
    }
)


class GGUFVocabulary:
    """The `tokenizer.*` keys of one GGUF file. Raises `ModelUnsupported` for kinds not known."""

    def __init__(self, path: Path) -> None:
        self._keys = read_gguf_metadata(path)
        self.kind = self._get("model")
        self.tokens: list[str] = self._get("tokens", [])
        self._types: list[int] = self._get("token_type", [1] * len(self.tokens))
        if self.kind not in ("gpt2", "llama"):
            raise ModelUnsupported(
                f"GGUF tokenizer kind {self.kind!r} is not served (gpt2 and llama are); "
                "use the checkpoint's safetensors form"
            )
        if len(self._types) != len(self.tokens) or not self.tokens:
            raise ModelUnsupported("the GGUF file's token lists are empty or differ in length")

    def _get(self, name: str, default: Any = None) -> Any:
        return self._keys.get(f"tokenizer.ggml.{name}", default)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, where the file names one."""
        return self._token_id("bos")

    def _token_id(self, name: str) -> int | None:
        value = self._get(f"{name}_token_id")
        if value is not None and not 0 <= value < len(self.tokens):
            raise ModelUnsupported(f"the GGUF file's {name} token {value} is not in its vocabulary")
        return value  # type: ignore[no-any-return]

    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens named by the file, and turn ends that its chat template writes."""
        ids = {self._token_id(name) for name in ("eos", "eot", "eom")} - {None}
        written = "".join(self.chat_templates().values())
        ids.update(
            i
            for i, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True))
            if kind == _CONTROL and token in _TURN_ENDS and token in written
        )
        return tuple(sorted(i for i in ids if i is not None))

    def named_tokens(self) -> dict[str, str]:
        """`bos_token` and the like, for templates."""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
        ids = {name: self._token_id(key) for key, name in names.items()}
        return {f"{name}_token": self.tokens[i] for name, i in ids.items() if i is not None}

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; the one without a name is "default"."""
        prefix = "tokenizer.chat_template"
        named = {
            key.removeprefix(prefix).removeprefix(".") or "default": value
            for key, value in self._keys.items()
            if key == prefix or key.startswith(prefix + ".")
        }
        if named and "default" not in named:
            named["default"] = next(iter(named.values()))
        return named

    def backend(self) -> Backend:
        """The `tokenizers` object; its ids are the file's."""
        try:
            return self._backend()
        except ModelUnsupported:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelUnsupported(f"the GGUF file's tokenizer cannot be read: {error}") from error

    def _backend(self) -> Backend:
        from tokenizers import AddedToken

        backend = self._byte_level() if self.kind == "gpt2" else self._sentence_piece()
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [t for t, type_ in zip(self.tokens, self._types, strict=True) if type_ == kind]
            tokens = [AddedToken(t, special=special, normalized=False) for t in added if t]
            (backend.add_special_tokens if special else backend.add_tokens)(tokens)
        self._add_bos_and_eos(backend)
        return backend

    def _vocab(self) -> dict[str, int]:
        vocab = {token: i for i, token in enumerate(self.tokens)}
        if len(vocab) != len(self.tokens):
            raise ModelUnsupported("the GGUF file names a token twice")
        return vocab

    def _byte_level(self) -> Backend:
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        pre = self._get("pre", "default")
        if pre not in _PRE_TOKENIZERS:
            raise ModelUnsupported(
                f"GGUF pre-tokenizer {pre!r} is not known; use the checkpoint's safetensors form"
            )
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("merges", [])]
        backend = Backend(
            models.BPE(vocab=self._vocab(), merges=merges, ignore_merges=pre in _IGNORE_MERGES)
        )
        split = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentence_piece(self) -> Backend:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, normalizers

        vocab = self._vocab()
        unknown = self.tokens[self._types.index(_UNKNOWN)] if _UNKNOWN in self._types else None
        backend = Backend(
            models.BPE(
                vocab=vocab,
                merges=self._merges(vocab),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        space_prefix = self._get("add_space_prefix", True)
        prepend = [normalizers.Prepend(_SPACE)] if space_prefix else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _merges(self, vocab: dict[str, int]) -> list[tuple[str, str]]:
        """Merges in the order of SentencePiece's BPE: best score of the merged piece first."""
        scores = self._get("scores")
        if scores is None or len(scores) != len(self.tokens):
            raise ModelUnsupported("the GGUF file's SentencePiece vocabulary has no scores")
        found = []
        for piece, i in vocab.items():
            if self._types[i] in (_UNKNOWN, _CONTROL):
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    found.append((-scores[i], vocab[left], vocab[right], left, right))
        found.sort()
        return [(left, right) for *_, left, right in found]

    def _add_bos_and_eos(self, backend: Backend) -> None:
        from plait.platform.text.tokenizer_files import set_post_processor

        by_default = self.kind == "llama" or self._get("pre") in _ADD_BOS
        bos, eos = self._token_id("bos"), self._token_id("eos")
        add_bos, add_eos = self._get("add_bos_token", by_default), self._get("add_eos_token", False)
        head = [self.tokens[bos]] if add_bos and bos is not None else []
        tail = [self.tokens[eos]] if add_eos and eos is not None else []
        if head or tail:
            set_post_processor(backend, head, tail)

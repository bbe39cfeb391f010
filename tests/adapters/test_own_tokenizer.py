"""What training saves of its tokenizer beside an adapter; transformers says what it means."""

import json

import pytest
import torch
from safetensors.torch import save
from support.tiny_tokenizers import byte_level_backend, sentence_piece_backend
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from plait.adapters.own_tokenizer import OwnTokenizer, parse_own_tokenizer
from plait.adapters.store import AdapterStore
from plait.platform.errors import AdapterFileTooLarge, InvalidAdapter

NAME = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = save(
    {f"{NAME}.lora_A.weight": torch.ones(2, 8), f"{NAME}.lora_B.weight": torch.ones(8, 2)}
)


@pytest.fixture
def store(tmp_path):
    store = AdapterStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 2}')
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return folder


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("make", [byte_level_backend, sentence_piece_backend])
def test_what_transformers_saves_is_read_as_it_means_it(store, folder, make):
    saved = PreTrainedTokenizerFast(
        tokenizer_object=make(), bos_token="<s>", eos_token="<|end|>", chat_template="{{ 1 }}"
    )
    saved.add_tokens([AddedToken("<foo>", special=True), AddedToken("bar baz", lstrip=True)])
    saved.save_pretrained(folder)
    own = store.add_directory(folder).tokenizer
    oracle = saved.added_tokens_decoder
    assert [t.token_id for t in own.added_tokens] == sorted(oracle)
    for token in own.added_tokens:
        other = oracle[token.token_id]
        assert token.text == other.content
        for flag in ("special", "normalized", "lstrip", "rstrip", "single_word"):
            assert getattr(token, flag) == getattr(other, flag), (token, flag)
    assert (own.end_token, own.chat_template) == ("<|end|>", "{{ 1 }}")


def test_older_files_are_read_as_well(store, folder):
    write(
        folder,
        added_tokens__json={"<new>": 300, "<named>": 301, "<said>": 302},
        special_tokens_map__json={"pad_token": {"content": "<named>"}, "eos_token": "<said>"},
        tokenizer_config__json={
            "added_tokens_decoder": {"303": {"content": "<4>", "rstrip": True}},
            "additional_special_tokens": ["<said>"],
            "chat_template": [{"name": "default", "template": "a"}, {"name": "b", "template": "c"}],
        },
    )
    own = store.add_directory(folder).tokenizer
    assert [(t.token_id, t.text, t.special, t.normalized) for t in own.added_tokens] == [
        (300, "<new>", False, True),
        (301, "<named>", True, False),
        (302, "<said>", True, False),
        (303, "<4>", False, False),
    ]
    assert own.added_tokens[3].rstrip
    assert (own.end_token, own.chat_template) == ("<said>", "a")


def test_one_file_is_kept_of_them_and_says_the_same(store, folder):
    plain = store.add_directory(folder)
    assert plain.tokenizer == OwnTokenizer()
    write(folder, added_tokens__json={"<new>": 300}, chat_template__jinja="{{ messages }}")
    stored = store.add_directory(folder)
    assert stored.generation != plain.generation
    names = sorted(path.name for path in stored.directory.iterdir())
    assert names == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer_config.json",
    ]
    again = store.add_directory(stored.directory)
    assert (again.generation, again.tokenizer) == (stored.generation, stored.tokenizer)
    raw = (stored.directory / "tokenizer_config.json").read_bytes()
    assert parse_own_tokenizer(raw) == stored.tokenizer


BROKEN = {
    "two texts of one id": {
        "added_tokens__json": {"a": 300},
        "tokenizer_config__json": {"added_tokens_decoder": {"300": {"content": "b"}}},
    },
    "two ids of one text": {
        "added_tokens__json": {"a": 300},
        "tokenizer_config__json": {"added_tokens_decoder": {"301": {"content": "a"}}},
    },
    "no list": {"tokenizer__json": {"version": "1.0", "added_tokens": 3}},
    "no JSON": {"tokenizer__json": '{"version": "1.0" "added_tokens": []}'},
    "cut off": {"tokenizer__json": '{"added_tokens": [{"id": 3'},
    "deep": {"tokenizer__json": '{"version": ' + "[" * 100_000},
    "id of another kind": {"tokenizer__json": {"added_tokens": [{"id": "3", "content": "a"}]}},
    "flag of another kind": {
        "tokenizer__json": {"added_tokens": [{"id": 3, "content": "a", "special": "yes"}]}
    },
    "text that is none": {"tokenizer__json": {"added_tokens": [{"id": 3, "content": "\ud800"}]}},
    "end token that is none": {"tokenizer_config__json": {"eos_token": "\ud800"}},
    "long text": {"added_tokens__json": {"a" * 2000: 300}},
    "long template": {"chat_template__jinja": "a" * 300_000},
    "no object": {"tokenizer_config__json": []},
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN.keys())
def test_files_that_contradict_or_are_none_are_refused(store, folder, files):
    write(folder, **files)
    with pytest.raises(InvalidAdapter):
        store.add_directory(folder)


def test_files_are_read_within_limits(store, folder):
    write(folder, chat_template__jinja="a" * (9 << 20))
    with pytest.raises(AdapterFileTooLarge, match=r"chat_template\.jinja"):
        store.add_directory(folder)

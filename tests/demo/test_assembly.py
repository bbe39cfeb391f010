"""The embedded model with sight: an ordinary checkpoint, which transformers reads as Plait does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoTokenizer, LlavaForConditionalGeneration
from transformers.models.clip import CLIPImageProcessorPil

from plait import LLM, SamplingParams
from plait.platform.demo import assemble as assembly
from plait.platform.errors import ConfigError

NUM_TOKENS = 8


def pictures() -> list[Image.Image]:
    """One of the demo's own size, and a wide one."""
    made = []
    for size, paint in (((96, 96), (30, 60, 210)), ((150, 90), (200, 30, 30))):
        image = Image.new("RGB", size, (245, 245, 240))
        ImageDraw.Draw(image).ellipse((20, 20, 50, 50), fill=paint)
        made.append(image)
    return made


def chat(image: Image.Image) -> list[dict[str, object]]:
    content = [{"type": "text", "text": "What is shown?"}, {"type": "image", "image": image}]
    return [{"role": "user", "content": content}]


@torch.no_grad()
def oracle(directory: Path) -> list[list[int]]:
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = CLIPImageProcessorPil.from_pretrained(directory)
    answers = []
    for image in pictures():
        text = tokenizer.apply_chat_template(
            chat(image), tokenize=False, add_generation_prompt=True
        )
        text = text.replace("<file_sep>", "<file_sep>" * model.config.image_seq_length)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        pixels = processor(images=image, return_tensors="pt")["pixel_values"]
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=-1,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def test_transformers_and_plait_say_the_same_of_a_picture(directory: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(directory), dtype="float32", kv_cache_bytes=64 << 20, num_threads=1) as llm:
        said = [list(llm.chat(chat(p), params)[0].outputs[0].token_ids) for p in pictures()]
    assert said == oracle(directory)


def test_a_checkpoint_is_made_once_and_anew_when_a_part_changes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = []
    monkeypatch.setattr(assembly, "_write", lambda _, folder: written.append(folder))
    assert assembly.assemble(directory.parent) == directory
    assert not written

    for part in assembly.VISION.iterdir():
        (tmp_path / part.name).write_bytes(part.read_bytes())
    (tmp_path / "content.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(assembly, "VISION", tmp_path)
    assert assembly.assemble(directory.parent) != directory
    assert written


def test_what_failed_to_be_made_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(assembly, "_write", fail)
    with pytest.raises(ConfigError, match=r"in /.*: disk full. Set XDG_CACHE_HOME to a folder"):
        assembly.assemble(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_full_disk_is_named_whatever_does_not_fit(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = assembly._write

    def write_to_a_full_disk(file: Path, folder: Path) -> None:
        (folder / name).symlink_to("/dev/full")
        write(file, folder)

    monkeypatch.setattr(assembly, "_write", write_to_a_full_disk)
    with pytest.raises(ConfigError, match="No space left on device"):
        assembly.assemble(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"in /.*file/demo: Not a directory"):
        assembly.assemble(tmp_path / "file" / "demo")


def test_of_two_that_make_it_at_once_both_get_one_whole_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = threading.Barrier(2)

    def write(_: Path, folder: Path) -> None:
        both.wait(timeout=30)
        (folder / "config.json").write_text(folder.name)

    monkeypatch.setattr(assembly, "_write", write)
    told: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(assembly.assemble, tmp_path, tell=told.append) for _ in "ab")
        assert first.result() == second.result()
    assert [path.name for path in tmp_path.iterdir()] == [first.result().name]
    assert len(told) == 2
    assert "once" in told[0]
    assert assembly.assemble(tmp_path, tell=told.append) == first.result()
    assert len(told) == 2

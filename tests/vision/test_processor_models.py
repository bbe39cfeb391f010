"""What processors make is what the models' encoders take, without padding between images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.images import picture
from support.tiny_processors import SPECS, make_processor_files, oracle_inputs, vision_info
from support.tiny_vision import FAMILIES, make_vision_checkpoint
from support.vision_tracks import load

from plait.platform.text.tokenizer import Tokenizer
from plait.vision.limits import ImageLimits
from plait.vision.processor import ImageProcessor
from plait.vision.sources import ImagePixels, read_pixels

SIZES = ((48, 32), (21, 70), (20, 20))


@pytest.mark.parametrize("family", [name for name in SPECS if name in FAMILIES])
@torch.no_grad()
def test_images_have_the_features_that_transformers_gives_them(family: str, tmp_path: Path) -> None:
    make_processor_files(family, tmp_path / "files")
    tokenizer = Tokenizer.load(tmp_path / "files")
    processor = ImageProcessor.load(tmp_path / "files", tokenizer, vision_info(family, tokenizer))
    model = make_vision_checkpoint(family, tmp_path / "model")
    executor = load(tmp_path / "model")
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    if family == "paligemma":
        images = images[:1]
    text = "a".join([processor.placeholder] * len(images))
    made = processor.process_blocking(
        [read_pixels(ImagePixels(value=one), ImageLimits()) for one in images]
    )
    _, placed = processor.encode(
        text, made, lambda t: tokenizer.encode(t, add_special_tokens=False)
    )

    rows = executor.encode(placed.items, [()] * len(images))

    inputs = {
        k: torch.from_numpy(np.asarray(v))
        for k, v in oracle_inputs(family, text, images).items()
        if k in (*placed.items[0].tensors, "batch_num_images")
    }
    features = model.model.get_image_features(**inputs, return_dict=True).pooler_output
    wanted = torch.cat([part.reshape(-1, part.shape[-1]) for part in features])
    size = wanted.shape[1]
    assert torch.allclose(torch.cat(rows)[:, :size], wanted, atol=2e-4, rtol=1e-3)
    assert [len(row) for row in rows] == [image.num_embeds for image in made]

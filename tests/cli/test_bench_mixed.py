"""`plait bench mixed` on a tiny model that sees."""

import json

import pytest
from support.seeing import make_seeing_checkpoint
from typer.testing import CliRunner

from plait.platform.bench.mixing import Answered, table
from plait.platform.cli.main import app


def test_requests_of_all_kinds_are_measured_beside_plain_ones_of_the_same_lengths(tmp_path):
    make_seeing_checkpoint("llava", tmp_path)
    shape = ["--num-requests", "8", "--input-len", "5", "--output-len", "6", "--repeats", "2"]
    small = ["--threads", "1", "--no-progress", "--kv-cache-memory", "8MiB", "--no-warm-up"]
    small += ["--max-model-len", "480", "--adapter-memory", "8MiB"]
    small += ["--encoder-cache-memory", "1MiB"]
    adapters = ["--random-adapters", "2", "--adapter-rank", "2"]
    result = CliRunner().invoke(
        app, ["bench", "mixed", str(tmp_path), *shape, *small, *adapters, "--json", "-"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    assert all(found["rows"][kind] > 0 for kind in ("adapter_rows", "image_rows", "mask_rows"))
    assert found["rows"]["prefill_rows"] > 8 * 5
    mixed, plain = found["measured"]["mixed"], found["measured"]["plain"]
    assert len(mixed) == len(plain) == 2
    assert found["ratio"] == pytest.approx((mixed[0] / plain[0] + mixed[1] / plain[1]) / 2)
    assert 4 * 6 < found["tokens"] <= 8 * 6
    assert "× plain" in result.stderr


def test_encoding_images_is_left_out_of_the_rate():
    answered = Answered(num_tokens=(6, 2), seconds=5.0, encoder_s=1.0, rows={"draft_rows": 3})
    assert answered.rate == 2.0
    rates = {"mixed": answered.rate, "plain": 4.0}
    assert table({"tokens_per_s": rates, "ratio": 0.5, "rows": answered.rows}).row_count == 4

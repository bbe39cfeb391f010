"""The commands that a server of the default model shows, to be pasted as they are."""

import json
import shlex

import pytest

from plait.platform.cli.tries import tries
from plait.platform.config import ModelInfo, VisionInfo

ALL = ("fields", "sight", "sql", "tone")


def model(*, sees: bool) -> ModelInfo:
    vision = VisionInfo(
        family="llava", hidden_size=4, num_levels=1, image_token_id=1, has_grid_positions=False
    )
    return ModelInfo(
        name="na'me",
        architecture="A",
        source="directory",
        dtype="float32",
        executor="torch",
        vocab_size=10,
        context_length=99,
        eos_token_ids=(),
        weight_bytes=0,
        vision=vision if sees else None,
    )


def shown(adapters=ALL, *, sees=True, has_key=False, socket=None):
    text = tries("http://h:1", model(sees=sees), adapters, has_key=has_key, socket=socket)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("curl ")]
    return commands, [json.loads(words[words.index("-d") + 1]) for words in commands]


def test_three_commands_show_an_adapter_a_picture_and_all_at_once():
    commands, bodies = shown()
    assert [body["model"] for body in bodies] == ["sql", "sight", "sight"]
    assert "response_format" in bodies[2]
    assert all("http://h:1/v1/chat/completions" in words for words in commands)
    pictures = [body["messages"][0]["content"][1]["image_url"]["url"] for body in bodies[1:]]
    assert all(len(url) < 200 for url in pictures)


@pytest.mark.parametrize(("adapters", "sees"), [(ALL, False), ((), True), (("mine",), True)])
def test_what_is_not_served_is_not_shown(adapters, sees):
    commands, bodies = shown(adapters, sees=sees)
    assert len(bodies) == 3
    assert {body["model"] for body in bodies} <= {"na'me", *adapters}
    assert [("-N" in words) for words in commands] == [body.get("stream", False) for body in bodies]


def test_keys_and_unix_sockets_are_part_of_the_commands():
    for words in shown(has_key=True)[0]:
        assert "Authorization: Bearer KEY" in words
    for words in shown(socket="/tmp/a b")[0]:
        assert words[words.index("--unix-socket") + 1] == "/tmp/a b"
        assert "http://localhost/v1/chat/completions" in words

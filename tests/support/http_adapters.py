"""Adapters as files of a few bytes, and the requests that load and use them over HTTP."""

import asyncio
import json
import struct
from pathlib import Path

ADMIN = {"authorization": "Bearer boss"}
LOAD, UNLOAD, TENSORS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter_from_tensors",
)
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
TEXT = "/v1/completions"


def weights(value: float) -> bytes:
    """A safetensors file of one low-rank pair."""
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{name}.lora_A.weight": [1, 8], f"{name}.lora_B.weight": [8, 1]}
    header, data = {}, b""
    for key, shape in shapes.items():
        part = struct.pack("<8f", *[value] * 8)
        offsets = [len(data), len(data) + len(part)]
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += part
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def write_adapter(folder: Path, value: float, **bundle) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(weights(value))
    if bundle:
        (folder / "plait_adapter.json").write_text(json.dumps(bundle))
    return folder


def below(path):
    return f"files/{path}" if isinstance(path, str) and "/" not in path else path


async def load(http, name="sql", status=200, headers=None, **fields):
    path = fields.pop("lora_path", name)
    body = {"lora_name": name, "lora_path": below(path)} | fields
    answer = await http.post(LOAD, json=body, headers={**ADMIN, **(headers or {})})
    assert answer.status_code == status, answer.text
    return answer.json()


async def unload(http, name="sql", status=200, **fields):
    answer = await http.post(UNLOAD, json={"lora_name": name} | fields, headers=ADMIN)
    assert answer.status_code == status, answer.text
    return answer.json()


async def ask(http, status=200, headers=None, **fields):
    body = {"prompt": "a", "max_tokens": 2} | fields
    answer = await http.post(TEXT, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def code(answer) -> str:
    return answer["error"]["code"]


async def until(holds) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)

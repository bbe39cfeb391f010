"""An EAGLE-3 head as torch trains it: one decoder layer on what the model has between its own.

Row t is given the model's rows at position t and the token behind it, and predicts the token after
that. In a draft the model's rows are missing: then it is given what the row before it gave. So
training rolls out drafts as serving does (`Head.rollout`); the layer is the one that
`plait.speculative.eagle_head` runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

HEADS, HEAD_SIZE = 9, 64  # as the model has, but keys and values for each
INTERMEDIATE = 1280

KeysValues = list[tuple[Tensor, Tensor]]


class Head(nn.Module):
    """The trained weights. The tables of embeddings and logits are the model's own."""

    def __init__(self, width: int, num_taps: int, *, eps: float, theta: float) -> None:
        super().__init__()
        self.eps = eps
        frequencies = theta ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        self.register_buffer("frequencies", frequencies, persistent=False)
        inside = HEADS * HEAD_SIZE
        self.fc = _linear(num_taps * width, width)
        self.embed_norm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.qkv = _linear(2 * width, 3 * inside)
        self.o = _linear(inside, width)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.gate_up = _linear(width, 2 * INTERMEDIATE)
        self.down = _linear(INTERMEDIATE, width)
        self.norm = nn.Parameter(torch.ones(width))

    @torch.no_grad()
    def start_from(self, model: Any) -> None:
        """Begin as the model's last layer, on its last tap alone; tokens count for nothing yet."""
        layer, width = model.model.layers[-1], self.norm.numel()
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] = torch.eye(width)
        self.qkv.weight.mul_(0.5)
        attention = layer.self_attn
        for i, part in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            rows = part.weight.view(-1, HEAD_SIZE, width)
            rows = rows.repeat_interleave(HEADS // len(rows), dim=0).flatten(0, 1)
            self.qkv.weight[i * len(rows) : (i + 1) * len(rows), width:] = rows
        self.o.weight.copy_(attention.o_proj.weight)
        self.hidden_norm.copy_(layer.input_layernorm.weight)
        self.mlp_norm.copy_(layer.post_attention_layernorm.weight)
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        largest = (gate.norm(dim=1) * up.norm(dim=1) * layer.mlp.down_proj.weight.norm(dim=0)).topk(
            INTERMEDIATE
        )
        self.gate_up.weight.copy_(torch.cat([gate[largest.indices], up[largest.indices]]))
        self.down.weight.copy_(layer.mlp.down_proj.weight[:, largest.indices])
        self.norm.copy_(model.model.norm.weight)

    def rollout(self, taps: Tensor, embeds: Tensor, depth: int) -> Iterator[Tensor]:
        """What is to predict the token after next, `[B, L, D]`, for drafts of 1, 2, … tokens.

        `taps` `[B, L, num_taps * D]`, `embeds` `[B, L, D]` of the tokens behind them. At depth j
        row t stands in a draft that began at row t - j.
        """
        cos, sin = self._angles(taps.shape[1])
        hidden, seen = self.fc(taps), KeysValues()
        for _ in range(depth):
            hidden = self._layer(hidden, embeds, cos, sin, seen)
            yield self._norm(hidden, self.norm)
            hidden = _down(hidden, 1)

    def _layer(
        self, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, seen: KeysValues
    ) -> Tensor:
        normed = self._norm(hidden, self.hidden_norm)
        both = torch.cat([self._norm(embeds, self.embed_norm), normed], dim=-1)
        x = hidden + self._attend(both, cos, sin, seen)
        gate, up = self.gate_up(self._norm(x, self.mlp_norm)).chunk(2, dim=-1)
        result: Tensor = x + self.down(functional.silu(gate) * up)
        return result

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, seen: KeysValues) -> Tensor:
        """Over the model's rows before the draft, then over the draft's own: one at each depth."""
        parts = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        query, key = _turn(parts[0], cos, sin) * HEAD_SIZE**-0.5, _turn(parts[1], cos, sin)
        seen.append((key, parts[2]))
        depth, length = len(seen) - 1, x.shape[1]
        (keys, values), drafts = seen[0], seen[1:]
        drafts = [
            (_down(k, depth - i), _down(v, depth - i)) for i, (k, v) in enumerate(drafts, start=1)
        ]
        hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1 - depth)
        scores = (query @ keys.transpose(-1, -2)).masked_fill(hidden_from, -1e9)
        own = [(query * k).sum(-1, keepdim=True) for k, _ in drafts]
        shares = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = shares[..., :length] @ values
        for i, (_, v) in enumerate(drafts):
            out = out + shares[..., length + i, None] * v
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.eps)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length)[:, None] * self.frequencies
        return angles.cos(), angles.sin()


def save(
    head: Head,
    folder: Path,
    target_ids: Tensor,
    config: dict[str, Any],
    seen: dict[str, int],
) -> None:
    """Write the head in the original EAGLE-3 form, fp16, without the tables that are the model's.

    `target_ids`: the tokens that it knows. `config`: what is told of the model. `seen`: what it
    was trained on, for its card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layer, inside = "midlayer.", HEADS * HEAD_SIZE
    qkv, gate_up = head.qkv.weight.split(inside), head.gate_up.weight.split(INTERMEDIATE)
    tensors = {
        "fc.weight": head.fc.weight,
        f"{layer}input_layernorm.weight": head.embed_norm,
        f"{layer}hidden_norm.weight": head.hidden_norm,
        **{f"{layer}self_attn.{n}_proj.weight": w for n, w in zip("qkv", qkv, strict=True)},
        f"{layer}self_attn.o_proj.weight": head.o.weight,
        f"{layer}post_attention_layernorm.weight": head.mlp_norm,
        f"{layer}mlp.gate_proj.weight": gate_up[0],
        f"{layer}mlp.up_proj.weight": gate_up[1],
        f"{layer}mlp.down_proj.weight": head.down.weight,
        "norm.weight": head.norm,
    }
    stored = {name: w.detach().half().contiguous() for name, w in tensors.items()}
    stored["d2t"] = target_ids - torch.arange(len(target_ids))
    told = {name: str(number) for name, number in seen.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt", **told})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": head.norm.numel(),
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": head.eps,
        "draft_vocab_size": len(target_ids),
        "norm_before_residual": False,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_rows(file: Path) -> list[tuple[Tensor, Tensor, int]]:
    """Sequences of a file of `collect_answers.py`: tokens, tapped rows, length of the prompt."""
    found = load_file(file)
    lengths = found["lengths"].tolist()
    tokens, rows = found["tokens"].long().split(lengths), found["rows"].split(lengths)
    return list(zip(tokens, rows, found["prompts"].tolist(), strict=True))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _down(x: Tensor, num: int) -> Tensor:
    """Rows, the last dimension but one, shifted to `num` places later; zeros come in."""
    return functional.pad(x, (0, 0, num, 0))[..., : x.shape[-2], :] if num else x

"""Random EAGLE-3 heads, written in both forms of checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A head for the tiny models of `support.tiny_models`."""

    form: str = "original"  # | speculators
    vocab_size: int = 307
    draft_vocab_size: int = 120
    target_hidden_size: int = 64
    hidden_size: int = 64
    intermediate_size: int = 80
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    taps: tuple[int, ...] | None = (2, 3, 4)  # None: the config says nothing
    num_taps: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    own_embeddings: bool = True
    model_type: str = "llama"
    attention_bias: bool = False
    rope_theta: float = 10000.0
    eps: float = 1e-5

    @property
    def layer_fields(self) -> dict[str, Any]:
        """The decoder layer's part of the config."""
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "max_position_embeddings": 512,
            "rope_theta": self.rope_theta,
        }

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        flags = {
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
        }
        taps = None if self.taps is None else list(self.taps)
        if self.form == "speculators":
            return {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.5.0",
                "transformer_layer_config": self.layer_fields,
                "draft_vocab_size": self.draft_vocab_size,
                "target_hidden_size": None,
                "eagle_aux_hidden_state_layer_ids": taps,
                **flags,
            }
        config = {
            **self.layer_fields,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "tie_word_embeddings": False,
            **{name: value for name, value in flags.items() if value},
        }
        if taps is not None:
            # This form counts layers whose output is meant, and begins with 1 where it does.
            shift = 1 if taps[0] == 2 else 0
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [tap - shift for tap in taps],
                "use_aux_hidden_state": True,
            }
        return config


Tensors = dict[str, torch.Tensor]


def head_tensors(shape: HeadShape, seed: int = 0) -> Tensors:
    """Random weights by our names, fp32; activations stay near one and logits apart."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def vector(size: int, center: float = 1.0) -> torch.Tensor:
        return center + 0.2 * torch.randn(size, generator=generator)

    hidden, wide = shape.hidden_size, shape.num_taps * shape.target_hidden_size
    query, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    tensors = {
        "fc.weight": matrix(hidden, wide),
        "norm.weight": vector(hidden),
        "lm_head.weight": 2 * matrix(shape.draft_vocab_size, hidden),
        "layer.input_layernorm.weight": vector(hidden),
        "layer.hidden_norm.weight": vector(hidden),
        "layer.post_attention_layernorm.weight": vector(hidden),
        "layer.self_attn.q_proj.weight": 2 * matrix(query, 2 * hidden),
        "layer.self_attn.k_proj.weight": 2 * matrix(kv, 2 * hidden),
        "layer.self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        "layer.self_attn.o_proj.weight": matrix(hidden, query),
        "layer.mlp.gate_proj.weight": matrix(shape.intermediate_size, hidden),
        "layer.mlp.up_proj.weight": matrix(shape.intermediate_size, hidden),
        "layer.mlp.down_proj.weight": matrix(hidden, shape.intermediate_size),
    }
    if shape.attention_bias:
        sizes = {"q": query, "k": kv, "v": kv, "o": hidden}
        tensors |= {
            f"layer.self_attn.{part}_proj.bias": vector(size, 0.0) for part, size in sizes.items()
        }
    if shape.model_type == "qwen3":
        tensors |= {f"layer.self_attn.{x}_norm.weight": vector(shape.head_size) for x in "qk"}
    if shape.norm_before_fc:
        tensors["input_norm.weight"] = vector(wide)
    if shape.own_embeddings:
        tensors["embed_tokens.weight"] = torch.randn(shape.vocab_size, hidden, generator=generator)
    if shape.draft_vocab_size != shape.vocab_size:
        ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size]
        ids = ids.sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(shape.vocab_size), ids)
    return tensors


def write_head(directory: Path, shape: HeadShape, tensors: Tensors) -> Path:
    """Write a checkpoint; `layer.` becomes what the form calls the only layer."""
    directory.mkdir(parents=True, exist_ok=True)
    layer = "midlayer." if shape.form == "original" else "layers.0."
    named = {
        name.replace("layer.", layer, 1) if name.startswith("layer.") else name: tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(shape.config))
    return directory


class ReferenceHead:
    """The head in plain torch and fp64: whole sequences, no pages, no kernels."""

    def __init__(self, shape: HeadShape, tensors: Tensors, embeddings: torch.Tensor) -> None:
        self.shape = shape
        self.w = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self.embeddings = self.w.get("embed_tokens.weight", embeddings.double())

    def chain(
        self,
        taps: torch.Tensor,
        tokens: list[int],
        length: int,
        choose: Callable[[tuple[int, ...], torch.Tensor], int] = lambda _, row: int(row.argmax()),
    ) -> list[torch.Tensor]:
        """Rows of logits over the target's vocabulary, one per draft behind `tokens`.

        `taps` [n - 1, num_taps * D]: the target's rows of all tokens but the last. `choose` is
        given the drafts so far and the row of the next.
        """
        w, taps = self.w, taps.double()
        if self.shape.norm_before_fc:
            taps = self._norm(taps, "input_norm.weight")
        hidden = taps @ w["fc.weight"].T
        behind = list(tokens[1:])
        rows: list[torch.Tensor] = []
        for _ in range(length):
            out = self._layer(hidden, torch.tensor(behind))
            rows.append(self._logits(out[-1]))
            hidden = torch.cat([hidden, out[-1:]])
            behind.append(choose(tuple(behind[len(tokens) - 1 :]), rows[-1]))
        return rows

    def _logits(self, row: torch.Tensor) -> torch.Tensor:
        logits = self._norm(row[None], "norm.weight")[0] @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return logits
        wide = torch.full((self.shape.vocab_size,), -torch.inf, dtype=torch.float64)
        wide[torch.arange(len(logits)) + self.w["d2t"]] = logits
        return wide

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / (mean + self.shape.eps).sqrt() * self.w[name]

    def _layer(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embeds = self._norm(self.embeddings[tokens], "layer.input_layernorm.weight")
        normed = self._norm(hidden, "layer.hidden_norm.weight")
        residual = normed if self.shape.norm_before_residual else hidden
        x = residual + self._attention(torch.cat([embeds, normed], dim=-1))
        y = self._norm(x, "layer.post_attention_layernorm.weight")
        gate, up = (y @ self.w[f"layer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate * gate.sigmoid() * up) @ self.w["layer.mlp.down_proj.weight"].T

    def _project(self, x: torch.Tensor, part: str) -> torch.Tensor:
        out = x @ self.w[f"layer.self_attn.{part}_proj.weight"].T
        return out + self.w.get(f"layer.self_attn.{part}_proj.bias", 0.0)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        shape, length = self.shape, len(x)
        q, k, v = (self._project(x, p).view(length, -1, shape.head_size) for p in "qkv")
        if shape.model_type == "qwen3":
            q, k = (
                self._norm(y, f"layer.self_attn.{n}_norm.weight") for n, y in (("q", q), ("k", k))
            )
        q, k = self._turn(q), self._turn(k)
        repeats = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_size**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self._project(torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1), "o")

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions, by complex numbers."""
        half = self.shape.head_size // 2
        steps = torch.arange(half, dtype=torch.float64) / half
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * self.shape.rope_theta**-steps
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones_like(angles), angles
        ).unsqueeze(1)
        return torch.cat([turned.real, turned.imag], dim=-1)

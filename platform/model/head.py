"""From hidden rows to logits, as the family computes them."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions

from plait.platform.errors import ModelUnsupported
from plait.platform.model.leaves import Linear
from plait.platform.model.parts import Head


@dataclass
class _GivenOutput(MoEModelOutputWithPastAndCrossAttentions):
    """With what heads of conditional-generation models hand on."""

    image_outputs: Any = None
    video_outputs: Any = None


class _Given(nn.Module):
    """Stands for the backbone: answers with the rows it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput(last_hidden_state=inputs_embeds)


class FamilyHead:
    """The family's own way, whatever it scales or caps.

    A shallow copy of the model in which the backbone answers with `inputs_embeds`: what is left of
    its forward is the head.
    """

    def __init__(self, model: Any) -> None:
        self.module: Any = copy.copy(model)
        name = backbone_name(model)
        given = _Given()
        if "decoder" in model._modules[name]._modules:  # OPT calls this part of its backbone
            given.decoder = _Given()
        self.module.__dict__["_modules"] = {**model._modules, name: given}

    def __call__(self, rows: Tensor) -> Tensor:
        """Logits `[R, V]` of `rows`."""
        logits: Tensor = self.module(inputs_embeds=rows[None], use_cache=False).logits[0]
        return logits.float()


@torch.no_grad()
def make_head(model: Any) -> tuple[Head, int]:
    """The head and the width of its logits; it must be a function of hidden rows alone.

    Where it is a linear layer and nothing else, that leaf itself: the family's forward around it
    takes a tenth of a millisecond in each step.
    """
    leaf, name, head = model.get_output_embeddings(), type(model).__name__, FamilyHead(model)
    size = model.config.get_text_config().hidden_size
    rows = torch.empty((1, 3, size), dtype=model.config.dtype, device="meta")
    calls: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as hooks:
        if type(leaf) is Linear:
            leaf.out_dtype = torch.float32  # logits are compared with each other: keep last bits
            hooks.callback(leaf.register_forward_hook(partial(_keep, calls)).remove)
        try:
            logits = head.module(inputs_embeds=rows, use_cache=False).logits
        except Exception as error:
            raise ModelUnsupported(f"{name}'s head cannot be run on rows alone: {error}") from error
    if logits.dim() != 3 or logits.shape[:2] != (1, 3):
        raise ModelUnsupported(f"{name}'s head gives logits of shape {tuple(logits.shape)}")
    if len(calls) == 1 and _is_same(calls[0][0], rows) and _is_same(calls[0][1], logits):
        return leaf, int(logits.shape[2])
    return head, int(logits.shape[2])


def _keep(
    calls: list[tuple[Tensor, Tensor]], _: nn.Module, given: tuple[Tensor, ...], out: Tensor
) -> None:
    calls.append((given[0], out))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two meta tensors are the same numbers: views of one memory, never written to."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride()) == (other.shape, other.stride())
        and one.storage_offset() == other.storage_offset()
        and one._version == other._version == 0
    )


def backbone_name(model: Any) -> str:
    """The child that turns tokens into hidden rows."""
    for name in (model.base_model_prefix, "model"):
        if isinstance(model._modules.get(name), nn.Module):
            return str(name)
    raise ModelUnsupported(f"{type(model).__name__} has no separate backbone")

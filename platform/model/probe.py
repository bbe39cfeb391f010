"""Probing a model: one forward on meta tensors that records what every layer asks for.

Nothing is taken on trust from a config. The probe runs the family's own forward, without
weights, and sees each attention call: the layer, its head sizes, scale, window, soft cap and
sinks, and the mask that transformers would have built for it. What our attention cannot do is
refused here, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from plait.platform.errors import ModelUnsupported
from plait.platform.model.attention import attention_forward
from plait.platform.model.rope import held_frequencies

_PROBE_NAME = "plait_probe"
NUM_ROWS = 2  # of the probe's one forward
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Attention arguments that we honour, or that mean nothing when serving.
_KNOWN_OPTIONS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids"}
    | {"use_cache", "output_attentions", "cache_position", "position_embeddings", "cache"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer asked of attention."""

    module: nn.Module
    layer: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands for a mask: may query position q see key position k?"""

    allows: Callable[..., Any]

    def permits(self, query: int, key: int) -> bool:
        """Ask for one pair of positions."""
        index = torch.tensor(0)
        return bool(self.allows(index, index, torch.tensor(query), torch.tensor(key)))


def _mask_rule(*, mask_function: Callable[..., Any], **_: Any) -> MaskRule:
    return MaskRule(mask_function)


class _Recorder:
    """The attention site of a probed module."""

    def __init__(self, module: nn.Module, name: str, calls: list[LayerAttention]) -> None:
        self.module = module
        self.name = name
        self.calls = calls

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        _refuse_options(self.name, options)
        if query.shape[0] != 1 or query.shape[2] != NUM_ROWS or key.shape[2] != NUM_ROWS:
            raise ModelUnsupported(
                f"{self.name} attends over {tuple(key.shape)} for {NUM_ROWS} rows: only "
                "self-attention over the sequence's own tokens is served"
            )
        if value.shape[3] > key.shape[3] or query.shape[3] != key.shape[3]:
            raise ModelUnsupported(f"{self.name} has values wider than its keys")
        window = options.get("sliding_window")
        _check_mask(self.name, mask, window)
        self.calls.append(
            LayerAttention(
                module=self.module,
                layer=self.module.layer_idx,  # type: ignore[arg-type]
                window=window,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_size=key.shape[3],
                value_size=value.shape[3],
            )
        )
        return query.new_empty((1, NUM_ROWS, query.shape[1], value.shape[3]))


def _refuse_options(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if option not in _KNOWN_OPTIONS and value is not None and value is not False:
            raise ModelUnsupported(f"{name} needs `{option}` in attention, which is not served")
    if options.get("is_causal") is False:
        raise ModelUnsupported(f"{name} attends in both directions")
    if not isinstance(options.get("scaling"), float | int):
        raise ModelUnsupported(f"{name} does not say by what to scale attention scores")


def _check_mask(name: str, mask: Any, window: int | None) -> None:
    """Compare the mask's rule with causal attention under `window`, at the points that tell."""
    if not isinstance(mask, MaskRule):
        raise ModelUnsupported(f"{name} makes its own attention mask ({type(mask).__name__})")
    width = window or 4096
    for query in (0, 1, width - 1, width, width + 1, 3 * width + 1, 16 * width):
        first = 0 if window is None else max(0, query - window + 1)
        for key in {0, 1, first - 1, first, first + 1, query // 2, query - 1, query, query + 1}:
            if key < 0:
                continue
            if mask.permits(query, key) != (first <= key <= query):
                kind = "causal" if window is None else f"causal with a window of {window}"
                raise ModelUnsupported(
                    f"{name} has an attention mask that is not {kind}: position {query} "
                    f"and position {key} disagree"
                )


def _not_packed(position_ids: Tensor) -> Tensor | None:  # noqa: ARG001 - transformers' signature
    return None


@contextmanager
def _probing(model: Any, calls: list[LayerAttention]) -> Iterator[None]:
    AttentionInterface.register(_PROBE_NAME, attention_forward)
    AttentionMaskInterface.register(_PROBE_NAME, _mask_rule)
    served = model.config._attn_implementation
    find_packed = masking_utils.find_packed_sequence_indices
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.attention_site = _Recorder(module, name, calls)
    model.config._attn_implementation = _PROBE_NAME
    # Looking for packed sequences reads values, which meta tensors do not have.
    masking_utils.find_packed_sequence_indices = _not_packed
    try:
        with held_frequencies(model):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        model.config._attn_implementation = served
        for module in model.modules():
            module.__dict__.pop("attention_site", None)


@torch.no_grad()
def probe_attention(model: Any, backbone: Any) -> tuple[LayerAttention, ...]:
    """What every layer asks of attention, in layer order.

    Raises `ModelUnsupported` if a layer does not go through the attention interface, or asks for
    something that is not served.
    """
    _refuse_row_mixing(model)
    calls: list[LayerAttention] = []
    ids = torch.zeros((1, NUM_ROWS), dtype=torch.int64, device="meta")
    with _probing(model, calls):
        try:
            backbone(input_ids=ids, position_ids=ids.clone(), use_cache=False)
        except ModelUnsupported:
            raise
        except Exception as error:
            raise ModelUnsupported(
                f"{type(model).__name__} is not served: {_fault(model, error)} "
                f"({type(error).__name__}: {error})"
            ) from error
    _check_layers(model, calls)
    return tuple(calls)


def _fault(model: Any, error: Exception) -> str:
    """Which part of the model failed, by the innermost of its modules on the way to `error`."""
    where, trace = type(model).__name__, error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and "forward" in trace.tb_frame.f_code.co_name:
            where = type(module).__name__
        trace = trace.tb_next
    if "Attention" in where:
        return f"{where} does not go through transformers' attention interface"
    return f"{where} cannot be run on a flat batch"


def _refuse_row_mixing(model: Any) -> None:
    """Rows of a flat batch may meet in attention alone: neighbours belong to other requests."""
    name = type(model).__name__
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise ModelUnsupported(f"{name} is not served: it has layers of type {_listed(kinds)}")
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    mixing = [n for n, module in model.named_modules() if isinstance(module, convolutions)]
    if mixing:
        raise ModelUnsupported(f"{name} is not served: {mixing[0]} is a convolution over tokens")


def _check_layers(model: Any, calls: list[LayerAttention]) -> None:
    name = type(model).__name__
    num_layers = model.config.num_hidden_layers
    layers = [call.layer for call in calls]
    missing = sorted(set(range(num_layers)) - set(layers))
    if missing:
        raise ModelUnsupported(
            f"{name} is not served: {_listed(missing)} of {num_layers} layers did not go through "
            "transformers' attention interface (another kind of attention, or a state-space layer)"
        )
    if any(b <= a for a, b in pairwise(layers)) or len(layers) != num_layers:
        raise ModelUnsupported(f"{name} is not served: its layers attend in the order {layers}")


def _listed(items: Iterable[int | str]) -> str:
    ordered = sorted(items)
    return ", ".join(str(x) for x in ordered[:8]) + (", …" if len(ordered) > 8 else "")

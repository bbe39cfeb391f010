"""Vision towers: their attention, and their patch embeddings as products.

A tower attends through transformers' attention interface under `NAME`. That name holds `flash`, by
which a tower that packs images of several sizes into one sequence makes one call a layer and says
where each image begins (`cu_seq_lens_q`), instead of one call an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.platform.errors import InternalError, ModelUnsupported
from plait.platform.model.adapter_step import LayerStep
from plait.platform.model.leaves import Linear
from plait.platform.ops.lora import LoraSegments, PlacedLora, lora_
from plait.platform.ops.varlen_attention import varlen_attention

NAME = "plait_flash_tower"
BUILD_NAME = "plait_tower"  # a class refuses to be built under a name that holds `flash`
# Attention arguments that are honoured below, or that change nothing.
_KNOWN_OPTIONS = frozenset(
    {"scaling", "dropout", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k"}
    | {"max_length_q", "max_length_k", "max_seqlen", "output_attentions", "output_hidden_states"}
    | {
        "return_dict",
        "use_cache",
        "position_ids",
        "position_embeddings",
        "interpolate_pos_encoding",
    }
)


def register() -> None:
    """Make `NAME` known to transformers, with masks that are None where nothing is masked."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name in (NAME, BUILD_NAME):
        AttentionInterface.register(name, _attention_forward)
        AttentionMaskInterface.register(name, sdpa_mask)


def rename(tower: nn.Module) -> None:
    """Let a tower that was built under `BUILD_NAME` attend under `NAME`."""
    for module in tower.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == BUILD_NAME:
            config._attn_implementation = NAME  # type: ignore[union-attr]


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Entry point for a tower's modules; tensors are `[B, H, T, D]`, the answer `[B, T, H, D]`."""
    name = type(module).__name__
    for option, given in options.items():
        if option not in _KNOWN_OPTIONS and given is not None and given is not False:
            raise InternalError(f"{name} needs `{option}` in a tower's attention")
    if options.get("is_causal") or query.shape != key.shape:
        raise InternalError(f"{name} does not attend from all patches of an image to all")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise InternalError(f"{name} makes an attention mask of its own")
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    bounds = options.get("cu_seq_lens_q")
    ends = None if bounds is None else bounds.tolist()
    return tower_attention(query, key, value, scale, ends, attention_mask), None


def tower_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bounds: Sequence[int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Full attention within each segment, `[B, T, H, D]`; a segment's bits do not depend on others.

    Args:
        query: `[B, H, T, D]`.
        key: The same.
        value: The same.
        scale: Multiplies q · k.
        bounds: Segment i is the rows bounds[i]:bounds[i + 1]; None: each of B is one segment.
        mask: bool `[B, 1, T or 1, T]`, True where a key is seen, by every row; None: all are.
    """
    batch, _, length, _ = query.shape
    bounds = [0, length] if bounds is None else bounds
    if bounds[-1] != length or (batch > 1 and len(bounds) > 2):
        raise InternalError(f"segments {bounds[-1]} of a tower's {length} rows")
    starts = [image * length + start for image in range(batch) for start in bounds[:-1]]
    row_bounds = torch.tensor([*starts, batch * length], dtype=torch.int32)
    key_bounds = row_bounds
    rows, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if mask is not None:
        if mask.shape[2] > 1 and not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
            raise InternalError("rows of a tower that see other keys than their neighbours")
        seen = mask[:, 0, 0].reshape(-1)
        keys, values = keys[seen], values[seen]
        before = functional.pad(seen.cumsum(0), (1, 0))
        key_bounds = before[row_bounds.long()].to(torch.int32)
    out = varlen_attention(rows, keys, values, row_bounds, key_bounds, scale=scale)
    return out.view(batch, length, *out.shape[1:])


class TowerStep(LayerStep):
    """The step of the leaves in a tower and its projector: every row has the same adapters.

    How many rows an image has differs from leaf to leaf, so images with other adapters are other
    runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._adapters: Sequence[tuple[PlacedLora, float]] = ()
        self._by_rows: dict[int, LoraSegments] = {}

    def begin(self, adapters: Sequence[tuple[PlacedLora, float]]) -> None:
        """Apply these from now on."""
        self._adapters = adapters
        self._by_rows = {}
        self.segments = self._of(1) if adapters else None

    def _of(self, num_rows: int) -> LoraSegments:
        found = self._by_rows.get(num_rows)
        if found is None:
            found = LoraSegments((0, num_rows, placed, scale) for placed, scale in self._adapters)
            self._by_rows[num_rows] = found
        return found

    def change(self, out: Tensor, x: Tensor, leaf: int) -> Tensor:
        """Add the low-rank changes in place."""
        assert self.segments is not None
        if self.segments.changes(leaf):
            rows = out.view(-1, out.shape[-1])
            lora_(rows, x.reshape(-1, x.shape[-1]), self._of(len(rows)), leaf)
        return out


class PatchEmbedding(nn.Module):
    """A convolution whose patches do not overlap, as one product: the same sums, much quicker."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.kernel: tuple[int, ...] = tuple(convolution.kernel_size)
        channels, dtype = convolution.in_channels, convolution.weight.dtype
        num_inputs = channels * torch.Size(self.kernel).numel()
        has_bias = convolution.bias is not None
        # Not a child: its names are not the checkpoint's.
        self._leaf = (Linear(num_inputs, convolution.out_channels, has_bias=has_bias, dtype=dtype),)
        self.weight = convolution.weight.detach()  # a meta tensor: families ask for its dtype
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        # A tower without any parameter of its own could not tell its dtype.
        self.register_parameter("plait_dtype", nn.Parameter(torch.empty(0, dtype=dtype), False))

    def set_weight(self, weight: Tensor) -> None:
        """Pack the convolution's `[D, C, *kernel]`."""
        self._leaf[0].set_weight(weight.flatten(1))

    def set_bias(self, bias: Tensor) -> None:
        """Keep `bias` `[D]`."""
        self._leaf[0].set_bias(bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, *sizes]` to `[N, D, *numbers of patches]`; what fills no patch is left out."""
        counts = [size // width for size, width in zip(x.shape[2:], self.kernel, strict=True)]
        for axis, (count, width) in enumerate(zip(counts, self.kernel, strict=True), start=2):
            x = x.narrow(axis, 0, count * width)
        pairs = [n for pair in zip(counts, self.kernel, strict=True) for n in pair]
        x = x.reshape(*x.shape[:2], *pairs)
        num_axes = len(counts)
        at, inside = range(2, 2 + 2 * num_axes, 2), range(3, 3 + 2 * num_axes, 2)
        rows = x.permute(0, *at, 1, *inside).flatten(1 + num_axes)
        return self._leaf[0](rows).movedim(-1, 1)  # type: ignore[no-any-return]


def replace_patch_embeddings(tower: nn.Module) -> None:
    """Put `PatchEmbedding` in the place of a tower's convolutions.

    Raises `ModelUnsupported` where one is of another kind.
    """
    for parent_name, parent in list(tower.named_modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                continue
            if not _is_patchwise(child):
                raise ModelUnsupported(
                    f"{type(tower).__name__} is not served: {parent_name}.{name} is a convolution "
                    "over patches that overlap"
                )
            setattr(parent, name, PatchEmbedding(child))  # type: ignore[arg-type]


def _is_patchwise(convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    padding = convolution.padding
    return (
        not isinstance(convolution, nn.Conv1d)
        and convolution.stride == convolution.kernel_size
        and (padding == "valid" or not any(padding))
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
    )

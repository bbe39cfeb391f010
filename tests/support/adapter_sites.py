"""The sites of a transformers model, found by its modules alone, for tests of the format."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from plait.adapters.sites import ModelSites, Site, SiteKind


def sites_of(model: Any, *, name: str = "base") -> ModelSites:
    """Every linear, the embedding, the head and the experts of a model."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found: dict[str, Site] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            shape = tuple(module.weight.shape)
            transposed = isinstance(module, Conv1D)
            found[path] = Site(
                name=path,
                kind=SiteKind.HEAD if module is head else SiteKind.LINEAR,
                in_features=shape[0] if transposed else shape[1],
                out_features=shape[1] if transposed else shape[0],
                affects_kv=module is not head,
                is_transposed=transposed,
            )
        elif module is embedding:
            found[path] = Site(
                name=path,
                kind=SiteKind.EMBEDDING,
                in_features=module.num_embeddings,
                out_features=module.embedding_dim,
            )
        elif path.endswith(".experts"):
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3:
                    _add_experts(found, f"{path}.{attribute}", parameter.shape, module)
    return ModelSites(
        sites=found,
        is_tied=bool(model.config.tie_word_embeddings),
        vocab_size=head.weight.shape[0],
        model_name=name,
    )


def _add_experts(found: dict[str, Site], name: str, shape: Any, module: nn.Module) -> None:
    transposed = bool(getattr(module, "is_transposed", False))
    num_experts, first, second = shape
    found[name] = Site(
        name=name,
        kind=SiteKind.EXPERTS,
        in_features=first if transposed else second,
        out_features=second if transposed else first,
        num_experts=num_experts,
        is_transposed=transposed,
    )

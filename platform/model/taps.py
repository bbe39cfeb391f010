"""Hidden rows from between the layers of a step, for those who draft from them.

Taken by hooks that hang on the layers for the length of one forward: a step that nobody taps runs
what it always ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from plait.platform.errors import ModelUnsupported

if TYPE_CHECKING:
    from plait.platform.model.probe import LayerAttention


class Taps:
    """Where rows pass from layer to layer in one backbone."""

    def __init__(
        self, backbone: nn.Module, layers: Iterable[LayerAttention], hidden_size: int
    ) -> None:
        self._hidden_size = hidden_size
        attentions = [layer.module for layer in layers]
        self._layers = decoder_layers(backbone, attentions)

    @property
    def num_layers(self) -> int:
        """Layers that can be tapped."""
        return len(self._layers)

    @contextmanager
    def taken(self, taps: tuple[int, ...]) -> Iterator[Callable[[], list[Tensor]]]:
        """Within, one forward runs; what is given then has the rows `[T, D]` of each tap."""
        found: dict[int, Tensor] = {}

        def keep(tap: int, value: Any) -> None:
            rows = value[0] if isinstance(value, tuple) else value
            if not isinstance(rows, Tensor) or rows.shape[::2] != (1, self._hidden_size):
                raise ModelUnsupported("the layers of this model do not pass on one row per token")
            found[tap] = rows[0]

        with ExitStack() as stack:
            for tap in dict.fromkeys(taps):
                stack.callback(self._hook(tap, keep).remove)
            yield lambda: [found[tap] for tap in taps]

    def _hook(self, tap: int, keep: Callable[[int, Any], None]) -> Any:
        if not self._layers:
            raise ModelUnsupported("the layers of this model are no list, so none can be tapped")
        if not 0 <= tap <= len(self._layers):
            raise ModelUnsupported(f"there is no layer {tap}: there are {len(self._layers)}")
        if tap > 0:
            return self._layers[tap - 1].register_forward_hook(lambda _m, _a, out: keep(tap, out))

        def before(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            keep(tap, args[0] if args else options["hidden_states"])

        return self._layers[0].register_forward_pre_hook(before, with_kwargs=True)


def decoder_layers(backbone: nn.Module, attentions: list[nn.Module]) -> list[nn.Module]:
    """The list of modules each of which holds one of `attentions`, in their order; else nothing."""
    for module in backbone.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(attentions):
            continue
        layers = list(module)
        pairs = zip(layers, attentions, strict=True)
        if all(any(part is attention for part in layer.modules()) for layer, attention in pairs):
            return layers
    return []

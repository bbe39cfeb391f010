"""Tracing one model's decoder: what each kind of its modules writes down when it is called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.platform.config import KVGroup
from plait.platform.model.build import Skeleton
from plait.platform.model.elementwise import is_activation
from plait.platform.model.experts import is_experts
from plait.platform.model.leaves import Linear, LinearSlice, RMSNorm
from plait.platform.model.merge import eps_of
from plait.platform.model.mlp import GatedMLP, activation_name
from plait.platform.model.native.instructions import (
    ActivationOp,
    AddEmbedsOp,
    AttentionOp,
    CallOp,
    Columns,
    GatedActivationOp,
    HeadNormOp,
    LayerNormOp,
    LinearOp,
    RMSNormOp,
    RopeOp,
    TapOp,
)
from plait.platform.model.native.ropes import (
    GrowingTable,
    NoRotation,
    Rotation,
    find_rotation,
)
from plait.platform.model.native.trace import NUM_ROWS, NotLowered, Trace, Tracer, answering, unseen
from plait.platform.model.taps import decoder_layers
from plait.platform.ops.gated_activation import Activation

_PLACEHOLDERS: dict[torch.dtype, Tensor] = {}  # of rows, where only their dtype is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A layer norm as `LayerNormOp` has it."""

    eps: float
    offset: float


@dataclass(slots=True, eq=False)
class DecoderTrace:
    """A traced decoder with the tables of its rotations."""

    trace: Trace
    tables: list[GrowingTable]
    called: dict[str, str] = field(default_factory=dict)  # modules left to torch, and why


class DecoderTracer:
    """Traces a skeleton's decoder, whose buffers are filled; weights may be missing."""

    def __init__(
        self, skeleton: Skeleton, kv_groups: Sequence[KVGroup], *, num_positions: int
    ) -> None:
        self._skeleton = skeleton
        self._backbone: Any = skeleton.backbone
        self._config = skeleton.model.config.get_text_config()
        self._dtype: torch.dtype = skeleton.model.config.dtype
        self._num_positions = num_positions
        self._names = {m: name for name, m in self._backbone.named_modules()}
        self._leaf_names = {site.leaf: name for name, site in skeleton.leaves.sites.items()}
        for owner in skeleton.leaves.merged:
            self._leaf_names[owner.leaf] = _merged_name(owner.names)
        self._numbers = {p.module: p.leaf for p in skeleton.places.by_name.values()}
        self._layers = decoder_layers(self._backbone, [x.module for x in skeleton.layers])
        self._groups = {
            layer: (group, index, kv_group.window)
            for group, kv_group in enumerate(kv_groups)
            for index, layer in enumerate(kv_group.layers)
        }
        family = None if skeleton.vision is None else skeleton.vision.family
        self._num_axes = 3 if family is not None and family.has_grid_positions else 1
        self._num_levels = _num_levels(skeleton)
        self._rotations: dict[Any, Rotation] = {}
        self._tables: list[GrowingTable] = []
        self._layer_norms: dict[Any, _Form | None] = {}
        self._activations: dict[type[nn.Module], Activation | None] = {}
        self._tracer: Tracer

    @torch.no_grad()
    def run(self) -> DecoderTrace:
        """Trace it.

        Raises `NotLowered`, whose message names the module.
        """
        if not self._layers:
            raise NotLowered("the decoder's layers are no list of modules")
        called = {
            child: "a mixture of experts"
            for layer in self._layers
            for child in layer.children()
            if any(is_experts(part) for part in child.modules())
        }
        while True:
            try:
                trace = self._trace(called)
            except NotLowered as error:
                found = self._callable(error, called)
                if not found:
                    raise NotLowered(self._place(error) + str(error)) from error
                called.update(dict.fromkeys(found, str(error)))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise NotLowered(self._place(error) + what) from error
            else:
                names = {self._names[module]: why for module, why in called.items()}
                return DecoderTrace(trace, self._tables, names)

    def _trace(self, called: Iterable[nn.Module]) -> Trace:
        positions = torch.arange(NUM_ROWS)[None]
        if self._num_axes > 1:
            positions = positions.expand(self._num_axes, 1, -1).contiguous()
        tracer = self._tracer = Tracer(positions, self._dtype)
        width = self._config.hidden_size
        rows = tracer.stand_in(tracer.value(width), (1, NUM_ROWS, width))
        sites = {x.module: x.module.__dict__.get("attention_site") for x in self._skeleton.layers}
        first = self._layers[0].register_forward_pre_hook(unseen(self._before), with_kwargs=True)
        hooks = [first]
        for index, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_hook(unseen(partial(self._behind, 1 + index))))
        try:
            for layer_attention in self._skeleton.layers:
                attend = unseen(partial(self._attend, layer_attention.layer))
                layer_attention.module.__dict__["attention_site"] = attend
            with answering(self._forwards(called)), tracer:
                output = self._backbone(inputs_embeds=rows, position_ids=positions, use_cache=False)
                tracer.trace.output = tracer.rows(output.last_hidden_state)
        finally:
            for module, site in sites.items():
                if site is None:
                    del module.__dict__["attention_site"]
                else:
                    module.__dict__["attention_site"] = site
            for hook in hooks:
                hook.remove()
            self._skeleton.leaves.release()
        return tracer.trace

    # Which module answers how

    def _forwards(self, called: Iterable[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
        forwards: dict[nn.Module, Callable[..., Any]] = {
            leaf: partial(self._linear, leaf) for leaf in self._leaf_names
        }
        embedding = self._skeleton.model.get_input_embeddings()
        for module in self._backbone.modules():
            answer = self._answer(module)
            if answer is not None and module is not embedding:
                forwards[module] = answer
        for module in called:
            for part in module.modules():
                forwards.pop(part, None)
                if isinstance(part, LinearSlice):
                    forwards.pop(part.owner.leaf, None)
            forwards[module] = partial(self._call, module, module.forward)
        return forwards

    def _answer(self, module: Any) -> Callable[..., Any] | None:
        if isinstance(module, RMSNorm):
            return partial(self._rms_norm, module)
        if isinstance(module, GatedMLP):
            return partial(self._gated, module)
        if _is_rotary(module) or isinstance(module, nn.Embedding):
            return partial(self._by_position, module.forward)
        if is_activation(module):
            if type(module) not in self._activations:
                self._activations[type(module)] = activation_name(module)
            return partial(self._activation, module)
        if self._layer_norm_form(module) is not None:
            return partial(self._layer_norm, module)
        return None

    def _layer_norm_form(self, module: Any) -> _Form | None:
        if "LayerNorm" not in type(module).__name__ or list(module.children()):
            return None
        weight = getattr(module, "weight", None)
        key = (type(module), None if weight is None else tuple(weight.shape), eps_of(module))
        if key not in self._layer_norms:
            self._layer_norms[key] = _layer_norm_form(module, self._config.hidden_size)
        return self._layer_norms[key]

    # The answers

    def _linear(self, leaf: Linear, x: Tensor) -> Tensor:
        t = self._tracer
        if leaf.out_dtype not in (None, self._dtype):
            raise NotLowered(f"a product gives {leaf.out_dtype}")
        value = t.rows(x)
        output = self._emit_linear(leaf, value)
        return t.stand_in(output, (*x.shape[:-1], leaf.out_features))

    def _emit_linear(self, leaf: Linear, value: int) -> int:
        output = self._tracer.value(leaf.out_features)
        self._tracer.emit(
            LinearOp(
                output=output,
                input=value,
                weight=leaf.packed or leaf.unfilled,
                bias=leaf.bias,
                leaf=self._numbers.get(leaf, -1),
                name=self._leaf_names[leaf],
            )
        )
        return output

    def _rms_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        t = self._tracer
        columns = self._columns(x)
        if columns is not None:
            t.emit(
                HeadNormOp(
                    heads=columns, weight=norm.weight, eps=norm.eps,
                    weight_offset=norm.weight_offset, round_first=norm.round_first,
                )
            )  # fmt: skip
            answer = t.changed(columns)
            if x.dim() == 4:
                return answer if t.is_rows_first(x) else answer.transpose(1, 2)
            return answer.view(x.shape)
        value = t.rows(x)
        output = t.value(t.trace.widths[value])
        t.emit(
            RMSNormOp(
                output=output, input=value, weight=norm.weight, eps=norm.eps,
                weight_offset=norm.weight_offset, round_first=norm.round_first,
            )
        )  # fmt: skip
        return t.stand_in(output, tuple(x.shape))

    def _columns(self, x: Tensor) -> Columns | None:
        """Where `x` is heads of a wider register, or a part of it as one head."""
        if x.dim() == 4:
            return self._tracer.heads(x.transpose(1, 2) if self._tracer.is_rows_first(x) else x)
        if x.dim() == 3:
            found = self._tracer.heads(x[:, None])
            if found is None or found.head_size == self._tracer.trace.widths[found.register]:
                return None
            return found
        return None

    def _layer_norm(self, norm: Any, x: Tensor) -> Tensor:
        t, form = self._tracer, self._layer_norm_form(norm)
        assert form is not None
        value = t.rows(x)
        output = t.value(t.trace.widths[value])
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if weight is not None and form.offset:
            weight = weight + form.offset
        t.emit(LayerNormOp(output=output, input=value, weight=weight, bias=bias, eps=form.eps))
        return t.stand_in(output, tuple(x.shape))

    def _gated(self, mlp: Any, x: Tensor) -> Tensor:
        t = self._tracer
        both = self._emit_linear(mlp._gate_up[0], t.rows(x))
        inner = t.value(t.trace.widths[both] // 2)
        t.emit(GatedActivationOp(output=inner, input=both, activation=mlp.activation))
        if type(mlp.down_proj) is not Linear:
            raise NotLowered("its last product is shared with others")
        output = self._emit_linear(mlp.down_proj, inner)
        return t.stand_in(output, (*x.shape[:-1], t.trace.widths[output]))

    def _activation(self, module: nn.Module, x: Tensor) -> Any:
        name = self._activations[type(module)]
        if name is None:
            return self._call(module, lambda rows: rows, x)
        t = self._tracer
        value = t.rows(x)
        output = t.value(t.trace.widths[value])
        t.emit(ActivationOp(output=output, input=value, activation=name))
        return t.stand_in(output, tuple(x.shape))

    def _call(
        self, module: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs:
            raise NotLowered(f"{type(module).__name__} takes more than rows")
        t = self._tracer
        device = "meta" if any(p.is_meta for p in module.parameters()) else "cpu"
        answer = forward(torch.zeros(x.shape, dtype=x.dtype, device=device))
        others = answer[1:] if isinstance(answer, tuple) else None
        value = t.rows(x)
        output = t.value(t.trace.widths[value])
        name = self._names[module]
        t.emit(CallOp(output=output, input=value, module=RowsCall(module), name=name))
        rows = t.stand_in(output, tuple(x.shape))
        return rows if others is None else (rows, *others)

    def _by_position(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rotary modules and tables of positions are run as they are, and written down whole."""
        args, kwargs = self._without_rows(args), self._without_rows(kwargs)
        result = forward(*args, **kwargs)
        self._tracer.record(forward, args, kwargs, result)
        return result

    def _without_rows(self, value: Any) -> Any:
        """Rows among a rotary module's arguments tell it a dtype and a device only."""
        if isinstance(value, dict):
            return {name: self._without_rows(part) for name, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._without_rows(part) for part in value)
        if isinstance(value, Tensor) and value.is_floating_point():
            return _PLACEHOLDERS.setdefault(value.dtype, torch.zeros((1, 1, 1), dtype=value.dtype))
        return value

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        t = self._tracer
        if mask is not None:
            raise NotLowered("attention has a mask")
        q, k, v = self._turned(query, "queries"), self._turned(key, "keys"), t.heads(value)
        if v is None:
            raise NotLowered("values: put together by torch")
        group, index, window = self._groups[layer]
        output = t.value(q.num_heads * v.head_size)
        sinks = options.get("s_aux")
        t.emit(
            AttentionOp(
                output=output, query=q, key=k, value=v, group=group, layer=index,
                scale=float(options["scaling"]), window=window,
                softcap=float(options.get("softcap") or 0.0),
                sinks=None if sinks is None else sinks.detach().float(),
            )
        )  # fmt: skip
        return t.stand_in(output, (1, NUM_ROWS, q.num_heads, v.head_size))

    def _turned(self, heads: Tensor, what: str) -> Columns:
        """The columns of queries or keys, turned by their positions where the family does that."""
        t = self._tracer
        columns = t.heads(heads)
        if columns is not None:
            return columns
        try:
            sources = t.sources(heads)
            is_rows_first = t.is_rows_first(sources[0])
            columns = t.heads(sources[0].transpose(1, 2) if is_rows_first else sources[0])
            assert columns is not None
            inputs = {id(source): "x" for source in sources}
            replay = t.replay(heads, {**inputs, id(t.positions): "positions"})
            key = (replay.form(), columns.head_size)
            if key not in self._rotations:
                self._rotations[key], table = find_rotation(
                    partial(_turn, replay, is_rows_first),
                    size=columns.head_size, num_axes=self._num_axes,
                    limit=self._num_positions, dtype=self._dtype,
                )  # fmt: skip
                self._tables.append(table)
        except NotLowered as error:
            raise NotLowered(f"{what}: {error}") from error
        except NoRotation as error:
            raise NotLowered(f"{what}: what the family does to them {error}") from error
        rotation = self._rotations[key]
        t.emit(
            RopeOp(
                heads=columns, table=rotation.table,
                is_interleaved=rotation.is_interleaved, round_products=rotation.round_products,
            )
        )  # fmt: skip
        t.changed(columns)
        return columns

    # Between the layers

    def _before(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        rows = args[0] if args else options["hidden_states"]
        self._tracer.emit(TapOp(input=self._tracer.rows(rows), layer=0))

    def _behind(self, count: int, _module: nn.Module, _args: Any, output: Any) -> None:
        t = self._tracer
        value = t.rows(output[0] if isinstance(output, tuple) else output)
        t.emit(TapOp(input=value, layer=count))
        if count < self._num_levels:
            t.emit(AddEmbedsOp(output=value, level=count))

    # What went wrong

    def _path(self, error: BaseException) -> list[nn.Module]:
        """The decoder's modules on the way to an error, outermost first."""
        path: list[nn.Module] = []
        trace = error.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._names and module not in path[-1:]:
                path.append(module)
            trace = trace.tb_next
        return path

    def _place(self, error: BaseException) -> str:
        names = [name for m in self._path(error) if (name := self._names[m])]
        return f"{names[-1]}: " if names else ""

    def _callable(self, error: NotLowered, called: dict[nn.Module, str]) -> list[nn.Module]:
        """What to leave to torch instead: the part of a layer that failed, in every layer."""
        attentions = {x.module for x in self._skeleton.layers}
        path = self._path(error)
        for layer in self._layers:
            if layer not in path:
                continue
            children = {child: name for name, child in layer.named_children()}
            part = next((m for m in path if m in children), None)
            if part is None or part in called or any(m in attentions for m in part.modules()):
                return []
            same = [getattr(x, children[part], None) for x in self._layers]
            return [m for m in same if type(m) is type(part) and m not in called]
        return []


class RowsCall:
    """A family's module as a function of rows `[T, D]`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, rows: Tensor) -> Tensor:
        """The module's answer, `[T, D]`; what else it gives is left out."""
        output = self.module(rows[None])
        answer: Tensor = output[0] if isinstance(output, tuple) else output
        return answer.reshape(rows.shape)


def _turn(replay: Any, is_rows_first: bool, x: Tensor, positions: Tensor) -> Tensor:
    given = x.transpose(1, 2).contiguous() if is_rows_first else x
    turned: Tensor = replay(x=given, positions=positions, cast_to=x.dtype)
    return turned


def _is_rotary(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))


def _merged_name(names: Sequence[str]) -> str:
    """`model.layers.0.self_attn.q_proj+k_proj+v_proj`."""
    return "+".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def _num_levels(skeleton: Skeleton) -> int:
    if skeleton.vision is None or not skeleton.vision.family.has_levels:
        return 1
    return 1 + len(skeleton.model.config.vision_config.deepstack_visual_indexes)


def _layer_norm_form(norm: Any, size: int) -> _Form | None:
    """Find by trial whether `norm` is a layer norm of whole rows."""
    weight = getattr(norm, "weight", None)
    if weight is not None:
        if weight.dim() != 1:
            return None
        size = weight.shape[0]
    eps = eps_of(norm)
    trial = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(size, generator=generator))
    scale = torch.tensor([1e-3, 1.0, 30.0])[:, None]  # the first row is ruled by eps
    rows = torch.randn(3, size, generator=generator) * scale
    wanted = trial(rows)
    bias = getattr(trial, "bias", None)
    for e in (1e-5,) if eps is None else (eps,):
        for offset in (0.0, 1.0):
            known = None if weight is None else trial.weight + offset
            ours = functional.layer_norm(rows, (size,), known, bias, e)
            if torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6):
                return _Form(eps=e, offset=offset)
    return None

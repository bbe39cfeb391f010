"""A tower and its projector as a list of operations, run without their family's class.

Recorded over one image when a model is first started, compared with the class, and written down
beside the layer program; a later start needs no transformers for its first image, which took it
2.7 s of processor time. Only where every image has the same shape and the tower is small: larger
ones would make a first start much longer. Images run one after the other, whose bits are the same
as in a batch. Leaves are called as such, so that adapters change them as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plait.platform.kv.pages import DTYPES
from plait.platform.model.families import VisionFamily
from plait.platform.model.leaves import Linear, LinearSlice
from plait.platform.model.native.stored import NotStorable
from plait.platform.model.tower import PatchEmbedding
from plait.platform.model.vision import VisionParts, rows_of

_MOST_FLOP = 1e11  # of one image: a second or two, and recording and comparing take four
_MOST_INLINE = 4096  # numbers of a constant that is no weight
_LEAF = "leaf"
_LINEAR = (Linear, LinearSlice)


# --- to data ---


def describe_tower(
    vision: VisionParts,
    leaves: Sequence[Linear],
    name_of: Callable[[Tensor], str | None],
    dtype: torch.dtype,
) -> tuple[Any, list[Linear]]:
    """What JSON can have of the tower, and the leaves it calls by number, `leaves` first.

    Raises `NotStorable`.
    """
    shape = _shape(vision)
    inner = [m for part in vision.encoding for m in part.modules()]
    called = [*leaves, *(m._leaf[0] for m in inner if isinstance(m, PatchEmbedding))]
    image = torch.rand((1, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    recording = _Recording(name_of)
    recording.number(image)
    hooks = [h for number, leaf in enumerate(called) for h in recording.listen(leaf, number)]
    try:
        with torch.inference_mode(), recording.mode():
            out = rows_of(_features(vision.root, image))
    finally:
        for hook in hooks:
            hook.remove()
    described = {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "operations": recording.operations,
        "constants": recording.constants,
        "out": recording.known(out),
    }
    return described, called


def _shape(vision: VisionParts) -> tuple[int, int, int]:
    family: VisionFamily = vision.family
    if family.tensors != ("pixel_values",) or family.is_nested or family.has_levels:
        raise NotStorable("a tower whose images differ in shape")
    config = vision.root.config.vision_config
    side, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if not isinstance(side, int) or not isinstance(patch, int) or getattr(
        config, "num_channels", 3
    ) != 3:  # fmt: skip
        raise NotStorable("a tower that names no size of images")
    inner = [m for part in vision.encoding for m in part.modules()]
    weights = sum(m.in_features * m.out_features for m in inner if isinstance(m, _LINEAR))
    if 2 * weights * (side // patch) ** 2 > _MOST_FLOP:
        raise NotStorable("a large tower")
    return 3, side, side


def _features(root: Any, image: Tensor) -> Any:
    return root.get_image_features(pixel_values=image, return_dict=True).pooler_output


class _Recording:
    """Numbers tensors in the order in which they come, and writes down what makes them."""

    def __init__(self, name_of: Callable[[Tensor], str | None]) -> None:
        self._name_of = name_of
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is of nobody else for as long
        self._is_paused = False
        self.operations: list[Any] = []
        self.constants: list[Any] = []

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor that an operation gave."""
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return found

    def known(self, tensor: Tensor) -> int:
        """The number of a tensor that is there."""
        if id(tensor) not in self._numbers:
            self._constant(tensor)
        return self._numbers[id(tensor)]

    def listen(self, leaf: Linear, number: int) -> list[Any]:
        """Write down calls of a leaf as one operation each. Returns the hooks."""

        def begin(*_: Any) -> None:
            self._is_paused = True

        def end(_: Any, inputs: Any, out: Tensor) -> None:
            self._is_paused = False
            given = [{"t": self.known(inputs[0])}]
            self.operations.append([_LEAF, [number, *given], {}, [self.number(out)]])

        return [leaf.register_forward_pre_hook(begin), leaf.register_forward_hook(end)]

    def mode(self) -> Any:
        """Within it, everything else is written down."""
        from torch.utils._python_dispatch import TorchDispatchMode

        recording = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                del types
                return recording._ran(func, args, kwargs or {})

        return Mode()

    def _ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_paused:
            return func(*args, **kwargs)
        given = [self._data(a) for a in args], {k: self._data(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        outs = out if isinstance(out, tuple | list) else [out]
        numbers = [self.number(o) if isinstance(o, Tensor) else None for o in outs]
        if None in numbers and numbers != [None]:
            raise NotStorable(f"{func} gives tensors and more")
        if numbers == [None] and out is not None:
            raise NotStorable(f"{func} reads a value")
        self.operations.append([str(func), *given, [n for n in numbers if n is not None]])
        return out

    def _data(self, value: Any) -> Any:
        match value:
            case Tensor():
                return {"t": self.known(value)}
            case bool() | int() | float() | str() | None:
                return value
            case list() | tuple():
                return [self._data(v) for v in value]
            case torch.dtype() | torch.memory_format() | torch.layout():
                return {"torch": str(value).removeprefix("torch.")}
            case torch.device() if value.type == "cpu":
                return {"device": "cpu"}
        raise NotStorable(f"an operation takes a {type(value).__name__}")

    def _constant(self, tensor: Tensor) -> None:
        name = self._name_of(tensor)
        if name is not None:
            self.constants.append([self.number(tensor), name])
            return
        if tensor.numel() > _MOST_INLINE or tensor.device.type != "cpu":
            raise NotStorable("a tower with a large constant that is no weight")
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in ("float32", "bfloat16", "float16", "int32", "int64", "bool"):
            raise NotStorable(f"a constant in {kind}")
        inline = {"values": tensor.detach().tolist(), "dtype": kind}
        self.constants.append([self.number(tensor), inline])


# --- and back ---


class StoredTower:
    """Runs what `describe_tower` described. Has of a family's class what an encoder asks for."""

    def __init__(
        self,
        stored: Any,
        leaves: Sequence[Linear],
        find: Callable[[str], Tensor],
        open_class: Callable[[], VisionParts],
    ) -> None:
        """`leaves` by number; `open_class` gives the family's own, for images of other shapes."""
        self._shape = tuple(stored["shape"])
        self._dtype = DTYPES[stored["dtype"]]
        self._constants = {
            number: find(what) if isinstance(what, str) else _tensor(what)
            for number, what in stored["constants"]
        }
        self._leaves = leaves
        self._out = stored["out"]
        self._calls = _with_ends(stored["operations"], self._constants, self._out)
        self._open_class = open_class
        self._class: VisionParts | None = None

    def get_image_features(self, *, pixel_values: Tensor, return_dict: bool = True) -> Any:
        """As the family's; `return_dict` is how it is always asked."""
        if pixel_values.shape[1:] != self._shape or pixel_values.dtype is not self._dtype:
            self._class = self._class or self._open_class()
            return self._class.root.get_image_features(
                pixel_values=pixel_values, return_dict=return_dict
            )
        rows = [self._run(pixel_values[i : i + 1]) for i in range(len(pixel_values))]
        return SimpleNamespace(pooler_output=rows[0] if len(rows) == 1 else torch.cat(rows))

    def _run(self, image: Tensor) -> Tensor:
        values: dict[int, Tensor] = {0: image, **self._constants}
        for call, args, kwargs, outs, ends in self._calls:
            given = [_value(a, values) for a in args]
            if call is None:
                made: Any = self._leaves[given[0]](given[1])
            else:
                made = call(*given, **{k: _value(v, values) for k, v in kwargs.items()})
            values.update(zip(outs, _all(made), strict=True))
            for number in ends:
                del values[number]
        return values[self._out]


def _all(made: Any) -> Sequence[Tensor]:
    if isinstance(made, tuple | list):
        return made
    return [] if made is None else [made]


def _with_ends(operations: Any, constants: Mapping[int, Any], out: int) -> list[Any]:
    """The calls with what is not needed any more behind each."""
    last: dict[int, int] = {}
    for index, (_, args, kwargs, outs) in enumerate(operations):
        for number in [*_numbers([args, list(kwargs.values())]), *outs]:
            last[number] = index
    ends: dict[int, list[int]] = {}
    for number, index in last.items():
        if number not in constants and number != out:
            ends.setdefault(index, []).append(number)
    return [
        (None if name == _LEAF else _operation(name), args, kwargs, outs, ends.get(index, []))
        for index, (name, args, kwargs, outs) in enumerate(operations)
    ]


def _numbers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [value["t"]] if "t" in value else []
    return [n for v in value for n in _numbers(v)] if isinstance(value, list) else []


def _operation(name: str) -> Any:
    namespace, function, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), function), overload)


def _value(data: Any, values: Mapping[int, Tensor]) -> Any:
    if isinstance(data, dict):
        if "t" in data:
            return values[data["t"]]
        return torch.device("cpu") if "device" in data else getattr(torch, data["torch"])
    return [_value(d, values) for d in data] if isinstance(data, list) else data


def _tensor(data: Any) -> Tensor:
    return torch.tensor(data["values"], dtype=getattr(torch, data["dtype"]))


def same_tower(one: Any, other: Any, stored: Any) -> bool:
    """Whether two roots make the same of images, one alone and two in a batch."""
    images = torch.rand((3, *stored["shape"]), generator=torch.Generator().manual_seed(1))
    images = images.to(DTYPES[stored["dtype"]])
    with torch.inference_mode():
        return all(
            torch.equal(rows_of(_features(one, part)), rows_of(_features(other, part)))
            for part in (images[:1], images[1:])
        )

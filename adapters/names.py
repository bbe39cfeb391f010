"""Tensor names of PEFT files, and the sites of the model that they mean.

A name is a module's path and a role ("…q_proj" + ".lora_A.weight"). Paths are those of the class
that the adapter was trained in, which need not be the served one: a text model may be served inside
a vision-language wrapper, or the other way round. Exactly one way to translate paths has to fit
*every* tensor; anything else would serve a part of the adapter, or a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from plait.adapters.sites import ModelSites, Site, SiteKind


class Role(StrEnum):
    """What a tensor is to its module; the value is what follows the module's path."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    B_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    TOKENS = "token_adapter.trainable_tokens_delta"
    WEIGHT = "weight"
    BIAS = "bias"
    # What PEFT saves beside these where training resized the vocabulary.
    SAVED_WEIGHT = "modules_to_save.weight"
    SAVED_BIAS = "modules_to_save.bias"
    ORIGINAL_WEIGHT = "original_module.weight"
    ORIGINAL_BIAS = "original_module.bias"


# More ways to write a role: with the wrappers that PEFT puts around what it trains.
_SUFFIXES: tuple[tuple[str, Role], ...] = (
    *((role.value, role) for role in Role if role not in (Role.WEIGHT, Role.BIAS)),
    ("lora_magnitude_vector.weight", Role.MAGNITUDE),
    ("token_adapter.base_layer.weight", Role.WEIGHT),
    ("base_layer.weight", Role.WEIGHT),
    ("base_layer.bias", Role.BIAS),
    ("weight", Role.WEIGHT),
    ("bias", Role.BIAS),
)
_PREFIX = "base_model.model."


def split_name(name: str) -> tuple[str, Role] | None:
    """The module's path and the role of a tensor; None for what PEFT gives no name like that."""
    path = name.removeprefix(_PREFIX)
    for suffix, role in _SUFFIXES:
        module = path.removesuffix(f".{suffix}")
        if module != path and module:
            # What is left of PEFT's own words marks a tensor of some other method.
            return None if ".lora_" in module or "token_adapter" in module else (module, role)
    return None


@dataclass(frozen=True, slots=True)
class Target:
    """The site that a module of the file stands for."""

    site: Site
    expert: int | None = None  # a module of one expert
    half: int | None = None  # which half of the site's outputs, where it fuses gate and up


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The tensors of a file by what they are."""

    modules: Mapping[str, Mapping[Role, str]]  # name by role, by module
    copies: tuple[tuple[str, str], ...]  # names of tensors that have to be equal
    unmatched: tuple[str, ...]  # that have no place in an adapter


def by_module(names: Iterable[str]) -> Named:
    """Tensor names by module and role.

    A module that training saved whole stands in the file up to three times where it also resized
    the vocabulary: as `weight`, again as `modules_to_save.weight`, and as it was before training,
    which nothing uses.
    """
    modules: dict[str, dict[Role, str]] = {}
    unmatched, copies = [], []
    for name in names:
        found = split_name(name)
        if found is None or found[1] in modules.get(found[0], {}):
            unmatched.append(name)
        else:
            modules.setdefault(found[0], {})[found[1]] = name
    for roles in modules.values():
        for role, saved, original in (
            (Role.WEIGHT, Role.SAVED_WEIGHT, Role.ORIGINAL_WEIGHT),
            (Role.BIAS, Role.SAVED_BIAS, Role.ORIGINAL_BIAS),
        ):
            if role in roles and saved in roles:
                copies.append((roles[role], roles.pop(saved)))
            elif saved in roles:
                roles[role] = roles.pop(saved)
            if role in roles:
                roles.pop(original, None)
    return Named(modules=modules, copies=tuple(copies), unmatched=tuple(unmatched))


# --- translations ---------------------------------------------------------------------------

# Each is tried as a whole: the first prefix that fits a path is replaced.
Translation = tuple[tuple[str, str], ...]

TRANSLATIONS: tuple[Translation, ...] = (
    (),
    # A text model's adapter, served in a wrapper.
    (("visual.", "model.visual."), ("model.", "model.language_model.")),
    # An adapter of a wrapper as they were named before transformers 4.52.
    (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head", "lm_head"),
        ("vision_tower.", "model.vision_tower."),
        ("vision_model.", "model.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("visual.", "model.visual."),
    ),
    # The same, by an intermediate naming.
    (("model.language_model.model.", "model.language_model."),),
    # A wrapper's adapter, served as the text model alone.
    (("model.language_model.", "model."),),
    (("language_model.model.", "model."), ("language_model.lm_head", "lm_head")),
    # GPT-NeoX named its head so before transformers 5.
    (("embed_out", "lm_head"),),
    # Adapters of a backbone alone, without a head (AutoModel).
    *(
        (("", prefix),)
        for prefix in ("model.", "model.language_model.", "transformer.", "gpt_neox.")
    ),
)


def translate(path: str, translation: Translation) -> str:
    """The path in the served model's names."""
    for prefix, replacement in translation:
        if path.startswith(prefix):
            return replacement + path.removeprefix(prefix)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """What the modules of a file stand for. Complete if nothing is unmatched."""

    targets: Mapping[str, tuple[Target, ...]]  # by module of the file; of experts all that fit
    unmatched: tuple[str, ...]  # modules


def match_modules(modules: Iterable[str], sites: ModelSites) -> list[Matches]:
    """Every complete and distinct way to match; if there is none, the one that comes closest."""
    modules = list(modules)
    experts = _experts_by_module(sites)
    found = [_match(modules, sites.sites, experts, translation) for translation in TRANSLATIONS]
    complete = [m for m in found if not m.unmatched]
    if not complete:
        return [min(found, key=lambda m: len(m.unmatched))]
    return [m for i, m in enumerate(complete) if m.targets not in [n.targets for n in complete[:i]]]


def _experts_by_module(sites: ModelSites) -> dict[str, tuple[Site, ...]]:
    found: dict[str, tuple[Site, ...]] = {}
    for name, site in sites.sites.items():
        if site.kind == SiteKind.EXPERTS:
            module = name.rpartition(".")[0]
            found[module] = (*found.get(module, ()), site)
    return found


def _match(
    modules: list[str],
    sites: Mapping[str, Site],
    experts: Mapping[str, tuple[Site, ...]],
    translation: Translation,
) -> Matches:
    targets: dict[str, tuple[Target, ...]] = {}
    unmatched = []
    for module in modules:
        path = translate(module, translation)
        found = tuple(_targets(path, sites, experts))
        if found:
            targets[module] = found
        else:
            unmatched.append(module)
    return Matches(targets=targets, unmatched=tuple(unmatched))


_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>\d{1,6})\.(?P<name>\w+)")
# Names of one expert's linears → the fused parameter, and which half of it.
_PARTS: Mapping[str, tuple[tuple[str, int | None], ...]] = {
    "gate_proj": (("gate_up_proj", 0),),
    "w1": (("gate_up_proj", 0),),
    "up_proj": (("gate_up_proj", 1), ("up_proj", None)),
    "w3": (("gate_up_proj", 1),),
    "down_proj": (("down_proj", None),),
    "w2": (("down_proj", None),),
}


def _targets(
    path: str, sites: Mapping[str, Site], experts: Mapping[str, tuple[Site, ...]]
) -> Iterator[Target]:
    site = sites.get(path)
    if site is not None:
        yield Target(site)
        return
    # Mixtral's experts lay under another name when they were modules.
    path = path.replace(".block_sparse_moe.experts", ".mlp.experts")
    all_of_them = experts.get(path.removesuffix(".base_layer"))
    if all_of_them is not None:
        yield from map(Target, all_of_them)
        return
    one = _ONE_EXPERT.fullmatch(path)
    for name, half in _PARTS.get(one["name"], ()) if one else ():
        fused = sites.get(f"{one['module']}.{name}") if one else None
        # A transposed base interleaves gate and up, and never had modules for each expert.
        if one and fused and not fused.is_transposed and int(one["expert"]) < fused.num_experts:
            yield Target(fused, expert=int(one["expert"]), half=half)
            return

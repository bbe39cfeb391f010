"""From names and shapes to what an adapter changes, before any of its data is read.

Whatever can be wrong with an adapter beside its numbers is found here. Knows no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from plait.adapters.header import SafetensorsHeader
from plait.adapters.info import LoadReport
from plait.adapters.names import Matches, Role, Target, by_module, match_modules
from plait.adapters.peft_config import PeftConfig
from plait.adapters.plan import Layout, LowRankPlan, Plan, RowsPlan, WholePlan, table_size
from plait.adapters.sites import ModelSites, Site, SiteKind
from plait.adapters.stacked import Shapes, pair, plan_parameters
from plait.adapters.targets import is_target_module, is_target_parameter, warnings_of_targets
from plait.platform.errors import AdapterError, AdapterRankExceeded, InvalidAdapter

_STACKED = frozenset({Layout.EXPERTS, Layout.EXPERTS_SWAPPED})
_LOW_RANK = frozenset({Role.A, Role.B, Role.B_BIAS, Role.MAGNITUDE})
_ROLES: Mapping[SiteKind, frozenset[Role]] = {
    SiteKind.LINEAR: _LOW_RANK,
    SiteKind.HEAD: _LOW_RANK | {Role.TOKENS, Role.WEIGHT, Role.BIAS},
    SiteKind.EMBEDDING: frozenset(
        {Role.EMBEDDING_A, Role.EMBEDDING_B, Role.MAGNITUDE, Role.TOKENS, Role.WEIGHT}
    ),
    SiteKind.EXPERTS: frozenset({Role.A, Role.B, Role.B_BIAS, Role.MAGNITUDE}),
}
_A_AND_B: Mapping[SiteKind, tuple[Role, Role]] = {
    kind: ((Role.EMBEDDING_A, Role.EMBEDDING_B) if kind == SiteKind.EMBEDDING else (Role.A, Role.B))
    for kind in SiteKind
}

MAX_LISTED = 1000  # tensors that a report names


def make_plan(
    config: PeftConfig, header: SafetensorsHeader, sites: ModelSites, *, max_rank: int
) -> Plan:
    """Match a file with the model. Raises `InvalidAdapter` or `AdapterRankExceeded`."""
    shapes = {entry.name: entry.shape for entry in header.tensors}
    try:
        return _Planner(config, shapes, sites, max_rank).plan()
    except AdapterError as error:
        if error.report is None:
            error.report = LoadReport(num_tensors=len(shapes))
        raise


class _Planner:
    """What is known while one file is matched."""

    def __init__(
        self, config: PeftConfig, shapes: Shapes, sites: ModelSites, max_rank: int
    ) -> None:
        self.config = config
        self.shapes = shapes
        self.sites = sites
        self.max_rank = max_rank
        named = by_module(shapes)
        self.modules, self.unmatched, self.copies = named.modules, named.unmatched, named.copies
        self.matches = self._match()
        self.low_rank: list[LowRankPlan] = []
        self.rows: list[RowsPlan] = []
        self.wholes: list[WholePlan] = []

    def plan(self) -> Plan:
        """Go through all modules, then check what only holds for all together."""
        if not self.shapes:
            raise InvalidAdapter("the adapter holds no tensors")
        self._check_saved_modules()
        for module, roles in self.modules.items():
            if self.matches.targets[module][0].site.kind == SiteKind.EXPERTS:
                self._plan_experts(module, roles)
            else:
                self._plan_module(module, roles, self.matches.targets[module][0].site)
        self._check_once()
        self._check_tokens()
        return Plan(
            low_rank=tuple(self.low_rank),
            rows=tuple(self.rows),
            wholes=tuple(self.wholes),
            copies=self.copies,
            vocab_size=self._vocab_size(),
            warnings=warnings_of_targets(self.config, self.modules),
        )

    # --- names ------------------------------------------------------------------------------

    def _match(self) -> Matches:
        ways = match_modules(self.modules, self.sites)
        if len(ways) > 1:
            raise InvalidAdapter(
                "the adapter's names fit the model in more than one way, so what they mean is open"
            )
        unmatched = list(self.unmatched)
        for module, roles in self.modules.items():
            targets = ways[0].targets.get(module)
            unmatched += [
                name
                for role, name in roles.items()
                if targets is None or role not in _ROLES[targets[0].site.kind]
            ]
        if unmatched:
            self._refuse_unmatched(unmatched)
        return ways[0]

    def _refuse_unmatched(self, unmatched: list[str]) -> None:
        names = ", ".join(sorted(unmatched)[:3])
        more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
        raise InvalidAdapter(
            f"{len(unmatched)} of {len(self.shapes)} tensors fit no place of "
            f"{self.sites.model_name} that adapters can change: {names}{more}",
            report=LoadReport(
                num_tensors=len(self.shapes), unmatched=tuple(sorted(unmatched)[:MAX_LISTED])
            ),
        )

    def _check_saved_modules(self) -> None:
        for name in self.config.modules_to_save:
            saved = [
                roles
                for module, roles in self.modules.items()
                if module.rpartition(".")[2] == name or module.endswith(f".{name}")
            ]
            if not any(Role.WEIGHT in roles for roles in saved):
                raise InvalidAdapter(f"modules_to_save names {name!r}, which the file lacks")

    # --- one module ---------------------------------------------------------------------------

    def _plan_module(self, module: str, roles: Mapping[Role, str], site: Site) -> None:
        target = self.matches.targets[module][0]
        if Role.WEIGHT in roles:
            self.wholes.append(self._whole(site, roles))
        elif Role.BIAS in roles:
            raise InvalidAdapter(f"{roles[Role.BIAS]}: a bias without its weight is not served")
        if Role.TOKENS in roles:
            self.rows.append(self._rows(module, roles, site))
        if roles.keys() - {Role.WEIGHT, Role.BIAS, Role.TOKENS}:
            if Role.TOKENS in roles:
                raise InvalidAdapter(f"{module}: trained tokens together with LoRA are not served")
            self._refuse_on_alora(site)
            width = self.shapes[roles[Role.WEIGHT]][0] if Role.WEIGHT in roles else None
            self.low_rank.append(self._low_rank(module, roles, target, width))

    def _low_rank(
        self, module: str, roles: Mapping[Role, str], target: Target, width: int | None
    ) -> LowRankPlan:
        site = target.site
        a, b = pair(roles, site.kind)
        name = self._pattern_name(module)
        rank = self._check_rank(name, self.shapes[a][0] if self.shapes[a] else 0)
        in_features, out_features = _features(site, target.half, width)
        # To PEFT a parameter has its outputs first, however its module reads it.
        is_swapped = site.is_transposed and name != module
        sizes = (out_features, in_features) if is_swapped else (in_features, out_features)
        self._check_shape(a, (rank, sizes[0]))
        self._check_shape(b, (sizes[1], rank))
        bias = self._optional(module, roles, Role.B_BIAS, out_features, site)
        magnitude = self._optional(module, roles, Role.MAGNITUDE, out_features, site)
        return LowRankPlan(
            target=target,
            layout=Layout.SWAPPED if is_swapped else Layout.PLAIN,
            rank=rank,
            scale=self.config.scale(name),
            a=a,
            b=b,
            b_bias=bias,
            magnitude=magnitude,
        )

    def _pattern_name(self, module: str) -> str:
        """The name that the config's patterns see: the module's, or its parameter's."""
        if is_target_module(self.config, module):
            return module
        if is_target_parameter(self.config, f"{module}.weight"):
            return f"{module}.weight"
        raise InvalidAdapter(
            f"the config's target_modules, exclude_modules and layers_to_transform leave out "
            f"{module}, which the file has; PEFT would ignore it"
        )

    def _check_rank(self, name: str, rank: int) -> int:
        wanted = self.config.rank(name)
        if rank != wanted:
            raise InvalidAdapter(
                f"{name}: the config says rank {wanted}, and the tensors have {rank}"
            )
        self._check_limit(name, rank)
        return rank

    def _check_limit(self, name: str, rank: int) -> None:
        if rank > self.max_rank:
            raise AdapterRankExceeded(
                f"{name}: rank {rank} is above this server's limit of {self.max_rank}; "
                "raise --max-adapter-rank"
            )

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        if self.shapes[name] != wanted:
            raise InvalidAdapter(
                f"{name} has the shape {list(self.shapes[name])}, and {list(wanted)} is wanted"
            )

    def _optional(
        self, module: str, roles: Mapping[Role, str], role: Role, size: int, site: Site
    ) -> str | None:
        key = "use_dora" if role == Role.MAGNITUDE else "lora_bias"
        wanted = bool(getattr(self.config, key))
        if role == Role.B_BIAS and site.kind == SiteKind.EMBEDDING:
            wanted = False  # PEFT's embeddings have none
        name = roles.get(role)
        if wanted and name is None:
            raise InvalidAdapter(f"{module}: the config says {key}, and {role.value} is missing")
        if name is not None and not wanted:
            raise InvalidAdapter(f"{name}: the config has no {key}, so PEFT would ignore it")
        if name is not None:
            self._check_shape(name, (size,))
        return name

    def _refuse_on_alora(self, site: Site) -> None:
        if self.config.invocation_tokens and site.kind != SiteKind.LINEAR:
            raise InvalidAdapter(
                f"alora_invocation_tokens together with a change of {site.name} is not served",
                param="alora_invocation_tokens",
            )

    # --- vocabulary ---------------------------------------------------------------------------

    def _whole(self, site: Site, roles: Mapping[Role, str]) -> WholePlan:
        self._refuse_on_alora(site)
        name, bias = roles[Role.WEIGHT], roles.get(Role.BIAS)
        rows, width = table_size(site)
        shape = self.shapes[name]
        if len(shape) != 2 or shape[1] != width or shape[0] < rows:
            raise InvalidAdapter(
                f"{name} has the shape {list(shape)}, and [{rows} or more, {width}] is wanted"
            )
        if bias is not None:
            self._check_shape(bias, (shape[0],))
        return WholePlan(site=site, weight=name, bias=bias)

    def _rows(self, module: str, roles: Mapping[Role, str], site: Site) -> RowsPlan:
        ids = self._token_ids(module)
        self._check_shape(roles[Role.TOKENS], (len(ids), table_size(site)[1]))
        followers: tuple[Site, ...] = ()
        if site.kind == SiteKind.EMBEDDING and self.sites.is_tied:
            followers = tuple(s for s in self._heads() if not self._has_own_rows(s))
        return RowsPlan(sites=(site, *followers), token_ids=ids, rows=roles[Role.TOKENS])

    def _token_ids(self, module: str) -> tuple[int, ...]:
        lists = self.config.trained_tokens
        for name, ids in lists.items():
            if name == "" or module == name or module.endswith(f".{name}"):
                return ids
        if self.sites.is_tied and len(lists) == 1:
            return next(iter(lists.values()))
        raise InvalidAdapter(f"trainable_token_indices does not say which tokens {module} has")

    def _heads(self) -> list[Site]:
        return [s for s in self.sites.sites.values() if s.kind == SiteKind.HEAD]

    def _has_own_rows(self, head: Site) -> bool:
        return any(
            targets[0].site == head and self.modules[module].keys() & {Role.TOKENS, Role.WEIGHT}
            for module, targets in self.matches.targets.items()
        )

    def _check_tokens(self) -> None:
        if self.config.trained_tokens and not self.rows:
            raise InvalidAdapter("trainable_token_indices is set, and the file has no such rows")
        wide = self._vocab_size() or self.sites.vocab_size
        beyond = [t for t in self.config.invocation_tokens if t >= wide]
        if beyond:
            raise InvalidAdapter(
                f"alora_invocation_tokens has {beyond[0]}, beyond the vocabulary of {wide}"
            )

    def _vocab_size(self) -> int | None:
        """How wide the logits become; embedding and head have to agree about new tokens."""
        widths: dict[str, int] = {}
        for whole in self.wholes:
            widths[whole.site.name] = self.shapes[whole.weight][0]
        for plan in self.rows:
            for site in plan.sites:
                known = widths.get(site.name, table_size(site)[0])
                widths[site.name] = _width_with(site, known, plan.token_ids)
        tables = {
            s.kind: s
            for s in self.sites.sites.values()
            if s.kind in (SiteKind.EMBEDDING, SiteKind.HEAD)
        }
        new = {kind for kind, s in tables.items() if widths.get(s.name, 0) > table_size(s)[0]}
        if not new:
            return None
        sizes = {widths.get(s.name, table_size(s)[0]) for s in tables.values()}
        if len(sizes) != 1 or len(tables) != 2:
            raise InvalidAdapter(
                "the adapter adds tokens to the embedding and to the head in different numbers: "
                + " and ".join(
                    f"{widths.get(s.name, table_size(s)[0])} in all" for s in tables.values()
                )
            )
        return sizes.pop()

    # --- experts ----------------------------------------------------------------------------

    def _plan_experts(self, module: str, roles: Mapping[Role, str]) -> None:
        first = self.matches.targets[module][0]
        for role in (Role.B_BIAS, Role.MAGNITUDE):
            if role in roles:
                raise InvalidAdapter(f"{roles[role]}: experts are served without it")
        if first.expert is not None:
            self._refuse_on_alora(first.site)
            self.low_rank.append(self._low_rank(module, roles, first, None))
        elif not module.endswith(".base_layer"):
            sites = [target.site for target in self.matches.targets[module]]
            tensors = {
                level: pair(self.modules[level], SiteKind.EXPERTS)
                for level in (f"{module}.base_layer", module)
                if level in self.modules
            }
            for plan in plan_parameters(module, sites, tensors, self.shapes, self.config):
                self._check_limit(plan.a, plan.rank)
                self.low_rank.append(plan)
        elif module.removesuffix(".base_layer") not in self.modules:
            raise InvalidAdapter(f"{module} stands without the outer parameter's tensors")

    def _check_once(self) -> None:
        """No two modules of the file may mean one place."""
        places = Counter(
            (p.target.site.name, p.target.expert, p.target.half) for p in self.low_rank
        )
        stacks = {p.target.site.name for p in self.low_rank if p.layout in _STACKED}
        replaced = Counter(whole.site.name for whole in self.wholes)
        rows = Counter(site.name for plan in self.rows for site in plan.sites)
        found = {name for (name, *_), count in places.items() if count > 1}
        found |= {p.target.site.name for p in self.low_rank if p.target.expert is not None} & stacks
        found |= {name for name, count in (*replaced.items(), *rows.items()) if count > 1}
        if found:
            raise InvalidAdapter(f"the file changes {min(found)} twice, by different names")


def _features(site: Site, half: int | None, num_tokens: int | None) -> tuple[int, int]:
    """Inputs and outputs of what one pair of tensors changes."""
    if half is not None:
        return site.in_features, site.out_features // 2
    if num_tokens is None:
        return site.in_features, site.out_features
    if site.kind == SiteKind.EMBEDDING:
        return num_tokens, site.out_features
    return site.in_features, num_tokens


def _width_with(site: Site, width: int, token_ids: tuple[int, ...]) -> int:
    """Rows of a table once those of `token_ids` are in it."""
    beyond = sorted(t for t in token_ids if t >= width)
    if beyond != list(range(width, width + len(beyond))):
        raise InvalidAdapter(
            f"{site.name} has {width} rows, and the adapter's new tokens do not follow on them: "
            f"{beyond[:5]}"
        )
    return width + len(beyond)

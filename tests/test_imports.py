"""Who may import whom. Read from the sources, so nothing has to be importable for it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("platform", "adapters", "vision", "speculative", "structured")


@dataclass(frozen=True)
class Rule:
    """The modules under `who` never import those under `never`, not even for their types.

    Save those under `save`.
    """

    who: tuple[str, ...]
    never: tuple[str, ...]
    save: tuple[str, ...] = ()


PARTS = (
    "plait.platform.kv",
    "plait.platform.ops",
    "plait.platform.kernels",
    "plait.platform.model",
    "plait.platform.text",
    "plait.platform.logits",
    "plait.platform.machine",
    "plait.adapters",
    "plait.vision",
    "plait.speculative",
    "plait.structured",
)
FACES = (
    "plait.platform.server",
    "plait.platform.offline",
    "plait.platform.cli",
    "plait.platform.api",
)

# core ← parts ← engine ← server
RULES = {
    "the shared words import nothing of ours": Rule(
        who=("plait.platform.core",),
        never=("plait",),
        save=("plait.platform.core",),
    ),
    "the parts know no engine": Rule(
        who=PARTS,
        never=("plait.platform.engine", *FACES),
    ),
    "the engine knows no face": Rule(
        who=("plait.platform.engine", "plait.platform.scheduler", "plait.platform.scheduling"),
        never=FACES,
    ),
    "the server knows the engine by its client and messages alone": Rule(
        who=("plait.platform.server",),
        never=(
            "plait.platform.engine",
            "plait.platform.scheduler",
            "plait.platform.scheduling",
            "plait.platform.batch",
            "plait.platform.executor",
            "plait.platform.sampling",
            "plait.platform.logits",
            "plait.platform.kv",
            "plait.platform.ops",
            "plait.platform.kernels",
            "plait.platform.offline",
            "plait.platform.api",
            "plait.platform.cli",
        ),
    ),
}

# Importing these, or anything of ours that they import in turn, brings no torch.
WITHOUT_TORCH = (
    "plait.platform.core",
    "plait.platform.errors",
    "plait.platform.config",
    "plait.platform.messages",
    "plait.platform.scheduler",
    "plait.platform.scheduling",
    "plait.platform.kv.pool",
    "plait.platform.text",
    "plait.platform.server",
    # Reading and storing adapters, in the process that answers HTTP.
    "plait.adapters.bundle",
    "plait.adapters.info",
    "plait.adapters.peft_config",
    "plait.adapters.sources",
    "plait.adapters.store",
    # They import it in a phase that is named and timed, and after settings that it reads.
    "plait.platform.start",
    "plait.platform.engine_process",
    "plait.platform.api",
)


@dataclass(frozen=True)
class Import:
    """One import found in a module. `at_import` tells whether importing the module runs it."""

    target: str
    line: int
    at_import: bool


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def modules(root: Path) -> dict[str, Path]:
    """All our modules by name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = ("plait", *path.relative_to(root).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> list[Import]:
    """All imports of one module, absolute; `from a import b` counts as a and as a.b."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(), filename=str(path))
    return list(_walk(tree, package, at_import=True))


def _walk(node: ast.AST, package: str, *, at_import: bool) -> Iterator[Import]:
    match node:
        case ast.Import():
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        case ast.ImportFrom():
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield Import(base, node.lineno, at_import)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, at_import)
        case ast.If(test=test, body=body, orelse=orelse) if "TYPE_CHECKING" in ast.unparse(test):
            for child in body:
                yield from _walk(child, package, at_import=False)
            for child in orelse:
                yield from _walk(child, package, at_import=at_import)
        case _:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from _walk(child, package, at_import=at_import and not inside)


def violations(rule: Rule, root: Path) -> list[str]:
    """The lines that break a rule."""
    return [
        f"{path.relative_to(root)}:{found.line} imports {found.target}"
        for name, path in modules(root).items()
        if under(name, rule.who)
        for found in imports(name, path)
        if under(found.target, rule.never) and not under(found.target, rule.save)
    ]


def way_to_torch(start: str, root: Path) -> str | None:
    """A chain of imports from a module to torch, or None where there is none."""
    ours = modules(root)
    waiting, seen = [(start,)], {start}
    while waiting:
        chain = waiting.pop(0)
        if under(chain[-1], ("torch",)):
            return " → ".join(chain)
        for target in sorted(_runs(chain[-1], ours) - seen):
            seen.add(target)
            waiting.append((*chain, target))
    return None


def _runs(name: str, ours: dict[str, Path]) -> set[str]:
    # A module runs what it imports and, before itself, the packages it lies in.
    if name not in ours:
        return set()
    found = {each.target for each in imports(name, ours[name]) if each.at_import}
    found |= {target.rpartition(".")[0] for target in [name, *found]}
    return {target for target in found if target in ours or under(target, ("torch",))}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_imports_keep_their_direction(rule):
    assert violations(rule, ROOT) == []


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_knows_no_torch(part):
    ways = [way_to_torch(name, ROOT) for name in modules(ROOT) if under(name, (part,))]
    assert [way for way in ways if way] == []


@pytest.fixture
def small_tree(tmp_path):
    """Writes modules given as path=source."""

    def write(**sources: str) -> Path:
        for name, source in sources.items():
            path = tmp_path / "platform" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return tmp_path

    return write


@pytest.mark.parametrize(
    "source",
    [
        "import plait.platform.engine",
        "from plait.platform import engine",
        "from plait.platform.engine import Engine",
        "from ..engine import Engine",
        "from .. import engine",
        "def later():\n    import plait.platform.engine",
        "if TYPE_CHECKING:\n    from plait.platform.engine import Engine",
    ],
)
def test_a_wrong_import_is_found_however_it_is_written(small_tree, source):
    root = small_tree(kv__pool=source)
    (found,) = {line.split(" ")[0] for line in violations(RULES["the parts know no engine"], root)}
    assert found.startswith("platform/kv/pool.py:")


def test_torch_is_found_through_others_but_not_for_types_or_later(small_tree):
    root = small_tree(
        scheduler="from plait.platform.middle import x",
        middle="try:\n    import plait.platform.end\nexcept ImportError:\n    pass",
        end="import torch.nn",
        core="if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
    )
    way = "plait.platform.scheduler → plait.platform.middle → plait.platform.end → torch"
    assert way_to_torch("plait.platform.scheduler", root) == way
    assert way_to_torch("plait.platform.core", root) is None

"""Who may import whom, and what no module of the package may do, read from the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400

COMPOSITION_ROOT = {
    f"skote.eval.{name}" for name in ("command", "runner", "stand_in", "plan", "session", "arms", "gate", "capacity")
}
MAY_IMPORT = {
    "skote": set(),
    "types": set(),
    "flags": {"types"},
    "kernels": {"types", "flags", "kernels"},
    "model": {"types", "flags", "kernels", "model"},
    "runtime": {"types", "flags", "kernels", "model", "runtime"},
    "serve": {"types", "model", "runtime", "serve"},
    "engines": {"types", "flags", "model", "engines"},
    "contracts": {"types", "flags", "kernels", "model", "runtime", "engines", "contracts"},
    "eval": {"types", "eval"},
    "config": {"types", "eval"},
}
MAY_ALSO_IMPORT = {"skote.eval.experiment": {"config"}, "skote.engines.endpoint_body": {"runtime"}}
"""An experiment file is composed by the schema, to be held against a run of it; a server may want a prompt's text."""
TOKENIZING = {"transformers.AutoTokenizer", "transformers.utils.logging"}
OF_TIERS_2_AND_3 = {
    "skote.model.causal_lm",
    "skote.runtime.module_attention",
    "skote.runtime.module_closure",
    "skote.runtime.module_step",
}
HEAVY = {"torch", "transformers", "triton"}
BLIND_EXCEPTS = {
    "skote/runtime/worker.py": "a replica's process answers every call, whatever happened",
    "skote/eval/runner.py": "the last door before the user",
    "skote/runtime/answers.py": "a callback's sys.exit must not end a thread that serves all other requests",
    "skote/eval/session.py": "the manifest records why a run failed, and the exception goes on",
}

PROTOCOLS = {
    "skote/eval/outcome.py": "GitHub names the file of a step's summary in a variable",
    "skote/engines/endpoint_key.py": "a server's key may lie in the variable that the configuration names",
}


@dataclass(frozen=True)
class Module:
    path: Path
    name: str
    source: str
    tree: ast.Module

    @property
    def relative(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def layer(self) -> str:
        return self.name.split(".")[1] if "." in self.name else "skote"

    def imports(self) -> Iterator[str]:
        """Every imported name in full, those inside of functions and of `if TYPE_CHECKING` included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.relative}:{node.lineno} imports relatively"
                assert node.module is not None
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    source = path.read_text(encoding="utf-8")
    return Module(path, name, source, ast.parse(source))


MODULES = [read_module(path) for path in sorted((ROOT / "skote").rglob("*.py"))]
PACKAGE = pytest.mark.parametrize("module", MODULES, ids=[module.relative for module in MODULES])


def own_layers(module: Module) -> set[str]:
    """The layers of the package that `module` imports from."""
    layers = set()
    for name in module.imports():
        if name.split(".")[0] == "skote":
            layers.add(name.split(".")[1])
    return layers


def test_the_package_is_found() -> None:
    assert {module.layer for module in MODULES} == set(MAY_IMPORT)
    assert {module.name for module in MODULES} >= COMPOSITION_ROOT


@PACKAGE
def test_imports_point_down(module: Module) -> None:
    if module.name not in COMPOSITION_ROOT:
        assert own_layers(module) <= MAY_IMPORT[module.layer] | MAY_ALSO_IMPORT.get(module.name, set())


@PACKAGE
def test_only_the_composition_root_knows_the_composition_root(module: Module) -> None:
    known = {root for root in COMPOSITION_ROOT for name in module.imports() if f"{name}.".startswith(f"{root}.")}
    assert module.name in COMPOSITION_ROOT or known == set()


@PACKAGE
def test_the_harness_needs_no_torch(module: Module) -> None:
    if module.layer in ("eval", "types", "config") and module.name not in COMPOSITION_ROOT:
        assert {name.split(".")[0] for name in module.imports()} & HEAVY == set()


@PACKAGE
def test_tier_1_is_no_wrapped_transformers_model(module: Module) -> None:
    if module.layer in ("kernels", "model", "runtime") and module.name not in OF_TIERS_2_AND_3:
        of_transformers = {name for name in module.imports() if name.split(".")[0] == "transformers"}
        assert of_transformers <= TOKENIZING


@PACKAGE
def test_tiers_2_and_3_are_imported_where_they_are_chosen(module: Module) -> None:
    """A model of tier 1 does not wait for Transformers."""
    if module.layer in ("model", "runtime", "eval") and module.name not in OF_TIERS_2_AND_3:
        at_the_top = {node.module for node in module.tree.body if isinstance(node, ast.ImportFrom)}
        assert at_the_top & OF_TIERS_2_AND_3 == set()


@pytest.mark.parametrize("name", ["skote.eval.report", "skote.config", "skote.types"])
def test_importing_it_loads_no_torch(name: str) -> None:
    code = f"import sys, {name}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@PACKAGE
def test_no_environment_variable_is_a_knob(module: Module) -> None:
    if module.relative in PROTOCOLS:
        return
    names = {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    names |= {name.split(".")[-1] for name in module.imports()}
    assert names & {"environ", "environb", "getenv", "putenv", "unsetenv"} == set()


def blind_excepts(module: Module) -> list[ast.ExceptHandler]:
    """Handlers of Exception, BaseException or everything."""
    handlers = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                handlers.append(node)
    return handlers


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether the handler's last statement lets the exception go on."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


@PACKAGE
def test_blind_excepts_go_on_or_say_why_they_are_there(module: Module) -> None:
    lines = module.source.splitlines()
    swallowing = [handler for handler in blind_excepts(module) if not raises_again(handler)]
    for handler in swallowing:
        assert module.relative in BLIND_EXCEPTS
        _, _, reason = lines[handler.lineno - 1].partition("#")
        assert len(reason.split()) > 3, f"{module.relative}:{handler.lineno} does not say why it catches everything"


@PACKAGE
def test_files_stay_small(module: Module) -> None:
    assert len(module.source.splitlines()) <= MAX_LINES

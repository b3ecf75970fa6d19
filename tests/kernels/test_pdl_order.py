"""The order of loads, stores and waits in the sources of the decode kernels, read without compiling or running them.

The rules are those of `skote.kernels.launch`. `test_sm90.py` reads in the machine code that the compiler kept them: it
knows what depends on an earlier kernel by the mark that this file demands, and that as many waits are left as there
are in the source, all of whose paths are walked here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CONSTANT = {
    f"{name}_ptr"
    for name in ("weight", "bias", "norm", "q_norm", "k_norm", "post", "cos", "sin", "position", "positions", "table")
}  # within a step, in every kernel that does not itself write it
CACHE = {"k_ptr", "v_ptr"}
OLDER = "(places < position)[:, None]"  # the mask of the cache's slots that no kernel of the step writes


@dataclass(frozen=True)
class Access:
    """One load or store of a kernel, and what is known where it stands."""

    kind: str  # load, store or atomic
    pointer: str  # the argument that it goes through; empty where it cannot be told
    line: int
    waited: bool
    kept: bool  # the load's mark is evict_last
    older: bool  # the load takes older slots of the cache alone


@dataclass
class Walk:
    """All paths through a function from top to bottom, with PDL on."""

    functions: dict[str, ast.FunctionDef]  # that a kernel may call
    pointers: dict[str, set[str]]  # the arguments that a name's address is made of
    accesses: list[Access] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)  # the source of a name's latest value

    def block(self, statements: list[ast.stmt], waited: bool) -> bool:
        """Walk `statements`; whether every path has waited at their end, where `waited` says so of their start."""
        for statement in statements:
            waited = self.statement(statement, waited)
        return waited

    def statement(self, statement: ast.stmt, waited: bool) -> bool:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id="gdc_wait"))):
                return True
            case ast.If(test=ast.Name(id="PDL")):
                return self.block(statement.body, waited)
            case ast.If():
                self.expression(statement.test, waited)
                return all([self.block(statement.body, waited), self.block(statement.orelse, waited)])
            case ast.For(iter=ast.Call(func=func)) if ast.unparse(func) == "tl.static_range":  # copied, not looped
                return self.block(statement.body, waited)
            case ast.For() | ast.While():
                self.expression(statement.iter if isinstance(statement, ast.For) else statement.test, waited)
                before = len(self.accesses)
                if self.block(statement.body, waited) != waited:
                    self.faults.append(f"line {statement.lineno}: a wait inside a loop")
                if not waited and len(self.accesses) > before:
                    self.faults.append(f"line {statement.lineno}: a loop of loads before the wait")
                return waited
            case ast.Return() if not waited:
                self.faults.append(f"line {statement.lineno}: a way out without a wait")
        self.expression(statement, waited)
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) and statement.value is not None:
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                self.assign(target, statement.value, kept=isinstance(statement, ast.AugAssign))
        return waited

    def assign(self, target: ast.expr, value: ast.expr, *, kept: bool) -> None:
        for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
            self.pointers[name] = self.addresses(value) | (self.pointers.get(name, set()) if kept else set())
            self.values[name] = ast.unparse(value)

    def addresses(self, value: ast.AST) -> set[str]:
        """The pointer arguments that `value` is computed from by arithmetic; what a call returns is no address."""
        if isinstance(value, ast.Name):
            return self.pointers.get(value.id, set())
        if isinstance(value, ast.Call | ast.Attribute):
            return set()
        return set().union(*(self.addresses(child) for child in ast.iter_child_nodes(value)))

    def expression(self, node: ast.AST, waited: bool) -> None:
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            name = ast.unparse(call.func)
            if name in self.functions:
                self.call(self.functions[name], call, waited)
            elif (kind := name.rpartition(".")[2].partition("_")[0]) in ("load", "store", "atomic"):
                options = {option.arg: ast.unparse(option.value) for option in call.keywords}
                through = self.addresses(call.args[0]) if call.args else set()
                pointer = "".join(through) if len(through) == 1 else ""
                mask = options.get("mask", "")
                older = OLDER in (mask, self.values.get(mask))
                kept = options.get("eviction_policy") == "'evict_last'"
                self.accesses.append(Access(kind, pointer, call.lineno, waited, kept, older))

    def call(self, function: ast.FunctionDef, call: ast.Call, waited: bool) -> None:
        given = dict(zip(parameters(function), map(self.addresses, call.args), strict=False))
        inner = Walk(
            self.functions, given | {each.arg: self.addresses(each.value) for each in call.keywords if each.arg}
        )
        inner.block([each for each in function.body if not isinstance(each, ast.Return)], waited)
        self.accesses += inner.accesses
        self.faults += inner.faults


def jitted(source: str) -> dict[str, ast.FunctionDef]:
    """The Triton functions of a source file."""
    return {
        each.name: each
        for each in ast.parse(source).body
        if isinstance(each, ast.FunctionDef) and "triton.jit" in map(ast.unparse, each.decorator_list)
    }


def parameters(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in function.args.args]


def faults(kernel: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> list[str]:
    """What `kernel` breaks of the rules."""
    walk = Walk(functions, {name: {name} for name in parameters(kernel) if name.endswith("_ptr")})
    if not walk.block(kernel.body, False):
        walk.faults.append("a path without a wait")
    written = {access.pointer for access in walk.accesses if access.kind != "load"}
    return walk.faults + [fault for access in walk.accesses for fault in broken(access, CONSTANT - written)]


def broken(access: Access, constant: set[str]) -> Iterator[str]:
    what = f"line {access.line}: the {access.kind} through {access.pointer or 'an unknown pointer'}"
    if access.kind != "load":
        if not access.waited:
            yield f"{what} comes before the wait"
    elif access.pointer not in constant and not (access.pointer in CACHE and access.older):
        if not access.waited:
            yield f"{what} comes before the wait"
        if not access.kept and not (access.pointer in CACHE and access.waited):
            yield f"{what} is not marked evict_last"


KERNELS = Path(__file__).parents[2] / "skote" / "kernels"
SOURCES = [path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*_triton.py"))]
FUNCTIONS = {name: function for source in SOURCES for name, function in jitted(source).items()}
TEXTS = {  # of the kernels with programmatic dependent launch
    name: text
    for source in SOURCES
    for name, function in jitted(source).items()
    if "PDL" in parameters(function) and (text := "@triton.jit\n" + str(ast.get_source_segment(source, function)))
}
WAIT = "gdc_wait()"


def faults_of(text: str) -> list[str]:
    (kernel,) = jitted(text).values()
    return faults(kernel, FUNCTIONS)


def without_wait(text: str, index: int) -> str:
    """`text` with the wait of that index taken out."""
    parts = text.split(WAIT)
    return WAIT.join(parts[: index + 1]) + "pass" + WAIT.join(parts[index + 1 :])


def test_no_kernel_has_an_atomic() -> None:
    """Sums whose order is left to chance would give other bits."""
    assert not [name for name, function in FUNCTIONS.items() if "atomic" in ast.unparse(function)]


@pytest.mark.parametrize("name", TEXTS)
def test_a_kernel_keeps_the_order_on_every_path(name: str) -> None:
    assert faults_of(TEXTS[name]) == []


@pytest.mark.parametrize(
    ("name", "index"), [(name, i) for name, text in TEXTS.items() for i in range(text.count(WAIT))]
)
def test_no_wait_of_a_kernel_can_be_spared(name: str, index: int) -> None:
    assert "a path without a wait" in faults_of(without_wait(TEXTS[name], index))


def test_a_kernel_that_reads_early_without_the_mark_is_found_out() -> None:
    text = TEXTS["residual_gemv_kernel"]
    wait = "    if PDL:\n        gdc_wait()\n"
    load = text[text.index("    h = row_chunks(") : text.index("    for turn")]
    early = "    h = tl.load(h_ptr)\n"
    found = faults_of(text.replace(wait + load, early + wait))
    assert [fault.partition(": ")[2] for fault in found] == [
        "the load through h_ptr comes before the wait",
        "the load through h_ptr is not marked evict_last",
    ]


SMALL = """
@triton.jit
def small_kernel(x_ptr, weight_ptr, k_ptr, out_ptr, n, PDL: tl.constexpr):
    places = tl.arange(0, 16)
    weight = tl.load(weight_ptr + places)
    earlier = (places < position)[:, None]
    keys = tl.load(k_ptr + places, mask=earlier)
    if n > 0:
        if PDL:
            gdc_wait()
        x_ptr += n
        x = tl.load(x_ptr + places, eviction_policy="evict_last")
        for start in range(n):
            x += tl.load(k_ptr + start)
        tl.store(out_ptr + places, x * weight)
    elif PDL:
        gdc_wait()
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("n > 0", "n > tl.load(x_ptr)", ["load through x_ptr comes before", "load through x_ptr is not marked"]),
        ("tl.load(weight_ptr", "tl.load(out_ptr", ["load through out_ptr comes before", "load through out_ptr is not"]),
        ("mask=earlier", "mask=places < n", ["load through k_ptr comes before", "load through k_ptr is not marked"]),
        ("(places < position)", "(places <= position)", ["load through k_ptr comes", "load through k_ptr is not"]),
        (', eviction_policy="evict_last"', "", ["load through x_ptr is not marked"]),
        (
            "tl.load(weight_ptr",
            "tl.load(x_ptr + weight_ptr",
            ["load through an unknown pointer", "unknown pointer is not"],
        ),
        ("    places =", "    tl.store(out_ptr, n)\n    places =", ["store through out_ptr comes before"]),
        ("    places =", "    tl.atomic_add(out_ptr, n)\n    places =", ["atomic through out_ptr comes before"]),
        ("    places =", "    if n < 0:\n        return\n    places =", ["a way out without a wait"]),
        (
            "    elif PDL:\n        gdc_wait()",
            "    for each in range(n):\n        gdc_wait()",
            ["a wait inside a loop", "a path without a wait"],
        ),
        ("    if n", "    for each in range(n):\n        tl.load(weight_ptr)\n    if n", ["a loop of loads before"]),
        (
            "    if n",
            "    for each in tl.static_range(n):\n        tl.load(out_ptr)\n    if n",
            ["load through out_ptr comes before", "load through out_ptr is not"],
        ),
        ("tl.load(weight_ptr", "rows_dot(x_ptr, x_ptr", ["a loop of loads", *["load through x_ptr"] * 6]),
    ],
)
def test_each_way_of_breaking_the_order_is_seen(old: str, new: str, found: list[str]) -> None:
    assert old in SMALL
    assert faults_of(SMALL) == []
    seen = faults_of(SMALL.replace(old, new, 1))
    assert len(seen) == len(found), seen
    assert all(part in fault for part, fault in zip(found, seen, strict=True)), seen

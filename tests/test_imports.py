"""The direction of imports: a layer imports only from itself and the layers before it."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = [
    {
        "rl.errors",
        "rl.host_protocol",
        "rl.host_tls",
        "rl.causes",
        "rl.bounds",
        "rl.fields",
        "rl.command_flags",
        "rl.type_hints",
        "rl.hub",
        "rl.paths",
        "rl.output",
        "rl.surroundings",
        "rl.owned_directory",
        "rl.cgroups",
        "rl.waiting",
        "rl.micro_batch",
        "rl.http_server",
        "rl.rewards",
        "rl.sequences",
        "rl.types",
        "rl.processes",
    },
    {"rl.interfaces", "rl.openai_format"},
    {"rl.batching", "rl.bins", "rl.prefixes", "rl.loss", "rl.envs", "rl.weight_sync", "rl.observability"},
    {"rl.models"},
    {"rl.plan"},
    {"rl.actors"},
    {"rl.cluster"},
    {"rl.config"},
    {"rl.controller", "rl.tinker"},
    {
        "rl.cli",
        "rl.__main__",
        "rl.doctor",
        "rl.fetch",
        "rl.gpu_check",
        "rl.gpu_checks",
        "rl.gpu_memory_check",
        "rl.gpu_stack_checks",
        "configs",
        "rl.configs",
    },
]


def layer_of(module: str) -> int | None:
    for level, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return level
    return None


@functools.cache
def imports() -> list[tuple[str, str, bool]]:
    """(module, what it imports, whether only type checkers run it) for every module of rl and configs."""
    found = []
    for path in [*ROOT.glob("rl/**/*.py"), *ROOT.glob("configs/*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        typing_only = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: imports are absolute here"
                names = [f"{node.module}.{a.name}" for a in node.names]
            found += [(module, name, id(node) in typing_only) for name in names]
    return found


def test_every_module_has_a_layer():
    assert not {m for m, _, _ in imports() if m != "rl" and layer_of(m) is None}


def test_no_import_points_upward():
    upward = [
        f"{module} imports {name}"
        for module, name, typing_only in imports()
        if not typing_only
        if (there := layer_of(name)) is not None and (here := layer_of(module)) is not None and there > here
    ]
    assert not upward, upward


def test_models_know_no_monarch_and_the_loop_neither_monarch_nor_torch():
    for module, name, _ in imports():
        top = name.split(".")[0]
        if module.startswith(("rl.models", "rl.loss", "rl.batching", "rl.envs", "rl.observability")):
            assert top != "monarch", f"{module} imports {name}"
        if module == "rl.controller.loop":
            assert top not in ("monarch", "torch"), f"{module} imports {name}"
        if module.startswith("rl.plan"):
            assert top not in ("monarch", "torch"), f"{module} imports {name}"


def test_the_loop_can_be_imported_without_torch_or_monarch():
    check = (
        "import sys, rl.controller.loop; print([m for m in ('torch', 'monarch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_recipe_can_be_composed_without_torch():
    """Each reward process imports its recipe: torch is a second and 180 MiB."""
    modules = sorted(f"configs.{path.stem}" for path in (ROOT / "configs").glob("[a-z]*.py"))
    check = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert len(modules) > 8 and done.stdout.strip() == "False", done.stderr


COMMANDS = {"rl.controller.check", "rl.controller.evaluate", "rl.controller.replay", "rl.controller.run"}
COMMANDS |= {"rl.gpu_stack_checks"}


def test_only_the_settings_own_package_and_the_commands_name_a_config():
    named = {module for module, name, _ in imports() if name.endswith(".RunConfig")}
    outside = {module for module in named if not module.startswith(("rl.config", "configs"))}
    assert outside == COMMANDS


def test_files_are_small_and_lines_short():
    for path in ROOT.glob("rl/**/*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 300, path
        assert all(len(line) <= 110 for line in lines), path
    assert len((ROOT / "rl/controller/loop.py").read_text().splitlines()) < 80

"""The package's layout is checked: layers, files at the root, lengths of functions and files, unique class names."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "bestiary"
TESTS = REPOSITORY / "tests"

# Layers from the lowest to the highest. A module may import from its own group and from every layer below. Two groups
# of one layer must not import each other. The longest matching prefix decides (`config.schema` before `config`).
LAYERS: list[list[set[str]]] = [
    [{"errors", "types", "tree", "seeding"}],
    [
        {
            "config.schema",
            "config.aliases",
            "config.extras",
            "config.suggestions",
            "config.machine",
            "config.versions",
            "config.compat",
        }
    ],
    [{"ops"}],
    [{"envs"}, {"nets", "cores", "replay"}],
    [{"algos"}],
    [{"acting"}],
    [{"runtime.config"}],
    [{"config", "config.experiment", "config.plugins", "config.registration"}],
    [{"presets"}],
    [{"training.checkpoint", "training.run"}],  # run directories on disk, from which runtimes load reference policies
    [{"runtime"}],
    [{"training"}],
    [{"analysis"}],
    [{"launch"}],
    [{"reward_hacking"}, {"bench"}],
    [{"cli"}],
    [{"", "__main__"}],  # the public API (`bestiary/__init__.py`) and `python -m bestiary`
]

ROOT_FILES = 6
FUNCTION_LINES = 80
FILE_LINES = 450
TEST_NAME_CHARACTERS = 70

# Every exception names the reason. An exception that is no longer needed fails the test too.
IMPORT_EXCEPTIONS: dict[tuple[str, str], str] = {}  # (importing module, imported module) -> reason
FUNCTION_EXCEPTIONS: dict[str, str] = {}  # "path:function" -> reason
FILE_EXCEPTIONS: dict[str, str] = {}  # path -> reason
CLASS_EXCEPTIONS: dict[str, str] = {}  # class name -> reason


def name_of(path: Path) -> str:
    """`bestiary/envs/atari.py` is `envs.atari`, `bestiary/envs/__init__.py` is `envs`, the package itself is ''."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


SOURCES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, function bodies included, except the bodies of `if TYPE_CHECKING:`."""
    yield node
    children = node.orelse if isinstance(node, ast.If) and is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from executed_nodes(child)


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The full name of the module that a `from ... import` names, relative imports resolved."""
    if not node.level:
        return node.module or ""
    package = ["bestiary", *filter(None, module.split("."))]
    if SOURCES[module].name != "__init__.py":
        package.pop()
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *filter(None, [node.module])])


def named_modules(module: str, node: ast.AST) -> Iterator[str]:
    """Full names of modules that this node imports: statements, and `import_module` with a literal name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = absolute(module, node)
        for alias in node.names:
            full = f"{source}.{alias.name}"
            yield full if full.removeprefix("bestiary.") in SOURCES else source
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.JoinedStr) and argument.values:  # f"bestiary.presets.{name}": the package is known
            argument = argument.values[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value.rstrip(".")


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module of this package) for every import, lazy ones included."""
    for node in executed_nodes(tree):
        for full in named_modules(module, node):
            if full == "bestiary" or full.startswith("bestiary."):
                yield getattr(node, "lineno", 0), full.removeprefix("bestiary").removeprefix(".")


def layer_of(module: str) -> tuple[int, int]:
    """(layer, group within the layer) of a module, by its longest listed prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for layer, groups in enumerate(LAYERS):
            for group, members in enumerate(groups):
                if prefix in members:
                    return layer, group
    raise KeyError(module)


def may_import(importer: str, imported: str) -> bool:
    own, other = layer_of(importer), layer_of(imported)
    return other[0] < own[0] or other == own


def report(violations: list[str], rule: str) -> None:
    if violations:
        pytest.fail(f"{rule}: {len(violations)}\n" + "\n".join(f"  {each}" for each in violations), pytrace=False)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_every_module_has_a_layer() -> None:
    unknown = []
    for module in SOURCES:
        try:
            layer_of(module)
        except KeyError:
            unknown.append(f"bestiary.{module}")
    report(unknown, "modules without a layer in tests/test_architecture.py")


def test_imports_point_down_the_layers() -> None:
    violations, used = [], set()
    for module, tree in TREES.items():
        for line, imported in dict.fromkeys(imports(module, tree)):
            if may_import(module, imported):
                continue
            if (module, imported) in IMPORT_EXCEPTIONS:
                used.add((module, imported))
            else:
                violations.append(f"{relative(SOURCES[module])}:{line} imports bestiary.{imported}")
    violations += [f"exception no longer needed: {pair}" for pair in IMPORT_EXCEPTIONS if pair not in used]
    report(violations, "imports against the layers")


def test_the_package_root_holds_at_most_six_files() -> None:
    files = sorted(path.name for path in PACKAGE.glob("*.py"))
    report(files if len(files) > ROOT_FILES else [], f"more than {ROOT_FILES} Python files at the package root")


def test_functions_have_at_most_80_lines() -> None:
    violations, used = [], set()
    for module, tree in TREES.items():
        for function in functions(tree):
            assert function.end_lineno is not None
            lines = function.end_lineno - function.lineno + 1
            key = f"{relative(SOURCES[module])}:{function.name}"
            if lines > FUNCTION_LINES:
                used.add(key)
                if key not in FUNCTION_EXCEPTIONS:
                    violations.append(f"{key} has {lines} lines")
    violations += [f"exception no longer needed: {key}" for key in FUNCTION_EXCEPTIONS if key not in used]
    report(violations, f"functions over {FUNCTION_LINES} lines")


def test_files_have_at_most_450_lines() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES.values()}
    too_long = {path: lines for path, lines in lengths.items() if lines > FILE_LINES}
    violations = [f"{path} has {lines} lines" for path, lines in too_long.items() if path not in FILE_EXCEPTIONS]
    violations += [f"exception no longer needed: {path}" for path in FILE_EXCEPTIONS if path not in too_long]
    report(violations, f"files over {FILE_LINES} lines")


def test_a_public_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{relative(SOURCES[module])}:{node.lineno}")
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    violations = [f"{name}: {', '.join(where)}" for name, where in repeated.items() if name not in CLASS_EXCEPTIONS]
    violations += [f"exception no longer needed: {name}" for name in CLASS_EXCEPTIONS if name not in repeated]
    report(violations, "class names defined more than once")


def test_names_of_tests_have_at_most_70_characters() -> None:
    violations = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            if function.name.startswith("test_") and len(function.name) > TEST_NAME_CHARACTERS:
                where = f"{relative(path)}:{function.lineno}"
                violations.append(f"{where} {function.name} has {len(function.name)} characters")
    report(violations, f"test names over {TEST_NAME_CHARACTERS} characters")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from bestiary.envs.atari import Atari", {"envs.atari"}),
        ("from bestiary.envs import atari", {"envs.atari"}),
        ("import bestiary.envs.atari", {"envs.atari"}),
        ("def f():\n    from bestiary import envs", {"envs"}),
        ("from ..envs import atari", {"envs.atari"}),
        ("import importlib\nimportlib.import_module('bestiary.envs.atari')", {"envs.atari"}),
        ("from importlib import import_module\nimport_module(f'bestiary.envs.{name}')", {"envs"}),
        ("if TYPE_CHECKING:\n    from bestiary.envs import atari\nelse:\n    import bestiary.tree", {"tree"}),
        ("import torch\nfrom gymnasium import envs", set()),
    ],
)
def test_imports_are_found_however_they_are_written(source: str, expected: set[str]) -> None:
    assert {name for _, name in imports("algos.dqn", ast.parse(source))} == expected


def test_layers_tell_a_forbidden_import_from_an_allowed_one() -> None:
    assert may_import("algos.dqn", "replay.uniform")
    assert may_import("nets.torso", "cores.base")
    assert not may_import("replay.uniform", "algos.dqn")
    assert not may_import("envs.atari", "nets")
    assert not may_import("nets", "envs.atari")
    assert may_import("config.experiment", "runtime.config")
    assert not may_import("runtime.config", "config.experiment")
    assert not may_import("training.session", "")

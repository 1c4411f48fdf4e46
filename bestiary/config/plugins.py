"""Plugins: `--plugin FILE.py` imports a Python file, which registers the parts that it defines."""

import importlib.metadata
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from bestiary.errors import UserError


def load_plugins() -> None:
    """Call every entry point of the group `bestiary`, through which installed packages register their parts."""
    for entry in importlib.metadata.entry_points(group="bestiary"):
        entry.load()()


def load_file(path: str) -> ModuleType:
    """Import a Python file by its path. Importing executes the file, so it must be trusted."""
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"--plugin {path}: there is no such Python file")
    name = f"bestiary_plugin_{file.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as e:
        del sys.modules[name]
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(e.__traceback__)) if f.filename == str(file.resolve())),
            None,
        )
        where = f" (line {line})" if line else ""
        raise UserError(f"{path} does not import{where}: {type(e).__name__}: {e}") from e
    return module


def load_plugin_flags(args: list[str]) -> list[str]:
    """Import the file of every `--plugin FILE.py`, which must register something; returns the other arguments."""
    rest: list[str] = []
    remaining = iter(args)
    for argument in remaining:
        if argument != "--plugin" and not argument.startswith("--plugin="):
            rest.append(argument)
            continue
        path = argument.partition("=")[2] if "=" in argument else next(remaining, "")
        if not path:
            raise UserError("--plugin needs a file, for example --plugin my_core.py")
        before = _registered()
        load_file(path)
        if _registered() == before and path not in _loaded:
            raise UserError(
                f"{path} registers nothing: call bestiary.register(core=YourCore) or gymnasium.register in it"
            )
        _loaded.add(path)
    return rest


_loaded: set[str] = set()


def plugin_files() -> list[str]:
    """Absolute paths of the files that `--plugin` has loaded, for other processes."""
    return sorted(str(Path(path).resolve()) for path in _loaded)


def plugin_args() -> list[str]:
    """The same files as arguments of a command."""
    return [argument for file in plugin_files() for argument in ("--plugin", file)]


def _registered() -> dict[str, set[str]]:
    """Names of all registered parts and Gymnasium environments."""
    import gymnasium

    from bestiary.config.experiment import family

    parts = {name: set(family(name)) for name in ("env", "algo", "core", "runtime")}
    return parts | {"gymnasium": set(gymnasium.registry)}

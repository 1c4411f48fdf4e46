"""Parts of your own, from a file: `--plugin FILE.py` imports it, and it registers what it defines."""

import importlib.metadata
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from bestiary.errors import UserError


def load_plugins() -> None:
    """Call every entry point of the group `bestiary`: installed packages register their parts there."""
    for entry in importlib.metadata.entry_points(group="bestiary"):
        entry.load()()


def load_file(path: str) -> ModuleType:
    """Import a Python file by its path. It runs: use only files you trust."""
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"--plugin {path}: there is no such Python file")
    name = f"bestiary_plugin_{file.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
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


def use_plugins(args: list[str]) -> list[str]:
    """Take every `--plugin FILE.py` out of the arguments and import the files; each must register something."""
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word != "--plugin" and not word.startswith("--plugin="):
            rest.append(word)
            continue
        path = word.partition("=")[2] if "=" in word else next(words, "")
        if not path:
            raise UserError("--plugin needs a file, for example --plugin my_core.py")
        before = _parts()
        load_file(path)
        if _parts() == before and path not in _used:
            raise UserError(
                f"{path} registers nothing: call bestiary.register(core=YourCore) or gymnasium.register in it"
            )
        _used.add(path)
    return rest


_used: set[str] = set()


def used() -> list[str]:
    """The files that have registered something, wherever one is."""
    return sorted(str(Path(path).resolve()) for path in _used)


def plugin_words() -> list[str]:
    """The same files, as words of a command."""
    return [word for file in used() for word in ("--plugin", file)]


def _parts() -> dict[str, set[str]]:
    import gymnasium

    from bestiary.config.experiment import family

    ours = {name: set(family(name)) for name in ("env", "algo", "core", "runtime")}
    return ours | {"gymnasium": set(gymnasium.registry)}

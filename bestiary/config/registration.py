"""Registration of this package's environments with Gymnasium, under names such as "bestiary/Recall-v0"."""

import sys
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

NAMES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (module of `bestiary.envs`:class, arguments)
    "Recall": ("recall:RecallEnv", {}),
    "Catch": ("catch:CatchEnv", {}),
    "TMazePassive": ("tmaze:TMazeEnv", {"active": False}),
    "TMazeActive": ("tmaze:TMazeEnv", {"active": True}),
    "VisualMatch": ("visual_match:VisualMatchEnv", {}),
    "KeyToDoor": ("key_to_door:KeyToDoorEnv", {}),
}


def register() -> None:
    """Register all environments; Gymnasium must be installed."""
    import gymnasium

    for name, (location, arguments) in NAMES.items():
        gymnasium.register(
            f"bestiary/{name}-v0",
            entry_point=partial(single_env, location),
            vector_entry_point=f"bestiary.envs.{location}",
            kwargs=arguments,
        )
    gymnasium.register("bestiary/Riverraid-v0", entry_point="bestiary.envs.riverraid:riverraid")


def single_env(location: str, **kwargs: Any) -> Any:
    """A single Gymnasium environment made of the vector environment class at a location."""
    from bestiary.envs.batched import SingleEnv

    module, name = location.split(":")
    return SingleEnv(getattr(import_module(f"bestiary.envs.{module}"), name)(1, **kwargs))


class _RegisterOnImport(MetaPathFinder):
    """Import hook that calls `register` when Gymnasium is imported, so that `import bestiary` need not import it.

    Gymnasium 1.4 no longer reads entry points of other packages.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("gymnasium")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_gymnasium() -> None:
    """Register the environments now if Gymnasium is imported already, else as soon as it is imported."""
    if "gymnasium" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _RegisterOnImport())

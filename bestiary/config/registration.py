"""Our environments under their Gymnasium names, such as "bestiary/Recall-v0"."""

import sys
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

NAMES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (class, its arguments)
    "Recall": ("recall:RecallEnv", {}),
    "Catch": ("catch:CatchEnv", {}),
    "TMazePassive": ("tmaze:TMazeEnv", {"active": False}),
    "TMazeActive": ("tmaze:TMazeEnv", {"active": True}),
    "VisualMatch": ("visual_match:VisualMatchEnv", {}),
    "KeyToDoor": ("key_to_door:KeyToDoorEnv", {}),
}


def register() -> None:
    import gymnasium

    for name, (home, arguments) in NAMES.items():
        gymnasium.register(
            f"bestiary/{name}-v0",
            entry_point=partial(single, home),
            vector_entry_point=f"bestiary.envs.{home}",
            kwargs=arguments,
        )
    gymnasium.register("bestiary/Riverraid-v0", entry_point="bestiary.envs.riverraid:riverraid")


def single(home: str, **kwargs: Any) -> Any:
    from bestiary.envs.batched import SingleEnv

    module, name = home.split(":")
    return SingleEnv(getattr(import_module(f"bestiary.envs.{module}"), name)(1, **kwargs))


class _Once(MetaPathFinder):
    """Registers when Gymnasium is imported, and not before: `import bestiary` alone stays quick."""

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
    """Now if Gymnasium is there, else as soon as it is: the order of imports does not matter."""
    if "gymnasium" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Once())

"""Claims of the documents are checked: every command is parsed, every link leads to a file."""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import gymnasium
import pytest

from bestiary.analysis import core_contract
from bestiary.cli.commands import doctor, launch, study, sweep
from bestiary.cli.main import COMMANDS, HELP, main
from bestiary.config import plugins
from bestiary.config.experiment import Experiment
from bestiary.presets import preset
from bestiary.training.run import EXPERIMENT

ROOT = Path(__file__).parent.parent
PAGES = [path for folder in ("", "docs/**/", "benchmarks/**/", "examples/**/") for path in ROOT.glob(f"{folder}*.md")]
SOURCES = [*ROOT.glob("bestiary/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]
USAGES = {"main": HELP} | {module.__name__: module.USAGE for module in (doctor, launch, study, sweep)}
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
# placeholders of usage texts -> something that they stand for
PLACEHOLDERS = {
    "PRESET": "recall",
    "COMMAND": "list",
    "FILE": "results.json",
    "NAME": "lstm",
    "FILE.py:Class": "examples/leaky_core.py:Leaky",
    "FILE.py": "examples/leaky_core.py",
    "IMAGE": "image:1",
    "CLAIM": "claim",
    "SPACE": "lr",
    "N": "3",
    "FIGURE": "memory-rl/fig3",
    "slurm|k8s": "slurm",
}


class ParsedError(Exception):
    """The arguments of a command were accepted."""


def code_lines(text: str) -> tuple[list[str], str]:
    """The lines of shell code blocks, and the text outside all code blocks."""
    lines, outside = [], []
    language = None
    for line in text.splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            language = fence[1] if language is None else None
        elif language in ("", "bash", "sh", "console"):
            lines.append(line.strip().removeprefix("$ "))
        elif language is None:
            outside.append(line)
    return lines, "\n".join(outside)


def command_lines(text: str) -> list[str]:
    """Every `bestiary ...` in a shell code block or in backticks, without comments and pipes."""
    blocks, outside = code_lines(text.replace("\\\n", " "))
    found = []
    for line in blocks:
        line = re.split(r"\s#\s|\s\|\s|\s>\s", f"{line} ")[0]
        found += re.findall(r"(?:^|[;&]\s*|\bdo\s+)(?:[A-Z_]+=\S+\s+)*bestiary\s+([^;&]+)", line)
    found += re.findall(r"`bestiary ([^`\n{]+)`", outside)
    return [line.strip().removesuffix(" | head") for line in found]


def usage_lines(text: str) -> list[str]:
    """Every command line of a usage text, without optional parts and descriptions."""
    lines = re.findall(r"^(?:usage:)? +bestiary (.*?)(?: {2,}.*)?$", text, re.M)
    return [re.sub(r"\s*\[[^]]*\]", "", line) for line in lines]


def commands() -> list[tuple[str, str]]:
    """(where it is written, command line)"""
    found = [(str(page.relative_to(ROOT)), line) for page in PAGES for line in command_lines(page.read_text())]
    found += [(name, line) for name, text in USAGES.items() for line in usage_lines(text)]
    for source in SOURCES:
        lines = re.findall(r"`bestiary ([a-z-][^`\n{|]*)`", source.read_text())
        found += [(str(source.relative_to(ROOT)), line) for line in lines]
    return list(dict.fromkeys(found))


def written_plugin(page: Path) -> str:
    """The Python code block of a page that registers a part."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    return next(block for block in blocks if "register(" in block)


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Iterator[Path]:
    """A working directory with the examples. What plugins register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(Experiment, "__annotations__", dict(Experiment.__annotations__))
    monkeypatch.setattr(plugins, "_loaded", set())
    for name in [name for name in sys.modules if name.startswith("bestiary_plugin_")]:
        monkeypatch.delitem(sys.modules, name)
    known = set(gymnasium.registry)
    yield tmp_path
    for name in set(gymnasium.registry) - known:
        del gymnasium.registry[name]
    for name in [name for name in sys.modules if name.startswith("bestiary_plugin_")]:
        del sys.modules[name]


def check_command(words: list[str], page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command up to the point where its arguments are accepted."""
    verb, *rest = words
    if verb.startswith("-"):
        assert main(words) == 0
        return
    assert verb in COMMANDS, f"there is no command {verb}"
    if (not rest and verb not in ("list", "doctor", "launch")) or words == ["doctor", "core"]:
        return  # a document that only names the command
    for flag, value in pairwise(rest):
        if flag == "--plugin" and not Path(value).exists():
            (directory / value).write_text(written_plugin(page))
    if page.name == "CONTRIBUTING.md" and "--plugin" not in rest:
        rest = [*rest, *(word for file in EXAMPLES for word in ("--plugin", str(file)))]
    if verb in ("eval", "video"):
        run = directory / rest[0]
        run.mkdir(parents=True, exist_ok=True)
        (run / EXPERIMENT).write_text(preset("tmaze").to_json())
    if verb == "launch":
        if "--" not in rest:
            return
        assert main([verb, *rest]) == 0
        check_command(rest[rest.index("--") + 1 :], page, directory, monkeypatch)
        return
    module = import_module(f"bestiary.cli.commands.{verb}")
    if hasattr(module, "parse"):
        parse = module.parse

        def parse_only(*args: object, **options: object) -> None:
            parse(*args, **options)
            raise ParsedError

        monkeypatch.setattr(module, "parse", parse_only)
        with pytest.raises((ParsedError, SystemExit)) as end:
            assert main([verb, *rest]) == 0
        assert isinstance(end.value, ParsedError) or (end.value.code == 0 and "--help" in rest)
        monkeypatch.setattr(module, "parse", parse)
    else:
        assert main([verb, *rest]) == 0


def test_commands_are_found_wherever_they_are_written():
    page = """
Text with `bestiary eval RUN` and

```python
bestiary.train()
```
```bash
bestiary train recall --seeds 5   # five runs
for i in 1 2; do bestiary list; done
RAY_ADDRESS=auto bestiary train recall \\
    --frames 1k | tail
```
"""
    assert command_lines(page) == ["train recall --seeds 5", "list", "train recall      --frames 1k", "eval RUN"]
    assert usage_lines("usage: bestiary sweep PRESET [--flags]\n\n  bestiary train x   text\n") == [
        "sweep PRESET",
        "train x",
    ]


def test_there_are_commands_to_check():
    found = commands()
    assert len(found) > 150
    verbs = {line.split()[0] for _, line in found}
    assert verbs >= COMMANDS.keys()


@pytest.mark.parametrize(("where", "line"), commands())
def test_a_command_in_a_document_is_understood(where, line, directory, monkeypatch, capsys):
    monkeypatch.setattr(core_contract, "check_contract", lambda config: [])
    for placeholder, word in PLACEHOLDERS.items():
        line = re.sub(rf"(?<![\w.]){re.escape(placeholder)}(?![\w.])", word, line)
    line = re.sub(r"^train \.\.\.", "train recall", line).replace("-- train ...", "-- train recall runtime:ray")
    line = re.sub(r"--\S+ \.\.\.|\.\.\.$", "", re.sub(r"--json$", "--json FILE", line))
    words = shlex.split(line)
    check_command(words, ROOT / where, directory, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "train recal",
        "train recall --frame 3",
        "sweep recall --spaces lr",
        "video RUN --env.lengt 3",
        "inspect RUN --sed 3",
        "launch slurm --node 3 -- train pong runtime:ray",
        "launch slurm -- train pong runtime:ray --frame 3",
        "reproduce memory-rl/fig3 --seed 1",
        "study riverraid --proxi score",
        "detect --refrence a b",
        "doctor nothing",
        "list nothing",
        "bench nothing",
        "nothing",
    ],
)
def test_a_wrong_command_in_a_document_is_found(line, directory, monkeypatch):
    with pytest.raises(AssertionError):
        try:
            check_command(line.split(), ROOT / "README.md", directory, monkeypatch)
        except pytest.fail.Exception as e:  # `pytest.raises` of the check itself
            raise AssertionError from e


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_figures_exist(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_no_document_or_module_speaks_of_its_making():
    words = re.compile(r"\bissue #?\d|this session|\.\./shared", re.I)
    for file in (*PAGES, *SOURCES):
        assert not words.search(file.read_text()), file


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    """The blocks are one program: the second uses what the first has trained."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code = "\n".join(blocks)
    assert "frames=200_000" in code
    names: dict[str, object] = {}
    exec(compile(code.replace("frames=200_000", "frames=2_000"), "README.md", "exec"), names)
    assert names["over"] is True
    assert (tmp_path / "runs" / "mine" / "experiment.json").exists()

"""Every command in a document is one the program understands, and every link leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from bestiary.bench import BENCHMARKS
from bestiary.cli.commands.detect import Settings as Detect
from bestiary.cli.commands.eval import Eval
from bestiary.cli.commands.plot import PlotSettings
from bestiary.cli.commands.resume import Resume
from bestiary.cli.commands.study import Settings as Study
from bestiary.cli.commands.train import read
from bestiary.cli.main import COMMANDS
from bestiary.cli.parse import check_parts, parse
from bestiary.envs import TMaze
from bestiary.presets import PRESETS, preset

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `bestiary ...` in a code block or in backticks."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        lines = [
            line.strip()
            for block in re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.S)
            for line in block.splitlines()
        ]
        lines += re.findall(r"`(bestiary [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        for line in lines:
            if line.startswith("bestiary ") and "..." not in line and "PRESET" not in line and "COMMAND" not in line:
                found.append((page.name, re.split(r"\s#\s|\s+\|", line)[0].strip()))
    return found


def test_there_are_commands_to_check():
    assert len(commands()) > 40


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_in_a_document_is_understood(page, line):
    verb, *rest = shlex.split(line)[1:]
    assert verb in COMMANDS or verb.startswith("-")
    if "--help" in rest:
        return
    if verb == "train":
        plugins = ("core:leaky", "env:repeat", "algo:actor-critic")
        if rest and rest[0] in PRESETS and not any(part.startswith(plugins) for part in rest):
            read(rest)
    elif verb == "eval" and rest:
        parse(Eval, rest, "bestiary eval", Eval(Path("RUN"), env=TMaze()))
    elif verb == "resume" and rest:
        parse(Resume, rest, "bestiary resume")
    elif verb == "plot" and rest:
        parse(PlotSettings, rest, "bestiary plot")
    elif verb == "study" and rest:
        parse(Study, check_parts(rest[1:]), "bestiary study", Study(preset(rest[0])))
    elif verb == "detect" and rest:
        parse(Detect, rest, "bestiary detect")
    elif verb == "bench" and rest:
        assert rest[0] in BENCHMARKS or rest[0] == "NAME"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_no_document_or_module_speaks_of_its_making():
    words = re.compile(r"\bissue #?\d|this session|\.\./shared", re.I)
    for file in (*PAGES, *ROOT.glob("bestiary/**/*.py"), *ROOT.glob("benchmarks/*.py")):
        assert not words.search(file.read_text()), file


def test_the_glossary_names_files_that_exist():
    files = re.findall(r"`((?:bestiary|tests)/[\w/]+\.py)`", (ROOT / "docs" / "glossary.md").read_text())
    assert len(files) >= 12
    assert [file for file in files if not (ROOT / file).is_file()] == []

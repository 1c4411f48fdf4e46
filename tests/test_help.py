"""Help texts: every setting has one, a researcher finds the field's words in them, and a preset's own part is first."""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
from helpers.program import bestiary

from bestiary.bench import BENCHMARKS
from bestiary.cli.commands.detect import DetectCommand
from bestiary.cli.commands.eval import Eval
from bestiary.cli.commands.inspect import InspectCommand
from bestiary.cli.commands.plot import PlotCommand
from bestiary.cli.commands.reproduce import ReproduceCommand
from bestiary.cli.commands.resume import Resume
from bestiary.cli.commands.study import StudyCommand
from bestiary.cli.commands.sweep import SweepCommand
from bestiary.cli.commands.train import Train
from bestiary.cli.commands.video import VideoCommand
from bestiary.cli.main import main
from bestiary.cli.parse import parse, settings
from bestiary.config.schema import advanced
from bestiary.launch import K8s, Slurm

COMMANDS: list[type] = [
    Train,
    SweepCommand,
    StudyCommand,
    DetectCommand,
    Eval,
    VideoCommand,
    InspectCommand,
    PlotCommand,
    Resume,
    ReproduceCommand,
    K8s,
    Slurm,
]


def bench_settings() -> list[type]:
    found = []
    for place, _ in BENCHMARKS.values():
        module, _, name = place.partition(":")
        found.append(getattr(import_module(f"bestiary.bench.{module}"), name))
    return found


def documented_fields(cls: type) -> set[str]:
    """Names of fields that a string follows in the source of the class or of one of its bases."""
    found = set()
    for base in cls.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, after in zip(tree.body, tree.body[1:], strict=False):
            string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            if isinstance(statement, ast.AnnAssign) and isinstance(string, str) and string.strip():
                assert isinstance(statement.target, ast.Name)
                found.add(statement.target.id)
    return found


def undocumented(cls: type) -> set[str]:
    return {
        f"{owner.__name__}.{field.name}"
        for _, owner, field in settings(cls)
        if field.name not in documented_fields(owner)
    }


def printed_help(capsys: Any, *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*args, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def words(text: str) -> str:
    """The help without its boxes and line ends, in lower case."""
    return re.sub(r"[│╭╮╰╯─\s]+", " ", text).lower()


def test_a_field_without_a_help_text_is_found():
    @dataclass(frozen=True)
    class Example:
        width: int = 3
        """units"""
        depth: int = 1
        empty: int = 2
        """ """

    assert documented_fields(Example) == {"width"}


@pytest.mark.parametrize("cls", [*COMMANDS, *bench_settings()], ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_setting_has_a_help_text(cls):
    assert undocumented(cls) == set()


@pytest.mark.parametrize(
    ("preset", "phrases"),
    [
        (
            "r2d2-small",
            [
                "dueling",
                "double q-learning",
                "n-step return",
                "burn-in",
                "replay capacity",
                "importance sampling",
                "gradient updates per",
                "priority exponent",
                "value rescaling",
                "epsilon-greedy",
                "target network update period",
            ],
        ),
        ("udrl-paper", ["return-to-go"]),
    ],
)
def test_a_researcher_finds_the_words_of_the_papers(preset, phrases, capsys):
    text = words(printed_help(capsys, "train", preset))
    assert [phrase for phrase in phrases if phrase not in text] == []


def test_the_help_of_plot_knows_the_interquartile_mean(capsys):
    assert "interquartile mean" in words(printed_help(capsys, "plot"))


@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_shows_the_parts_of_a_preset_first_in_one_column(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = printed_help(capsys, "train", "recall")
    titles = re.findall(r"^╭─ (.*?) ─+╮$", text, re.M)
    assert titles.count("options") == 1
    heads = list(dict.fromkeys(title.split(" ")[0].split(".")[0] for title in titles))
    assert [head for head in heads if head != "advanced"] == [
        "algo",
        "core",
        "env",
        "net",
        "options",
        "evaluation",
        "runtime",
        "checkpoint",
        "log",
        "video",
        "parts",
    ]
    assert max(map(len, text.splitlines()[2:])) <= min(100, int(columns))


def test_help_without_utf8_is_printed_all_the_same(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert "--algo.unroll" in bestiary("train", "recall", "--help").stdout


@dataclass(frozen=True)
class Algo:
    """An algorithm."""

    lr: float = 1e-3
    """learning rate"""
    rare: int = advanced(3)
    """a setting that few change"""


@dataclass(frozen=True)
class Toy:
    algo: Algo = Algo()
    seed: int = 0
    """random seed"""


def test_advanced_flags_are_listed_apart_and_still_parsed(capsys):
    with pytest.raises(SystemExit):
        parse(Toy, ["--help"], "toy")
    text = capsys.readouterr().out.split("\n\n", 1)[1]  # without the usage
    algo, apart = text.index("╭─ algo options"), text.index("╭─ advanced algo options")
    assert algo < text.index("--algo.lr") < text.index("--seed") < apart < text.index("--algo.rare")
    assert parse(Toy, ["--algo.rare", "5"], "toy").algo.rare == 5
    assert typing.get_type_hints(Algo)["rare"] is int


@pytest.mark.parametrize(
    ("args", "listed_apart"), [(["r2d2-small"], False), (["udrl"], True), (["recall", "algo:r2d2"], False)]
)
def test_a_setting_is_advanced_only_for_the_chosen_algorithm(args, listed_apart, capsys):
    with pytest.raises(SystemExit):
        main(["train", *args, "--help"])
    text = capsys.readouterr().out.split("\n\n", 1)[1]
    apart = text.find("╭─ advanced algo options")
    assert (0 < apart < text.index("--algo.burn-in")) == listed_apart

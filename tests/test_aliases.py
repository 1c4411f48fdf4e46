"""Names of earlier versions: old settings are read as those of today, and old flags are answered with the new ones."""

import dataclasses
import json
import typing
from dataclasses import replace
from typing import Any

import pytest

from bestiary.cli.commands.train import Train
from bestiary.cli.main import main
from bestiary.cli.parse import flags, refuse_old_flags
from bestiary.config.aliases import FIELDS, NESTED, VALUES, Removed, renamed_choice, renamed_flag
from bestiary.config.experiment import Experiment, family
from bestiary.config.schema import encode, kebab, members
from bestiary.errors import UserError
from bestiary.launch.spaces import read_space
from bestiary.presets import preset


def kinds(cls: type = Experiment, prefix: str = "") -> dict[str, tuple[str, type]]:
    """kind -> (flag prefix, class) of every settings class of an experiment."""
    found: dict[str, tuple[str, type]] = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for part in members(hint):
            found |= {kebab(part): (f"{prefix}{name}", part), **kinds(part, f"{prefix}{name}.")}
    return found


KINDS_OF_TODAY = kinds()
ENTRIES = [(kind, old, new) for kind, fields in FIELDS.items() for old, new in fields.items()]


def old_json(kind: str) -> tuple[Experiment, dict[str, Any], dict[str, Any]]:
    """An experiment with default settings of a kind; its JSON under the old names; and the part of that kind in it."""
    prefix, cls = KINDS_OF_TODAY[kind]
    assert "." not in prefix, "parts of parts had no settings that were renamed"
    experiment = replace(Experiment(), **{prefix: cls()})
    data = encode(experiment)
    part = data[prefix]
    nested = {path.split(".")[0] for path in FIELDS[kind].values() if isinstance(path, str) and "." in path}
    for old, new in FIELDS[kind].items():
        if isinstance(new, Removed):
            part[old] = new.value
            continue
        *path, last = new.split(".")
        holder = part
        for name in path:
            holder = holder[name]
        part[old] = holder.pop(last)
    for name in nested:
        part.pop(name)  # the settings that remain in it are new ones
    for field, values in VALUES.get(kind, {}).items():
        old = next((one for one, new in FIELDS[kind].items() if new == field), field)
        for before, now in values.items():
            part[old] = before if part[old] == now else part[old]
    return experiment, data, part


@pytest.mark.parametrize("kind", FIELDS)
def test_settings_under_their_old_names_are_read(kind):
    experiment, data, _ = old_json(kind)
    assert Experiment.from_json(json.dumps(data)) == experiment


@pytest.mark.parametrize(("kind", "old", "new"), [entry for entry in ENTRIES if isinstance(entry[2], str)])
def test_an_old_value_is_read_into_the_new_setting(kind, old, new):
    experiment, data, part = old_json(kind)
    part[old] = None if part[old] is not None else 1
    try:
        changed = Experiment.from_json(json.dumps(data))
    except UserError as e:  # the value is refused under the new name
        assert new.split(".")[-1] in str(e).replace("-", "_") or old not in str(e)
        return
    assert changed != experiment


@pytest.mark.parametrize(("kind", "old", "new"), [entry for entry in ENTRIES if isinstance(entry[2], Removed)])
def test_a_removed_setting_is_read_only_with_the_value_of_today(kind, old, new):
    _, data, part = old_json(kind)
    part[old] = "another value"
    with pytest.raises(
        UserError, match=f"{old}=another value is a setting of an earlier version that no longer exists"
    ):
        Experiment.from_json(json.dumps(data))


@pytest.mark.parametrize(("kind", "old", "new"), ENTRIES)
def test_every_old_flag_is_answered(kind, old, new):
    prefix, _ = KINDS_OF_TODAY[kind]
    flag = f"--{prefix}.{old}".replace("_", "-")
    known = flags(Train)
    if flag in known:  # another part has a setting of this name today
        return
    with pytest.raises(UserError) as refusal:
        refuse_old_flags(Train, [flag, "1"])
    if isinstance(new, str):
        answer = f"--{prefix}.{new}".replace("_", "-")
        assert answer in known and answer in str(refusal.value)
    else:
        assert str(refusal.value) == f"{flag} no longer exists"


def test_every_nested_part_exists():
    for (kind, field), nested in NESTED.items():
        _, cls = KINDS_OF_TODAY[kind]
        assert nested in {kebab(part) for part in members(typing.get_type_hints(cls, include_extras=True)[field])}


def test_new_names_exist_and_old_names_are_gone():
    for kind, fields in FIELDS.items():
        _, cls = KINDS_OF_TODAY[kind]
        names = {field.name for field in dataclasses.fields(cls)}
        assert names.isdisjoint(fields), kind
        assert {new.split(".")[0] for new in fields.values() if isinstance(new, str)} <= names, kind


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--algo.ratio", "1"], "--algo.ratio is called --algo.replay.updates-per-step now"),
        (["--evaluation.beside"], "--evaluation.beside is called --evaluation.background now"),
        (["--evaluation.no-beside"], "--evaluation.no-beside is called --evaluation.no-background now"),
        (["algo:udrl", "--algo.command=to-go"], "--algo.command to-go is called --algo.command return-to-go now"),
        (["--seeds", "2", "--runtime", "ray:auto"], "many runs on a Ray cluster are --executor ray:auto"),
        (["--seeds", "2", "--runtime=ray"], "many runs on a Ray cluster are --executor ray"),
        (["--runtime", "ray"], "and runtime:ray spreads one run over a cluster"),
    ],
)
def test_the_command_line_answers_old_names(args, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recall", *args]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["study", "riverraid", "--games", "3"], "--games is called --episodes now"),
        (["detect", "--trusted", "runs/a", "runs/b"], "--trusted is called --reference now"),
        (["eval", "runs/a", "--runs", "3"], "--runs is called --repeats now"),
    ],
)
def test_commands_answer_their_old_flags(args, sentence, capsys):
    assert main(args) == 2
    assert sentence in capsys.readouterr().err


def test_a_search_space_with_an_old_name_is_answered():
    space = {"algo.ratio": {"low": 0.1, "high": 1.0}}
    with pytest.raises(UserError, match=r"algo\.ratio is called algo\.replay\.updates-per-step now"):
        read_space(space, replace(preset("recall"), algo=family("algo")["dqn"]()))


def test_names_that_were_never_used_have_no_answer():
    assert renamed_flag("--algo.unheard-of", {"--algo.lr"}) is None
    assert renamed_flag("--seed", set()) is None
    assert renamed_choice("core", "unheard-of", family("core")) is None

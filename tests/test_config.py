"""Experiments round-trip through JSON, refuse unknown fields and kinds, and parse counts such as 1.5M."""

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Annotated

import pytest
import tyro

from bestiary.algos import Impala
from bestiary.config.experiment import Checkpoints, Experiment, family, load_experiment
from bestiary.config.schema import Count, Counts, decode, differences, encode, kebab, members, parse_count, parse_counts
from bestiary.cores import Ff, Lstm
from bestiary.envs import Catch, Recall
from bestiary.nets import Net, Resnet, SmallCnn
from bestiary.nets.optim import Adam, RmsPropTf
from bestiary.presets import PRESETS, preset
from bestiary.replay import Fifo

# counts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("200", 200),
        ("1_000_000", 1_000_000),
        ("1e6", 1_000_000),
        ("2.5e3", 2_500),
        ("1k", 1_000),
        ("1K", 1_000),
        ("1.5k", 1_500),
        ("50M", 50_000_000),
        ("200m", 200_000_000),
        ("0.1M", 100_000),
        ("1.2345M", 1_234_500),
        ("3b", 3_000_000_000),
        ("1G", 1_000_000_000),
        (" 7 ", 7),
    ],
)
def test_counts_are_parsed_with_suffixes_and_exponents(text, value):
    count = parse_count(text)
    assert count == value
    assert type(count) is int


@pytest.mark.parametrize(
    "text",
    ["", " ", "many", "1.5", "1.0001k", "-5", "5kk", "5 M", "M", "1e", "e6", "0x10", "1,000", "nan", "inf", "1e-3"],
)
def test_what_is_not_a_whole_number_is_refused(text):
    with pytest.raises(ValueError, match="is not a whole number; write it like 1000000, 1M or 1e6"):
        parse_count(text)


def test_thousandths_of_a_thousand_are_whole_numbers():
    wrong = []
    for n in range(1, 10_000):
        text = f"{n // 1000}.{n % 1000:03}k"
        try:
            read = parse_count(text)
        except ValueError:
            read = None
        if read != n:
            wrong.append(text)
    assert wrong == []


def test_large_counts_are_exact():
    assert parse_count("9007199254740993") == 2**53 + 1


def test_a_count_that_overflows_a_float_is_exact_or_a_value_error():
    try:
        huge = parse_count("1e400")
    except ValueError:
        return
    assert huge == 10**400


def test_counts_are_separated_by_commas():
    assert parse_counts("50M,200M") == (50_000_000, 200_000_000)
    assert parse_counts(" 1k , 2 ,") == (1000, 2)
    assert parse_counts("") == ()
    with pytest.raises(ValueError, match="'x' is not a whole number"):
        parse_counts("1,x")


@dataclass(frozen=True)
class Budget:
    frames: Count = 5
    milestones: Counts = ()


def test_counts_can_be_typed_on_the_command_line():
    assert tyro.cli(Budget, args=[]) == Budget()
    assert tyro.cli(Budget, args=["--frames", "1.5M"]) == Budget(1_500_000)
    assert tyro.cli(Budget, args=["--milestones", "50M,1e3"]) == Budget(5, (50_000_000, 1000))


def test_a_wrong_count_on_the_command_line_is_refused(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Budget, args=["--frames", "some"])
    assert "not a whole number" in "".join(capsys.readouterr())


# names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("Ff", "ff"),
        ("R2d2", "r2d2"),
        ("DeltaNet", "delta-net"),
        ("SmallCnn", "small-cnn"),
        ("RmsPropTf", "rms-prop-tf"),
    ],
)
def test_names_are_typed_in_lower_case_with_hyphens(name, typed):
    assert kebab(type(name, (), {})) == typed


def test_the_members_of_a_union_are_its_dataclasses():
    assert members(Ff | Lstm) == (Ff, Lstm)
    assert members(Annotated[Ff | Lstm | None, "note"]) == (Ff, Lstm)
    assert members(Net) == (Net,)
    assert members(int | None) == ()
    assert members(Count) == ()


def test_the_parts_of_a_family_are_found_by_name():
    assert family("core")["lstm"] is Lstm
    assert family("algo")["impala"] is Impala
    assert {"recall", "catch", "gym", "atari"} <= family("env").keys()


# JSON -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json(name):
    experiment = preset(name)
    again = Experiment.from_json(experiment.to_json())
    assert again == experiment
    assert again.to_json() == experiment.to_json()
    assert again.differs_from(experiment) == []


@pytest.mark.parametrize("part", ["env", "algo", "core", "runtime"])
def test_every_part_survives_json_and_stores_its_kind(part):
    for name, cls in family(part).items():
        experiment = replace(Experiment(), **{part: cls()})
        data = json.loads(experiment.to_json())
        assert data[part]["kind"] == name
        assert decode(Experiment, data) == experiment


def test_changed_settings_survive_json():
    experiment = Experiment(
        env=Recall(delay=3, cues=2),
        algo=Impala(replay=Fifo(capacity=70), clip_rho=None, optimizer=RmsPropTf(lr=1e-4, momentum=0.5)),
        core=Lstm(hidden=None, layers=2),
        net=Net(encoder=Resnet(hidden_size=7, num_layers=2), frame_stack=3, prev_action=False),
        checkpoint=Checkpoints(milestones=(1, 2, 3)),
        seed=2**40 + 1,
    )
    again = Experiment.from_json(experiment.to_json())
    assert again == experiment
    assert again.checkpoint.milestones == (1, 2, 3)
    assert hash(again) == hash(experiment)


def test_json_contains_every_setting_even_defaults():
    data = json.loads(preset("monobeast").to_json())
    assert data["algo"]["optimizer"] == {
        "kind": "rms-prop",
        "lr": 4.8e-4,
        "alpha": 0.99,
        "eps": 0.01,
        "momentum": 0.0,
        "centred": False,
    }
    encoder = {"kind": "shallow", "hidden_size": 512, "num_layers": 1, "filters": [32, 64, 64]}
    assert data["net"]["encoder"] == encoder
    assert data.keys() == {"kind", *(f.name for f in dataclasses.fields(Experiment))}


def test_settings_missing_in_json_take_their_default():
    assert decode(Experiment, {"kind": "experiment", "seed": 4}) == Experiment(seed=4)
    assert decode(Ff | Lstm, {"kind": "lstm", "layers": 2}) == Lstm(layers=2)


def test_an_unknown_kind_is_refused_and_the_known_ones_are_named():
    data = encode(Experiment())
    data["core"] = {"kind": "hippocampus"}
    with pytest.raises(ValueError, match=r"experiment\.core is of unknown kind 'hippocampus'; known: ff, lstm"):
        decode(Experiment, data)


def test_a_missing_kind_is_refused():
    with pytest.raises(ValueError, match=r"core is of unknown kind None; known: ff, lstm"):
        decode(Ff | Lstm, {"layers": 2}, "core")


def test_a_kind_of_another_family_is_refused():
    data = encode(Experiment())
    data["core"] = data["env"]
    with pytest.raises(ValueError, match=r"experiment\.core is of unknown kind 'catch'"):
        decode(Experiment, data)


def test_unknown_fields_are_refused_by_their_full_path():
    data = encode(Experiment())
    data["algo"]["optimizer"] |= {"warmup": 5, "betas": []}
    with pytest.raises(ValueError, match=r"experiment\.algo\.optimizer has unknown fields: betas, warmup"):
        decode(Experiment, data)


@pytest.mark.parametrize("wrong", ["lstm", 5, None, ["lstm"]], ids=str)
def test_a_part_that_is_not_an_object_is_refused(wrong):
    data = encode(Experiment())
    data["core"] = wrong
    with pytest.raises(ValueError, match=r"experiment\.core should be an object with a kind, not"):
        decode(Experiment, data)


@pytest.mark.parametrize("field", ["discount", "trace_decay"])
def test_a_saved_value_out_of_range_is_refused_by_its_path(field):
    data = encode(Experiment())
    data["algo"][field] = 1.5
    with pytest.raises(ValueError, match=rf"algo\.{field.replace('_', '-')}=1\.5 must lie in \[0, 1\]"):
        decode(Experiment, data)


@pytest.mark.parametrize(
    ("part", "field", "wrong"),
    [
        (None, "seed", 1.5),
        ("algo", "unroll", 2.5),
        ("algo", "reward_clip", "sometimes"),
        ("algo", "reduction", "median"),
        ("net", "prev_action", "no"),
        ("log", "tensorboard", 3),
    ],
)
def test_a_saved_value_of_the_wrong_type_is_refused_by_name(part, field, wrong):
    # without this check an unknown value of reward_clip would silently mean no clipping
    data = encode(Experiment())
    (data[part] if part else data)[field] = wrong
    with pytest.raises(ValueError, match=field.replace("_", "[-_]")):
        decode(Experiment, data)


def test_files_without_a_valid_experiment_are_refused(tmp_path):
    path = tmp_path / "experiment.json"
    with pytest.raises(ValueError, match=r"is not a run: it has no experiment\.json"):
        load_experiment(path)
    path.write_text('{"kind": "experiment", ')
    with pytest.raises(ValueError, match="cannot be read"):
        load_experiment(path)
    path.write_text('{"kind": "experiment", "frames": "many"}')
    with pytest.raises(ValueError, match="frames cannot be"):
        load_experiment(path)


def test_load_experiment_returns_the_saved_experiment(tmp_path):
    path = tmp_path / "experiment.json"
    path.write_text(preset("recall").to_json())
    assert load_experiment(path) == preset("recall")


# differences ----------------------------------------------------------------------------------------------------------


def test_an_experiment_does_not_differ_from_itself():
    assert differences(encode(Experiment()), encode(Experiment())) == []


def test_differences_are_named_with_dots_and_both_values():
    one = Experiment()
    other = replace(one, seed=3, algo=replace(one.algo, unroll=7), net=replace(one.net, encoder=SmallCnn(9)))
    assert sorted(differences(encode(one), encode(other))) == [
        "algo.unroll: 20 -> 7",
        "net.encoder: auto -> small-cnn",
        "seed: 0 -> 3",
    ]


def test_another_kind_is_one_difference():
    found = differences(encode(Impala()), encode(Impala(optimizer=Adam())))
    assert found == ["optimizer: rms-prop -> adam"]


def test_a_setting_in_only_one_experiment_is_a_difference():
    old, new = encode(Lstm()), encode(Lstm())
    del old["layers"]
    assert differences(old, new) == ["layers: None -> 1"]
    assert differences(new, old) == ["layers: 1 -> None"]


def test_only_settings_that_do_not_change_results_may_differ():
    saved = preset("recall")
    longer = replace(
        saved,
        frames=2 * saved.frames,
        runtime=replace(saved.runtime, envs=64),
        checkpoint=Checkpoints(minutes=1),
        log=replace(saved.log, every=10),
        evaluation=replace(saved.evaluation, episodes=3),
    )
    assert longer.differs_from(saved) == []
    assert replace(saved, core=Ff()).differs_from(saved) == ["core: lstm -> ff"]
    assert replace(saved, env=Catch()).differs_from(saved) == ["env: recall -> catch"]


# presets --------------------------------------------------------------------------------------------------------------


def test_a_mistyped_preset_is_answered_with_near_names():
    with pytest.raises(ValueError, match=r"no preset 'monobeest': did you mean monobeast"):
        preset("monobeest")


def test_an_unknown_preset_is_answered_with_all_names():
    with pytest.raises(ValueError, match=r"there are: .*recall.*polybeast-docker"):
        preset("zzz")

"""Differences besides the studied setting are named; their consequences and unknown settings are reported."""

import copy
import csv
import json
from pathlib import Path

import pytest
from tiny_records import a_record, layer_study, of_table, store

from mlsm.common.errors import ComparisonError
from mlsm.common.progress import silent
from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.arms import CHECKPOINTS, sort_into_arms
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.identity import KEPT, differences
from mlsm.evaluation.comparison.models import models_of
from mlsm.evaluation.comparison.paper import vary
from mlsm.terminal.comparison import comparison

LEARNED = {"k": 3072, "lam": 0.05, "seed": 0, "epochs": 1, "vectors": 1000}
TARGET = {
    "kind": "lsp",
    "format": 2,
    "windowing": {"max_length": 128},
    "teacher": "f" * 64,
    "teacher_name": "bert",
    "layer": 10,
    "dictionary": "d" * 64,
    "k": 3072,
    "lam": 0.05,
    "top_n": 32,
    "tolerance": 1e-3,
    "dtype": "float32",
    "dictionary_settings": LEARNED,
}
OTHER = TARGET | {"dictionary": "e" * 64}
SETTINGS = {"objective": "mlsm", "encoder": "deberta-base", "lr": 1e-4, "dropout": 0.1, "max_steps": 1000, "seed": 42}
LOGITS = {name: TARGET[name] for name in ("windowing", "teacher", "teacher_name", "dtype")}
LOGITS |= {"kind": "logits", "format": 2, "k": 28996, "top_n": 64, "octaves": 4}


def identity(objective="mlsm", target=TARGET, kept=0.99, **settings):
    known = SETTINGS | {"objective": objective} | settings
    return {
        "objective": objective,
        "settings": known,
        "plan": "p" * 32,
        "windowing": {"max_length": 128},
        "target": json.dumps(target, sort_keys=True),
        "target_settings": target,
        "tail": {"mass_kept": kept, "mass_dropped": 1 - kept},
    }


def of_layer(layer, **changes):
    """An identity whose dictionary is, as it must be, another one at another layer."""
    return identity(target=TARGET | {"layer": layer, "dictionary": f"{layer:064x}"}, **changes)


def models(**identities):
    """Models by name, with the records' facts that follow from their identities; None: a stock model."""
    records = []
    for name, known in identities.items():
        facts = {}
        if known:
            target, settings = known["target_settings"], known["settings"]
            facts = {"objective": known["objective"], "identity": known, "kappa": settings.get("kappa")}
            facts |= {"layer": target.get("layer"), "k": target.get("k")} if known["objective"] != "mlm" else {}
        records.append(a_record(name, "rte", 0, [0.5], **facts))
    return models_of(records)[0]


def named(**identities):
    return differences(models(**identities))


def test_what_follows_from_layer_or_objective_is_no_difference():
    layers = named(a=of_layer(8), b=of_layer(10))
    assert list(layers.settings) == ["layer"] and layers.alone
    assert layers.sentence({"layer"}) == "The models differ only in layer."
    objectives = named(
        mlsm=identity(), mlm=identity("mlm", target={"kind": "ids", "windowing": {}}), kd=identity("kd", target=LOGITS)
    )
    assert list(objectives.settings) == ["objective"] and objectives.alone


def test_a_setting_beside_the_studied_one_is_named_with_its_values():
    found = named(a=of_layer(8), b=of_layer(10, lr=1e-3), c=of_layer(12))
    assert found.settings["lr"] == {"0.0001": ["a", "c"], "0.001": ["b"]} and not found.alone
    assert found.sentence({"layer"}) == "The models differ in layer and also in lr (0.0001: a, c; 0.001: b)."


def test_weights_of_masks_are_named_by_their_kind_and_content():
    tables = {"a": "frequency 0123456789abcdef", "b": "frequency fedcba9876543210"}
    found = named(none=identity(), **{name: identity(mask_weights=table) for name, table in tables.items()})
    assert found.sentence({"mask_weights"}) == "The models differ only in mask_weights."
    assert found.settings["mask_weights"] == {"uniform": ["none"], tables["a"]: ["a"], tables["b"]: ["b"]}
    turns = {"mask_weights": ["common 0123456789abcdef", "uniform"], "mask_weight_steps": [0.3]}
    found = named(none=identity(), turns=identity(**turns))
    assert list(found.settings) == ["mask_weights"]  # only tables that take turns have steps at which they do
    assert list(found.settings["mask_weights"].values()) == [["none"], ["turns"]]
    later = identity(**turns | {"mask_weight_steps": [0.5]})
    assert list(named(a=identity(**turns), b=later).settings) == ["mask_weight_steps"]


def test_the_loss_of_hidden_states_is_named_beside_students_of_them_only():
    first, second = (identity("regress", regress_loss=loss) for loss in ("cosine", "mse"))
    assert set(named(a=first, b=second).settings) == {"regress_loss"}
    assert set(named(a=second, mlm=identity("mlm", regress_loss="cosine")).settings) == {"objective"}


def test_another_wordnet_is_named_and_one_beside_other_objectives_is_not():
    first, second = (identity("supersense", wordnet=content * 16) for content in "ab")
    assert named(a=first, b=second).settings == {"wordnet": {"a" * 8: ["a"], "b" * 8: ["b"]}}
    assert list(named(a=first, mlsm=identity(), mlm=identity("mlm")).settings) == ["objective"]
    assert set(named(a=first, b=second, mlm=identity("mlm")).settings) == {"objective", "wordnet"}


def test_short_windows_are_named_with_their_length():
    short = {"short_windows": 128, "short_share": 0.9}
    assert named(a=identity(**short), b=identity()).settings == {"short_windows": {"128": ["a"], "not set": ["b"]}}
    fewer = identity(**short | {"short_share": 0.5})
    assert named(a=identity(**short), b=fewer).settings == {"short_share": {"0.9": ["a"], "0.5": ["b"]}}


def test_what_follows_from_another_setting_is_not_a_second_difference():
    for first, second in (
        ({"schedule": "linear"}, {"schedule": "wsd", "decay_share": 0.2}),
        ({"mask_schedule": "linear"}, {"mask_schedule": "steps", "mask_rate_steps": [0.3, 0.5]}),
    ):
        found = named(a=identity(**first), b=identity(**second))
        assert list(found.settings) == list(first)
    several = identity(store_weights=[1.0, 0.5]) | {"other_targets": [{"target": json.dumps(OTHER), "settings": OTHER}]}
    assert "store_weights" not in named(a=identity(), b=several).settings
    other = identity(schedule="wsd", decay_share=0.5)
    assert list(named(a=identity(schedule="wsd", decay_share=0.2), b=other).settings) == ["decay_share"]


def test_masks_that_follow_the_model_are_named_as_unpaired(tmp_path):
    adaptive = {"mask_weights": "adaptive", "mask_update_steps": 200}
    found = named(a=identity(**adaptive), b=identity("mlm", target={"kind": "ids", "windowing": {}}, **adaptive))
    said = found.sentence({"objective"})
    assert said.startswith("The models differ only in objective. The masks of a, b followed the model's own loss")
    assert said.endswith("pairs with such a model are not paired in masks.")
    both = named(a=identity(**adaptive), b=identity())
    assert both.own_masks == ["a"] and list(both.settings) == ["mask_weights"]  # only adaptive masks have an interval
    assert list(named(a=identity(**adaptive), b=identity(**adaptive | {"mask_update_steps": 50})).settings) == [
        "mask_update_steps"
    ]
    identities = {("a", 8): of_layer(8, **adaptive), ("b", 10): of_layer(10, **adaptive)}
    result, settings, figures = compared(tmp_path, study(identities))
    assert result.notes[-1].startswith("The masks of a, b followed") and result.notes[-1] in figures[3].caption
    assert "not paired in masks" in comparison(result, settings)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"target": TARGET | {"dtype": "bfloat16"}}, "teacher dtype"),
        ({"target": TARGET | {"solver": {"name": "fista", "steps": 100}}}, "solver"),
        ({"target": TARGET | {"documents_apart": True}}, "teacher documents_apart"),
        ({"target": OTHER | {"dictionary_settings": LEARNED | {"seed": 1}}}, "dictionary seed"),
        ({"target": OTHER}, "dictionary"),
        ({"segments": True}, "segments"),
        ({"target_temperature": 2.0}, "target_temperature"),
        ({"mask_later": 2}, "mask_later"),
        ({"dropout": 0.0}, "dropout"),
        ({"mask_weights": "pmi 0123456789abcdef"}, "mask_weights"),
        ({"mask_schedule": "cosine"}, "mask_schedule"),
        ({"seed": 43}, "run_seed"),
    ],
)
def test_every_setting_that_names_a_run_counts(change, name):
    assert list(named(a=identity(), b=identity(**change)).settings) == [name]


def test_the_targets_of_several_stores_and_their_weights_count():
    def of_both(layer, weights=(1.0, 0.5), **changes):
        other = TARGET | {"layer": layer, "target": f"{layer:032x}"}
        known = identity(other_targets=[other["target"]], store_weights=list(weights), **changes)
        return known | {"other_targets": [other]}

    assert named(a=of_both(6), b=of_both(6)).settings == {}
    found = named(one=identity(), both=of_both(6))
    assert list(found.settings) == ["other_targets"]  # one store has no weights
    described = '["teacher bert, layer 6, k 3072, lambda 0.05, target 00000000"]'
    assert found.settings["other_targets"] == {"not set": ["one"], described: ["both"]}
    assert list(named(a=of_both(6), b=of_both(8)).settings) == ["other_targets"]
    assert list(named(a=of_both(6), b=of_both(6, (1.0, 1.0))).settings) == ["store_weights"]
    of_layers = models(**{f"l{layer}": of_layer(layer) for layer in (8, 10)}, both=of_both(6))
    assert [model.label for model in vary(of_layers, "layer").models] == ["l8", "l10"]


def test_an_absent_key_is_the_usual_value():
    explicit = identity(segments=False, target_temperature=1.0, mask_later=0)
    assert named(a=identity(), b=explicit).settings == {}
    mtl = {"objective": "mtl", "kappa": 1.0}
    assert named(a=identity(**mtl), b=identity(**mtl, tied=True)).settings == {"tied": {"false": ["a"], "true": ["b"]}}
    words = named(mlm=identity("mlm"), kd=identity("kd", target=LOGITS), mtl=identity(**mtl, tied=True))
    assert list(words.settings) == ["objective"]  # all are tied
    words = named(tied=identity("mlm"), untied=identity("mlm", untied=True))
    assert words.settings == {"tied": {"true": ["tied"], "false": ["untied"]}}


def test_the_mass_that_top_n_keeps_is_named_where_it_differs():
    cut = named(a=of_layer(1, kept=0.99), b=of_layer(6, kept=0.91))
    assert cut.settings[KEPT] == {"99.0%": ["a"], "91.0%": ["b"]}
    assert KEPT not in named(a=of_layer(1, kept=0.99), b=of_layer(6, kept=0.985)).settings
    unknown = copy.deepcopy(of_layer(6)) | {"tail": None}
    assert named(a=of_layer(1), b=unknown).settings[KEPT] == {"99.0%": ["a"], "unknown": ["b"]}


def test_what_is_not_recorded_is_unknown_not_equal():
    found = named(old=None, new=identity())
    assert found.unknown == ["old"] and not found.alone
    assert "Other differences of old are unknown" in found.sentence({"layer"})
    of_own_loop = identity()
    of_own_loop["settings"] = {name: value for name, value in of_own_loop["settings"].items() if name != "lr"}
    assert named(own=of_own_loop, new=identity()).unknown == ["own"]
    stock = differences(models_of([a_record("bert", "rte", 0, [0.5], objective=None, encoder=None)])[0])
    assert stock.unknown == ["bert"] and stock.settings == {}


def test_another_dictionary_at_an_equal_layer_is_a_difference_whatever_a_third_model_has():
    other = identity(target=TARGET | {"dictionary": "c" * 64})
    found = named(a=of_layer(8), b=of_layer(10), c=other)
    assert set(found.settings) == {"layer", "dictionary"} and "alone" not in found.sentence({"layer"})


def test_what_follows_from_solver_and_documents_apart_is_no_difference():
    fista = {name: value for name, value in TARGET.items() if name != "tolerance"} | {"solver": {"name": "fista"}}
    assert named(a=identity(), b=identity(target=fista)).alone
    found = named(a=identity(), b=identity(target=fista), c=identity(target=TARGET | {"tolerance": 1e-4}))
    assert set(found.settings) == {"solver", "tolerance"}
    assert list(named(a=identity(), b=identity(target=OTHER | {"documents_apart": True})).settings) == [
        "teacher documents_apart"
    ]  # by which it has learned another dictionary


def test_one_teacher_in_two_places_is_one_teacher():
    elsewhere = TARGET | {"teacher_name": "/data/bert", "layer": 8, "dictionary": "8" * 64}
    assert list(named(a=identity(), b=identity(target=elsewhere)).settings) == ["layer"]
    other = elsewhere | {"teacher": "0" * 64}
    assert "teacher" in named(a=identity(), b=identity(target=other)).settings
    assert named(a=identity(), b=identity(target=elsewhere | {"teacher": None})).settings["teacher"]


def test_weights_to_begin_with_are_compared_by_content():
    first, second = "1" * 32, "2" * 32
    assert named(a=of_layer(8, continue_from=first), b=of_layer(10, continue_from=first)).alone
    found = named(a=of_layer(8, continue_from=first), b=of_layer(10, continue_from=second))
    assert list(found.settings) == ["continue_from", "layer"]


def test_runs_of_other_settings_are_other_arms():
    found = sort_into_arms(models(a=identity(), b=identity(lr=1e-3), c=identity("mlm")), CHECKPOINTS)
    assert [arm.name for arm in found] == ["MLSM, lr 0.0001", "MLSM, lr 0.001", "MLM"]


# -- in compare ----------------------------------------------------------------------------------------------


def study(identities, seeds=1):
    table = published.scores(1)
    return [
        record
        for (name, layer), known in identities.items()
        for record in of_table(name, table[layer], seeds, layer=layer, identity=known)
    ]


def compared(directory, records, **settings):
    settings = CompareConfig(results=(store(directory, records),), output=directory / "out", **settings)
    result = compare(settings, silent)
    return result, settings, {figure.figure: figure for figure in result.figures}


def test_a_figure_is_drawn_of_the_models_that_differ_in_its_variable_alone(tmp_path):
    identities = {("l8", 8): of_layer(8), ("l10", 10): of_layer(10), ("l12", 12): of_layer(12, lr=1e-3)}
    result, settings, figures = compared(tmp_path, study(identities))
    assert figures[3].models == "l8, l10"
    assert figures[3].caption == ("The models differ only in layer. Excluded because other settings differ: l12 (lr).")
    assert "Excluded because other settings differ: l12 (lr)" in (settings.output / "figure-03-layers.svg").read_text()
    said = comparison(result, settings)
    assert "lr: 0.0001 (1/2), 0.001 (3)" in said and "1 and 3: lr, layer" in said


def test_where_no_two_agree_the_figure_names_what_differs(tmp_path):
    identities = {("l8", 8): of_layer(8), ("l10", 10): of_layer(10, lr=1e-3)}
    result, settings, figures = compared(tmp_path, study(identities))
    caption = "The models differ in layer and also in lr (0.0001: l8; 0.001: l10)."
    assert figures[3].caption == caption
    svg = (settings.output / "figure-03-layers.svg").read_text()
    assert "The models differ in layer and also in lr" in svg
    assert caption in comparison(result, settings)
    with (settings.output / "significance.csv").open() as file:
        assert {row["differ_in"] for row in csv.DictReader(file)} == {"lr, layer"}
    (pair,) = result.pairs
    assert (pair.differ_in, pair.alone) == (["lr", "layer"], False)
    assert "l8" in Path(settings.output / "differences.csv").read_text()


def test_old_records_are_compared_and_said_to_be_unknown(tmp_path):
    _, _, figures = compared(tmp_path, layer_study((8, 10), seeds=1))
    assert "differ only in" not in figures[3].caption and "are unknown" in figures[3].caption


def test_the_tail_is_in_the_tables(tmp_path):
    identities = {("l8", 8): of_layer(8, kept=0.95), ("l10", 10): of_layer(10, kept=0.9)}
    result, settings, figures = compared(tmp_path, study(identities))
    with (settings.output / "models.csv").open() as file:
        assert [row["mass_kept"] for row in csv.DictReader(file)] == ["0.95", "0.9"]
    assert "95.0%" in comparison(result, settings) and "90.0%" in figures[3].caption


def judgements(path, judge="a judge", **aucs):
    dictionaries = [{"target": known["target"], "auc": auc} for known, auc in aucs.values()]
    path.write_text(json.dumps({"judge": judge, "samples": 9, "dictionaries": dictionaries}))
    return path


def test_how_interpretable_the_lsps_are_stands_beside_who_learned_them(tmp_path, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])
    eight, ten, twelve = (of_layer(layer) for layer in (8, 10, 12))
    untold = a_record("old", "rte", 0, [0.5])
    words = identity("mlm", target=eight["target_settings"])  # reads words of the store, not its LSPs
    records = [*study({("l8", 8): eight, ("l10", 10): ten, ("l12", 12): twelve}), untold]
    records.append(a_record("words", "rte", 0, [0.5], objective="mlm", identity=words, layer=None, k=None))
    first = judgements(tmp_path / "a.json", eight=(eight, 0.93), none=(twelve, None))
    second = judgements(tmp_path / "b.json", ten=(ten, 0.81))
    result, settings, _ = compared(tmp_path, records, intruders=(first, second))
    with (settings.output / "models.csv").open() as file:
        found = {row["model"]: row["intruder_auc"] for row in csv.DictReader(file)}
    assert found == {"l8": "0.93", "l10": "0.81", "l12": "", "old": "", "words": ""}
    said = comparison(result, settings)
    assert "93.0%" in said and "81.0%" in said and "how often a judge can distinguish" in " ".join(said.split())
    result, settings, _ = compared(tmp_path, records)
    assert "Intruder" not in (text := comparison(result, settings)) and "intruder AUC" not in text


def test_judgements_that_do_not_compare_are_refused(tmp_path):
    known = of_layer(8)
    records = study({("l8", 8): known, ("l10", 10): of_layer(10)})
    right = judgements(tmp_path / "a.json", l8=(known, 0.9))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "lacks.json").write_text('{"judge": "a judge", "samples": 9}')
    for files, message in (
        ((right, judgements(tmp_path / "b.json", judge="another", l8=(known, 0.9))), "b.json was judged by another"),
        ((right, judgements(tmp_path / "d.json", l8=(known, 0.8))), "d.json has another AUC for the store"),
        ((judgements(tmp_path / "e.json", l8=(known, 0.8), l9=(known, 0.7)),), "e.json has another AUC for the store"),
        ((judgements(tmp_path / "c.json", l12=(of_layer(12), 0.9)),), "from none of the judged stores"),
        ((tmp_path / "nothing.json",), "nothing.json: .*No such file.*show-lsp STORE --intruders --json"),
        ((tmp_path / "list.json",), "expected an object"),
        ((tmp_path / "lacks.json",), "field dictionaries is missing"),
    ):
        with pytest.raises(ComparisonError, match=message):
            compared(tmp_path, records, intruders=files)


def test_fine_tunings_with_and_without_segments_are_no_pairs(tmp_path):
    told = {"settings": {"dropout": 0.1, "segments": True}}
    records = [a_record("a", "rte", 0, [0.5], **told)]
    records += [a_record("b", "rte", 0, [0.6], settings={"dropout": 0.1, "segments": False})]
    result, settings, _ = compared(tmp_path, records)
    reasons = {(found.model, found.against): found.why for found in result.left_out}
    assert reasons["a", "b"] == "settings differ (segments: true and false)"

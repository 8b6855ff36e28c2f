"""Records of whole evaluations: against another way to compute them, interrupted, repeated, and with models of runs."""

import json
import math
import random
import shutil
import signal
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preloaded import run_python
from tiny_exports import exported
from tiny_store import write_store, write_tokenizer
from transformers import AutoModel, AutoModelForMaskedLM

from mlsm import __main__ as cli
from mlsm.cli import run as command_line
from mlsm.commands.evaluate_blimp import show as blimp
from mlsm.common.errors import BlimpError, ModelError, RecordError, RunError
from mlsm.evaluation import records
from mlsm.evaluation.tasks.blimp import evaluate as evaluating
from mlsm.evaluation.tasks.blimp.config import BlimpConfig
from mlsm.evaluation.tasks.blimp.data import PARADIGMS, PHENOMENA
from mlsm.evaluation.tasks.blimp.data import read as read_paradigms
from mlsm.evaluation.tasks.blimp.evaluate import evaluate_blimp
from student.config import ProbeConfig, StudentConfig
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.probe import train_probe
from student.train import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """67 paradigms of four pairs in the language of tiny_store; the last pair of `causative` is one sentence twice."""
    directory, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in PARADIGMS:
        pairs = [
            [" ".join(f"w{draw.randrange(50)}" for _ in range(draw.choice([3, 5]))) for _ in range(2)] for _ in range(4)
        ]
        if name == "causative":
            pairs[3][1] = pairs[3][0]
        lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def config(data, model, tmp_path):
    return BlimpConfig(models=(str(model),), data_dir=data, output=tmp_path / "out", device="cpu")


@torch.no_grad()
def sentence_score(model, sentence):
    """Of a sentence of tiny_store's language: ln p of each word when it is masked, summed."""
    ids = torch.tensor([2, *(int(word[1:]) + 5 for word in sentence.split()), 3])
    places = torch.arange(1, len(ids) - 1)
    rows = ids.repeat(len(places), 1)
    rows[places - 1, places] = 4
    logits = model(input_ids=rows).logits.double()
    return float(logits.log_softmax(-1)[places - 1, places, ids[places]].sum())


def expected_figures(directory, data):
    model, found = AutoModelForMaskedLM.from_pretrained(directory), []
    for name in PARADIGMS:
        pairs = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        scores = [[sentence_score(model, pair[f"sentence_{kind}"]) for kind in ("good", "bad")] for pair in pairs]
        right = sum(good > bad + 1e-6 for good, bad in scores)
        ties = sum(abs(good - bad) < 1e-6 for good, bad in scores)
        found.append({"metric": name, "value": right / 4, "n": 4, "ties": ties})
    return found


def read(config):
    """The records of an output, without the files that they are in."""
    return [{name: value for name, value in one.items() if name != "file"} for one in records.read([config.output])]


def test_a_record_holds_what_another_way_to_score_gives(config, model, data):
    result = evaluate_blimp(config)
    (record,), (path,) = result["records"], result["paths"]
    assert record["figures"] == expected_figures(model, data)
    assert record["averages"]["ties"] == 1
    values = {figure["metric"]: figure["value"] for figure in record["figures"]}
    assert record["averages"]["headline"] == pytest.approx(sum(values.values()) / 67)
    assert record["averages"]["phenomena"]["ellipsis"] == pytest.approx(
        (values["ellipsis_n_bar_1"] + values["ellipsis_n_bar_2"]) / 2
    )
    assert list(record["averages"]["phenomena"]) == list(PHENOMENA)
    assert Path(path) == config.output / f"evaluations/tiny-bert-{record['weights'][:8]}/blimp/blimp.json"
    assert read(config) == [record]
    assert record["task"] == "blimp" and record["data"]["n_eval"] == 268 and len(record["data"]["files"]) == 67


def test_the_summary_has_phenomena_headline_and_ties(config):
    result = evaluate_blimp(config)
    text = blimp(result, config)
    averages = result["records"][0]["averages"]
    for name, value in averages["phenomena"].items():
        assert f"{100 * value:.1f}" in next(line for line in text.splitlines() if line.strip().startswith(name))
    assert f"{100 * averages['headline']:.2f}" in text and "268 of 67 paradigms" in text
    both = evaluate_blimp(replace(config, models=config.models * 2))
    assert both["finished_before"] == [True, True]
    assert blimp(both, config).count(f"{100 * averages['headline']:.2f}") == 2


def test_the_same_command_again_loads_nothing(config, monkeypatch):
    first = evaluate_blimp(config)
    monkeypatch.setattr(evaluating, "load", None)
    again = evaluate_blimp(config)
    assert again["finished_before"] == [True] and again["records"] == first["records"]


def test_another_tokenizer_on_the_same_weights_is_scored_again(config, model, tmp_path, monkeypatch):
    first = evaluate_blimp(config)["records"][0]
    other = shutil.copytree(model, tmp_path / "other" / model.name)
    write_tokenizer(other, 59, step=-1)
    config = replace(config, models=(str(other),))
    again = evaluate_blimp(config)
    second = again["records"][0]
    assert again["finished_before"] == [False] and second["weights"] == first["weights"]
    assert second["tokenizer"] != first["tokenizer"] and second["figures"] != first["figures"]
    monkeypatch.setattr(evaluating, "load", None)
    assert evaluate_blimp(config)["finished_before"] == [True]


def test_another_configuration_of_the_same_weights_is_scored_again(config, model, tmp_path):
    first = evaluate_blimp(config)["records"][0]
    other = shutil.copytree(model, tmp_path / "other" / model.name)
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"hidden_act": "relu"}))
    second = evaluate_blimp(replace(config, models=(str(other),)))["records"][0]
    assert second["weights"] == first["weights"] and second["figures"] != first["figures"]
    with pytest.raises(RecordError, match="same name and weights"):
        evaluate_blimp(replace(config, models=(str(model), str(other))))


def test_another_metric_or_part_is_another_record(config):
    whole = evaluate_blimp(config)["records"][0]
    parts = [
        evaluate_blimp(replace(config, **change))["records"][0]
        for change in ({"per_paradigm": 2}, {"metric": "within-word-l2r"})
    ]
    assert [part["task"] for part in parts] == ["blimp-2", "blimp-within-word-l2r"]
    assert parts[0]["data"]["n_eval"] == 134
    assert parts[1]["figures"] == whole["figures"]  # a vocabulary of whole words
    assert read(config) == [parts[0], parts[1], whole]


def scored(monkeypatch):
    """A list that fills with the paradigms that are really scored."""
    names, score = [], evaluating._score
    monkeypatch.setattr(evaluating, "_score", lambda scorer, *rest: names.append(rest[0].name) or score(scorer, *rest))
    return names


def test_a_killed_evaluation_goes_on_behind_the_last_whole_paradigm(config, monkeypatch):
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from mlsm.evaluation.tasks.blimp.config import BlimpConfig
        from mlsm.evaluation.tasks.blimp.evaluate import evaluate_blimp

        def progress(stage, done, total, unit="tokens", **figures):
            if done == 20 * 8:
                os.kill(os.getpid(), signal.SIGKILL)

        evaluate_blimp(BlimpConfig(models=({config.models[0]!r},), data_dir=Path({str(config.data_dir)!r}),
                             output=Path({str(config.output)!r}), device="cpu"), progress)
    """)
    run = run_python(["-c", code])
    assert run.returncode == -signal.SIGKILL
    files = sorted(path.name for path in config.output.rglob("*") if path.is_file())
    assert files == sorted(f"{name}.npz" for name in PARADIGMS[:20])
    names = scored(monkeypatch)
    resumed = evaluate_blimp(config)["records"][0]
    assert names == list(PARADIGMS[20:])
    unbroken = evaluate_blimp(replace(config, output=config.output / "other"))["records"][0]
    assert resumed | {"wall": 0} == unbroken | {"wall": 0}


def test_scores_that_were_cut_or_are_of_other_pairs_are_made_again(config, data, tmp_path, monkeypatch):
    first = evaluate_blimp(config)["records"][0]
    files = {path.stem: path for path in config.output.rglob("*.npz")}
    raw = files["causative"].read_bytes()
    files["causative"].write_bytes(raw[: len(raw) // 2])
    files["wh_island"].write_bytes(b"")
    changed = shutil.copytree(data, tmp_path / "changed")
    lines = (changed / "transitive.jsonl").read_text().splitlines()
    (changed / "transitive.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    names = scored(monkeypatch)
    again = evaluate_blimp(replace(config, data_dir=changed))
    assert again["finished_before"] == [False] and names == ["causative", "transitive", "wh_island"]
    assert again["records"][0]["figures"] == first["figures"]  # the same pairs in another order


def test_weights_that_are_no_numbers_are_said_to_be_so(config, model, tmp_path):
    broken = AutoModelForMaskedLM.from_pretrained(model)
    with torch.no_grad():
        broken.cls.predictions.bias[7] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    write_tokenizer(tmp_path / "broken", 59)
    with pytest.raises(BlimpError, match="broken: scores of adjunct_island are not finite"):
        evaluate_blimp(replace(config, models=(str(tmp_path / "broken"),)))


# -- models of runs


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store", k=24)


def settings(store, **changes):
    return {
        "store": store.path,
        "max_steps": 4,
        "batch_windows": 4,
        "micro_batch": 4,
        "seed": 1,
        "save_every": 3,
        "eval_every": 0,
        "eval_windows": 4,
        "checkpoints": (0.5, 1.0),
        "device": "cpu",
        "keep_last": 2,
    } | changes


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    """A finished mlm run with kept checkpoints at steps 2 and 4, and one to resume from at step 3."""
    output = tmp_path_factory.mktemp("runs") / "mlm-run"
    train(StudentConfig(**settings(store, objective="mlm", encoder="bert-2x32", run_dir=output)))
    return output


@pytest.fixture(scope="module")
def mlsm_export(store, tmp_path_factory):
    _, export = exported("bert-2x32", Mlsm(store), store, tmp_path_factory.mktemp("mlsm") / "export")
    return export


def test_a_run_and_its_checkpoints_are_scored(run, config, data):
    result = evaluate_blimp(replace(config, models=(str(run),)))
    assert result["records"][0]["figures"] == expected_figures(run / "export", data)
    every = evaluate_blimp(replace(config, models=(str(run), config.models[0]), step="all"))["records"]
    assert [(record["model"], record["step"], record["fraction"]) for record in every] == [
        ("mlm-run-step-00000002", 2, 0.5),
        ("mlm-run-step-00000004", 4, 1.0),
        ("tiny-bert", None, None),
    ]
    assert every[0]["figures"] == expected_figures(run / "checkpoints/step-00000002", data)
    one = evaluate_blimp(replace(config, models=(str(run),), step="2"))
    assert one["finished_before"] == [True] and one["records"] == every[:1]


def test_a_checkpoint_that_is_not_there_or_not_kept_is_said_to_be_so(run, config):
    with pytest.raises(ModelError, match="no checkpoint of step 9; those kept are: 2, 4"):
        evaluate_blimp(replace(config, models=(str(run),), step="9"))
    with pytest.raises(ModelError, match=r"step 3 can only be resumed from.*mlsm export-student .*mlm-run --step 3"):
        evaluate_blimp(replace(config, models=(str(run),), step="3"))
    with pytest.raises(ModelError, match="--step 2 chooses a checkpoint of a run"):
        evaluate_blimp(replace(config, step="2"))
    with pytest.raises(ModelError, match="--step is an optimiser step or `all`, found last"):
        evaluate_blimp(replace(config, models=(str(run),), step="last"))


@pytest.mark.parametrize("probe_input", ["softmax", "logits"])
def test_probes_are_scored_from_their_runs(probe_input, mlsm_export, store, config, data, tmp_path):
    output = tmp_path / "probe-run"
    train_probe(ProbeConfig(**settings(store), student=str(mlsm_export), probe_input=probe_input, run_dir=output))
    (record,) = evaluate_blimp(replace(config, models=(str(output),), per_paradigm=1))["records"]
    assert record["objective"] == "mlsm" and record["step"] == 5  # those of the student
    assert record["data"]["n_eval"] == 67
    assert record["data"]["files"] == {paradigm.name: paradigm.digest for paradigm in read_paradigms(data)}


def test_an_unfinished_run_is_said_to_be_so(run, config, tmp_path):
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "export")
    (unfinished / "result.json").unlink()
    with pytest.raises(
        RunError, match="is unfinished; finish it, or pass the directory that this writes:  mlsm export-student"
    ):
        evaluate_blimp(replace(config, models=(str(unfinished),)))


# -- what is no masked language model, on the command line


@pytest.fixture(autouse=True)
def no_traces(monkeypatch):
    """A command sets up its process, and this one is pytest's."""
    monkeypatch.setattr(cli, "end_on_signals", lambda: None)
    monkeypatch.setattr(command_line, "quiet_libraries", lambda downloads: None)


def error_of(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["evaluate-blimp", *map(str, arguments)])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert end.value.code == 2
    return line


def test_a_student_without_a_head_is_told_of_probes_before_anything_is_scored(mlsm_export, config, capsys):
    arguments = [config.models[0], mlsm_export, "--data-dir", config.data_dir, "--output", config.output]
    line = error_of(arguments, capsys)
    assert "no masked-LM head" in line and f"mlsm train-probe --student {mlsm_export.parent}" in line
    assert not config.output.exists()


def test_other_models_and_no_model_are_one_clear_line(model, config, tmp_path, capsys):
    bare, empty = tmp_path / "bare", tmp_path / "empty"
    AutoModel.from_pretrained(model).save_pretrained(bare)
    write_tokenizer(bare, 59)
    (empty / "tiny-gpt").mkdir(parents=True)
    (empty / "tiny-gpt/config.json").write_text('{"model_type": "gpt2"}')
    given = ["--data-dir", config.data_dir]
    assert "no whole masked-LM head: its weights lack cls.predictions" in error_of([bare, *given], capsys)
    assert "type gpt2, for which transformers has no masked language model" in error_of(
        [empty / "tiny-gpt", *given], capsys
    )
    assert "does not contain a model" in error_of([empty, *given], capsys)
    assert "no such model: someone/student" in error_of(["someone/student", *given], capsys)
    assert "no model to score" in error_of(given, capsys)
    larger = shutil.copytree(model, tmp_path / "larger")
    write_tokenizer(larger, 70)
    assert "ids go up to 74, but the model has 64 words" in error_of([larger, *given], capsys)


def test_the_command_prints_a_table_or_json(store, config, tmp_path, capsys):
    _, export = exported("bert-2x32", Mlm(store), store, tmp_path / "export")
    arguments = ["evaluate-blimp", str(export), "--data-dir", str(config.data_dir), "--output", str(config.output)]
    for more, shown in (([], "HEADLINE"), (["--json"], '"headline"')):
        with pytest.raises(SystemExit) as end:
            cli.main([*arguments, *more])
        out = capsys.readouterr().out
        assert not end.value.code and shown in out
    assert json.loads(out)["finished_before"] == [True]


def test_a_few_paradigms_have_a_record_of_their_own(config):
    """By name or phenomenon; the scores are those of the whole evaluation."""
    whole = evaluate_blimp(config)["records"][0]
    result = evaluate_blimp(replace(config, tasks=("ellipsis", "wh_island")))
    (part,) = result["records"]
    names = ["ellipsis_n_bar_1", "ellipsis_n_bar_2", "wh_island"]
    assert part["settings"]["paradigms"] == names and "paradigms" not in whole["settings"]
    assert part["figures"] == [figure for figure in whole["figures"] if figure["metric"] in names]
    assert list(part["averages"]["phenomena"]) == ["ellipsis", "island effects"] and part["task"] != whole["task"]
    assert "ellipsis" in blimp(result, config) and "binding" not in blimp(result, config)
    with pytest.raises(BlimpError, match="--tasks islands is neither a paradigm nor a phenomenon of BLiMP"):
        evaluate_blimp(replace(config, tasks=("islands",)))
    with pytest.raises(BlimpError, match=r"BLiMP\. Did you mean wh_island\? The phenomena: anaphor"):
        evaluate_blimp(replace(config, tasks=("wh_islands",)))

"""`finetune --frozen` against transformers' hidden states, scikit-learn's pipelines, seqeval and SciPy, by hand."""

import errno
import json
import os
import shutil
import signal
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from data import data_path
from minilm import minilm_dir
from preloaded import run_command, run_python
from scipy.stats import spearmanr
from seqeval.metrics import f1_score
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tiny_families import tiny_model
from tiny_senses import plain_vectors, slow_diagnostic, write_miniature
from transformers import AutoModel, AutoTokenizer

from mlsm.commands.finetune import show as summary
from mlsm.common.errors import DataError, ModelError, RecordError, StudyError, WsdDataError
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.studies.word_senses.data import WsdData
from mlsm.evaluation.studies.word_senses.framework import TEST_SETS
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.data import load_task, split_tenth
from mlsm.evaluation.tasks.finetuning.suite import finetune
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from mlsm.evaluation.tasks.frozen import measures, senses
from mlsm.evaluation.tasks.frozen.features import FeatureExtractor, in_blocks, kept, pair_features
from mlsm.evaluation.tasks.frozen.linear import INVERSE_PENALTIES, RIDGE_PENALTIES, tune_and_fit
from mlsm.terminal.comparison import comparison
from pipeline.dictionary import DictionarySettings, learn_dictionary
from pipeline.solvers import nonneg_lasso

CPU = torch.device("cpu")


@pytest.fixture
def settings(teacher_directory, miniatures, tmp_path):
    return FinetuneConfig(
        models=(str(teacher_directory),),
        frozen=True,
        tasks=("conll2003",),
        data_dir=miniatures,
        output=tmp_path,
        device="cpu",
    )


def test_a_length_that_a_model_cannot_read_is_refused(settings):
    with pytest.raises(StudyError, match="reads at most 128 tokens; found --max-length 256"):
        finetune(replace(settings, max_length=256))


def figures_of(settings, task, suite="frozen"):
    (record,) = [r for r in records.read([settings.output / "evaluations"]) if (r["suite"], r["task"]) == (suite, task)]
    return {figure["metric"]: figure["value"] for figure in record["figures"]}, record


def states_of(directory, text):
    """Embeddings and all layers side by side (L, D), and the word of every token, by transformers alone."""
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    encoding = tokenizer(text, is_split_into_words=isinstance(text, list), return_tensors="pt")
    with torch.inference_mode():
        states = model(encoding["input_ids"], output_hidden_states=True).hidden_states
    return torch.cat(states, dim=-1)[0].numpy(), encoding.word_ids()


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_features_are_the_hidden_states_of_transformers(family, teacher_directory, tmp_path):
    directory = tmp_path / family
    tiny_model(family, "masked-lm", vocab_size=600, max_position_embeddings=60, pad_token_id=0).save_pretrained(
        directory
    )
    AutoTokenizer.from_pretrained(teacher_directory).save_pretrained(directory)
    encoder = FeatureExtractor(directory, None, 128, CPU)
    sentences = [["Anna", "visits", "unbelievable", "Berlin"], ["It", "rains"], ["Bruno"]]
    words = encoder.words(sentences, silent)
    expected = []
    for sentence in sentences:
        states, word_of = states_of(directory, sentence)
        expected += [states[word_of.index(place)] for place in range(len(sentence))]
    np.testing.assert_allclose(words.states_TD, expected, atol=2e-5)
    texts = [" ".join(sentence) for sentence in sentences]
    np.testing.assert_allclose(
        encoder.means(texts, silent), [states_of(directory, text)[0].mean(0) for text in texts], atol=2e-5
    )
    some = FeatureExtractor(directory, (1,), 128, CPU).means(texts, silent)
    width = some.shape[1]
    np.testing.assert_array_equal(some, encoder.means(texts, silent)[:, width : 2 * width])
    with pytest.raises(ModelError, match="has layers 0 .* found --layer 9"):
        FeatureExtractor(directory, (9,), 128, CPU)


def noisy_classes(count=400, width=30, classes=3):
    """Classes that overlap, so that the penalty matters, with columns of very different scales."""
    rng = np.random.default_rng(0)
    y_N = rng.integers(0, classes, count)
    x_ND = rng.normal(size=(count, width)).astype(np.float32)
    x_ND[:, :classes] += 1.2 * np.eye(classes)[y_N]
    return x_ND * np.logspace(-2, 2, width).astype(np.float32), y_N


def test_labels_are_those_of_scikit_learns_pipeline():
    x_ND, y_N = noisy_classes()
    rest, tuning = slice(0, 300), slice(300, 400)
    by_hand = {}
    for penalty in INVERSE_PENALTIES:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=2000, tol=1e-6))
        by_hand[penalty] = (model.fit(x_ND[rest], y_N[rest]).predict(x_ND[tuning]) == y_N[tuning]).mean()

    def score(said):
        return float((said == y_N[tuning]).mean())

    (said, again), chosen = tune_and_fit(x_ND, y_N, 100, score, [in_blocks(x_ND)])
    for penalty, value in chosen["tried"]:
        assert value == pytest.approx(by_hand[penalty], abs=0.011), "one prediction may be near the border"
    tried = dict(map(tuple, chosen["tried"]))
    assert tried[chosen["penalty"]] == max(tried.values()) == score(said) and chosen["converged"]
    assert len({round(value, 2) for value in tried.values()}) > 1, "the penalties differ"
    model = make_pipeline(StandardScaler(), LogisticRegression(C=chosen["penalty"], max_iter=2000, tol=1e-6))
    assert (again == model.fit(x_ND, y_N).predict(x_ND)).mean() > 0.99


def test_a_score_that_falls_once_does_not_end_the_search():
    """As F1 of chunks did for a real student: a fall at the second penalty, the best far beyond it."""
    x_ND, y_N = noisy_classes()
    worth = iter([0.5, 0.4, 0.7, 0.6, 0.5, 0.9, 0.9])
    (_,), chosen = tune_and_fit(x_ND, y_N, 100, lambda said: next(worth), [])
    assert chosen["penalty"] == INVERSE_PENALTIES[2]
    assert [value for _, value in chosen["tried"]] == [0.5, 0.4, 0.7, 0.6, 0.5], "two in a row below the best end it"


def test_scores_are_those_of_scikit_learns_ridge():
    x_ND, y_N = noisy_classes()
    target = x_ND[:, 0] / x_ND[:, 0].std() + y_N + 0.0
    (said, again), chosen = tune_and_fit(
        x_ND, target, 100, lambda p: -float(((p - target[300:]) ** 2).mean()), [[x_ND]]
    )
    by_hand = {}
    for alpha in RIDGE_PENALTIES:
        model = make_pipeline(StandardScaler(), Ridge(alpha=alpha)).fit(x_ND[:300].astype(float), target[:300])
        by_hand[alpha] = -float(((model.predict(x_ND[300:]) - target[300:]) ** 2).mean())
    assert chosen["penalty"] == max(by_hand, key=by_hand.get)
    model = make_pipeline(StandardScaler(), Ridge(alpha=chosen["penalty"])).fit(x_ND.astype(float), target)
    np.testing.assert_allclose(again, model.predict(x_ND), rtol=1e-3, atol=1e-3)


def test_a_label_that_only_the_tuning_split_has_is_learned_from_all():
    x_ND, y_N = noisy_classes()
    y_N[:300] %= 2
    (_, again), _ = tune_and_fit(x_ND, y_N, 100, lambda said: float((said == y_N[300:]).mean()), [[x_ND[:7], x_ND[7:]]])
    assert 2 in again


def test_conll_is_tagged_as_by_hand(settings, teacher_directory, miniatures):
    """Features by transformers, scikit-learn's pipeline with the penalty of the record, seqeval on the test set."""
    result = finetune(settings)
    found, record = figures_of(settings, "conll2003")
    assert record["settings"]["frozen"] is True and record["seed"] is None and record["head"] is None

    def read(part):
        blocks = (miniatures / "conll2003" / f"{part}.txt").read_text().split("\n\n")[1:]
        sentences = [[line.split() for line in block.splitlines()] for block in blocks if block.strip()]
        return [[list(column) for column in zip(*sentence, strict=True)] for sentence in sentences]

    def features(sentences):
        rows = []
        for words, *_ in sentences:
            states, word_of = states_of(teacher_directory, words)
            rows += [states[word_of.index(place)] for place in range(len(words))]
        return np.array(rows)

    train, test = read("train"), read("test")
    for metric, column in (("pos", 1), ("entities", 3)):
        model = make_pipeline(
            StandardScaler(), LogisticRegression(C=record["chosen"][metric]["penalty"], max_iter=1000)
        ).fit(features(train), np.concatenate([sentence[column] for sentence in train]))
        said = model.predict(features(test))
        gold = [sentence[column] for sentence in test]
        ends = np.cumsum([len(tags) for tags in gold])[:-1]
        if metric == "pos":
            expected = (said == np.concatenate(gold)).mean()
        else:
            expected = f1_score(gold, [part.tolist() for part in np.split(said, ends)])
        assert found[f"{metric}_test"] == pytest.approx(expected, abs=0.02)
    assert found["chunks_dev"] > 0.9 and 0 < found["entities_tuning"] <= 1
    said = summary(result, settings)
    assert "conll2003 pos_test" in said and "chosen" in said


def test_words_that_are_cut_off_are_wrong(settings):
    finetune(replace(settings, max_length=8))
    found, record = figures_of(settings, "conll2003")
    assert record["settings"]["max_length"] == 8
    assert found["pos_dev"] < 0.95 and found["entities_dev"] < 0.9, "seven words never fit"


def test_a_model_that_cannot_be_measured_is_found_before_the_first_is(settings, with_senses, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.tasks.frozen.suite.record_scores", lambda *_: pytest.fail("was measured"))
    with pytest.raises(ModelError, match="use a --layer of at least 1"):
        finetune(replace(settings, tasks=("conll2003", "wsd"), layer=(0,), data_dir=with_senses))


def test_cosines_and_pairs_are_those_by_hand(settings, teacher_directory, miniatures):
    finetune(replace(settings, tasks=("stsb", "wic", "cola")))
    found, record = figures_of(settings, "stsb")
    data = load_task(TASKS["stsb"], miniatures)
    layers = record["chosen"]["cosine"]["layers"]
    depth = len(layers)

    def vectors(examples, side):
        return np.array([np.split(states_of(teacher_directory, e[side])[0].mean(0), depth) for e in examples])

    for name, examples in (("tuning", data.train), ("dev", data.evaluation["validation"])):
        first, second = vectors(examples, 0), vectors(examples, 1)
        for layer in range(depth):
            u, v = first[:, layer], second[:, layer]
            cosines = (u * v).sum(1) / np.linalg.norm(u, axis=1) / np.linalg.norm(v, axis=1)
            expected = spearmanr(cosines, [e.label for e in examples])[0]
            assert layers[layer][name] == pytest.approx(expected, abs=0.02)
    best = max(layers, key=lambda one: one["tuning"])
    assert record["chosen"]["cosine"]["layer"] == best["layer"] and found["cosine_dev"] == best["dev"]
    assert [found["cosine_last_tuning"], found["cosine_last_dev"]] == [layers[-1]["tuning"], layers[-1]["dev"]]
    # the word of WiC is the one that the file names
    wic = load_task(TASKS["wic"], miniatures).train[:3]
    encoder = FeatureExtractor(teacher_directory, None, 128, CPU)
    for side in (0, 1):
        targets = measures._targets(encoder, wic, side, silent)
        for example, target in zip(wic, targets, strict=True):
            begin, end = example.targets[side]
            words = example[side].split(" ")
            states, word_of = states_of(teacher_directory, words)
            np.testing.assert_allclose(target, states[word_of.index(words.index(example[side][begin:end]))], atol=2e-5)
    quoted = [example._replace(first=f'"{example.first}', targets=((1, 2), (0, 1))) for example in wic]
    plain = [example._replace(first=f'" {example.first}', targets=((2, 3), (0, 1))) for example in wic]
    first = [measures._targets(encoder, examples, 0, silent) for examples in (quoted, plain)]
    np.testing.assert_array_equal(*first)  # not the quotation mark before the word
    u, v = np.array([[1.0, 2.0]]), np.array([[3.0, 1.0]])
    assert pair_features(u, v).tolist() == [[1, 2, 3, 1, 2, 1, 3, 2]]


def test_the_tuning_split_is_no_part_of_the_rest(miniatures):
    measure = measures.Tags(miniatures, 50)
    nine, tenth = ([e.first for e in part] for part in (measure.nine, measure.parts["tuning"]))
    assert measure.data["n_train"] == len(nine) + len(tenth) == 50
    assert tenth and not any(sentence in nine for sentence in tenth)
    data = load_task(TASKS["conll2003"], miniatures)
    assert [e.first for e in split_tenth("conll2003", measures.take_examples("conll2003", data.train, 50))[1]] == tenth


@pytest.fixture
def with_senses(miniatures, tmp_path):
    data_dir = shutil.copytree(miniatures, tmp_path / "data")
    write_miniature(data_dir / "wsd")
    return data_dir


@pytest.mark.filterwarnings("ignore:.*in this data")
def test_word_senses_are_those_of_the_slow_diagnostic(settings, with_senses, teacher_directory, monkeypatch):
    monkeypatch.setattr(senses, "ATOMS", 4)
    finetune(replace(settings, tasks=("wsd",), data_dir=with_senses))
    found, record = figures_of(settings, "wsd")
    learned = {"k": 4, "lam": senses.LAM, "vectors": senses.SAMPLE, "seed": 0, "algorithm": senses.ALGORITHM}
    assert record["settings"]["dictionary"] == learned  # as below
    layers = record["chosen"]["wsd"]["layers"]
    data = WsdData.read(with_senses / "wsd", silent)
    sizes = [sum(len(s.instances) for s in part) for part in (data.sentences[:5], data.sentences[5:])]
    for one in layers:
        (rows,) = plain_vectors(
            teacher_directory,
            [(s.words, s.instances) for s in data.sentences if s.instances],
            [one["layer"]],
        )
        rows = rows.astype(np.float16)
        training = rows[: sizes[0]]
        wanted = DictionarySettings(k=min(senses.ATOMS, sizes[0] // 2), lam=senses.LAM, seed=0)
        dictionary = learn_dictionary(training[np.any(training != 0, axis=1)], wanted)
        codes = nonneg_lasso(rows, dictionary.atoms_Kd, senses.LAM, tol=1e-4)
        dense = np.zeros((len(rows), len(dictionary.atoms_Kd)))
        for row in range(len(rows)):
            inside = slice(codes.indptr[row], codes.indptr[row + 1])
            dense[row, codes.indices[inside]] = codes.values[inside]
        ends = np.cumsum([sizes[0], *(data.groups[name].sum() for name in TEST_SETS)])
        parts = dict(zip(["training", *TEST_SETS], np.split(dense, ends[:-1]), strict=True))
        slow = slow_diagnostic(with_senses / "wsd", parts.__getitem__)["raw-npmi0"]
        others = sum(slow[name] * data.groups[name].sum() for name in TEST_SETS if name != senses.TUNING)
        assert one["tuning"] == pytest.approx(slow[senses.TUNING])
        assert one["test"] == pytest.approx(others / (sizes[1] - data.groups[senses.TUNING].sum()))
    best = max(layers, key=lambda one: one["tuning"])
    assert (found["f1_tuning"], found["f1_test"]) == (best["tuning"], best["test"])
    assert [one["layer"] for one in layers] == list(range(1, len(layers) + 1))


def test_a_second_time_it_is_finished_and_other_settings_are_refused(settings):
    settings = replace(settings, tasks=("rte", "cola"))
    first = finetune(settings)
    assert (first["made"], first["kept"]) == (2, 0)
    assert not any((settings.output / "features").iterdir()), "features are removed when their record is written"
    second = finetune(settings)
    assert (second["made"], second["kept"], second["finished_before"]) == (0, 2, True)
    assert second["models"] == first["models"]
    with pytest.raises(StudyError, match=r"cola.json was made with other settings: .*n_train \(there 64, now 40\)"):
        finetune(replace(settings, limit_train=40))
    with pytest.raises(StudyError, match=r"settings layers \(there all, now \[1\]\)"):
        finetune(replace(settings, layer=(1,)))
    left = finetune(replace(settings, layer=(1,), overwrite="never"))
    assert len(left["differing"]) == 2 and "Made with other settings" in summary(left, settings)
    assert finetune(replace(settings, layer=(1,), overwrite="always"))["made"] == 2


KILLED = """
    import json, os, signal, sys
    from pathlib import Path
    import torch
    from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
    from mlsm.evaluation.tasks.finetuning.suite import finetune
    from mlsm.evaluation.tasks.frozen import measures

    torch.set_num_threads(1)
    measures.tune_and_fit = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    finetune(FinetuneConfig(**json.loads(sys.argv[1])))
"""


def test_killed_while_fitting_it_goes_on_from_the_features(settings, tmp_path_factory, monkeypatch):
    unbroken = replace(settings, output=tmp_path_factory.mktemp("unbroken"))
    finetune(unbroken)
    given = {"models": settings.models, "frozen": True, "tasks": ["conll2003"], "device": "cpu"}
    given |= {"data_dir": str(settings.data_dir), "output": str(settings.output)}
    child = run_python(["-c", textwrap.dedent(KILLED), json.dumps(given)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert child.returncode == -signal.SIGKILL, child.stderr
    files = sorted(settings.output.glob("features/*/*.npz"))
    assert {file.name for file in files} == {"nine.npz", "tuning.npz", "dev.npz", "test.npz"}
    files[0].write_bytes(files[0].read_bytes()[:100])  # cut, as by a full disk
    read = []
    whole = FeatureExtractor.words
    monkeypatch.setattr(FeatureExtractor, "words", lambda *given: read.append(given) or whole(*given))
    finetune(settings)
    assert len(read) == 1, "only the damaged part is read again"
    assert figures_of(settings, "conll2003")[0] == figures_of(unbroken, "conll2003")[0]
    assert not any((settings.output / "features").iterdir())


def test_features_stay_until_their_record_is_written(settings, monkeypatch):
    settings = replace(settings, tasks=("rte",))
    with monkeypatch.context() as patch:
        patch.setattr(records, "write", mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
        with pytest.raises(OSError, match="no space left"):
            finetune(settings)
    assert list(settings.output.glob("features/*/*.npz"))
    finetune(settings)
    assert not any((settings.output / "features").iterdir())


def test_a_kept_file_is_what_was_made(tmp_path):
    made = {"states": np.arange(6.0).reshape(2, 3)}
    kept(tmp_path / "a.npz", lambda: made)
    again = kept(tmp_path / "a.npz", lambda: pytest.fail("made again"))
    np.testing.assert_array_equal(again["states"], made["states"])


def test_frozen_and_fine_tuned_scores_stay_apart(settings, tmp_path):
    settings = replace(settings, tasks=("rte",))
    finetune(settings)
    finetune(replace(settings, frozen=False, seeds=1, epochs=1))
    config = CompareConfig(results=(tmp_path / "evaluations",), output=tmp_path / "compared")
    result = compare(config, silent)
    (model,) = result.summaries
    assert model.n == 1 and [figure.metric for figure in model.figures] == ["accuracy"]
    assert [score.metric for score in result.frozen] == ["accuracy_tuning", "accuracy_dev"]
    assert "Frozen encoders" in comparison(result, config)
    assert "accuracy_dev" in (tmp_path / "compared" / "frozen.csv").read_text()


def test_frozen_records_that_were_made_otherwise_are_named(settings, tmp_path, teacher_directory, miniatures):
    other = shutil.copytree(teacher_directory, tmp_path / "other")
    weights = AutoModel.from_pretrained(other)
    with torch.no_grad():
        weights.get_input_embeddings().weight.mul_(1.1)
    weights.save_pretrained(other)
    settings = replace(settings, tasks=("cola",))
    finetune(settings)
    finetune(replace(settings, models=(str(other),), layer=(1,)))
    config = CompareConfig(results=(tmp_path / "evaluations",), output=tmp_path / "compared")
    result = compare(config, silent)
    said = [note for note in result.notes if "The frozen scores of cola of " in note]
    assert len(said) == 1 and "settings differ (layers: " in said[0]
    assert len({score.model for score in result.frozen}) == 1


def test_a_record_of_another_kind_is_refused(settings):
    finetune(replace(settings, tasks=("cola",)))
    _, record = figures_of(settings, "cola")
    record.pop("file")
    for change in ({"task": "boolq"}, {"settings": {}}, {"figures": [{"metric": "f1_dev", "value": 0.1, "n": 3}]}):
        with pytest.raises(RecordError):
            records.check_record(record | change, "a file")


MISTAKES = [
    ({"seeds": 2}, "--frozen trains no encoder. Omit --seeds."),
    ({"lr": 1e-3}, "--frozen trains no encoder. Omit --lr."),
    ({"split": "train-tenth"}, "Omit --split"),
    ({"layer": ()}, "--layer takes numbers"),
    ({"frozen": False, "layer": (1,)}, "--layer is only for --frozen"),
    ({"frozen": False, "tasks": ("wsd",)}, "--tasks wsd is only for --frozen"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_settings_that_frozen_encoders_do_not_have_are_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        replace(settings, **changes)


def test_data_that_is_not_there_is_named_before_anything_is_measured(settings, tmp_path):
    with pytest.raises(WsdDataError, match="pass a --data-dir that contains a directory `wsd`"):
        finetune(replace(settings, tasks=("wsd",), data_dir=None))
    with pytest.raises(DataError, match=r"conll2003 from files .* train.txt and dev.txt"):
        finetune(replace(settings, data_dir=tmp_path))
    with pytest.raises(WsdDataError, match="that contains a directory `wsd`"):  # not the directory itself
        finetune(replace(settings, tasks=("cola", "wsd")))
    (tmp_path / "data" / "wsd").mkdir(parents=True)
    with pytest.raises(WsdDataError, match=r"wsd/.*semcor.data.xml is missing"):
        finetune(replace(settings, tasks=("wsd",), data_dir=tmp_path / "data"))
    assert not (tmp_path / "evaluations").exists()


def test_smoke_measures_all_tasks_as_a_command(teacher_directory, tmp_path):
    run = run_command(["finetune", teacher_directory, "--frozen", "--smoke", "--json", "--output", tmp_path], code=0)
    result = json.loads(run.stdout)
    assert result["made"] == 10 and len(result["models"][0]["chosen"]) == 10


@pytest.mark.parametrize("how", [{"frozen": True}, {"frozen": False, "lr": (1e-3, 1e-4), "seeds": 1, "max_steps": 2}])
def test_ten_examples_of_stsb_leave_one_to_choose_by(how, settings):
    """Correlations need two."""
    finetune(replace(settings, tasks=("stsb",), limit_train=10, **how))
    _, record = figures_of(settings, "stsb", "frozen" if how["frozen"] else "finetune")
    tried = record["chosen"]["stsb"]["tried"] if how["frozen"] else record["lr_choice"]["tried"]
    assert {value["score"] if isinstance(value, dict) else value[1] for value in tried} == {0.0}


def test_minilm_on_real_sentences(tmp_path):
    """The figures of the study's first trial, on as many sentences: 86.7 without training, 89.0 for parts of speech."""
    settings = FinetuneConfig(
        models=(str(minilm_dir()),),
        frozen=True,
        tasks=("stsb",),
        limit_train=300,
        layer=(6,),
        data_dir=Path(data_path("glue")).parent,
        output=tmp_path,
        device="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finetune(settings)
    found, _ = figures_of(settings, "stsb")
    assert found["cosine_dev"] == pytest.approx(0.867, abs=0.001)


def test_a_test_set_that_one_model_was_not_scored_on_is_a_dash():
    """As if the test file was removed between two models."""
    first = {"model": "a", "figures": {"conll2003 pos_dev": 0.5, "conll2003 pos_test": 0.25}, "directory": "a"}
    second = {"model": "b", "figures": {"conll2003 pos_dev": 0.75}, "directory": "b"}
    result = {"settings": {"layers": "all", "max_length": 128}, "finished_before": True, "made": 0, "kept": 2}
    for models in ([first, second], [second, first]):
        said = summary(result | {"models": models, "differing": []}, FinetuneConfig(frozen=True))
        values = next(line for line in said.splitlines() if "pos_test" in line).split()[2:]
        assert values == (["25.00", "–"] if models[0] is first else ["–", "25.00"])

"""--center: against NumPy and scikit-learn, interrupted as unbroken, with workers, layers and k; what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import Lasso
from tiny_families import tiny_model

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.common.errors import CenteringError, DictionaryError, EncodeError, TeacherError
from mlsm.common.workplaces import is_part, read_mark
from mlsm.evaluation.inspection.lsps.texts import teacher_lsps
from mlsm.evaluation.studies.word_senses.word_vectors import WordWindow as WordReading
from mlsm.evaluation.studies.word_senses.word_vectors import word_vectors
from pipeline import sample as sampling
from pipeline.batch import InputFormat, hidden_rows
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig, LearnConfig
from pipeline.dictionary import Dictionary
from pipeline.dictionary import checkpoint as learning_checkpoint
from pipeline.dictionary.centering import LEAST_TOKENS, HiddenSums
from pipeline.job import load_teacher, open_executor, teacher_job
from pipeline.learn import learn_dictionary
from pipeline.teacher import check_position_means
from shards.reader import Store

SETTINGS = ("mean", "position")


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=(24,),
        lam=0.1,
        max_length=32,
        max_tokens=12_000,
        unit_tokens=4_000,
        dictionary_tokens=6_000,
        top_n="all",
        tolerance=1e-5,
        batch_tokens=1024,
        device="cpu",
        output=tmp_path_factory.mktemp("centring"),
    )


@pytest.fixture(scope="module", params=SETTINGS)
def made(request, place):
    config = replace(place, center=request.param)
    (report,) = encode_lsp(config)
    return config, Store.open(report["store"]), Dictionary.load(report["dictionary"])


def silent(*_, **__):
    pass


def raw_states(config, windows):
    """Raw hidden states of windows, by the whole model of transformers, one at a time: (rows, positions)."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(config.teacher).eval()
    rows, positions = [], []
    for ids in windows:
        with torch.inference_mode():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0].double().numpy()
        kept = [p for p, i in enumerate(ids) if i >= 5]
        rows.append(states[kept])
        positions += kept
    return np.concatenate(rows), np.array(positions)


# -- what is stored --------------------------------------------------------------------------------------------


def test_targets_are_those_of_subtracted_unit_rows_by_scikit_learn(made):
    config, store, dictionary = made
    split = store.split("train")
    read = split.read(np.arange(6))
    rows_Nd, position_N = raw_states(config, [ids[:n].tolist() for ids, n in zip(read.ids, read.lengths, strict=True)])
    center = np.load(store.files.dictionary / "center.npy")
    subtracted = (
        center[0] if config.center == "mean" else np.stack([center[min(p, len(center) - 1)] for p in position_N])
    )
    rows_Nd = rows_Nd - subtracted
    rows_Nd /= np.linalg.norm(rows_Nd, axis=1, keepdims=True)
    window_N, place_N = np.nonzero((read.documents >= 0) & (read.ids >= 5))
    assert place_N.tolist() == position_N.tolist()
    stored = split.targets(read, window_N, place_N)
    lasso = Lasso(config.lam / rows_Nd.shape[1], positive=True, fit_intercept=False, tol=1e-10, max_iter=100_000)
    for token in range(0, len(rows_Nd), 7):
        expected = lasso.fit(dictionary.atoms_Kd.T.astype(np.float64), rows_Nd[token]).coef_
        row = slice(stored.indptr[token], stored.indptr[token + 1])
        found = np.zeros(24)
        found[stored.indices[row]] = stored.weights[row]
        assert found == pytest.approx(expected / expected.sum(), abs=0.02)  # weights are stored in eight bits


def test_the_centre_is_the_mean_of_the_sampled_raw_states(made, monkeypatch):
    config, _, dictionary = made
    job = teacher_job(config, silent)
    windows = sampling.sample_windows(open_executor(job), config.dictionary_tokens, config.seed)
    rows_Nd, position_N = raw_states(config, [window.ids for window in windows])
    rows_Nd, position_N = rows_Nd[:6000], position_N[:6000]
    assert dictionary.center.record["tokens"] == len(rows_Nd)
    center_Pd = dictionary.center.rows_Pd
    np.testing.assert_allclose(center_Pd[-1], rows_Nd.mean(0), atol=2e-5)
    if config.center == "mean":
        assert len(center_Pd) == 1
        return
    a = dictionary.center.record["pseudo_count"]
    for position in range(1, 31):
        at = rows_Nd[position_N == position]
        assert len(at) >= LEAST_TOKENS
        expected = (len(at) * at.mean(0) + a * rows_Nd.mean(0)) / (len(at) + a)
        np.testing.assert_allclose(center_Pd[position], expected, atol=2e-5)


def test_names_and_fingerprints_change_only_with_a_centre(made, place):
    config, store, dictionary = made
    assert store.settings["center"] == config.center == dictionary.centering
    assert store.settings["dictionary"] == dictionary.fingerprint
    assert replace(dictionary, center=None).fingerprint != dictionary.fingerprint
    (plain,) = encode_lsp(place)
    assert "center" not in Store.open(plain["store"]).settings
    assert not (Path(plain["dictionary"]) / "center.npy").exists()
    assert "center" not in json.loads((Path(plain["dictionary"]) / "dictionary.json").read_text())


def test_a_damaged_centre_is_noticed(made, tmp_path):
    _, store, _ = made
    shutil.copytree(store.files.dictionary, tmp_path / "dictionary")
    rows = np.load(tmp_path / "dictionary" / "center.npy")
    rows[0, 0] += 1
    np.save(tmp_path / "dictionary" / "center.npy", rows)
    with pytest.raises(DictionaryError, match="damaged"):
        Dictionary.load(tmp_path / "dictionary")


def test_a_text_is_coded_as_the_store_was(made):
    config, store, dictionary = made
    found = teacher_lsps(store, "Return the value of the first element.")
    ids = [store.special_ids["cls"], *found.ids_T.tolist(), store.special_ids["sep"]]
    rows_Nd, position_N = raw_states(config, [ids])
    rows_Nd = dictionary.center.subtract_from(rows_Nd, position_N)
    rows_Nd /= np.linalg.norm(rows_Nd, axis=1, keepdims=True)
    lasso = Lasso(config.lam / rows_Nd.shape[1], positive=True, fit_intercept=False, tol=1e-10, max_iter=100_000)
    for number, position in enumerate(position_N):
        expected = lasso.fit(dictionary.atoms_Kd.T.astype(np.float64), rows_Nd[number]).coef_
        lsps, weights = found.row(position - 1)
        assert weights == pytest.approx((expected / expected.sum())[lsps], abs=1e-3)


def test_vectors_of_words_are_centred_by_the_positions_of_their_subtokens(made):
    import torch

    config, _, dictionary = made
    job = teacher_job(config, silent)
    teacher, special = load_teacher(job), job.special_ids
    ids = [special["cls"], 50, 60, 70, 80, special["sep"]]
    readings = [WordReading(ids, [1, 2, 4], [0, 0, 1])]
    centers = {"centred": (2, torch.from_numpy(dictionary.center.rows_Pd)), 2: (2, None)}
    found = word_vectors(teacher, 2, readings, centers, 1024, special["pad"])
    raw_Nd, _ = raw_states(config, [ids])
    for name, rows_Nd in (("centred", dictionary.center.subtract_from(raw_Nd, np.arange(1, 5))), (2, raw_Nd)):
        sums = np.stack([rows_Nd[0] + rows_Nd[1], rows_Nd[3]])
        expected = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        np.testing.assert_allclose(found[name], expected, atol=1e-4)


# -- however it is made ----------------------------------------------------------------------------------------


CENTRE_FILES = {"center.npy", "center.json", "lock"}


@pytest.mark.parametrize(
    ("stage", "vectors", "kept", "again"),
    [
        ("sample", 2_000, None, {"sample", "centre"}),  # half a sample is of no use: nothing stays
        ("center", None, CENTRE_FILES | {"raw.npy"}, {"centre"}),
        ("dictionary", 5_400, CENTRE_FILES | {"sample.npy", "learning.npz"}, set()),  # after the first evaluation
    ],
)
def test_interrupted_and_resumed_equals_unbroken(made, tmp_path, monkeypatch, stage, vectors, kept, again):
    config, store, dictionary = made
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    given = replace(config, output=tmp_path)

    def stop(*_, **__):
        raise KeyboardInterrupt

    def progress(name, done, total=None, **figures):
        if name == stage and done > vectors:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if stage == "center":  # between the centre and the sample that it is subtracted from
            patched.setattr(
                sampling,
                "growing_rows",
                lambda path, *a, real=sampling.growing_rows: stop() if path.name == "sample.npy" else real(path, *a),
            )
        encode_lsp(given, progress)
    left = list((tmp_path / "dictionaries").iterdir())
    assert [{path.name for path in work.iterdir()} for work in left] == ([kept] if kept else [])
    assert all(is_part(path.name, read_mark(work)) for work in left for path in work.iterdir())
    stages = {}
    (report,) = encode_lsp(given, lambda name, done, *_, **figures: stages.setdefault(name, done))
    assert stages.keys() & {"sample", "centre"} == again and (stages["dictionary"] > 5_400) == (stage == "dictionary")
    assert Dictionary.load(report["dictionary"]).fingerprint == dictionary.fingerprint
    assert Store.open(report["store"]).target_id == store.target_id
    assert not list((tmp_path / "dictionaries").glob(".*"))


@pytest.mark.parametrize("links", range(3))
def test_an_end_between_the_links_to_a_shared_sample_is_recovered_from(place, tmp_path, monkeypatch, links):
    """Two dictionaries share a sample and its centre, by links; then each is asked for by itself."""
    several = replace(place, center="mean", k=(16, 24), output=tmp_path)
    link, made = Path.hardlink_to, []

    def stop(*args):
        if len(made) == links:
            raise KeyboardInterrupt
        made.append(link(*args))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "hardlink_to", stop)
        encode_lsp(several)
    for k in several.k:
        (report,) = encode_lsp(replace(several, k=(k,)))
        assert len(Dictionary.load(report["dictionary"]).atoms_Kd) == k


def test_several_layers_and_k_equal_one_at_a_time(made, tmp_path):
    config, store, dictionary = made
    reports = encode_lsp(replace(config, layer=(1, 2), k=(16, 24), output=tmp_path))
    assert len(reports) == 4
    same = Store.open(reports[3]["store"])
    assert same.target_id == store.target_id
    for ours, theirs in zip(same.records(), store.records(), strict=True):
        assert [block["sha256"] for block in ours.blocks] == [block["sha256"] for block in theirs.blocks]


def test_workers_make_the_same(made, forked_workers, tmp_path):
    config, store, dictionary = made
    (report,) = encode_lsp(replace(config, workers=2, output=tmp_path))
    found = Dictionary.load(report["dictionary"])
    np.testing.assert_allclose(found.center.rows_Pd, dictionary.center.rows_Pd, atol=1e-6)
    (again,) = encode_lsp(replace(config, workers=2, dictionary=store.files.dictionary, output=tmp_path / "given"))
    ours = Store.open(again["store"])
    assert ours.target_id == store.target_id
    assert sum(record.tokens for record in ours.records()) == sum(record.tokens for record in store.records())


def test_positions_are_counted_from_each_document_where_these_are_apart(place, tmp_path):
    job = teacher_job(replace(place, documents_apart=True, center="position"), silent)
    windows = [window for unit in job.plan.units[:1] for window in job.windows(unit)][:40]
    several = next(window for window in windows if len(window.run_starts) > 1)
    (raw,) = hidden_rows(load_teacher(job), [several], 1, 32, job.special_ids, (2,), InputFormat(True), raw=True)
    ids, expected, count = np.array(several.ids), [], 0
    for i in ids:
        expected.append(count)
        count = 0 if i == job.special_ids["sep"] else count + 1
    coded = ~np.isin(ids, job.special_ids["all"])
    assert raw.position_N.tolist() == np.array(expected)[coded].tolist()
    (report,) = encode_lsp(replace(place, documents_apart=True, center="position", output=tmp_path))
    assert Store.open(report["store"]).settings["documents_apart"] is True


def test_a_dry_run_estimates_with_a_centre(made, tmp_path):
    config, *_ = made
    (report,) = encode_lsp(replace(config, dry_run=True, output=tmp_path))
    assert report["lacking"] == 1 and report["tokens"] > 0 and not list(tmp_path.glob("*/*"))


# -- a given dictionary ----------------------------------------------------------------------------------------


def test_a_given_dictionary_brings_its_centring_and_another_is_refused(made, tmp_path):
    config, store, dictionary = made
    given = replace(config, dictionary=store.files.dictionary, output=tmp_path)
    (report,) = encode_lsp(replace(given, center="none"))
    assert Store.open(report["store"]).target_id == store.target_id
    other = "mean" if config.center == "position" else "position"
    with pytest.raises(EncodeError, match=f"--center {other}, but .* was learned with --center {config.center}"):
        encode_lsp(replace(given, center=other, output=tmp_path / "other"))
    words = ["--teacher", config.teacher, "--layer", "2", "--corpus", *config.corpus, "--max-length", "32"]
    words += ["--dictionary", str(given.dictionary), "--center", "none", "--output", str(tmp_path / "other")]
    with pytest.raises(EncodeError, match=f"--center none, but .* was learned with --center {config.center}"):
        encode_lsp(parse(load("encode-lsp"), words).settings)
    plain = replace(dictionary, center=None)
    plain.save(tmp_path / "plain")
    with pytest.raises(EncodeError, match="was learned with --center none"):
        encode_lsp(replace(given, dictionary=tmp_path / "plain", output=tmp_path / "other"))


# -- refusals and the estimate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["modernbert", "eurobert", "deberta", "deberta-v2"])
def test_teachers_without_position_embeddings_have_nothing_to_centre_by_position(tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(TeacherError, match="--center position: .* has relative positions"):
        check_position_means(tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "distilbert", "electra"])
def test_teachers_with_position_embeddings_can_be_centred(tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    check_position_means(tmp_path)


def test_an_unknown_centring_is_refused(place):
    with pytest.raises(ValueError, match="--center takes one of none, mean, position, found"):
        replace(place, center="both")


def test_vectors_of_a_file_have_no_positions_and_no_teacher_that_centres_alike(tmp_path):
    for center in SETTINGS:
        with pytest.raises(ValueError, match=f"--center {center} needs a teacher.s hidden states"):
            LearnConfig(hidden=tmp_path / "a.npy", center=center)


def test_a_sample_too_small_for_positions_is_refused(place, tmp_path):
    with pytest.raises(CenteringError, match="needs 100 tokens at every position, but 100% of the"):
        learn_dictionary(
            LearnConfig(
                **{
                    name: getattr(place, name)
                    for name in ("teacher", "layer", "corpus", "k", "lam", "max_length", "batch_tokens", "device")
                },
                center="position",
                dictionary_tokens=2_000,
                max_tokens=4_000,
                output=tmp_path,
            )
        )


@pytest.mark.parametrize(("longest", "warned"), [(1, False), (10, False), (100, True)])
def test_a_mean_of_a_few_long_rows_is_warned_of(tmp_path, caplog, longest, warned):
    rng = np.random.default_rng(0)
    raw = np.zeros(1000, [("position", "<i4"), ("row", "<f4", (16,))])
    raw["row"] = rng.normal(size=(1000, 16))
    raw["row"][:5] *= longest
    np.save(tmp_path / "raw.npy", raw)
    sampling._center_sample(tmp_path, "mean")
    assert ("one hundredth of all" in caplog.text) == warned


def test_means_of_positions_are_shrunk_as_far_as_they_are_noise():
    rng, width = np.random.default_rng(0), 16
    position = np.repeat(np.arange(1, 41), 200)
    effect = rng.normal(size=(42, width))
    for scale, low, high in ((1.0, 0.5, 2.0), (0.0, 1e3, np.inf)):
        sums = HiddenSums(width)
        rows = scale * effect[position] + rng.normal(size=(len(position), width)) + 3
        for part in np.array_split(np.arange(len(rows)), 7):
            sums.add(position[part], rows[part])
        center = sums.center("position")
        assert low < center.record["pseudo_count"] < high  # within is 1, between is scale ** 2
        error = np.linalg.norm(center.rows_Pd[1:41] - (scale * effect[1:41] + 3), axis=1).mean()
        raw = np.stack([rows[position == p].mean(0) for p in range(1, 41)])
        unshrunk = np.linalg.norm(raw - (scale * effect[1:41] + 3), axis=1).mean()
        assert error < unshrunk * (1.01 if scale else 0.6)


def test_rare_positions_have_the_mean_of_all():
    rng, sums = np.random.default_rng(1), HiddenSums(8)
    position = np.concatenate([np.repeat(np.arange(1, 11), 300), np.full(20, 11)])
    sums.add(position, rng.normal(size=(len(position), 8)) + position[:, None])
    center = sums.center("position")
    assert center.record["positions"] == 10
    assert (center.rows_Pd[11] == center.rows_Pd[-1]).all() and (center.rows_Pd[0] == center.rows_Pd[-1]).all()
    subtracted = center.subtract_from(np.zeros((3, 8)), np.array([5, 12, 500]))
    assert (subtracted[1] == subtracted[2]).all() and (subtracted[0] == -center.rows_Pd[5]).all()


def textbook_pseudo_count(groups):
    """Variance within groups over that between them, one way, unequal sizes, summed over columns."""
    rows, sizes = np.concatenate(groups), np.array([len(group) for group in groups])
    within = sum(((group - group.mean(0)) ** 2).sum() for group in groups) / (len(rows) - len(groups))
    squares = sum(len(group) * ((group.mean(0) - rows.mean(0)) ** 2).sum() for group in groups) / (len(groups) - 1)
    usual_size = (len(rows) - (sizes**2).sum() / len(rows)) / (len(groups) - 1)
    return within / ((squares - within) / usual_size)


def test_the_pseudo_count_is_that_of_the_textbook():
    """Few positions of very unequal sizes, and differences that are not much larger than their noise."""
    rng, sums = np.random.default_rng(3), HiddenSums(12)
    groups = [rng.normal(size=(n, 12)) + 0.1 * rng.normal(size=12) for n in (100, 130, 2000)]
    rare = rng.normal(size=(99, 12)) + 10  # at a position with too few tokens, which has no mean of its own
    sums.add(np.repeat([1, 2, 3, 4], [*map(len, groups), 99]), np.concatenate([*groups, rare]))
    expected = textbook_pseudo_count(groups)
    assert sums.center("position").record["pseudo_count"] == pytest.approx(expected, rel=1e-9)
    assert 30 < expected < 1000


def test_a_position_has_a_mean_of_its_own_from_the_least_number_of_tokens_on():
    rng, sums = np.random.default_rng(1), HiddenSums(8)
    position = np.repeat([1, 2, 3], [LEAST_TOKENS - 1, LEAST_TOKENS, 3000])
    sums.add(position, rng.normal(size=(len(position), 8)) + position[:, None])
    center = sums.center("position")
    assert center.record["positions"] == 2
    assert (center.rows_Pd[1] == center.rows_Pd[-1]).all() and (center.rows_Pd[2] != center.rows_Pd[-1]).all()

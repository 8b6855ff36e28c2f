"""Tables of mask weights: counts and n-grams against plain loops over the store; runs that are trained with them."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from preloaded import run_command
from tiny_store import SPECIAL, log_of, write_store
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import student.masks.collocations
from mlsm.commands.make_mask_weights import show as view
from mlsm.common.errors import RunError
from shards.reader import Store
from student.config import StudentConfig
from student.masks import weights
from student.masks.collocations import collocations, count_ngrams
from student.masks.config import MaskWeightsConfig
from student.masks.table import read_table, write_table
from student.masks.weights import make_mask_weights
from student.objectives import OBJECTIVES
from student.runs.identity import find_description
from student.train import train


@pytest.fixture
def settings(tmp_path):
    common = {"encoder": "bert-2x32", "dropout": 0.1, "max_steps": 8, "batch_windows": 12, "micro_batch": 5, "seed": 1}
    return common | {"lr": 1e-3, "mask_rate": 0.3, "save_every": 2, "eval_windows": 8, "run_dir": tmp_path / "run"}


def sentences(store):
    """The training windows without special tokens, lists of ids."""
    windows = store.split("train")
    read = windows.read(np.arange(len(windows)))
    rows = [row[:length].tolist() for row, length in zip(read.ids, read.lengths, strict=True)]
    return [[id for id in row if id not in SPECIAL.values()] for row in rows]


def made(store, tmp_path, **settings):
    report = make_mask_weights(MaskWeightsConfig(store=store.path, output=tmp_path / "table.npz", **settings))
    return read_table(tmp_path / "table.npz"), report


def test_rare_tokens_weigh_more_by_a_power_of_their_counts(ids_store, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "LEAST_COUNT", 25)
    table, report = made(ids_store, tmp_path, power=0.7)
    counts = Counter(id for row in sentences(ids_store) for id in row)
    assert min(counts.values()) < 25 < max(counts.values())
    expected = {id: max(count, 25) ** -0.7 for id, count in counts.items()}
    scale = sum(counts.values()) / sum(counts[id] * weight for id, weight in expected.items())
    for id, weight in expected.items():
        assert table.weights_V[id] == pytest.approx(weight * scale, rel=1e-6)
    assert report["tokens"] == sum(counts.values()) and report["heaviest"][0][1] > 1 > report["lightest"][0][1]
    assert (made(ids_store, tmp_path / "equal", power=0)[0].weights_V == 1).all()


def test_domain_weights_follow_the_ratio_of_frequencies(ids_store, tmp_path):
    general = write_store(tmp_path / "general", k=0, train_windows=40)
    table, _ = made(ids_store, tmp_path, kind="domain", against=general.path)
    ours, theirs = ([Counter(id for row in sentences(store) for id in row)] for store in (ids_store, general))
    ours, theirs = ours[0], theirs[0]
    for id in range(len(SPECIAL), 65):
        ratio = (ours[id] + 1) / (ours.total() + 65) / ((theirs[id] + 1) / (theirs.total() + 65))
        assert table.weights_V[id] == pytest.approx(math.log(1 + ratio), rel=1e-6)
    same, _ = made(ids_store, tmp_path / "same", kind="domain", against=ids_store.path)
    assert len(np.unique(same.weights_V)) == 1


@pytest.mark.parametrize(
    ("settings", "flag"), [({"kind": "frequency", "weight": 2}, "weight"), ({"kind": "common", "power": 0.2}, "power")]
)
def test_a_setting_of_another_kind_is_refused(settings, flag):
    with pytest.raises(ValueError, match=f"--{flag} is for --kind "):
        MaskWeightsConfig(**settings)


def test_a_list_without_a_word_is_refused(ids_store, tmp_path):
    (tmp_path / "words.txt").write_text("\n")
    with pytest.raises(RunError, match="lists no word"):
        made(ids_store, tmp_path, kind="domain", words=tmp_path / "words.txt")


def test_a_list_of_words_gives_its_weights_to_their_tokens(ids_store, tmp_path):
    (tmp_path / "words.txt").write_text("w3\t5\nw7 w3 2\n\nw9 0\n")
    table, _ = made(ids_store, tmp_path, kind="domain", words=tmp_path / "words.txt")
    expected = {3: 5, 7: 2, 9: 0}
    assert [table.weights_V[len(SPECIAL) + word] for word in range(60)] == [expected.get(word, 1) for word in range(60)]
    for wrong in ("w3 five", "w3 -1", "w3 nan", "w3"):
        (tmp_path / "words.txt").write_text(f"w1 1\n{wrong}\n")
        with pytest.raises(RunError, match="line 2 of .*words.txt"):
            made(ids_store, tmp_path / "wrong", kind="domain", words=tmp_path / "words.txt")


def test_a_word_that_follows_a_space_in_byte_level_tokens_leaves_its_parts_alone(ids_store, tmp_path, monkeypatch):
    """And a file of Windows begins with a mark of its encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([" water" * 9], trainers.BpeTrainer(vocab_size=60, special_tokens=list(SPECIAL)))
    tokens = tokenizer.get_vocab()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    monkeypatch.setattr(Store, "load_tokenizer", lambda self: wrapped)
    (tmp_path / "words.txt").write_text("water 10\n", encoding="utf-8-sig")
    table, _ = made(ids_store, tmp_path, kind="domain", words=tmp_path / "words.txt")
    assert np.flatnonzero(table.weights_V != 1).tolist() == [tokens["Ġwater"]]


def test_a_space_of_its_own_before_a_word_gets_no_weight(ids_store, tmp_path, monkeypatch):
    """SentencePiece writes "▁" before each word that has no token with it."""
    tokenizer = Tokenizer(models.BPE({"▁": 5, "北": 6, "京": 7, "a": 8}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    monkeypatch.setattr(Store, "load_tokenizer", lambda self: wrapped)
    (tmp_path / "words.txt").write_text("北京 10\n", encoding="utf-8")
    table, _ = made(ids_store, tmp_path, kind="domain", words=tmp_path / "words.txt")
    assert np.flatnonzero(table.weights_V != 1).tolist() == [6, 7]


def test_common_words_are_counted_with_their_capitals_and_are_neither_pieces_nor_punctuation(tmp_path, monkeypatch):
    store = write_store(tmp_path / "store", k=0)
    file = store.tokenizer_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    renamed = {"w1": "W0", "w2": "##x", "w3": ",", "w4": "7"}
    vocabulary = {renamed.get(token, token): id for token, id in tokenizer["model"]["vocab"].items()}
    tokenizer["model"] = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocabulary}
    tokenizer["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    file.write_text(json.dumps(tokenizer))
    counts = Counter(id for row in sentences(store) for id in row)
    token_of = {id: token for token, id in vocabulary.items() if id >= len(SPECIAL)}
    by_word = Counter()
    for id, token in token_of.items():
        if token not in ("##x", ",", "7"):
            by_word[token.lower()] += counts[id]
    monkeypatch.setattr(weights, "MOST_FREQUENT", 9)
    table, report = made(Store.open(store.path), tmp_path, kind="common", weight=4)
    common = {token_of[id] for id in token_of if table.weights_V[id] == 4}
    assert {token.lower() for token in common} == {word for word, _ in by_word.most_common(9)}
    assert set(table.weights_V.tolist()) == {1, 4} and not {"##x", ",", "7"} & common
    assert by_word["w0"] == counts[5] + counts[6] and ("w0" in common) == ("W0" in common)
    shown = [counts[vocabulary[token]] for token, _ in report["heaviest"]]
    assert shown == sorted((counts[vocabulary[token]] for token in common), reverse=True)[:8]
    tokenizer["model"] = {"type": "BPE", "vocab": vocabulary, "merges": []}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(RunError, match="^--kind common: cannot tell where words begin .*--kind domain --words FILE"):
        made(Store.open(store.path), tmp_path / "unknown", kind="common")


def test_each_token_of_a_script_without_spaces_is_a_word(tmp_path, monkeypatch):
    store = write_store(tmp_path / "store", k=0)
    file = store.tokenizer_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    plain = made(store, tmp_path, kind="common", weight=4)[1]["name"]
    counts = Counter(id for row in sentences(store) for id in row)
    frequent = counts.most_common(3)[2][0]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary = {("##北" if id == frequent else token): id for token, id in vocabulary.items()}
    tokenizer["model"] = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocabulary}
    tokenizer["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    file.write_text(json.dumps(tokenizer))
    monkeypatch.setattr(weights, "MOST_FREQUENT", 3)
    table, report = made(Store.open(store.path), tmp_path / "other", kind="common", weight=4)
    assert table.weights_V[frequent] == 4 and ["##北", 4.0] in report["heaviest"] and report["name"] != plain
    assert json.loads(table.origin)["unspaced"] == "each token"


def brute_pmi(ngram, counts, tokens):
    """The loosest of all segmentations, one by one."""
    found = []
    for cuts in itertools.product([False, True], repeat=len(ngram) - 1):
        if any(cuts):
            places = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), len(ngram)]
            parts = [ngram[start:stop] for start, stop in itertools.pairwise(places)]
            found.append(math.log(counts[ngram] / tokens) - sum(math.log(counts[part] / tokens) for part in parts))
    return min(found)


def test_collocations_are_those_of_a_plain_loop(ids_store, monkeypatch):
    monkeypatch.setattr(student.masks.collocations, "TOKENS_AT_ONCE", 300)  # several parts are merged
    rows = sentences(ids_store)
    counts = Counter(tuple(row[i : i + n]) for row in rows for n in range(1, 6) for i in range(len(row) - n + 1))
    found = count_ngrams(ids_store.split("train"))
    mine = {tuple(ids[ids >= 0].tolist()): count for ids, count in zip(found.ids_E5, found.counts_E, strict=True)}
    assert mine == {ngram: count for ngram, count in counts.items() if len(ngram) > 1} and found.undercount == 0
    assert found.ids_E5.shape[1] == 5, "as tables are stored"
    token_counts = np.array([counts[(id,)] for id in range(65)], float)
    tokens, chosen = token_counts.sum(), {}
    listed = collocations(found, token_counts, least_count=5, coverage=0.5)
    listed = [tuple(ids[ids >= 0].tolist()) for ids in listed]
    for n in range(2, 6):
        pmi = {ngram: brute_pmi(ngram, counts, tokens) for ngram in counts if len(ngram) == n and counts[ngram] >= 5}
        chosen[n] = [ngram for ngram in listed if len(ngram) == n]
        left_out = [pmi[ngram] for ngram in pmi.keys() - set(chosen[n])]
        ranked = [pmi[ngram] for ngram in chosen[n]]
        assert ranked == sorted(ranked, reverse=True) and ranked[-1] >= max(left_out) - 1e-12 and ranked[-1] > 0
    sizes = [len(chosen[n]) for n in range(2, 6)]
    assert sizes == pytest.approx(len(listed) * np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8]), abs=2)
    assert 0.4 * tokens < sum(counts[ngram] * len(ngram) for ngram in listed) <= 0.5 * tokens


def test_few_entries_lose_rare_ngrams_alone_and_no_more_than_said(ids_store, monkeypatch):
    monkeypatch.setattr(student.masks.collocations, "TOKENS_AT_ONCE", 200)
    windows = ids_store.split("train")
    whole, part = count_ngrams(windows), count_ngrams(windows, entries=300)
    assert len(part.keys_E) <= 300 < len(whole.keys_E) and part.undercount > 0
    known = dict(zip(whole.keys_E.tolist(), whole.counts_E.tolist(), strict=True))
    kept = dict(zip(part.keys_E.tolist(), part.counts_E.tolist(), strict=True))
    assert all(count - part.undercount <= kept.get(key, 0) <= count for key, count in known.items())
    assert len(collocations(part, windows.token_counts().astype(float), least_count=5, coverage=0.5)) > 0


def test_no_ngram_crosses_a_special_token_or_a_document(tmp_path):
    store = write_store(tmp_path / "store", k=0, pairs=True)  # [CLS] four words [SEP] ... [SEP]
    found = count_ngrams(store.split("train"))
    assert not np.isin(found.ids_E5, list(SPECIAL.values())).any()
    read = store.split("train").read(np.arange(150))
    pairs = sum(max(0, length - 2 - 4 - 1 - 1) + 3 for length in read.lengths.tolist())
    assert found.counts_E[(found.ids_E5 >= 0).sum(axis=1) == 2].sum() == pairs


def test_the_same_request_finds_the_finished_table(ids_store, lsp_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = MaskWeightsConfig(store=ids_store.path, kind="pmi")
    report = make_mask_weights(config)
    assert not report["finished_before"] and report["collocations"] == len(
        read_table(report["mask_weights"]).collocations_C5
    )
    assert make_mask_weights(replace(config, store=lsp_store.path)) == report | {
        "finished_before": True,
        "store": str(lsp_store.path),
        "kind": "lsp",
    }
    with monkeypatch.context() as patch:
        patch.setattr(weights, "LEAST_COUNT", 6)
        assert make_mask_weights(config)["mask_weights"] != report["mask_weights"]
    shown = view(report, config)
    assert f"--objective mlm --mask-weights {report['mask_weights']}" in shown  # mlsm would refuse a store of ids
    assert report["mask_weights"] in shown and f"{report['collocations']:,}, first: {report['examples'][0]}" in shown
    with open(report["mask_weights"], "r+b") as file:
        file.truncate(100)
    assert make_mask_weights(config) == report  # made anew
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(RunError, match="taken exists"):
        make_mask_weights(replace(config, output=tmp_path / "taken"))
    assert (tmp_path / "taken").read_text() == "mine"


def test_what_does_not_belong_together_is_refused(ids_store, settings, tmp_path):
    other = write_store(tmp_path / "other", k=0, words=50)
    with pytest.raises(RunError, match="another vocabulary"):
        made(ids_store, tmp_path, kind="domain", against=other.path)
    table, _ = made(ids_store, tmp_path, kind="pmi")
    common = {"objective": "mlm", "mask_weights": str(tmp_path / "table.npz")}
    with pytest.raises(RunError, match="another vocabulary than .*other"):
        train(StudentConfig(store=other.path, **settings | common))
    with pytest.raises(RunError, match="--mask-unit span .* Use --mask-unit token or word"):
        train(StudentConfig(store=ids_store.path, mask_unit="span", **settings | common))
    for spoilt in (
        replace(table, weights_V=-table.weights_V),
        replace(table, weights_V=table.weights_V.astype(np.float64)),
        replace(table, collocations_C5=table.collocations_C5 + 65),
        replace(table, collocations_C5=table.collocations_C5[:, :4]),
    ):
        write_table(tmp_path / "table.npz", spoilt)
        with pytest.raises(RunError, match="is not a table"):
            train(StudentConfig(store=ids_store.path, **settings | common))
    with pytest.raises(RunError, match="nowhere.npz cannot be read"):
        train(StudentConfig(store=ids_store.path, **settings | common | {"mask_weights": "nowhere.npz"}))
    assert not settings["run_dir"].exists()
    for wrong in (
        {"kind": "domain"},
        {"words": "list.txt"},
        {"power": -1},
        {"weight": -1},
    ):
        with pytest.raises(ValueError, match="^--"):
            MaskWeightsConfig(store="x", **wrong)


@pytest.mark.parametrize("kind", ["frequency", "pmi"])
def test_objectives_see_the_same_weighted_batches_and_are_judged_on_uniform_masks(
    store_for, needed_by, settings, tmp_path, kind
):
    few = settings | {"encoder": "bert-1x32", "max_steps": 2, "checkpoints": (1,), "save_every": 0}
    batches, baselines = {}, {}
    for name in (*OBJECTIVES, "uniform"):
        masks = {"objective": "mlm"} if name == "uniform" else {"objective": name, "mask_weights": kind}
        paths = {"store": store_for(masks["objective"]).path, "run_dir": tmp_path / "students" / name}
        baselines[name] = train(StudentConfig(**few | paths | masks | needed_by(name)))["baseline"]
        batches[name] = [line["batch"] for line in log_of(paths["run_dir"]).values()]
    assert baselines["mlm"] == baselines["uniform"]
    assert all(batches[objective] == batches["mlm"] for objective in OBJECTIVES)
    assert batches["uniform"] != batches["mlm"]
    (table,) = (tmp_path / "students" / "mask-weights").iterdir()  # made once, by the first run
    assert read_table(table).kind == kind
    kept = tmp_path / "students" / "mlm"
    name = find_description(kept)["settings"]["mask_weights"]
    assert name == read_table(kept / "mask_weights.npz").name == read_table(table).name
    assert json.loads((kept / "export" / "lineage.json").read_text())["settings"]["mask_weights"] == name


def test_a_run_is_named_after_the_content_of_its_table(ids_store, settings, tmp_path):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    train(replace(config, mask_weights="frequency"))
    copy = settings["run_dir"] / "mask_weights.npz"
    assert train(replace(config, mask_weights=str(copy)))["finished_before"]
    other, _ = made(ids_store, tmp_path, power=1.0)
    with pytest.raises(RunError, match=rf"mask_weights \(there {read_table(copy).name}, now {other.name}\)"):
        train(replace(config, mask_weights=str(tmp_path / "table.npz")))
    with pytest.raises(RunError, match=r"mask_weights \(there frequency .{16}, now not set\)"):
        train(config)


def test_tables_take_turns_at_the_given_steps(store_for, settings, tmp_path, monkeypatch):
    """Each step has the batch of a run that keeps to the table whose turn it is, whatever the objective."""
    few = settings | {"encoder": "bert-1x32", "checkpoints": (1,), "save_every": 0, "mask_weight_steps": (0.2, 0.55)}
    monkeypatch.setattr(weights, "MOST_FREQUENT", 15)
    made(store_for("mlm"), tmp_path, kind="common")
    common = str(tmp_path / "table.npz")

    def batches(objective, *weights):
        output = tmp_path / "students" / f"{objective} {len(weights)} {weights[0][-9:]}"
        changes = {"objective": objective, "store": store_for(objective).path, "mask_weights": weights}
        train(StudentConfig(**few | changes | {"run_dir": output}))
        return output, [line["batch"] for line in log_of(output).values()]

    turns = (common, "uniform", "frequency")
    alone = {name: batches("mlm", name)[1] for name in turns}
    assert len({alone[name][5] for name in turns}) == 3
    output, mixed = batches("mlm", *turns)  # of 8 steps: from 1.6 and 4.4 on
    assert mixed == [*alone[common][:2], *alone["uniform"][2:5], *alone["frequency"][5:]]
    assert batches("mlsm", *turns)[1] == mixed
    kept = {path.name: read_table(path).name for path in output.glob("*.npz")}
    (frequency,) = (tmp_path / "students" / "mask-weights").iterdir()  # made once, by the first run
    names = [read_table(path).name for path in (tmp_path / "table.npz", frequency)]
    assert kept == dict(zip(("mask_weights-1.npz", "mask_weights-3.npz"), names, strict=True))
    found = find_description(output)["settings"]
    assert found["mask_weights"] == [names[0], "uniform", names[1]]
    assert found["mask_weight_steps"] == [0.2, 0.55]


def test_lists_of_weights_name_a_run_and_are_checked():
    plain = StudentConfig()
    assert StudentConfig(mask_weights="uniform") == StudentConfig(mask_weights=["uniform"]) == plain
    assert (
        StudentConfig(mask_weights=["pmi"], mask_weight_steps=(0.1, 0.2)).identity()
        == replace(plain, mask_weights="pmi").identity()
    )
    turns = StudentConfig(mask_weights=["common", "uniform"]).identity()
    assert turns == plain.identity() | {"mask_weights": ["common", "uniform"], "mask_weight_steps": [0.5]}
    for wrong in (
        {"mask_weights": ("pmi", "adaptive")},
        {"mask_weights": ("pmi", "domain")},
        {"mask_weights": ()},
        {"mask_weight_steps": (0.2, 0.4), "mask_weights": ("pmi", "uniform")},
        {"mask_weight_steps": (0.4, 0.2), "mask_weights": ("pmi", "uniform", "pmi")},
    ):
        with pytest.raises(ValueError, match=f"^--{next(iter(wrong)).replace('_', '-')} "):
            StudentConfig(**wrong)


def test_a_lost_copy_is_written_anew_and_one_of_a_killed_process_is_taken_over(ids_store, settings, tmp_path, caplog):
    settings["run_dir"].mkdir()
    copy = settings["run_dir"] / "mask_weights.npz"
    write_table(copy, made(ids_store, tmp_path / "other", power=1.0)[0])  # killed before it wrote config.json
    table, _ = made(ids_store, tmp_path)
    weights = {"objective": "mlm", "mask_weights": str(tmp_path / "table.npz"), "max_steps": 1}
    config = StudentConfig(store=ids_store.path, **settings | weights)
    train(config)
    assert read_table(copy).name == table.name and "written again" not in caplog.text
    for lose in (copy.unlink, lambda: copy.write_bytes(copy.read_bytes()[:100])):
        lose()
        caplog.clear()
        assert train(config)["finished_before"]
        assert read_table(copy).name == table.name and "mask_weights.npz was damaged or lost" in caplog.text
    several = tmp_path / "several"
    several.mkdir()
    write_table(several / "mask_weights-2.npz", table)  # of a killed process, too
    turns = replace(config, mask_weights=("uniform", config.mask_weights), run_dir=several)
    train(turns)
    (several / "mask_weights-2.npz").unlink()
    assert train(turns)["finished_before"]
    assert (
        read_table(several / "mask_weights-2.npz").name == table.name and not (several / "mask_weights-1.npz").exists()
    )


@pytest.mark.parametrize("power", [100, 500])
def test_weights_too_far_apart_for_numbers_are_refused(ids_store, tmp_path, monkeypatch, power):
    """100: beside rare tokens the others weigh less than float32 can say; 500: all weights are zero."""
    monkeypatch.setattr(weights, "LEAST_COUNT", 1 if power == 100 else 25)
    with pytest.raises(RunError, match=f"^--power {power}: the weights of rare and frequent .* a smaller --power"):
        made(ids_store, tmp_path, power=power)
    assert not (tmp_path / "table.npz").exists()


def test_settings_without_effect_do_not_name_a_run():
    plain = StudentConfig(mask_rate_end=0.1)
    assert not {"mask_weights", "mask_schedule", "mask_rate_steps"} & plain.identity().keys()
    assert replace(plain, mask_rate_steps=(0.2,)).identity() == plain.identity()
    steps = replace(plain, mask_schedule="steps", mask_rate_steps=(0.25, 0.5)).identity()
    assert steps == plain.identity() | {"mask_schedule": "steps", "mask_rate_steps": [0.25, 0.5]}
    for wrong in (
        {"mask_schedule": "cosine"},
        {"mask_weights": "domain"},
        {"mask_rate_steps": ()},
        {"mask_rate_steps": (0.5, 0.5)},
        {"mask_rate_steps": (0.5, 1)},
    ):
        with pytest.raises(ValueError, match=f"^--{next(iter(wrong)).replace('_', '-')} "):
            StudentConfig(**wrong)


@pytest.mark.promise(
    "training with weighted masks of collocations, or three tables in turns, and a mask rate along a cosine, by "
    "SIGKILL: batches, losses and weights of an unbroken run",
    cases="2 real kills",
)
@pytest.mark.parametrize("weights", ["pmi", ("pmi", "frequency", "uniform")], ids=["one", "in turns"])
def test_a_killed_run_with_weights_and_a_schedule_goes_on_bit_for_bit(
    lsp_store, settings, tmp_path, weights, train_until_killed
):
    """Turns begin at steps 3 and 6, counted from 0: before the kill, and after the steps that are done again."""
    masks = {"mask_weights": weights, "mask_weight_steps": (0.3, 0.7)}
    masks |= {"mask_unit": "word", "mask_rate_end": 0.15, "mask_schedule": "cosine"}
    common = settings | masks | {"store": lsp_store.path}
    unbroken = StudentConfig(**common | {"run_dir": tmp_path / "unbroken" / "run"})
    train(unbroken)
    killed = StudentConfig(**common)
    train_until_killed(killed, 5)
    steps = []
    train(killed, lambda *args, step, **figures: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]
    logs = [log_of(config.run_dir) for config in (unbroken, killed)]
    for name in ("loss", "batch", "mask_rate", "held_out"):
        ours, theirs = ([line.get(name) for line in log.values()] for log in logs)
        assert ours == theirs
    exports = [(config.run_dir / "export" / "model.safetensors").read_bytes() for config in (unbroken, killed)]
    assert exports[0] == exports[1]


def test_from_the_command_line(tmp_path):
    write_store(tmp_path / "runs" / "stores" / "ids-tiny", k=0)
    table = run_command(["make-mask-weights", "--kind", "frequency", "--json"], cwd=tmp_path, code=0)
    found = json.loads(table.stdout)
    words = ["--objective", "mlm", "--encoder", "bert-1x32", "--max-steps", "2", "--batch-windows", "8", "--json"]
    for named in (found["mask_weights"], "frequency"):
        run = run_command(["train-student", *words, "--mask-weights", named], cwd=tmp_path, code=0)
    assert json.loads(run.stdout)["finished_before"]  # both ways name one table
    assert (
        Store.open(tmp_path / "runs" / "stores" / "ids-tiny").plan_id
        in read_table(tmp_path / found["mask_weights"]).origin
    )

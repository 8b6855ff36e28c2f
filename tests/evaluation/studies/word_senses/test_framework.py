"""Reading the framework's files: the real counts, a miniature by hand, and what is wrong with a file."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from data import data_path
from tiny_senses import SETS, write_miniature

from mlsm.common.errors import WsdDataError
from mlsm.common.progress import silent
from mlsm.common.wordnet import WordNet
from mlsm.evaluation.studies.word_senses.data import WsdData, data_fingerprint
from mlsm.evaluation.studies.word_senses.framework import SEMCOR, read_annotated


def test_the_real_data_has_the_published_counts():
    data = WsdData.read(Path(data_path("wsd")), silent)
    assert data.training == 226_036 and len(data.training_words) == 226_695 and len(data.wordnet.synset_of) == 206_941
    sizes = {name: int(data.groups[name].sum()) for name in data.groups}
    assert sizes == {
        "ALL": 7253,
        "semeval2007": 455,
        "senseval3": 1850,
        "senseval2": 2282,
        "semeval2013": 1644,
        "semeval2015": 1022,
        "NOUN": 4300,
        "VERB": 1652,
        "ADJ": 955,
        "ADV": 346,
    }
    first = {name: round(100 * data.questions.first_sense_Q()[data.groups[name]].mean(), 1) for name in ("ALL", *SETS)}
    assert first == {
        "ALL": 65.2,
        "semeval2007": 55.2,
        "senseval3": 66.2,
        "senseval2": 66.8,
        "semeval2013": 63.0,
        "semeval2015": 67.8,
    }
    assert (np.diff(data.questions.starts_Q) > 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.warn_of_differences()
    assert data.wordnet.lemmas("02084071-n") == ["dog", "canis_familiaris", "domestic_dog"]
    names = [data.wordnet.lexname(data.wordnet.synset_of[key]) for key in ("rain%2:43:00::", "think%2:31:01::")]
    assert names == ["verb.weather", "verb.cognition"]


def test_a_miniature_by_hand(tmp_path):
    root = write_miniature(tmp_path / "wsd")
    data = WsdData.read(root, silent)
    assert [len(sentence.instances) for sentence in data.sentences[:5]] == [1, 2, 2, 0, 2]
    assert data.sentences[1].words[5] == "bank" and data.sentences[7].words[1] == "big day"
    assert data.synsets == ["00011093-r", "01275562-s", "01382086-a", "02084071-n", "08420278-n", "09213565-n"]
    pairs = [(0, 4), (1, 3), (2, 5), (2, 4), (3, 2), (4, 3), (5, 1), (6, 0)]
    assert list(zip(data.training_words.tolist(), data.training_rows.tolist(), strict=True)) == pairs
    assert data.questions.starts_Q.tolist() == [0, 2, 3, 5, 6, 7, 8, 10, 12]
    assert data.questions.rows_C.tolist() == [4, 5, -1, 2, 1, -1, 0, 3, 4, 5, 2, 1]
    assert data.questions.first_sense_Q().tolist() == [False, True, False, True, True, True, True, True]
    with pytest.warns(UserWarning) as found:
        data.warn_of_differences()
    assert len(found) == 3 and "training: 7 in this data, 226,036 in the published framework" in str(found[0].message)


def test_wordnet_by_hand(tmp_path):
    wordnet = WordNet.load(write_miniature(tmp_path / "wsd") / "wordnet3.0/index.sense")
    assert wordnet.candidates("big", "ADJ") == [
        ("big%3:00:01::", "01382086-a"),
        ("big%5:00:00:important:00", "01275562-s"),
    ]
    assert wordnet.candidates("big", "NOUN") == []
    assert wordnet.lemmas("01275562-s") == ["big", "great"]  # tagged 20 and 14 times
    assert [wordnet.lexname(s) for s in ("02084071-n", "02343595-v", "01275562-s", "00011093-r")] == [
        "noun.animal",
        "verb.possession",
        "adj.all",
        "adv.all",
    ]


def damaged(root, name, old, new):
    path = root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1), errors="surrogateescape")


XML, GOLD, INDEX = f"{SEMCOR}.data.xml", f"{SEMCOR}.gold.key.txt", "wordnet3.0/index.sense"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (XML, "</wf>", "</fw>", "semcor.data.xml, line 5: expected XML, found mismatched tag"),
        (XML, 'pos="NOUN"', 'pos="NN"', "line 6: expected id, lemma and pos NOUN, VERB, ADJ, ADV .* found pos 'NN'"),
        (XML, 'lemma="bank"', "", "line 6: expected .* found none of lemma"),
        (XML, 'id="d0.s1.t1"', 'id="other"', "line 12: semcor.gold.key.txt has no sense key for the instance other"),
        (XML, "<instance", "<!-- <instance", "line .*: expected XML, found"),
        (XML, '<sentence id="d0.s0">', "<x>", "line 5: expected <wf> directly inside of a <sentence>"),
        (XML, "</wf>", "<wf>a</wf></wf>", "line 5: expected <wf> directly inside of a <sentence>"),
        (XML, "</wf>", "<sentence/></wf>", "line 5: expected <sentence> outside of all others"),
        (XML, "</wf>", "</wf><sentence/>", "line 5: expected <sentence> outside of all others"),
        (GOLD, "bank%1:14:00::", "bank%1:99:00::", "line 1: the sense key bank%1:99:00:: is not in"),
        (GOLD, "d0.s1.t1 dog%1:05:00::", "d0.s1.t1", "line 2: expected an instance's id and its sense keys, found 'd0"),
        (GOLD, "d0.s1.t1 ", "d0.s0.t1 ", "line 2: expected .* found d0.s0.t1 a second time"),
        (GOLD, "d0.s0.t1", "d9\td9.s9 bank%2:40:00::\nd0.s0.t1", "line 1: the sense key d9.s9 is not in"),
        (GOLD, "d0.s0.t1", "d9.s9 bank%2:40:00::\nd0.s0.t1", "d9.s9 has sense keys, but no instance"),
        (INDEX, " 2 25", " two 25", "index.sense, line 2: expected a sense key, a synset's offset"),
        (INDEX, "big%3", "big\udcff%3", r"index.sense, line 4: expected a sense key, .* found b'big\\xff%3"),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path, name, old, new, message):
    root = write_miniature(tmp_path / "wsd")
    damaged(root, name, old, new)
    with pytest.raises(WsdDataError, match=message):
        read_annotated(root, SEMCOR, WordNet.load(root / INDEX))


def test_a_missing_file_and_the_content_of_all(tmp_path):
    root = write_miniature(tmp_path / "wsd")
    before = data_fingerprint(root)
    assert data_fingerprint(write_miniature(tmp_path / "again")) == before
    damaged(root, "Evaluation_Datasets/senseval2/senseval2.data.xml", "slope<", "slopes<")
    assert data_fingerprint(root) != before
    (root / GOLD).unlink()
    with pytest.raises(WsdDataError, match="semcor.gold.key.txt is missing. --data-dir must be the directory that"):
        data_fingerprint(root)

"""A tokenizer is trained on the documents that a plan of the same settings would take."""

import os
import random
from pathlib import Path

import pytest
from preloaded import ROOT, Preloaded, Python, run_command, run_python
from tokenizers import Tokenizer

from mlsm.common.errors import CorpusError, TeacherError
from mlsm.common.progress import silent
from pipeline import tokenizer
from pipeline.config import TokenizerConfig
from pipeline.tokenizer import make_tokenizer


def vocabulary(path, **settings):
    (directory,) = make_tokenizer(
        TokenizerConfig(corpus=(str(path),), output=path.parent, vocab_size=600, **settings), silent
    )
    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json")).get_vocab()


def test_documents_that_are_left_out_teach_no_words(tmp_path):
    path = tmp_path / "a.txt"
    plain = [f"plain words of document {n} are here" for n in range(200)]
    odd = ["repeated text about zebras"] * 300 + ["quagga"] * 300
    path.write_bytes("\n\n".join(plain + odd).encode() + b"\n\ninvalid \xff yaks yaks yaks yaks" * 3)
    with pytest.raises(CorpusError, match="not UTF-8"):
        vocabulary(path)
    assert {"plain", "yaks"} <= vocabulary(path, invalid_utf8="replace").keys()
    skipped = vocabulary(path, invalid_utf8="skip", min_characters=10)
    assert "plain" in skipped and not {"yaks", "zebras", "quagga"} & skipped.keys()
    assert "zebras" in vocabulary(path, invalid_utf8="skip", keep_duplicates=True)


# -- one request, one tokenizer


def many_ties(path, *, reverse=False):
    """Random words over a few letters, and 1,200 letters that are seen once each: counts that are equal decide much."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdef", k=rng.randint(1, 7))) for _ in range(6000)]
    lines = [" ".join(words[start : start + 40]) for start in range(0, len(words), 40)]
    lines += [f"a{chr(0xAC00 + number)}b{chr(0xAC00 + 600 + number)}" for number in range(600)]
    path.write_text("\n\n".join(reversed(lines) if reverse else lines) + "\n")
    return path


def train(path, output, **settings):
    (directory,) = make_tokenizer(
        TokenizerConfig(corpus=(str(path),), output=output, vocab_size=2100, **settings), silent
    )
    return Path(directory)


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_command_gives_the_same_bytes_in_every_process(tmp_path):
    """In processes with other hashes of strings, with the library's threads and without, and for another order."""
    path = many_ties(tmp_path / "a.txt")
    found = []
    for process, threads in ((Preloaded, "false"), (Python, "true")):
        output = tmp_path / f"out-{threads}"
        words = ["train-tokenizer", "--corpus", path, "--vocab-size", "2100", "--output", output]
        ran = run_python([ROOT / "cli.py", *words], process, env=os.environ | {"TOKENIZERS_PARALLELISM": threads})
        assert ran.returncode == 0, ran.stderr
        (directory,) = (output / "tokenizers").iterdir()
        found.append((directory.name, files_of(directory)))
    assert found[0] == found[1]
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    assert sorted(ids.values()) == list(range(len(ids)))
    other = train(many_ties(tmp_path / "b.txt", reverse=True), tmp_path)
    assert other.name != directory.name  # another file
    assert (other / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_merges_are_those_of_the_tokenizers_library(tmp_path):
    """Where no counts are equal there is nothing to decide: the oracle is the library's own training."""
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    path = tmp_path / "a.txt"
    counts = {"ab": 100, "cd": 90, "hij": 70, "hi": 5, "klmn": 50, "kl": 6, "lmn": 9, "mn": 3, "op": 40, "qr": 2}
    text = " ".join(word for word, count in counts.items() for _ in range(count))
    vocab_size = 5 + len({*"abcdhijklmnopqr"}) + len("bdijlmnpr") + 9
    path.write_text(text)
    plain = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    plain.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    plain.train_from_iterator([text], trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special))
    (directory,) = make_tokenizer(TokenizerConfig(corpus=(str(path),), output=tmp_path, vocab_size=vocab_size), silent)
    ours = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    assert ours.get_vocab().keys() == plain.get_vocab().keys()
    merges = ["ab", "cd", "hi", "hij", "##mn", "kl", "klmn", "op", "lmn"]
    assert [token for token in sorted(ours.get_vocab(), key=ours.get_vocab().get) if token in merges] == merges
    assert [ours.id_to_token(number) for number in range(5)] == special
    assert ours.encode("klmn hijab").tokens == ["[CLS]", *plain.encode("klmn hijab").tokens, "[SEP]"]


@pytest.mark.parametrize(
    ("first", "words", "vocab_size", "unknown"),
    [
        (0x4E00, False, 8000, 0.01),  # Chinese: each character is a word
        (0xAC00, True, 16_000, 0.02),  # Korean: most characters also continue words, so they need two entries
        (0xAC00, True, 6000, 1.0),  # not all fit: half of the entries is left to merges
    ],
)
def test_an_alphabet_of_thousands_of_characters_is_known_if_the_vocabulary_has_room(first, words, vocab_size, unknown):
    dice, characters = random.Random(0), [chr(first + number) for number in range(3000)]
    text = " ".join("".join(dice.sample(characters, 3)) if words else dice.choice(characters) for _ in range(30_000))
    made = tokenizer.train_tokenizer([text], vocab_size=vocab_size)
    ids = made(text, add_special_tokens=False)["input_ids"]
    assert ids.count(made.unk_token_id) / len(ids) < unknown and len(made) <= vocab_size


@pytest.mark.parametrize("clause", [90, 110])
def test_clauses_of_languages_without_spaces_that_become_unknown_are_told(clause, caplog):
    dice = random.Random(0)
    text = " ".join("".join(chr(dice.randrange(0x0E01, 0x0E20)) for _ in range(clause)) for _ in range(200))
    made = tokenizer.train_tokenizer([text + " a few words" * 20], vocab_size=500)
    is_told = "of the text's characters are in words that become [UNK]" in caplog.text
    assert is_told == (clause > 100) == (made.unk_token_id in made(text)["input_ids"])


def test_characters_that_are_rare_take_no_room_from_words():
    text = "plain words " * 100_000 + " ".join(chr(0x4E00 + number) for number in range(1500))
    assert len(tokenizer.train_tokenizer([text], vocab_size=8000).get_vocab().keys() - {"plain", "words"}) < 1050


def test_another_corpus_or_setting_is_another_tokenizer_and_the_same_is_found(tmp_path, monkeypatch):
    first = tmp_path / "a.txt"
    first.write_text("one document of some words here\n\nsome other document of words\n")
    made = train(first, tmp_path)
    before = files_of(made)
    (tmp_path / "b.txt").write_text("quite another corpus with quite other words\n")
    others = [train(tmp_path / "b.txt", tmp_path), train(first, tmp_path, min_characters=30)]
    assert len({made, *others}) == 3 and files_of(made) == before
    monkeypatch.setattr("pipeline.tokenizer.train_tokenizer", lambda *_, **__: pytest.fail("it trained again"))
    assert train(first, tmp_path) == made
    (made / "tokenizer.json").write_bytes(before["tokenizer.json"].replace(b"document", b"decument"))
    with pytest.raises(TeacherError, match=r"is not the tokenizer that this command wrote.*another --output"):
        train(first, tmp_path)


def test_a_corpus_that_changes_while_it_is_read_makes_no_tokenizer(tmp_path, monkeypatch):
    path, real = tmp_path / "a.txt", tokenizer.train_tokenizer
    path.write_text("one document of some words here\n")

    def change(*args, **settings):
        path.write_text("another document\n")
        return real(*args, **settings)

    monkeypatch.setattr(tokenizer, "train_tokenizer", change)
    with pytest.raises(CorpusError, match="changed while it was read"):
        train(path, tmp_path)
    assert not list((tmp_path / "tokenizers").glob("cased-*"))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path, share):
    path = many_ties(tmp_path / "a.txt")
    size = (train(path, tmp_path / "whole") / "tokenizer.json").stat().st_size
    words = ["train-tokenizer", "--corpus", path, "--vocab-size", "2100", "--output", tmp_path / "cut"]
    ran = run_command(words, largest_file=int(share * size))
    assert ran.returncode == 74 and ran.stderr.count("mlsm: error:") == 1 and "File too large" in ran.stderr, ran
    assert not list((tmp_path / "cut" / "tokenizers").iterdir())


def test_a_text_that_gives_fewer_entries_says_so(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a few short words\n\nand a few more\n")
    config = TokenizerConfig(corpus=(str(tmp_path / "a.txt"),), vocab_size=500, output=tmp_path / "runs")
    (made,) = make_tokenizer(config, silent)
    entries = len(Tokenizer.from_file(str(made / "tokenizer.json")).get_vocab())
    assert f"the text gives only {entries} of 500 entries: {made}" in caplog.text and entries < 100

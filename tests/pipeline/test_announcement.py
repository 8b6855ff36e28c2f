"""What encoding announces before its work, in a dry run as well: the settings that decide, each with its origin."""

import re

import pytest

from mlsm import __main__ as cli
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig


@pytest.fixture
def flags(english_text, teacher_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.estimate.SECONDS", 0.01)
    common = ["--corpus", str(english_text), "--teacher", str(teacher_directory), "--layer", "2", "--max-length", "32"]
    common += ["--max-tokens", "20000", "--batch-tokens", "2048", "--device", "cpu"]
    return [*common, "--output", str(tmp_path / "runs")]


def rows(text):
    """Names of settings to what is said of them."""
    return dict(re.findall(r"^  (\w+) +(\S.*)$", text.partition("encode-lsp:")[2], re.MULTILINE))


def test_flags_recipe_and_defaults_are_named(flags, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("encode-lsp: {k: 48, dictionary-tokens: 4_000}\n")
    line = ["encode-lsp", "--recipe", str(tmp_path / "mine.yaml"), *flags, "--lam", "0.1", "--dry-run"]
    assert cli.run(line) == 0
    said = rows(capsys.readouterr().err)
    recipe = f"[recipe {tmp_path / 'mine.yaml'}]"
    assert said["teacher"].endswith(": 3 layers of width 32   [flag]")
    assert said["layer"] == "2   [flag]" and said["k"] == f"48   {recipe}" and said["lambda"] == "0.1   [flag]"
    assert said["sample"] == f"at most 4,000 vectors, to learn a dictionary   {recipe}"
    assert said["n"] == "the fewest entries that hold 98% of the mass on held-out vectors   [default]"
    assert "max-length 32 (flag)" in said["also"] and "batch-tokens 2048 (flag)" in said["also"]
    assert not (tmp_path / "runs" / "stores").exists()
    assert cli.run(line[:-1]) == 0
    assert rows(capsys.readouterr().err) == said, "the dry run announces what the encoding does"


def test_the_atoms_of_a_given_dictionary_are_counted(flags, tmp_path, capsys):
    """Not what --k would be by default, which it is not."""
    learned = ["--lam", "0.1", "--dictionary-tokens", "4000", "--k", "48"]
    assert cli.run(["learn-dictionary", *flags, *learned]) == 0
    announced = capsys.readouterr().err
    assert "learn-dictionary:" in announced and "  k        48   [flag]" in announced
    (dictionary,) = (tmp_path / "runs" / "dictionaries").iterdir()
    assert cli.run(["encode-lsp", *flags, "--lam", "0.1", "--dictionary", str(dictionary), "--dry-run"]) == 0
    said = rows(capsys.readouterr().err)
    assert said["k"] == "48   [dictionary]" and said["dictionary"] == f"{dictionary}   [flag]" and "sample" not in said


def test_the_defaults_that_a_dry_run_took_silently_are_announced(flags, capsys):
    """`help` shows the demonstration's 1,024 LSPs; a teacher of one's own gets 3,072."""
    assert cli.run(["encode-lsp", *flags, "--dictionary-tokens", "4000", "--lam", "0.1", "--dry-run"]) == 0
    said = rows(capsys.readouterr().err)
    assert said["k"] == "3,072   [default]" and said["layer"] == "2   [flag]"


@pytest.mark.parametrize(("atoms", "is_shown"), [("learned", True), ("clusters", False)])
def test_a_penalty_that_decides_nothing_is_not_announced(atoms, is_shown, flags, capsys):
    """Learning has one, whatever the solver of the codes."""
    line = ["encode-lsp", *flags, "--k", "16", "--atoms", atoms, "--solver", "nearest", "--dry-run"]
    assert cli.run([*line, "--dictionary-tokens", "4000"]) == 0
    assert ("lambda" in rows(capsys.readouterr().err)) == is_shown


def test_settings_from_python(flags, english_text, teacher_directory, tmp_path, caplog):
    config = EncodeConfig(
        corpus=(str(english_text),), teacher=str(teacher_directory), layer=(2,), k=(48,), max_length=32,
        dictionary_tokens=4_000, max_tokens=20_000, dry_run=True, output=tmp_path / "runs", device="cpu"
    )  # fmt: skip
    with caplog.at_level("INFO"):
        encode_lsp(config)
    said = rows(caplog.text)
    assert said["k"] == "48   [given]" and said["lambda"] == "0.05   [default]"


def test_advice_on_the_text_comes_before_the_work(flags, tmp_path, capsys):
    def announced(*more):
        place = flags.index("--corpus") + 1
        line = ["encode-lsp", *flags[:place], str(tmp_path / "texts"), *flags[place + 1 :], "--k", "16", "--dry-run"]
        at = line.index("--max-tokens")
        assert cli.run([*line[:at], *line[at + 2 :], *more]) == 0
        return " ".join(capsys.readouterr().err.split())

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "lines.txt").write_text("\n".join(f"sentence {n} of a long file" for n in range(2000)))
    assert "lines.txt has hardly any, so its documents are larger than a unit." in announced("--unit-tokens", "1000")
    (tmp_path / "texts" / "lines.txt").unlink()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(f"word{n} of file {number}" for n in range(20)))
    assert "With --held-out-by file a unit never has text of two files" in announced("--held-out-by", "file")
    assert "Each shard counts" not in announced(), "small files are joined"
    larger = announced("--unit-tokens", "120")  # than an eighth of a unit
    assert "smaller than an eighth of a unit: raise --unit-tokens, or put the text into a few files" in larger
    (tmp_path / "texts" / "all.txt").write_text("\n\n".join(file.read_text() for file in tmp_path.glob("texts/*")))
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").unlink()
    assert "Each shard counts" not in announced()


@pytest.mark.parametrize(("command", "row"), [("encode-ids", "tokenizer"), ("encode-logits", "teacher")])
def test_other_encodings_announce_too(command, row, english_text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.estimate.SECONDS", 0.01)
    line = [command, "--corpus", str(english_text), f"--{row}", "bundled", "--max-tokens", "5000", "--max-length", "32"]
    assert cli.run([*line, "--output", str(tmp_path), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert f"{command}:\n" in said and re.search(rf"^  {row} +bundled.*\[flag\]$", said, re.MULTILINE)
    assert ("  n " in said) == (command == "encode-logits")


def test_text_that_the_tokenizer_does_not_know_is_told_before_the_work(flags, tmp_path, capsys):
    assert cli.run(["encode-lsp", *flags, "--k", "32", "--lam", "0.1", "--dry-run"]) == 0
    assert "does not know" not in capsys.readouterr().err
    text = tmp_path / "other.txt"
    text.write_text("銀行は金利を上げた。\n\n" * 50 + "the bank raised its rates\n\n" * 50, encoding="utf-8")
    flags[flags.index("--corpus") + 1] = str(text)
    assert cli.run(["encode-ids", "--tokenizer", flags[3], "--corpus", str(text), "--output", flags[-1]]) == 0
    said = capsys.readouterr().err
    share = int(re.search(r"does not know about (\d+)% of the text's tokens \(\[UNK\]\)", said)[1])
    assert 20 < share < 80

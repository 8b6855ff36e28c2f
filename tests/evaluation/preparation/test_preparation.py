"""prepare-data: published archives, real ones where they are at hand, become what the evaluations read."""

import io
import json
import lzma
import random
import shutil
import tarfile
import tracemalloc
import zipfile

import pytest
from data import data_path
from tiny_senses import write_miniature

from mlsm.commands.prepare_data import show as preparation
from mlsm.common.errors import DataError
from mlsm.evaluation.preparation import archives
from mlsm.evaluation.preparation.config import PrepareDataConfig
from mlsm.evaluation.preparation.prepare import prepare_data
from mlsm.evaluation.preparation.sets import SETS
from mlsm.evaluation.tasks.blimp.data import PARADIGMS
from mlsm.evaluation.tasks.blimp.data import read as read_blimp
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.tasks import TASKS


@pytest.fixture
def places(tmp_path):
    (tmp_path / "downloads").mkdir()
    return tmp_path / "downloads", tmp_path / "data"


def run(name, places):
    source, output = places
    return prepare_data(PrepareDataConfig(dataset=name, from_=source, output=output))


def write_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


WIC = {
    "train/train.data.txt": "carry\tV\t2-1\tYou must carry it .\tSound carries well .\n",
    "train/train.gold.txt": "F\n",
    "dev/dev.data.txt": "board\tN\t2-2\tRoom and board .\tHe nailed boards .\n",
    "dev/dev.gold.txt": "T\n",
}
PAIRS = "sentence1\tsentence2\tlabel\n"
RTE = {"RTE/train.tsv": PAIRS + "a b\tc\tentailment\n", "RTE/dev.tsv": PAIRS + "d\te f\tnot_entailment\n"}
COLA = {"CoLA/train.tsv": 'gj04\t1\t\tSome "quoted words.\n', "CoLA/dev.tsv": "gj04\t0\t*\tThem sleeps.\n"}


@pytest.mark.parametrize("name", ["wic", "conll", "blimp", "wsd"])
def test_the_real_sets_have_the_published_counts(name, tmp_path):
    places = data_path({"conll": "conll2003"}.get(name, name)), tmp_path / "data"
    (part,) = run(name, places)["parts"]
    assert part["counts"] == part["expected"]


def test_real_mrpc_from_the_files_of_msr(places):
    """MSR's one file and the ids of the development set give the two files that GLUE makes of them."""
    real = data_path("glue/MRPC")
    header, *train = (real / "train.tsv").read_text(encoding="utf-8").split("\n")[:-1]
    dev = (real / "dev.tsv").read_text(encoding="utf-8-sig").split("\n")[1:-1]
    together = [*train, *dev]
    random.Random(0).shuffle(together)
    text = "\ufeff" + "\r\n".join([header.lstrip("\ufeff"), *together]) + "\r\n"
    (places[0] / "msr_paraphrase_train.txt").write_bytes(text.encode())
    (places[0] / "mrpc_dev_ids.tsv").write_text("".join("\t".join(line.split("\t")[1:3]) + "\n" for line in dev))
    report = run("glue", places)
    assert report["parts"][0]["counts"] == {"train": 3668, "validation": 408}
    made, known = (load_task(TASKS["mrpc"], place) for place in (places[1], real.parent))
    assert sorted(made.train) == sorted(known.train)
    assert sorted(made.evaluation["validation"]) == sorted(known.evaluation["validation"])


def test_glue_from_its_zips_says_what_is_missing(places):
    write_zip(places[0] / "RTE.zip", RTE)
    write_zip(places[0] / "CoLA.zip", COLA | {"CoLA/original/raw/in_domain_train.tsv": "x"})
    report = run("glue", places)
    assert contents(places[1]) == {f"glue/{name}": text.encode() for name, text in (RTE | COLA).items()}
    assert {part["directory"] for part in report["missing"]} == {
        f"glue/{task}" for task in ("MNLI", "MRPC", "QNLI", "QQP", "SST-2", "STS-B")
    }
    shown = preparation(report, PrepareDataConfig(dataset="glue", from_=places[0]))
    assert "1 train, 1 validation; 8,551 train, 1,043 validation are published" in shown
    assert "glue/QQP lacks QQP/train.tsv, QQP/dev.tsv; published at https://" in shown
    (places[0] / "RTE.zip").unlink()
    again = {part["directory"]: part for part in run("glue", places)["parts"]}
    assert all(part["finished_before"] for part in again.values()) and len(again) == 2


@pytest.mark.parametrize("form", ["zip", "directory", "tar.gz"])
def test_wic_in_any_form(form, places):
    source, output = places
    if form == "zip":
        write_zip(source / "WiC_dataset.zip", WIC | {"__MACOSX/train/train.data.txt": "junk", "README.txt": "text"})
    for name, text in WIC.items() if form == "directory" else ():
        (source / "WiC" / name).parent.mkdir(parents=True, exist_ok=True)
        (source / "WiC" / name).write_text(text)
    if form == "tar.gz":
        with tarfile.open(source / "wic.tar.gz", "w:gz") as archive:
            for name, text in WIC.items():
                entry = tarfile.TarInfo(f"wic/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    run("wic", places)
    assert contents(output) == {f"wic/{name}": text.encode() for name, text in WIC.items()}
    assert load_task(TASKS["wic"], output).train[0].label == 0


def test_one_archive_may_be_named(places):
    write_zip(places[0] / "WiC_dataset.zip", WIC)
    prepare_data(PrepareDataConfig(dataset="wic", from_=places[0] / "WiC_dataset.zip", output=places[1]))
    assert (places[1] / "wic/dev/dev.gold.txt").read_text() == "T\n"


def test_conll_under_the_names_of_the_shared_task(places):
    lines = "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n"
    for part in ("eng.train", "eng.testa"):
        (places[0] / part).write_text(lines)
    (part,) = run("conll", places)["parts"]
    assert part["files"] == ["dev.txt", "train.txt"] and part["counts"] == {"train": 1, "validation": 1}
    (places[0] / "eng.testb").write_text(lines + lines)
    with pytest.raises(DataError, match="it lacks the test.txt that is in --from"):
        run("conll", places)
    (part,) = run("conll", (places[0], places[1] / "again"))["parts"]
    assert part["counts"] == {"train": 1, "validation": 1, "test": 2}
    for wrong in ("", "<html>404 not found</html>\n"):
        (places[0] / "eng.testb").write_text(wrong)
        with pytest.raises(DataError, match="eng.testb"):
            run("conll", (places[0], places[1] / "third"))
        assert not (places[1] / "third" / "conll2003").exists()


def test_blimp_from_a_checkout_as_zip(places):
    line = json.dumps({"sentence_good": "He sleeps.", "sentence_bad": "He sleep."}) + "\n"
    write_zip(places[0] / "blimp-master.zip", {f"blimp-master/data/{name}.jsonl": line for name in PARADIGMS})
    (part,) = run("blimp", places)["parts"]
    assert part["counts"] == {"paradigms": 67, "pairs": 67}
    assert len(read_blimp(places[1] / "blimp")) == 67


def test_senses_from_the_framework_and_wordnet(places, tmp_path):
    tree = write_miniature(tmp_path / "tree")
    files = {f"WSD_Evaluation_Framework/{name}": raw for name, raw in contents(tree).items() if "wordnet" not in name}
    write_zip(places[0] / "WSD_Evaluation_Framework.zip", files)
    with pytest.raises(DataError, match=r"contains no index.sense.*wordnet.princeton.edu"):
        run("wsd", places)
    with tarfile.open(places[0] / "WordNet-3.0.tar.gz", "w:gz") as archive:
        archive.add(tree / "wordnet3.0" / "index.sense", "WordNet-3.0/dict/index.sense")
    (part,) = run("wsd", places)["parts"]
    assert contents(places[1] / "wsd") == contents(tree)
    assert part["counts"]["SemCor"] == sum(
        len(path.read_text().splitlines()) for path in tree.rglob("semcor.gold.key.txt")
    )


def test_what_cannot_be_used_is_said_and_leaves_nothing(places):
    source, output = places
    with pytest.raises(DataError, match=r"no train/train.data.txt.*pilehvar.github.io"):
        run("wic", places)
    write_zip(source / "wic.zip", WIC | {"train/train.gold.txt": "F\nT\n"})
    with pytest.raises(DataError, match="expected 1 lines"):
        run("wic", places)
    assert not output.exists() or contents(output) == {} and list(output.iterdir()) == []
    (source / "wic.zip").write_bytes((source / "wic.zip").read_bytes()[:200])
    with pytest.raises(DataError, match="wic.zip cannot be read .* Fetch it again"):
        run("wic", places)
    (source / "wic.zip").unlink()
    write_zip(source / "one.zip", WIC)
    write_zip(source / "two.zip", WIC | {"dev/dev.gold.txt": "F\n"})
    with pytest.raises(DataError, match=r"one.zip.*and.*two.zip.*differ"):
        run("wic", places)
    (source / "two.zip").unlink()
    run("wic", places)
    (source / "one.zip").unlink()
    write_zip(source / "one.zip", WIC | {"dev/dev.gold.txt": "F\n"})
    with pytest.raises(DataError, match=r"wic exists, and its dev/dev.gold.txt differs from the one in --from"):
        run("wic", places)
    assert (output / "wic/dev/dev.gold.txt").read_text() == "T\n"


def test_damage_inside_of_an_archive_names_the_file(places):
    """The directory of the archive is whole: only reading finds it out."""
    with zipfile.ZipFile(places[0] / "wic.zip", "w", zipfile.ZIP_STORED) as archive:
        for name, text in WIC.items():
            archive.writestr(name, text)
    whole = (places[0] / "wic.zip").read_bytes()
    (places[0] / "wic.zip").write_bytes(whole.replace(b"Room and board", b"Room and bread"))
    with pytest.raises(DataError, match=r"wic.zip, dev/dev.data.txt cannot be read \(BadZipFile: Bad CRC-32"):
        run("wic", places)


def test_a_file_of_any_size_is_not_read(places, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 40)
    write_zip(places[0] / "wic.zip", WIC)
    with pytest.raises(DataError, match=r"train/train.data.txt has 53 bytes, more than any published file"):
        run("wic", places)
    assert not (places[1] / "wic").exists()


def test_an_unreadable_file_is_named_as_published_and_the_other_sets_are_prepared(places):
    source, output = places
    write_zip(source / "CoLA.zip", {"CoLA/train.tsv": "a\t1\t\tok.\nshort\n", "CoLA/dev.tsv": "a\t1\t\tok.\n"})
    sentences = "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n"
    write_zip(source / "RTE.zip", {"RTE/train.tsv": sentences, "RTE/dev.tsv": sentences})
    with pytest.raises(DataError, match=r"CoLA.zip, CoLA/train.tsv, line 2: expected 4 tab-separated columns"):
        run("glue", places)
    assert [path.name for path in (output / "glue").iterdir()] == ["RTE"]
    assert [path.name for path in output.iterdir()] == ["glue"]
    (source / "msr_paraphrase_train.txt").write_bytes(b"Quality\n1\t2\t3\tcaf\xe9\tb\n")
    (source / "dev_ids.tsv").write_text("1\t3\n")
    with pytest.raises(DataError, match=r"line 2: expected 4 .* 1 more of its sets cannot be prepared"):
        run("glue", places)
    (source / "CoLA.zip").unlink()
    shutil.rmtree(output)
    with pytest.raises(DataError, match=r"msr_paraphrase_train.txt, line 2: not UTF-8 .* again\.$"):
        run("glue", places)
    assert [path.name for path in (output / "glue").iterdir()] == ["RTE"]


def test_what_a_killed_command_left_is_no_source(places):
    source, output = places
    write_zip(source / "wic.zip", WIC)
    (left := source / ".prepare-data.1.tmp" / "dev").mkdir(parents=True)
    (left / "dev.gold.txt").write_text("F\n")
    run("wic", places)
    assert (output / "wic/dev/dev.gold.txt").read_text() == "T\n"


def test_an_id_of_no_pair(places):
    (places[0] / "msr_paraphrase_train.txt").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\ta\tb\n")
    (places[0] / "dev_ids.tsv").write_text("1\t3\n")
    with pytest.raises(DataError, match="the pair 1 3 is not in msr_paraphrase_train.txt"):
        run("glue", places)


def test_a_large_file_in_an_archive_is_not_read_into_memory(places, monkeypatch):
    """Publishing it takes far less memory than the file has bytes; only the evaluation's own reading is left out."""
    rows = [f"gj04\t{number % 2}\t\tSentence {number} of {number * 7919 % 104729}.\n" for number in range(600_000)]
    write_zip(places[0] / "CoLA.zip", {"CoLA/train.tsv": "".join(rows), "CoLA/dev.tsv": rows[0]})
    size = len("".join(rows))
    part = SETS["glue"][0]._replace(count_examples=lambda root: {})
    monkeypatch.setitem(SETS, "glue", (part,))
    tracemalloc.start()
    run("glue", places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (places[1] / "glue" / "CoLA" / "train.tsv").read_text() == "".join(rows)
    assert peak < size / 3


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_tar_archive_whose_names_expand_like_a_bomb_is_refused_at_once(places, kind):
    long, file = tarfile.TarInfo("././@LongLink"), tarfile.TarInfo("x")
    long.type, long.size = kind, 1 << 25
    with lzma.open(places[0] / "GLUE.tar.xz", "wb", preset=1) as archive:
        archive.write(long.tobuf(tarfile.GNU_FORMAT) + b"a" * long.size + file.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"GLUE.tar.xz cannot be read .*a name or header of 33,554,432 bytes"):
        run("glue", places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_an_archive_that_expands_like_a_bomb_is_refused_at_once(places):
    write_zip(places[0] / "CoLA.zip", {"CoLA/train.tsv": "\0" * (1 << 25), "CoLA/dev.tsv": COLA["CoLA/dev.tsv"]})
    tracemalloc.start()
    with pytest.raises(
        DataError, match=r"CoLA.zip, CoLA/train.tsv expands from [\d,]+ to 33,554,432 bytes, .*Remove it"
    ):
        run("glue", places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24 and not list(places[1].glob("glue/*"))

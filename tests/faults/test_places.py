"""A directory in the place of an output file, or a file in the place of an output directory, is named in one line."""

import pytest
from tiny_records import a_record, store

from mlsm.common.durable import make_directories, refuse_what_is_in_the_way, replace_bytes
from mlsm.common.errors import EXIT_INPUT, PlaceError, exit_code
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.comparison.compare import compare, keep_withheld
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.inspection.lsps.pages import publish_pages
from mlsm.evaluation.studies.protocol.cells import at_work
from mlsm.evaluation.studies.protocol.facts import keep_costs


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Of a comparison without the paper's figures, which take time."""
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])
    found = store(tmp_path, [a_record("a", "rte", 0, [0.5])])
    return CompareConfig(results=(found,), output=tmp_path / "out" / "compared")


def refused(place, kind, wanted):
    """What `pytest.raises` expects: one line with the place, what it is, what is wanted there, and the way on."""
    said = f"^{place} is {kind}, and {wanted} is to be written there. Move it elsewhere, or choose another [^\\n]*$"
    return pytest.raises(PlaceError, match=said)


@pytest.mark.parametrize("name", ["report.html", "report-scores.csv", "report-scores.tex", "models.csv"])
def test_compare_into_a_directory_with_a_directory_of_a_files_name(settings, name):
    (settings.output / name / "mine").mkdir(parents=True)
    with refused(settings.output / name, "a directory", "a file") as raised:
        compare(settings, silent)
    assert exit_code(raised.value) == EXIT_INPUT and (settings.output / name / "mine").is_dir()


@pytest.mark.parametrize("put", ["file", "device"])
@pytest.mark.parametrize("above", [0, 1])
def test_compare_into_what_is_no_directory(settings, put, above):
    place = (settings.output, *settings.output.parents)[above]
    make_directories(place.parent)
    if put == "file":
        place.write_text("mine")
    else:
        place.symlink_to("/dev/null")
    with refused(place, f"a {put}", "a directory"):
        compare(settings, silent)
    assert place.read_text() == ("mine" if put == "file" else "")


def begin(output):
    with at_work(output, "finetune/a", "a commit"):
        pass


WRITERS = {
    "a record": lambda output: records.write(output, a_record("a", "rte", 0, [0.5])),
    "costs of a study": lambda output: keep_costs([], output, []),
    "a part of a study": begin,
    "what a study withholds": lambda output: keep_withheld(output, ("a", "b")),
    "pages of LSPs": lambda output: publish_pages(output / "pages", dict),
}


@pytest.mark.parametrize("what", list(WRITERS))
def test_others_into_what_is_no_directory(tmp_path, what):
    (tmp_path / "output").write_text("mine")
    with refused(tmp_path / "output", "a file", "a directory"):
        WRITERS[what](tmp_path / "output")


def test_callers_with_a_way_around_it_still_get_an_error_of_the_system(tmp_path):
    (tmp_path / "file").mkdir()
    (tmp_path / "directory").write_text("")
    with pytest.raises(IsADirectoryError):
        replace_bytes(tmp_path / "file", b"")
    with pytest.raises(NotADirectoryError):
        make_directories(tmp_path / "directory" / "below")


def test_what_is_no_matter_of_places_stays(tmp_path):
    with pytest.raises(FileNotFoundError), refuse_what_is_in_the_way():
        replace_bytes(tmp_path / "nowhere" / "file", b"")
    gone = NotADirectoryError(20, "Not a directory", str(tmp_path / "gone" / "file"))
    with pytest.raises(NotADirectoryError), refuse_what_is_in_the_way():
        raise gone

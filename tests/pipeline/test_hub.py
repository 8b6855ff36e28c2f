"""Datasets on the Hub, played by a local directory behind huggingface_hub's own interface; nothing is downloaded."""

import hashlib
import inspect
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
from kinds import documents, write
from test_plan import RULES, SPECIAL, WordTokenizer

from mlsm.common.errors import CorpusError
from pipeline import plan as planning
from pipeline.commands import encode_ids
from pipeline.config import EncodeIdsConfig
from pipeline.corpus import open_corpus

pytestmark = pytest.mark.promise(
    "no network, no such dataset, a connection that breaks: one clear line (the Hub is played by a local directory)",
    cases="11",
)

COMMIT = "b04c8d1ceb2f5cd4588862100d08de323dccfbaa"
TEXTS = [f"{n} {n}" for n in range(1000, 1060)]
DATA = "hf://datasets/wikimedia/wikipedia"


class FakeHub:
    """A dataset whose branch `main` and tag `v1` are one commit, in a local directory."""

    def __init__(self, directory):
        self.directory, self.opened, self.listed = directory, [], []

    def dataset_info(self, dataset, revision):
        if dataset != "wikimedia/wikipedia" or revision not in ("main", "v1", "refs/convert/parquet", COMMIT):
            raise RepositoryNotFoundError("404\nlong text", response=SimpleNamespace(headers={}, request=None))
        return SimpleNamespace(sha=COMMIT)

    def list_repo_tree(self, dataset, path, *, recursive, repo_type, revision):
        assert (recursive, repo_type, revision) == (True, "dataset", COMMIT)
        self.listed.append(path)
        if not (self.directory / (path or "")).is_dir():
            raise EntryNotFoundError("404")
        yield from map(self.entry, (self.directory / (path or "")).rglob("*"))

    def get_paths_info(self, dataset, paths, *, repo_type, revision):
        return [self.entry(self.directory / path) for path in paths if (self.directory / path).exists()]

    def entry(self, path):
        name = str(path.relative_to(self.directory))
        if path.is_dir():
            return huggingface_hub.hf_api.RepoFolder(path=name, oid="0" * 40)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lfs = {"size": 1, "oid": digest, "pointerSize": 1} if path.suffix != ".txt" else None
        return huggingface_hub.hf_api.RepoFile(path=name, size=path.stat().st_size, oid=digest[:40], lfs=lfs)

    def open(self, url, mode):
        prefix = f"{DATA}@{COMMIT}/"
        assert url.startswith(prefix)
        self.opened.append(url)
        return open(self.directory / url.removeprefix(prefix), mode)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    directory = tmp_path / "hub"
    for place in ("20231101.en", "20231101.fr"):
        (directory / place).mkdir(parents=True)
    write(directory, "20231101.en/train-0.parquet", TEXTS[:30])
    write(directory, "20231101.en/train-1.parquet", TEXTS[30:])
    write(directory, "20231101.fr/train-0.json.gz", ["1 2"])
    write(directory, "notes.txt", ["3 4"])
    (directory / "README.md").write_text("what it is")
    fake = FakeHub(directory)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: fake)
    return fake


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/20231101.en/*.parquet", ["20231101.en/train-0.parquet", "20231101.en/train-1.parquet"]),
        ("@v1/20231101.en/train-[1-9].parquet", ["20231101.en/train-1.parquet"]),
        (f"@{COMMIT}/20231101.en", ["20231101.en/train-0.parquet", "20231101.en/train-1.parquet"]),
        ("@refs%2Fconvert%2Fparquet/20231101.en/train-0.parquet", ["20231101.en/train-0.parquet"]),
        ("@refs/convert/parquet/20231101.fr/", ["20231101.fr/train-0.json.gz"]),
        ("/*/train-0.*", ["20231101.en/train-0.parquet", "20231101.fr/train-0.json.gz"]),
        ("/**/*.gz", ["20231101.fr/train-0.json.gz"]),
        ("/README.md", ["README.md"]),
        (
            "",
            [
                *(f"20231101.{name}" for name in ("en/train-0.parquet", "en/train-1.parquet", "fr/train-0.json.gz")),
                "notes.txt",
            ],
        ),
    ],
)
def test_a_pattern_becomes_files_at_a_commit(hub, pattern, expected):
    sources = open_corpus((DATA + pattern, DATA + pattern))
    assert [source.name for source in sources] == [f"{DATA}@{COMMIT}/{name}" for name in expected]
    assert hub.opened == [], "listing downloads nothing"
    assert open_corpus((sources[0].name,))[0].name == sources[0].name, "a name in a plan names it again"


def test_the_stand_in_has_the_interface_of_the_library():
    for name, arguments, options in (
        ("dataset_info", ["d"], {"revision": "r"}),
        ("list_repo_tree", ["d", "p"], {"recursive": True, "repo_type": "dataset", "revision": "r"}),
        ("get_paths_info", ["d", ["p"]], {"repo_type": "dataset", "revision": "r"}),
    ):
        inspect.signature(getattr(huggingface_hub.HfApi, name)).bind(None, *arguments, **options)
    with pytest.raises(OfflineModeIsEnabled):
        huggingface_hub.HfFileSystem().open(f"{DATA}@{COMMIT}/notes.txt", "rb")


def test_only_the_directory_above_a_wildcard_is_listed(hub):
    open_corpus((f"{DATA}/20231101.en/*.parquet",))
    assert hub.listed == ["20231101.en"]


def test_units_of_a_streamed_dataset_are_those_of_its_copy(hub, tmp_path):
    """The content comes from what the Hub says of its files: hashing downloads nothing, and a copy hashes the same."""
    streamed = open_corpus((f"{DATA}/20231101.en/*.parquet",))
    contents = [source.content_hash for source in streamed]
    assert hub.opened == []
    copy = open_corpus((str(hub.directory / "20231101.en"),))
    assert contents == [source.content_hash for source in copy]
    plans = [planning.scan(sources, WordTokenizer(), SPECIAL, RULES, unit_tokens=20) for sources in (streamed, copy)]
    assert plans[0].id == plans[1].id and len(hub.opened) == 2
    assert {unit.source for unit in plans[0].units} == {source.name for source in streamed}
    assert {source.stamp() for source in streamed} == {source.stamp() for source in streamed}
    names = {source.name: source for source in streamed}
    for one, other in zip(plans[0].units, plans[1].units, strict=True):
        windows = [
            list(planning.unit_windows(unit, source, WordTokenizer(), SPECIAL, RULES))
            for unit, source in ((one, names[one.source]), (other, copy[other.source.endswith("1.parquet")]))
        ]
        assert windows[0] == windows[1] != []


def test_a_command_encodes_a_dataset(hub, tmp_path):
    (report,) = encode_ids(
        EncodeIdsConfig(corpus=(f"{DATA}@v1/20231101.en/*.parquet",), tokenizer="bundled", output=tmp_path)
    )
    assert report["documents"] == len(TEXTS)


def test_text_and_json_are_streamed_too(hub):
    french, notes = open_corpus((f"{DATA}/20231101.fr", f"{DATA}/notes.txt"))
    assert documents(french) == {0: "1 2"} and documents(notes) == {0: "3 4\n"}
    assert french.content_hash != notes.content_hash != ""


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("hf://datasets/wikimedia", "expected hf://datasets/<owner>/<name>"),
        ("hf://datasets/who/knows/*", "no such dataset or revision on the Hub.*hf auth login"),
        (f"{DATA}@v9/20231101.en", "no such dataset or revision"),
        (f"{DATA}/20231101.de/*.parquet", f"no such text, JSON lines or Parquet file at commit {COMMIT}"),
        (f"{DATA}/20231101.en/*.txt", "no such text"),
        (f"{DATA}/20231101.de", "no such text"),
        (f"{DATA}/20231101.**/*.txt", rf"^{DATA}/20231101.\*\*/\*.txt: Invalid pattern: '\*\*' can only be an entire"),
    ],
)
def test_what_is_not_there_is_one_clear_error(hub, pattern, message):
    with pytest.raises(CorpusError, match=message):
        open_corpus((pattern,))


def test_no_network_is_one_clear_error(hub, monkeypatch):
    for failure in (OfflineModeIsEnabled("offline mode is enabled"), RuntimeError("of some HTTP library")):

        def fails(*_, failure=failure, **__):
            raise failure

        monkeypatch.setattr(hub, "dataset_info", fails)
        with pytest.raises(CorpusError, match=f"{DATA}.*cannot be reached .{failure}.*pass them with --corpus"):
            open_corpus((f"{DATA}/20231101.en/*.parquet",))


@pytest.mark.parametrize("place", ["20231101.en", "20231101.fr", "notes.txt"])
def test_a_connection_that_breaks_is_a_corpus_error(hub, monkeypatch, place):
    (source, *_) = open_corpus((f"{DATA}/{place}",))

    class Broken:
        def read(self, size):
            raise RuntimeError("the connection broke")

        def seek(self, *_):
            return 0

        def tell(self):
            return 10_000

        def close(self):
            pass

    monkeypatch.setattr(hub, "open", lambda *_: Broken())
    with pytest.raises(CorpusError, match=f"{COMMIT}/{place}.*cannot be read .*the connection broke"):
        list(source.pieces())

"""Stores that somebody else, or an accident, has put together: refused where they would be used, listed by verify.

Everything here has right checksums and hashes, or none to be wrong: what is tested is what a checksum does not say.
"""

import io
import json
import math
import os
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_store
import webdataset as wds
from faulty_disk import forked
from tiny_teacher import random_dictionary
from transformers import AutoTokenizer

from mlsm.common import disk
from mlsm.common.errors import DictionaryError, Interrupted, RecordError, ShardError, StoreError
from mlsm.evaluation import records
from mlsm.evaluation.inspection.lsps.view import StoreView
from mlsm.evaluation.inspection.stores import token_texts
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from pipeline.encode import open_coder
from pipeline.executor import Context
from pipeline.job import teacher_job
from pipeline.learn import load_dictionary
from pipeline.targets.lsp import Lsp
from shards import copies, writer
from shards.codec import block_windows
from shards.derive import derive
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint, with_checksum
from shards.members import decode_block
from shards.reader import Store, finished_stores
from shards.schema import LSP_OCTAVES, ShardMeta
from shards.verify import verify
from shards.writer import UnitWriter
from student.config import StudentConfig
from student.encoders import modeling_mlsm
from student.runs.checkpoint import Checkpoints
from student.runs.export import write_card_and_lineage
from student.train import train

K, WORDS = 24, 60
VOCABULARY = len(tiny_store.SPECIAL) + WORDS
UNITS = {"train-0": ("train", 90), "train-1": ("train", 60), "held-out": ("held_out", 20)}


def named_store(path, scale=1.0):
    """A small store that is named by the tokenizer and the dictionary that it holds.

    scale  of each row's first weight: other bytes under the same target
    """
    files = StoreFiles(path)
    tiny_store.write_tokenizer(files.tokenizer, WORDS)
    dictionary = random_dictionary(K)
    files.path.mkdir(exist_ok=True)
    dictionary.save(files.dictionary)
    found = copies.tokenizer_fingerprint(AutoTokenizer.from_pretrained(files.tokenizer))
    windowing = {"tokenizer": found, "max_length": tiny_store.LENGTH}
    settings = {
        "kind": "lsp",
        "k": K,
        "layer": 3,
        "top_n": 8,
        "windowing": windowing,
        "dictionary": dictionary.fingerprint,
    }
    files.create(
        {
            "target": fingerprint(settings),
            "settings": settings,
            "lineage": {},
            "k": K,
            "vocab_size": VOCABULARY,
            "max_length": tiny_store.LENGTH,
            "weight_octaves": LSP_OCTAVES,
            "special_ids": tiny_store.SPECIAL | {"all": sorted(tiny_store.SPECIAL.values())},
        }
    )
    for number, (unit, (_, windows)) in enumerate(UNITS.items()):
        write_unit(files, unit, windows, number, scale)
    units = tuple(PlannedUnit(unit, split, "made up", 0, windows) for unit, (split, windows) in UNITS.items())
    files.publish_plan(Plan(windowing, units))
    return files


def write_unit(files, unit, windows, seed, scale=1.0):
    columns = tiny_store.block(np.random.default_rng(seed), windows, WORDS)
    rows = tiny_store.lsp_rows(columns["ids"], K)
    first = np.cumsum(rows["nnz"])[rows["nnz"] > 0] - rows["nnz"][rows["nnz"] > 0]
    rows["weights"] = rows["weights"].astype(np.float64)
    rows["weights"][first] *= scale
    totals = np.add.reduceat(rows["weights"], first)
    rows["weights"] /= np.repeat(totals, rows["nnz"][rows["nnz"] > 0])
    with UnitWriter(files, ShardMeta(files.target()["target"], unit, K, VOCABULARY, tiny_store.LENGTH)) as written:
        written.write_block(**columns, **rows)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return named_store(tmp_path_factory.mktemp("foreign") / "store").path


@pytest.fixture
def files(whole, tmp_path):
    return StoreFiles(shutil.copytree(whole, tmp_path / "stores" / "store"))


@contextmanager
def within_seconds(seconds):
    """TimeoutError instead of a test that waits for ever."""

    def too_late(*_):
        raise TimeoutError(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def settings_of(files, tmp_path, **changes):
    given = {
        "objective": "mlsm",
        "encoder": "bert-1x16",
        "max_steps": 4,
        "batch_windows": 12,
        "eval_windows": 4,
        "device": "cpu",
        "store": files.path,
        "run_dir": tmp_path / "run",
        "save_every": 1,
    }
    return StudentConfig(**given | changes)


def problems(files, full=False):
    with within_seconds(60):
        return {entry["file"]: entry["problem"] for entry in verify(files.path, full=full)["damaged"]}


def rewrite(path, change):
    """Change a JSON file and give it a checksum that is right."""
    values = json.loads(path.read_text())
    values = change(values) or values
    if "settings" in values and "target" in values:
        values["target"] = fingerprint(values["settings"])
    path.write_text(json.dumps(with_checksum(values)))


# -- dictionaries and tokenizers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoding(tmp_path_factory, english_text, teacher_directory):
    """Settings of an encoding, and the store that they make."""
    config = EncodeConfig(
        teacher=str(teacher_directory),
        layer=(1,),
        corpus=(str(english_text),),
        k=16,
        lam=0.1,
        top_n=8,
        max_length=32,
        max_tokens=6000,
        unit_tokens=3000,
        dictionary_tokens=1000,
        batch_tokens=2048,
        device="cpu",
        output=tmp_path_factory.mktemp("encoding") / "runs",
    )
    return config, StoreFiles(encode_lsp(config)[0]["store"])


def foreign_dictionary(directory):
    atoms_Kd = np.load(directory / "atoms.npy")
    shutil.rmtree(directory)
    Dictionary(np.ascontiguousarray(atoms_Kd[::-1]), [], "enough", {"k": len(atoms_Kd)}).save(directory)


@pytest.mark.promise(
    "a store holds another dictionary, tokenizer or plan than its target names, or lost or empty files of "
    "them: restored by the command that encoded it, refused by every use (workers, training, export, derive, "
    "show-lsp, show-shards), listed by verify",
    cases="1, 3, 1, 4, 1",
)
@pytest.mark.promise("33 another dictionary, tokenizer or windowing in a store")
def test_a_resume_never_codes_with_another_dictionary(encoding):
    """One unit is lost, and another run's atoms lie in the store: they are replaced by the right ones, and the unit is
    coded anew with those, byte for byte."""
    config, files = encoding
    before = {path.name: path.read_bytes() for path in files.units.glob("*.tar")}
    assert not problems(files)
    foreign_dictionary(files.dictionary)
    assert "dictionary" in problems(files)
    assert f"--dictionary {files.dictionary}" not in " ".join(verify(files.path)["commands"])
    with pytest.raises(StoreError, match="is not the dictionary of this store: .* target.json names"):
        load_dictionary(config, str(files.dictionary), None)  # as `--dictionary` of such a store
    job = teacher_job(config, lambda *args, **figures: None)
    with pytest.raises(StoreError, match="is not the dictionary of this store"):
        open_coder(Context(job), [files.path], Lsp)  # what every worker process calls
    record = files.record(Store.open(files.path).plan.units[0].id)
    files.record_file(record.unit).unlink()
    (files.units / record.file).unlink()
    (report,) = encode_lsp(config)
    assert report["new_units"] == 1 and report["store"] == str(files.path)
    assert {path.name: path.read_bytes() for path in files.units.glob("*.tar")} == before
    assert not problems(files, full=True)


@pytest.mark.promise("a store holds another …")
@pytest.mark.promise("33 another dictionary …")
@pytest.mark.parametrize("damage", ["lost", "empty", "cut"])
def test_encoding_again_restores_the_copies(encoding, damage):
    config, files = encoding
    for path in (files.tokenizer / "tokenizer.json", files.dictionary / "atoms.npy"):
        if damage == "lost":
            shutil.rmtree(path.parent)
        else:
            os.truncate(path, 0 if damage == "empty" else path.stat().st_size // 2)
    assert problems(files).keys() == {"tokenizer", "dictionary"}
    (report,) = encode_lsp(config)
    assert report["finished_before"] and not problems(files)


@pytest.mark.promise("a store holds another …")
@pytest.mark.promise("33 another dictionary …")
def test_another_dictionary_is_refused_wherever_it_is_used(files, tmp_path):
    foreign_dictionary(files.dictionary)
    with pytest.raises(StoreError, match="is not the dictionary of this store"):
        derive(files.path, 2)
    assert [path.name for path in files.path.parent.iterdir()] == ["store"]
    with pytest.raises(StoreError, match="is not the dictionary of this store"):
        StoreView(Store.open(files.path), 100).dictionary  # noqa: B018 (show-lsp)
    assert "dictionary" in problems(files)


def other_tokenizer(directory):
    shutil.rmtree(directory)
    tiny_store.write_tokenizer(directory, WORDS + 1)


@pytest.mark.promise("a store holds another …")
@pytest.mark.promise("33 another dictionary …")
@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "tokenizer.json").write_bytes(b""),
        lambda directory: (directory / "tokenizer.json").unlink(),
        shutil.rmtree,
        other_tokenizer,
    ],
)
def test_a_lost_or_other_tokenizer_is_refused_wherever_it_is_used(files, tmp_path, damage):
    damage(files.tokenizer)
    store = Store.open(files.path)
    uses = [
        lambda: train(settings_of(files, tmp_path)),
        lambda: derive(files.path, 2),
        lambda: write_card_and_lineage(tmp_path, None, store, {}),
        lambda: token_texts(store, [5]),
        lambda: StoreView(store, 100).vocabulary,
    ]
    for use in uses:
        with pytest.raises(StoreError, match="tokenizer"):
            use()
    assert not (tmp_path / "run").exists()
    assert problems(files).keys() == {"tokenizer"}


def mask_is_a_word(directory, words):
    """[MASK] has the id of the last word, as transformers gives it when a vocabulary with gaps lacks it."""
    tiny_store_tokenizer(directory, words)
    content = json.loads((directory / "tokenizer.json").read_text())
    del content["model"]["vocab"]["[MASK]"]
    content["added_tokens"] = [added for added in content["added_tokens"] if added["content"] != "[MASK]"]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    made = AutoTokenizer.from_pretrained(directory)
    assert made.mask_token_id == made.convert_tokens_to_ids(f"w{words - 1}")
    made.save_pretrained(directory)


tiny_store_tokenizer = tiny_store.write_tokenizer


def test_a_store_whose_tokenizer_gives_two_tokens_one_id_is_not_used(tmp_path, monkeypatch):
    """Only a store of an earlier version can be such a one."""
    monkeypatch.setattr(tiny_store, "write_tokenizer", mask_is_a_word)
    store = Store.open(named_store(tmp_path / "store").path)
    for use in (
        lambda: train(settings_of(store.files, tmp_path)),
        lambda: write_card_and_lineage(tmp_path, None, store, {}),
    ):
        with pytest.raises(StoreError, match=r"'\[MASK\]' and 'w59' have the same id, 64.*encode again"):
            use()
    assert not (tmp_path / "run").exists()


def test_special_ids_other_than_those_of_the_tokenizer_are_refused(files, tmp_path):
    """Else a student would learn to fill in a word as if it were hidden."""
    rewrite(files.target_file, lambda target: target["special_ids"].update(mask=20))
    with pytest.raises(StoreError, match="field special_ids: another id for mask than the store's tokenizer has"):
        Store.open(files.path).read_tokenizer()


@pytest.mark.promise("a store holds another …")
@pytest.mark.promise("33 another dictionary …")
def test_a_plan_of_another_windowing_is_refused(files):
    plan = Store.open(files.path).plan
    files.publish_plan(Plan(plan.windowing | {"tokenizer": "f" * 64}, plan.units))
    with pytest.raises(StoreError, match="is of another store: tokenizer is"):
        for path in files.plans.glob("*.json"):
            Store.open(path)


@pytest.mark.promise(
    "exports and derived stores get named files only: no code and no `auto_map` but our own, nothing through a "
    "link that leaves the store",
    cases="1, 3, 1",
)
@pytest.mark.promise("35 links that leave …")
def test_an_export_holds_named_files_only(files, tmp_path):
    """No code of the store's comes along, and no entry that would have transformers load it; our own is there."""
    (files.tokenizer / "evil.py").write_text("raise SystemExit")
    (files.tokenizer / "__pycache__").mkdir()
    config = files.tokenizer / "tokenizer_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    result = train(settings_of(files, tmp_path, max_steps=1))
    export = Path(result["export"])
    (code,) = [path for path in export.rglob("*") if path.suffix == ".py" or path.is_dir()]
    assert code.name == "modeling_mlsm.py" and code.read_bytes() == Path(modeling_mlsm.__file__).read_bytes()
    (named,) = [path for path in export.glob("*.json") if "auto_map" in path.read_text()]
    assert json.loads(named.read_text())["auto_map"] == {"AutoModel": "modeling_mlsm.MlsmModel"}
    assert AutoTokenizer.from_pretrained(export).get_vocab().keys() >= {"w0", "[MASK]"}
    derived = StoreFiles(derive(files.path, 2)["store"])
    assert "evil.py" not in os.listdir(derived.tokenizer)
    assert json.loads((derived.tokenizer / "tokenizer_config.json").read_text()) == values


@pytest.mark.promise("exports and derived …")
@pytest.mark.promise("35 links that leave a store (its half for stores and exports)")
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "atoms.npy"])
def test_links_out_of_the_store_are_not_followed(files, tmp_path, name):
    secret = tmp_path / "secret"
    directory = files.dictionary if name == "atoms.npy" else files.tokenizer
    secret.write_bytes((directory / name).read_bytes() if (directory / name).exists() else b"secret")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(secret)
    with pytest.raises(StoreError, match=f"{name} is a link to .*secret, outside the store"):
        derive(files.path, 2)
    if directory == files.tokenizer:
        with pytest.raises(StoreError, match="outside the store"):
            train(settings_of(files, tmp_path))
    assert "outside the store" in problems(files)[directory.name]


@pytest.mark.promise("exports and derived …")
def test_a_link_inside_the_store_is_as_good_as_the_file(files, tmp_path):
    (files.tokenizer / "tokenizer.json").rename(files.path / "shared.json")
    (files.tokenizer / "tokenizer.json").symlink_to("../shared.json")
    derived = StoreFiles(derive(files.path, 2)["store"])
    assert not (derived.tokenizer / "tokenizer.json").is_symlink() and not problems(files) and not problems(derived)


# -- members ------------------------------------------------------------------------------------------------


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def store_with_member(path, monkeypatch, name, payload):
    """A store in whose first block a member was added, or replaced, before it was hashed."""
    made = writer._tar_members

    def with_member(samples):
        return made({key: members | ({name: payload} if key == "000000" else {}) for key, members in samples.items()})

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_tar_members", with_member)
        return named_store(path)


@pytest.mark.promise(
    "a member that is not a column of the format, or no plain array of its type: refused by reader, verify, "
    "derive and the documented WebDataset lines; nothing is unpickled",
    cases="6, 5, 4",
)
@pytest.mark.promise("34 unknown members")
@pytest.mark.parametrize("name", ["x.pyd", "x.pickle", "x.py", "x.npy", "x.json", "ids.npy"])
def test_unknown_members_are_refused_and_nothing_runs(tmp_path, monkeypatch, name):
    import pickle

    payload = pickle.dumps(Evil(tmp_path / "evil"))
    if name == "ids.npy":
        array = io.BytesIO()
        np.save(array, np.array([Evil(tmp_path / "evil")], object), allow_pickle=True)
        payload = array.getvalue()
    files = store_with_member(tmp_path / "store", monkeypatch, name, payload)
    with pytest.raises(ShardError, match=r"block 000000: .*member .*--repair"):
        Store.open(files.path).split("train").read([0])
    assert len([problem for problem in problems(files, full=True).values() if "member" in problem]) == 3
    with pytest.raises(ShardError, match="member"):
        derive(files.path, 2)
    urls = Store.open(files.path).urls("train")
    for stream in (
        wds.WebDataset(urls, shardshuffle=False).compose(block_windows),
        wds.WebDataset(urls, shardshuffle=False).map(decode_block),
    ):
        with pytest.raises(ShardError, match="member"):
            next(iter(stream))
    assert not (tmp_path / "evil").exists()


@pytest.mark.promise("a member that is …")
@pytest.mark.promise("34 unknown members")
@pytest.mark.parametrize(
    "header",
    ["'shape': (-1,), ", "'shape': (99999999999999,), ", "'shape': (2, 3), ", "'shape': (), ", "'shape': (((((1,), "],
)
def test_arrays_of_absurd_shape_are_refused(tmp_path, monkeypatch, header):
    text = ("{'descr': '<u2', 'fortran_order': False, " + header + "}").ljust(117) + "\n"
    payload = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(12)
    files = store_with_member(tmp_path / "store", monkeypatch, "ids.npy", payload)
    with pytest.raises(ShardError, match=r"member '000000.ids.npy'"):
        Store.open(files.path).split("train").read([0])
    assert len(problems(files, full=True)) == 3


@pytest.mark.promise("a member that is …")
def test_columns_that_break_the_format_are_found_at_the_first_read(tmp_path, monkeypatch):
    def npy(values, dtype):
        return writer._npy_bytes(np.array(values, dtype))

    for name, payload in {
        "ids.npy": npy([VOCABULARY] * 1000, np.uint16),
        "lengths.npy": npy([0] * 90, np.uint16),
        "nnz.npy": npy([255] * 1000, np.uint8),
        "run_starts.npy": npy([2**32 - 1], np.uint32),
    }.items():
        files = store_with_member(tmp_path / name, monkeypatch, name, payload)
        with pytest.raises(ShardError, match="block 000000: "):
            Store.open(files.path).split("train").read([0])
        with pytest.raises(ShardError):
            list(wds.WebDataset(Store.open(files.path).urls("train"), shardshuffle=False).compose(block_windows))


# -- what is no file ----------------------------------------------------------------------------------------


def a_socket(path):
    at_work = os.getcwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(at_work)


INSTEAD = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "socket": a_socket,
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.promise(
    "a pipe, socket, directory, loop or dangling link instead of a shard, record, plan, tokenizer or "
    "dictionary; files that may not be read: listed, never waited for, the rest is looked at; `--repair` "
    "removes those that are not directories",
    cases="5 × 5, 4, 1",
)
@pytest.mark.promise("36 what is no file")
@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("place", ["shard", "record", "plan", "tokenizer", "atoms"])
def test_what_is_no_file_is_listed_and_the_rest_is_looked_at(files, instead, place):
    record = files.record("train-0")
    path = {
        "shard": files.units / record.file,
        "record": files.record_file("train-0"),
        "plan": next(files.plans.glob("*.json")),
        "tokenizer": files.tokenizer / "tokenizer.json",
        "atoms": files.dictionary / "atoms.npy",
    }[place]
    path.unlink()
    INSTEAD[instead](path)
    os.truncate(files.units / files.record("held-out").file, 100)  # found as well
    found = problems(files)
    name = {"tokenizer": "tokenizer", "atoms": "dictionary"}.get(place, str(path.relative_to(files.path)))
    other = {f"units/{files.record('held-out').file}"}
    assert found.keys() == {name} | (other if place != "plan" else set())  # no plan, no units that it names
    with within_seconds(60), pytest.raises((StoreError, ShardError)):
        store = Store.open(files.path)
        store.split("train").read([0, 100])
        store.read_tokenizer()
        copies.read_dictionary(store.files)
    if place in ("shard", "record"):
        with within_seconds(60):
            verify(files.path, repair=True)
        assert path.is_dir() == (instead == "directory") and (path.is_dir() or not os.path.lexists(path))


@pytest.mark.promise("a pipe, socket, directory …")
@pytest.mark.promise("36 what is no file")
def test_files_that_may_not_be_read_are_listed(files, monkeypatch):
    """As files of mode 000, which a test that runs as root can read."""
    record, closed = files.record("train-0"), []
    opened = disk.open_to_read

    def refuse(path):
        if Path(path).name in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(disk, "open_to_read", refuse)
    closed += [record.file, "held-out.json", "atoms.npy", "tokenizer.json"]
    found = problems(files, full=True)
    assert found.keys() == {f"units/{record.file}", "units/held-out.json", "dictionary", "tokenizer"}
    assert all("Permission denied" in problem for problem in found.values())


# -- others at work -----------------------------------------------------------------------------------------


@pytest.mark.promise("derive during `verify --repair`", cases="1")
@pytest.mark.promise("44 derive during verify --repair")
def test_deriving_beside_a_repair_is_an_error_that_says_so(files):
    def repair(*args, **figures):
        files.record_file("held-out").unlink(missing_ok=True)

    with pytest.raises(StoreError, match=r"held-out.json is missing. Run the encoding command again"):
        derive(files.path, 2, progress=repair)
    again = named_store(files.path)
    report = derive(again.path, 2)
    assert report["new_units"] == 1 and not verify(report["store"], full=True)["damaged"]


def overwrite(path):
    """Other bytes in the same file, of the same length."""
    raw = bytearray(path.read_bytes())
    raw[3000:-3000] = bytes(len(raw) - 6000)
    time.sleep(0.02)
    with open(path, "r+b") as file:
        file.write(raw)


@pytest.mark.promise(
    "a shard overwritten, or cut, after its first read, mapped still or mapped again: an error, no signal; "
    "touched or replaced by equal bytes: no error",
    cases="2, 1, 3",
)
@pytest.mark.promise("41 shards changed after their first read; units of another processor")
@pytest.mark.parametrize("evicted", [False, True])
def test_a_shard_overwritten_after_its_first_read_is_found(files, evicted):
    windows = Store.open(files.path).split("train")
    windows.read(range(len(windows)))
    overwrite(files.units / files.record("train-0").file)
    if evicted:  # the mapping was given up for others, and is made anew
        windows._make_caches()
    with pytest.raises(ShardError, match=r"train-0.*block 000000 .*does not match its hash"):
        windows.read(range(len(windows)))
    assert len(windows.read([95]).ids) == 1  # of the other shard


@pytest.mark.promise("a shard overwritten …")
@pytest.mark.promise("41 shards changed …")
def test_a_shard_that_is_touched_or_replaced_by_equal_bytes_stays_readable(files):
    windows = Store.open(files.path).split("train")
    before = windows.read(range(len(windows)))
    path = files.units / files.record("train-0").file
    os.utime(path)
    assert np.array_equal(windows.read(range(len(windows))).ids, before.ids)
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    assert np.array_equal(windows.read(range(len(windows))).ids, before.ids)
    path.unlink()  # as `clean` may, after a retry: what is mapped stays
    assert np.array_equal(windows.read(range(len(windows))).ids, before.ids)


@pytest.mark.promise("a shard overwritten …")
@pytest.mark.promise("41 shards changed …")
def test_a_shard_that_shrinks_while_it_is_mapped_is_an_error_and_no_signal(files):
    def read_twice():
        windows = Store.open(files.path).split("train")
        batch = windows.read(range(len(windows)))
        os.truncate(files.units / files.record("train-0").file, 4096)
        for read in (lambda: windows.read([0]), lambda: windows.targets(batch, [0], [1])):
            with pytest.raises(ShardError, match=r"4096 bytes, the record says \d+.*--repair"):
                read()

    assert forked(read_twice) == 0


@pytest.mark.promise(
    "units encoded again to other bytes (another processor): a resumed run says so in its log, derive makes them again",
    cases="1 each",
)
@pytest.mark.promise("41 shards changed …")
def test_a_run_says_that_it_goes_on_with_other_shards_on_another_device(files, tmp_path, caplog, monkeypatch):
    """A unit was encoded again on another processor: the same target and plan, other bytes."""
    config = settings_of(files, tmp_path)

    def stop(*args, step, **figures):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(config, stop)
    record = files.record("train-1")
    files.record_file("train-1").unlink()
    write_unit(files, "train-1", UNITS["train-1"][1], 1, scale=1.2)
    assert files.record("train-1").sha256 != record.sha256
    monkeypatch.setattr("mlsm.common.device.device_name", lambda device: "another")
    result = train(config)
    assert "(device cpu, now another). The run continues, and may not equal" in caplog.text
    assert "units of its training split were encoded again since step 2" in caplog.text and result["steps"] == 4
    events = [json.loads(line) for line in (config.run_dir / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in events if line.get("event") == "other shards"] == [2]


@pytest.mark.promise("units encoded again …")
def test_a_run_on_the_same_shards_says_nothing(files, tmp_path, caplog):
    config = settings_of(files, tmp_path)

    def stop(*args, step, **figures):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(config, stop)
    train(config)
    assert "encoded again" not in caplog.text


@pytest.mark.promise("units encoded again …")
@pytest.mark.promise("41 shards changed …")
def test_a_unit_derived_from_other_bytes_is_derived_again(files, tmp_path):
    derived = StoreFiles(derive(files.path, 2)["store"])
    assert derive(files.path, 2)["finished_before"]
    files.record_file("train-1").unlink()
    write_unit(files, "train-1", UNITS["train-1"][1], 1, scale=1.2)
    assert derive(files.path, 2)["new_units"] == 1
    fresh = StoreFiles(derive(files.path, 2, output=tmp_path / "fresh")["store"])
    shas = [[store.record(unit).sha256 for unit in UNITS] for store in (derived, fresh)]
    assert shas[0] == shas[1] and not verify(derived.path, full=True)["damaged"]


# -- crafted JSON -------------------------------------------------------------------------------------------


def deep(levels=100_000):
    return "[" * levels + "]" * levels


RECORDS = {
    "groups[1].windows": lambda record: record["groups"][1].update(windows=3_000_000_000),
    "groups: 000000": lambda record: record["groups"][1].update(windows=60_000, tokens=60_000),
    "groups[1].length": lambda record: record["groups"][1].update(length=-1),
    "groups: 000000 lies beyond": lambda record: record["groups"][1].update(offset=2**40),
    "groups[1].sha256": lambda record: record["groups"][1].update(sha256="x"),
    "groups": lambda record: record.update(groups={}),
    "groups: expected": lambda record: record.update(groups=[]),
    "windows": lambda record: record.update(windows=True),
    "tokens": lambda record: record.update(tokens=1.5),
    "bytes": lambda record: record.update(bytes=2**70),
    "statistics: expected": lambda record: record.update(statistics={"documents": "many"}),
    "statistics.coded_tokens": lambda record: record["statistics"].pop("coded_tokens") and None,
    "environment": lambda record: record["environment"].update(solver_seconds="long"),
    "quarantined[0].windows": lambda record: record.update(
        quarantined=[{"record": 0, "source": "", "reason": "", "windows": [[]]}]
    ),
}
PLANS = {
    "units[0].id": lambda plan: plan["units"][0].update(id="../../evil"),
    "units[0].split": lambda plan: plan["units"][0].update(split=7),
    "units": lambda plan: plan.update(units="all"),
    "units[1].start": lambda plan: plan["units"][1].update(start=-1),
    "windowing": lambda plan: plan.update(windowing=[]),
}
TARGETS = {
    "vocab_size": lambda target: target.update(vocab_size=3_000_000_000),
    "k": lambda target: target.update(k=-1),
    "max_length": lambda target: target.update(max_length=0),
    "weight_octaves": lambda target: target.update(weight_octaves="twelve"),
    "special_ids": lambda target: target["special_ids"].update(mask=VOCABULARY),
    "special_ids.pad": lambda target: target["special_ids"].update(pad=None),
    "settings.windowing": lambda target: target["settings"].update(windowing=3),
    "settings.lam": lambda target: target["settings"].update(lam="small"),
    "lineage": lambda target: target.update(lineage=None),
    "k is 24": lambda target: target["settings"].update(k=25),
}


def read_all(path):
    with within_seconds(60):
        store = Store.open(path)
        windows = store.split("train")
        windows.read(windows.order(0, 0, 0, 1))
        store.report()


@pytest.mark.promise(
    "plan, record, target, dictionary, checkpoint, evaluation record with a right checksum and a wrong content "
    "(deep nesting, NaN, wrong types, giant numbers, ids beyond the vocabulary): typed error with file and "
    "field, memory bounded; one bad store hides no other",
    cases="29, 24, 13, 6, 4",
)
@pytest.mark.promise("42 crafted JSON and arrays")
@pytest.mark.parametrize("field", RECORDS)
def test_a_record_of_the_wrong_form_names_file_and_field(files, field):
    rewrite(files.record_file("train-0"), RECORDS[field])
    with pytest.raises(ShardError, match="train-0.json: .*field ") as caught:
        read_all(files.path)
    assert f"field {field}" in str(caught.value) and len(str(caught.value)) < 1000
    if field != "statistics.coded_tokens":
        assert f"field {field}" in problems(files)["units/train-0.json"]


@pytest.mark.promise("plan, record, target …")
@pytest.mark.promise("42 crafted JSON and …")
@pytest.mark.parametrize("field", PLANS)
def test_a_plan_of_the_wrong_form_names_file_and_field(files, field):
    path = next(files.plans.glob("*.json"))
    rewrite(path, PLANS[field])
    with pytest.raises(ShardError) as caught:
        read_all(files.path)
    assert str(path) in str(caught.value) and f"field {field}" in str(caught.value)


@pytest.mark.promise("plan, record, target …")
@pytest.mark.promise("42 crafted JSON and …")
@pytest.mark.parametrize("field", TARGETS)
def test_a_target_of_the_wrong_form_names_file_and_field(files, field):
    rewrite(files.target_file, TARGETS[field])
    for use in (read_all, verify, lambda path: derive(path, 2)):
        with pytest.raises(ShardError) as caught:
            use(files.path)
        assert f"{files.target_file}: field {field}" in str(caught.value)


@pytest.mark.promise("plan, record, target …")
@pytest.mark.promise("42 crafted JSON and …")
@pytest.mark.parametrize("name", ["target.json", "plans", "units"])
@pytest.mark.parametrize(
    "text", [deep(), '{"a": ' * 70 + "1" + "}" * 70, "NaN", '{"k": 1e999}', '{"k": "\\ud800"}', "9" * 5000, "[]", "3"]
)
def test_json_that_is_none_of_ours_is_an_error_with_its_file(files, name, text):
    directory = files.path / name
    path = directory if directory.is_file() else sorted(directory.glob("*.json"))[-1]
    path.write_text(text)
    with pytest.raises(ShardError) as caught:
        read_all(files.path)
    assert str(path) in str(caught.value)


@pytest.mark.promise("plan, record, target …")
@pytest.mark.promise("42 crafted JSON and …")
@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "dictionary.json").write_text(deep()),
        lambda path: (path / "dictionary.json").write_text('{"history": 3}'),
        lambda path: (path / "atoms.npy").write_bytes(
            b"\x93NUMPY\x01\x00v\x00"
            + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 32), }".ljust(117)
            + b"\n"
        ),
        lambda path: np.save(path / "atoms.npy", np.zeros((24, 32), object), allow_pickle=True),
        lambda path: np.save(path / "atoms.npy", np.zeros((0, 32), np.float32)),
    ],
)
def test_a_crafted_dictionary_is_refused(files, change):
    change(files.dictionary)
    with pytest.raises(DictionaryError, match="is damaged"):
        Dictionary.load(files.dictionary)
    assert problems(files).keys() == {"dictionary"}


STATE = tiny_store.CHECKPOINT_STATE | {"files": {}}


@pytest.mark.promise("plan, record, target …")
@pytest.mark.promise("42 crafted JSON and …")
@pytest.mark.parametrize(
    "state",
    [
        deep(),
        "[]",
        "NaN",
        {"step": "three"},
        {"step": 3, "tokens": -1},
        {"step": 3, "held_out": {"loss": "low"}},
        {"step": 3, "files": ["a"]},
        {"step": 3, "run": None},
    ],
)
def test_a_crafted_checkpoint_is_passed_over(tmp_path, caplog, state):
    from student.runs.checkpoint import _checksum

    (tmp_path / "step-00000003").mkdir()
    if isinstance(state, dict):
        state = STATE | state
        state = json.dumps(state | {"checksum": _checksum(state)})
    (tmp_path / "step-00000003" / "state.json").write_text(state)
    assert Checkpoints(tmp_path).newest_whole() is None
    assert "step-00000003 is damaged" in caplog.text and "state.json" in caplog.text


@pytest.mark.promise("a pipe, socket, directory …")
def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path, caplog):
    from student.runs.checkpoint import _checksum

    (tmp_path / "step-00000003").mkdir()
    state = STATE | {"step": 3, "files": {"resume": "0"}}
    (tmp_path / "step-00000003" / "state.json").write_text(json.dumps(state | {"checksum": _checksum(state)}))
    os.mkfifo(tmp_path / "step-00000003" / "resume")
    with within_seconds(20):
        assert Checkpoints(tmp_path).newest_whole() is None
    assert "a pipe, not a file" in caplog.text


@pytest.mark.promise("plan, record, target …")
@pytest.mark.promise("42 crafted JSON and …")
def test_a_crafted_evaluation_record_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text(deep())
    with pytest.raises(RecordError, match=r"deep.json: expected a record as JSON"):
        records.read([tmp_path])
    (tmp_path / "deep.json").unlink()
    os.mkfifo(tmp_path / "pipe.json")
    with within_seconds(20), pytest.raises(RecordError, match="a pipe, not a file"):
        records.read_file(tmp_path / "pipe.json")


@pytest.mark.promise("plan, record, target …")
def test_one_bad_store_hides_no_other(files, monkeypatch):
    root = files.path.parent
    bad = {
        "deep": lambda store: store.target_file.write_text(deep()),
        "kind": lambda store: rewrite(store.target_file, lambda target: target["settings"].update(kind=["lsp"])),
        "list": lambda store: next(store.plans.glob("*.json")).write_text("[]"),
        "pipe": lambda store: (store.target_file.unlink(), os.mkfifo(store.target_file)),
        "loop": lambda store: (store.target_file.unlink(), store.target_file.symlink_to("target.json")),
        "closed": lambda store: None,
    }
    for name, spoil in bad.items():
        spoil(StoreFiles(shutil.copytree(files.path, root / name)))
    opened = disk.open_to_read

    def refuse(path):
        if "closed" in Path(path).parts:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(disk, "open_to_read", refuse)
    with within_seconds(60):
        assert finished_stores(root)[0] == files.path


@pytest.mark.promise("plan, record, target …")
def test_numbers_that_are_none_are_no_json(files):
    record = files.record_file("train-0")
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw = record.read_text()
        record.write_text(raw.replace('"kept_mass":', f'"x": {text}, "kept_mass":'))
        with pytest.raises(ShardError, match="train-0.json: not readable as JSON"):
            read_all(files.path)
        record.write_text(raw)
    assert math.isfinite(files.record("train-0").statistics["kept_mass"])

"""What the fuzzer (fuzz.py) found, each as the smallest thing that shows it."""

import errno
import hashlib
import json
import os
import resource
import shutil
import socket
import struct
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz import TRAINING, make_subjects
from mutations import Pickle, member, members, write_sealed, write_shard
from safetensors.torch import load_file, save_file
from test_foreign_stores import within_seconds

from mlsm.commands.train_student import show as training
from mlsm.common.errors import (
    DictionaryError,
    FlopsError,
    InspectionError,
    ModelError,
    RecordError,
    RunError,
    ShardError,
    StoreError,
    TeacherError,
    TrainingError,
    WriteError,
)
from mlsm.common.progress import silent
from mlsm.evaluation import models, records
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.show import show as show_lsps
from mlsm.evaluation.inspection.stores import document_tokens, show_shards
from mlsm.evaluation.lineage import lineage
from mlsm.evaluation.studies.flops.encoders import EncoderShape
from mlsm.evaluation.tasks.finetuning import trials
from mlsm.evaluation.tasks.finetuning.heads import Backbone
from mlsm.evaluation.tasks.scoring import models as masked_lms
from mlsm.recipes.reading import read_recipe
from pipeline.dictionary import Dictionary
from pipeline.teacher import load_tokenizer
from shards.config import ShowConfig
from shards.derive import derive
from shards.files import StoreFiles
from shards.reader import Store
from shards.schema import ShardMeta
from shards.verify import verify
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import vocabulary_of
from student.lsp_model import LspModel
from student.masks.words import continuation_flags
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.runs.hub import Revision, push
from student.runs.probed import with_student_and_store
from student.train import train

pytestmark = pytest.mark.promise(
    "a run whose checkpoint is of another model, whose optimiser is damaged under a right hash, whose "
    "config.json cannot be built, whose lock, log or result is a pipe; strays and links next to and in "
    "checkpoints: not waited for, not exported, not pushed, not removed",
    cases="1, 1, 3, 8, 2",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzzed") / "made"
    make_subjects(directory, 0)
    return directory


@pytest.fixture
def subjects(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made", symlinks=True)


@pytest.fixture
def files(subjects):
    return StoreFiles(subjects / "store")


# -- stores -----------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "links instead of `plans/` or `units/`: `--repair` removes nothing outside; files that have not the "
    "name of a plan stay",
    cases="1, 1",
)
def test_repair_removes_nothing_through_a_link_in_the_place_of_a_directory(files, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("secret.json", f"{'0' * 32}.json"):
        (outside / name).write_text("{}")
    shutil.rmtree(files.plans)
    files.plans.symlink_to(outside)
    with within_seconds(20):
        assert not verify(files.path, repair=True)["repaired"]
    assert len(list(outside.iterdir())) == 2


@pytest.mark.promise("links instead of …")
def test_what_has_not_the_name_of_a_plan_is_none(files):
    (files.plans / "notes.json").write_text("[]")
    assert Store.open(files.path).split("train").read([0]).ids.size
    found = verify(files.path, repair=True)
    assert not found["damaged"] and [entry["file"] for entry in found["stray"]] == ["plans/notes.json"]
    assert (files.plans / "notes.json").exists()


def test_a_plan_of_other_windows_is_listed(files):
    path = next(files.plans.glob("*.json"))
    plan = json.loads(path.read_text())
    plan["windowing"]["max_length"] += 1
    write_sealed(files.path, path, plan)
    [damage] = verify(files.path)["damaged"]
    assert damage["file"].startswith("plans/") and "of another store: max_length is 17, not 16" in damage["problem"]


def test_verify_and_the_reader_agree_on_statistics_that_a_record_must_have(files):
    path = files.record_file("train-0")
    record = json.loads(path.read_text())
    del record["statistics"]["entropy_nats"]
    write_sealed(files.path, path, record)
    with pytest.raises(ShardError, match="statistics.entropy_nats is missing"):
        show_shards(ShowConfig(store=str(files.path)))
    [damage] = verify(files.path)["damaged"]
    assert "field statistics.entropy_nats is missing" in damage["problem"]


@pytest.mark.parametrize("header", ["(" * 3000, "{'descr': '''", "[" * 200])
def test_a_header_that_pythons_tokenizer_refuses(files, header):
    text = header.encode() + b"\n"
    (files.dictionary / "atoms.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(DictionaryError, match="is damaged") as caught:
        Dictionary.load(files.dictionary)
    assert len(str(caught.value)) < 1000
    assert [entry["file"] for entry in verify(files.path)["damaged"]] == ["dictionary"]


def craft(files, unit, change):
    """Rewrite a unit's shard with change(list of [group, bytes]), with right hashes."""
    record_file = files.record_file(unit)
    record = json.loads(record_file.read_bytes())
    raw = (files.units / record["file"]).read_bytes()
    parts = [[group, raw[group["offset"] : group["offset"] + group["length"]]] for group in record["groups"]]
    change(parts)
    write_shard(files.units, record_file, record, parts)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_sums_that_are_no_numbers_from_0(files, value):
    def change(parts):
        for part in parts:
            found = dict(members(part[1]))
            if mass := found.get("__stats__/sums.mass.npy"):
                found["__stats__/sums.mass.npy"] = mass[:-8] + struct.pack("<d", value)
                part[1] = b"".join(member(*entry) for entry in found.items())

    store = Store.open(files.path)
    craft(files, next(unit.id for unit in store.plan.units if unit.split == "train"), change)
    with pytest.raises(ShardError, match="sums called mass are not all finite numbers from 0"):
        Store.open(files.path).split("train").mean_distribution()
    [damage] = verify(files.path, full=True)["damaged"]
    assert "sums of mass are not 24 finite numbers from 0" in damage["problem"]


@pytest.mark.promise("values of a right …")
def test_sums_of_more_than_there_is(files):
    """Numbers that are finite, but whose sum is not."""

    def change(parts):
        found = dict(members(parts[-1][1]))
        mass = found["__stats__/sums.mass.npy"]
        found["__stats__/sums.mass.npy"] = mass[:128] + struct.pack("<d", 1.5e308) * ((len(mass) - 128) // 8)
        parts[-1][1] = b"".join(member(*entry) for entry in found.items())

    craft(files, "train-0", change)
    with pytest.raises(ShardError, match="sums called mass are larger than its .* tokens"):
        Store.open(files.path).split("train").mean_distribution()
    [damage] = verify(files.path, full=True)["damaged"]
    assert "sums of mass are larger than the unit's" in damage["problem"]


@pytest.mark.promise(
    "values of a right checksum that later arithmetic cannot bear: rows of which nearly all was dropped (they "
    "are derived from), weights that round to nothing, sums whose sum is no number, a vocabulary or k that is "
    "wider than the stored sums, windows that no memory holds",
    cases="1, 1, 1, 2, 1",
)
def test_rows_of_which_nearly_all_was_dropped_can_be_derived_from(files, tmp_path):
    """A tail of more than 0.979 is stored as 1."""
    craft(files, "train-0", spoil("tail", lambda raw: bytes(len(raw))))
    made = derive(files.path, 2, output=tmp_path / "out")
    assert not verify(made["store"], full=True)["damaged"] and 0 < made["mass_kept"] < 1
    windows = Store.open(made["store"]).split("train")
    rows = windows.targets(windows.read([0]), np.zeros(3, int), np.arange(1, 4))
    assert len(rows.weights) and (rows.weights > 0).all() and (rows.tail == 1).all()


@pytest.mark.promise("values of a right …")
def test_weights_that_would_be_rounded_to_nothing(files):
    path = files.path / "target.json"
    write_sealed(files.path, path, json.loads(path.read_bytes()) | {"weight_octaves": 200})
    with pytest.raises(ShardError, match="target.json: field weight_octaves: expected"):
        Store.open(files.path)
    with pytest.raises(ValueError, match="1 to 100"):
        ShardMeta("0" * 32, "unit", 24, 65, 16, weight_octaves=200)


@pytest.mark.promise("values of a right …")
@pytest.mark.parametrize("change", [{"vocab_size": 1 << 24}, {"k": 1 << 24, "settings": {"k": 1 << 24}}])
def test_a_target_that_is_wider_than_the_sums_of_its_units(files, change):
    """Readers make arrays of this width before they read a shard."""
    path = files.path / "target.json"
    target = json.loads(path.read_bytes())
    target |= change | {"settings": target["settings"] | change.get("settings", {})}
    write_sealed(files.path, path, target, follow=True)
    store = Store.open(files.path)
    for use in (store.report, lambda: store.split("train")):
        with pytest.raises(ShardError, match="json: field groups: __stats__ of .* bytes cannot hold the sums"):
            use()


@pytest.mark.promise("values of a right …")
def test_windows_that_are_longer_than_the_memory(subjects):
    """Which the libraries that allocate report in classes of their own, if the system lets them."""
    path = subjects / "logits" / "target.json"
    write_sealed(path.parent, path, json.loads(path.read_bytes()) | {"max_length": 65_535})
    config = StudentConfig(store=str(path.parent), run_dir=subjects / "out", **TRAINING | {"objective": "kd"})
    expected = f"too little memory for windows of 65,535 tokens, as in {path.parent}"
    with pytest.raises(TrainingError, match=expected), limited_addresses(2 << 30):
        train(config)


@contextmanager
def limited_addresses(more):
    """At most so many bytes of address space beside those that are in use."""
    pages, before = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def append_padding(parts):
    parts[1][1] += bytes(512)


def spoil(name, change_values):
    def change(parts):
        found = dict(members(parts[1][1]))
        column = found[f"000000.{name}.npy"]
        found[f"000000.{name}.npy"] = column[:128] + change_values(column[128:])
        parts[1][1] = b"".join(member(*entry) for entry in found.items())

    return change


CHANGES = {
    "padding": append_padding,
    "atoms": spoil("atoms", lambda raw: raw[::-1]),
    "ids": spoil("ids", lambda raw: b"\xff" * len(raw)),
    "run_starts": spoil("run_starts", lambda raw: raw[::-1]),
    "lengths": spoil("lengths", lambda raw: bytes(len(raw))),
}


@pytest.mark.promise("statistics, documents …")
@pytest.mark.parametrize("change", CHANGES)
def test_an_error_of_a_crafted_shard_names_it_wherever_it_is_read(files, tmp_path, change):
    craft(files, "train-0", CHANGES[change])
    shard = files.record("train-0").file
    for use in (
        lambda: derive(files.path, 2, output=tmp_path / "out"),
        lambda: show_shards(ShowConfig(store=str(files.path), document=0)),
    ):
        with pytest.raises(ShardError, match=f"{shard}: block 000000: .*--repair"):
            use()


@pytest.mark.promise(
    "statistics, documents, identities of the wrong form; crafted columns, wherever they are read",
    cases="5, 1, 5, 5",
)
@pytest.mark.parametrize(
    "statistics",
    [
        {"entries": [1, 2]},
        {"coded_tokens": 10**400},
        {"nnz_histogram": [-1e308] + [0] * 255},
        {"nnz_histogram": [2**70] * 256},
        {"kept_mass": [0.5]},
    ],
)
def test_statistics_that_are_no_numbers(files, statistics):
    record = json.loads(files.record_file("train-0").read_bytes())
    record["statistics"] |= statistics
    write_sealed(files.path, files.record_file("train-0"), record)
    with pytest.raises(ShardError, match="train-0.json: field statistics"):
        show_shards(ShowConfig(store=str(files.path)))


@pytest.mark.promise("statistics, documents …")
def test_more_documents_than_a_shard_has(files):
    record = json.loads(files.record_file("train-0").read_bytes())
    record["statistics"]["documents"] += 5
    write_sealed(files.path, files.record_file("train-0"), record)
    with pytest.raises(ShardError, match="train-0.json: field statistics.documents"):
        document_tokens(Store.open(files.path), "train", record["statistics"]["documents"] - 1, 5)


@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: path.write_text("[" * 100_000), Path.mkdir])
def test_the_kept_command_is_no_condition(files, spoil):
    store = Store.open(files.path)
    spoil(files.plans / f"{store.plan_id}.yaml")
    with within_seconds(20):
        assert store.command == {}


def test_a_dictionary_that_has_no_end_is_not_read(files):
    (files.dictionary / "dictionary.json").unlink()
    (files.dictionary / "dictionary.json").symlink_to("/dev/zero")
    with within_seconds(20):
        assert "a device, not a file" in show_shards(ShowConfig(store=str(files.path)))["dictionary"]["problem"]


def test_a_tokenizer_that_no_target_names_may_be_anything(subjects):
    path = subjects / "ids" / "tokenizer" / "tokenizer.json"
    kept = json.loads(path.read_text())
    kept["model"]["vocab"]["w29"] = 1e308
    path.write_text(json.dumps(kept))
    for use in (
        lambda: show_shards(ShowConfig(store=str(subjects / "ids"), window=0)),
        lambda: Store.open(subjects / "ids").load_tokenizer(),
    ):
        with pytest.raises(StoreError, match="tokenizer cannot be loaded"):
            use()


def test_a_full_directory_of_temporary_files_is_no_damage(subjects, monkeypatch):
    def refuse(path, raw):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(WriteError, match="No space left on device. TMPDIR names another"):
        Store.open(subjects / "ids").load_tokenizer()


WHOLE_WORDS = '{"model": {"vocab": [1], "type": "WordLevel"}, "pre_tokenizer": {"type": "Whitespace"}}'


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": 1}', WHOLE_WORDS])
def test_a_tokenizer_that_says_nothing_of_words(subjects, text):
    path = subjects / "ids" / "tokenizer" / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(RunError, match=f"--mask-unit word: {path} is not a valid tokenizer"):
        continuation_flags(path.parent, 65)


# -- exports ----------------------------------------------------------------------------------------------


def set_value(name, **values):
    def change(export):
        kept = json.loads((export / name).read_bytes()) | values
        (export / name).write_text(json.dumps(kept))

    return change


def change_tokenizer(*path, value):
    """Set one value in tokenizer.json; None removes it."""

    def change(export):
        kept = json.loads((export / "tokenizer.json").read_bytes())
        *outer, name = path
        holder = kept
        for step in outer:
            holder = holder[step]
        holder.pop(name) if value is None else holder.update({name: value})
        (export / "tokenizer.json").write_text(json.dumps(kept))

    return change


def frame(id, segment):
    """A post-processor that puts a token with some id, in some segment, before every text."""
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"Sequence": {"id": "B", "type_id": segment}}]
    tokens = {"[CLS]": {"id": "[CLS]", "ids": [id], "tokens": ["[CLS]"]}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces + second, "special_tokens": tokens}


def cut_head(export):
    raw = (export / "lsp_head.safetensors").read_bytes()
    (export / "lsp_head.safetensors").write_bytes(raw[:-4])


def lose_weights(export):
    kept = load_file(export / "model.safetensors")
    kept.pop("embeddings.LayerNorm.weight")
    save_file(kept, export / "model.safetensors", metadata={"format": "pt"})


def give_pickle_only(export):
    (export / "model.safetensors").unlink()
    (export / "pytorch_model.bin").write_bytes(Pickle(export).dumps())


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
KNOWN = dict.fromkeys(FLAGS, False) | {"special": True}
EXPORTS = {
    "a list": lambda export: (export / "config.json").write_text("[]"),
    "family": set_value("config.json", model_type=["bert"]),
    "no text": lambda export: (export / "tokenizer_config.json").write_bytes(b'{"a": "\xff"}'),
    "longest text": set_value("tokenizer_config.json", model_max_length="a/b"),
    "huge id": set_value("tokenizer.json", added_tokens=[{"id": 4_000_000_000, "content": "[X]"}]),
    "token": set_value("tokenizer_config.json", unk_token=2**63),
    "vocabulary": set_value("config.json", vocab_size=1 << 24),
    "layers": set_value("config.json", num_hidden_layers=10**9),
    "width": set_value("config.json", intermediate_size="wide"),
    "heads": set_value("config.json", num_attention_heads=12),
    "head": cut_head,
    "lsps": set_value("lsp_config.json", lsps=2**24),
    "no lsps": lambda export: (export / "lsp_config.json").write_text("{}"),
    "special": set_value("lsp_config.json", special_ids={"pad": 0, "cls": 10**6, "sep": 3, "mask": 4}),
    "room": set_value("lsp_config.json", max_length=600),
    "word": change_tokenizer("model", "vocab", "w1", value=65_536),
    "added word": change_tokenizer(
        "added_tokens",
        value=[{"id": 4000, "content": "[X]"} | dict.fromkeys(FLAGS, False), {"id": 1, "content": "[UNK]"} | KNOWN],
    ),
    "framing": change_tokenizer("post_processor", value=frame(70, 0)),
    "segment": change_tokenizer("post_processor", value=frame(2, 7)),
    "unknown": change_tokenizer("model", "vocab", "[UNK]", value=None),
    "weights": lose_weights,
    "pickle": give_pickle_only,
}


@pytest.mark.promise(
    "an export whose files are damaged, exchanged, of another shape, no files, or a pickle: RunError or "
    "RecordError that names it",
    cases="16, 6, 9",
)
@pytest.mark.promise(
    "a tokenizer with a huge token id or a maximum length that is no number; a config.json of a far larger "
    "model than its weights: refused in tens of megabytes",
    cases="4",
)
@pytest.mark.promise(
    "a tokenizer with ids, or a frame around a text, beyond a model's embeddings or segments, or that fails at "
    "an unknown word; windows beyond its positions: refused wherever a tokenizer and a model are loaded "
    "together; a panic of the tokenizers library is an error",
    cases="6, 4 × 2, 3",
)
@pytest.mark.parametrize("change", EXPORTS)
def test_a_damaged_export_is_one_error_that_names_it(subjects, change):
    export = subjects / "export"
    assert len(LspModel.from_pretrained(export).lsp("w1 w2")[0].tokens) == 2
    EXPORTS[change](export)
    with pytest.raises(RunError, match=str(export)) as caught:
        LspModel.from_pretrained(export)
    assert len(str(caught.value)) < 1000 and not (export / "pickle-was-run").exists()


TOKENIZERS = ("word", "framing", "segment", "unknown")


@pytest.mark.promise("a tokenizer with ids …")
@pytest.mark.parametrize("change", TOKENIZERS)
def test_a_tokenizer_whose_ids_a_model_does_not_know(subjects, change):
    """Wherever a tokenizer and a model are loaded together."""
    export = subjects / "export"
    trials.load(export)
    EXPORTS[change](export)
    with pytest.raises(ModelError, match=f"{export}: the tokenizer"):
        trials.load(export)


@pytest.mark.promise("a tokenizer with ids …")
@pytest.mark.parametrize("change", TOKENIZERS)
def test_a_tokenizer_whose_ids_a_masked_language_model_does_not_know(subjects, change):
    export = subjects / "mlm"
    masked_lms.load(export, torch.device("cpu"))
    EXPORTS[change](export)
    with pytest.raises(ModelError, match=f"{export}: the tokenizer"):
        masked_lms.load(export, torch.device("cpu"))


@pytest.mark.promise("a tokenizer with ids …")
def test_a_panic_of_the_tokenizers_library_is_an_error(subjects, monkeypatch):
    """Such a panic is no Exception, and would pass every handler."""
    panic = type("PanicException", (BaseException,), {})

    def from_pretrained(*_, **__):
        raise panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(RunError, match=f"{subjects}/export cannot be loaded"):
        LspModel.from_pretrained(subjects / "export")
    with pytest.raises(RunError, match="its tokenizer cannot be loaded"):
        vocabulary_of(subjects / "export")
    with pytest.raises(TeacherError, match="cannot be read"):
        load_tokenizer(subjects / "export")


def bind_socket(name):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


@pytest.mark.promise("an export whose files …")
@pytest.mark.parametrize("name", ["model.safetensors", "lineage.json"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, bind_socket])
def test_what_is_no_file_in_an_export_is_not_waited_for(subjects, name, put):
    export = subjects / "export"
    (export / name).unlink()
    with chdir(export):
        put(name)
    with within_seconds(20), pytest.raises(RecordError, match=name):
        records.describe_model(export)


@pytest.mark.promise("an export whose files …")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"step": "three"}',
        '{"settings": []}',
        '{"store": {"settings": {"k": -1}}}',
        '{"store": {"tail": [{"mass_kept": 1.0}]}}',
        '{"student": 3}',
        '{"student": {"student": {}}}',
        '{"flops": 1' + "0" * 400 + "}",
    ],
)
def test_a_damaged_lineage_is_an_error_that_names_it(subjects, text):
    (subjects / "export" / "lineage.json").write_text(text)
    with pytest.raises(RecordError, match="export/lineage.json"):
        records.describe_model(subjects / "export")


@pytest.mark.parametrize("field", [{"auto_map": 3}, {"num_hidden_layers": "x" * 70_000}, {"layer_types": 1}])
def test_a_configuration_that_transformers_cannot_read(subjects, field):
    """It is asked for a dropout that the lineage leaves open, for a record, and for the operations of a model."""
    export = subjects / "export"
    for file, changes in ((export / "config.json", field), (export / "lineage.json", {})):
        known = json.loads(file.read_text()) | changes
        known.get("settings", {}).pop("dropout", None)
        known.setdefault("settings", {})["dropout"] = None
        file.write_text(json.dumps(known))
    lineage(export)
    with pytest.raises(RecordError, match="config.json cannot be read"):
        records.describe_model(export)
    with pytest.raises(FlopsError, match="no configuration found there"):
        EncoderShape.find(str(export))
    with pytest.raises(ModelError, match="config.json cannot be read") as caught:
        Backbone(export)
    assert len(str(caught.value)) < 1000


def test_an_auto_map_that_is_no_mapping_still_names_code(subjects):
    file = subjects / "export" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": "own.Model"}))
    with pytest.raises(TeacherError, match="config.json names code of its own"):
        Backbone(subjects / "export")


@pytest.mark.promise("statistics, documents …")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("settings", []),
        ("tail", {"mass_kept": "all"}),
        ("target_settings", {"dictionary_settings": 3}),
        ("probe", {}),
        ("windowing", None),
    ],
)
def test_an_identity_of_the_wrong_form(subjects, field, value):
    file = sorted((subjects / "records").glob("ours*mrpc*"))[0]
    record = json.loads(file.read_text())
    record["identity"][field] = value
    file.write_text(json.dumps(record))
    with pytest.raises(RecordError, match=f"{file.name}: field identity.{field}"):
        records.read([subjects / "records"])


@pytest.mark.parametrize("files", [[{}], {"train.tsv": []}, None])
def test_the_data_of_a_record_of_the_wrong_form(subjects, files):
    file = sorted((subjects / "records").glob("ours*mrpc*"))[0]
    record = json.loads(file.read_text())
    record["data"]["files"] = files
    file.write_text(json.dumps(record))
    with pytest.raises(RecordError, match=f"{file.name}: field data"):
        records.read([subjects / "records"])


# -- runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(subjects):
    return StudentConfig(store=str(subjects / "healthy"), run_dir=subjects / "run", **TRAINING)


def test_weights_of_another_model_under_a_right_hash(run):
    path = run.run_dir / "checkpoints" / "step-00000003"
    weights = load_file(path / "resume" / "student.safetensors")
    weights["other"] = weights.pop("encoder.embeddings.LayerNorm.weight")
    save_file(weights, path / "resume" / "student.safetensors")
    state = json.loads((path / "state.json").read_text())
    raw = (path / "resume" / "student.safetensors").read_bytes()
    state["files"]["resume/student.safetensors"] = hashlib.sha256(raw).hexdigest()
    write_sealed(run.run_dir, path / "state.json", state)
    with pytest.raises(RunError, match="step-00000003 is as it was written, but does not fit.*the one before it"):
        train(run)
    with pytest.raises(RunError, match="do not belong together"):
        export_run(ExportConfig(run=run.run_dir, step="3", output=run.run_dir.parent / "out", store=run.store))
    shutil.move(path, run.run_dir.parent / "elsewhere")
    assert train(run)["steps"] == 4


@pytest.mark.promise(
    "figures, step, store or summary of a run of the wrong form: the checkpoint is passed over, the summary "
    "written again",
    cases="4, 1, 5, 1",
)
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("flops", [None], "a number"),
        ("held_out", {"lass": 4.0}, "an object of numbers, loss among them"),
        ("held_out", {"loss": None}, "a number, found None"),
        ("held_out", {"loss": 4.0, "accuracy": 0.5}, "an object of numbers, loss among them"),
    ],
)
def test_a_checkpoint_whose_figures_are_none_is_passed_over(run, caplog, field, value, expected):
    path = run.run_dir / "checkpoints" / "step-00000003" / "state.json"
    write_sealed(run.run_dir, path, json.loads(path.read_text()) | {field: value})
    assert train(run)["steps"] == 4
    assert f"step-00000003 is damaged (state.json: field {field}: expected {expected}" in caplog.text


@pytest.mark.promise("figures, step, store …")
def test_a_checkpoint_that_says_another_step_is_passed_over(run, caplog):
    path = run.run_dir / "checkpoints" / "step-00000003" / "state.json"
    write_sealed(run.run_dir, path, json.loads(path.read_text()) | {"step": 4})
    assert train(run)["steps"] == 4
    assert "step-00000003 is damaged (state.json is of step 4)" in caplog.text


@pytest.mark.promise("figures, step, store …")
@pytest.mark.parametrize(
    "change",
    [{"held_out": {"loss": "low"}}, {"held_out": {"lass": 1.0}}, {"baseline": {}}, {"tokens": 1.5}, {"tokens": True}],
)
def test_a_summary_of_another_form_is_written_anew(run, caplog, change):
    result = train(run)
    file = run.run_dir / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    again = train(run)
    assert "result.json is damaged" in caplog.text and not again["finished_before"]
    assert (again["held_out"], again["tokens"]) == (result["held_out"], result["tokens"])
    training(again, run)


@pytest.mark.promise("figures, step, store …")
def test_the_place_of_a_store_that_is_no_text(run):
    file = run.run_dir / "config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"operational": kept["operational"] | {"store": 3}}))
    with pytest.raises(RunError, match="config.json is damaged"):
        export_run(ExportConfig(run=run.run_dir, step="3", output=run.run_dir.parent / "out"))
    shutil.copytree(run.run_dir.parent / "export", run.run_dir / "export")
    with pytest.raises(RunError, match="is not inside a run that names its store"):
        with_student_and_store(ProbeConfig(student=str(run.run_dir / "export")))


def test_a_description_without_the_encoders_hash_is_judged_by_its_architecture(run):
    file = run.run_dir / "config.json"
    kept = json.loads(file.read_text())
    del kept["encoder"]
    file.write_text(json.dumps(kept))
    assert train(run)["steps"] == 4


@pytest.mark.promise(
    "checkpoints behind a link: neither written nor removed there; a kept checkpoint whose weights cannot be "
    "read: not exported; messages of at most 4,000 characters",
    cases="1, 1, 1",
)
def test_checkpoints_are_neither_written_nor_removed_through_a_link(run, tmp_path):
    outside = tmp_path / "outside"
    (run.run_dir / "checkpoints").rename(outside)
    (run.run_dir / "checkpoints").symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(RunError, match="checkpoints is a link"):
        train(run)
    assert sorted(outside.rglob("*")) == before


@pytest.mark.promise("checkpoints behind …")
def test_a_kept_checkpoint_whose_weights_are_none_is_not_exported(run, tmp_path):
    path = run.run_dir / "checkpoints" / "step-00000002"
    (path / "model.safetensors").write_bytes(Pickle(tmp_path).dumps())
    state = json.loads((path / "state.json").read_text())
    state["files"]["model.safetensors"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    write_sealed(run.run_dir, path / "state.json", state)
    with pytest.raises(RunError, match="model.safetensors has the right hash, but holds no weights"):
        export_run(ExportConfig(run=run.run_dir, step="2", output=tmp_path / "out", store=run.store))
    assert not (tmp_path / "out").exists()


def change_optimiser(run, change):
    """Change what the newest checkpoint keeps of the optimiser, under a right hash."""
    path = run.run_dir / "checkpoints" / "step-00000003"
    file = path / "resume" / "optimizer.pt"
    kept = torch.load(file, weights_only=True)
    change(kept)
    torch.save(kept, file)
    state = json.loads((path / "state.json").read_text())
    state["files"]["resume/optimizer.pt"] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_sealed(run.run_dir, path / "state.json", state)


OPTIMISERS = {
    "no second moment": lambda kept: kept["state"][3].update(other=kept["state"][3].pop("exp_avg_sq")),
    "no step": lambda kept: kept["state"][3].update(other=kept["state"][3].pop("step")),
    "no state": lambda kept: kept["state"].clear(),
    "steps below zero": lambda kept: kept["state"][3].update(step=torch.tensor(-1.0)),
}


@pytest.mark.parametrize("change", OPTIMISERS)
def test_an_optimiser_whose_state_cannot_be_after_three_steps(run, change):
    change_optimiser(run, OPTIMISERS[change])
    with pytest.raises(RunError, match="step-00000003 is as it was written, but does not fit"):
        train(run)


def test_the_options_of_the_optimiser_are_the_runs(run, tmp_path):
    """Not those that somebody wrote into the checkpoint."""
    shutil.copytree(run.run_dir, tmp_path / "other", symlinks=True)
    unbroken = train(replace(run, run_dir=tmp_path / "other"))["held_out"]
    change_optimiser(
        run, lambda kept: [group.update(maximize=True, weight_decay=5.0) for group in kept["param_groups"]]
    )
    assert train(run)["held_out"] == unbroken


def test_an_optimiser_that_breaks_the_weights_in_the_last_step(run):
    path = run.run_dir / "checkpoints" / "step-00000003"
    file = path / "resume" / "optimizer.pt"
    kept = torch.load(file, weights_only=True)
    for state in kept["state"].values():
        state["exp_avg"][:] = float("nan")
    torch.save(kept, file)
    state = json.loads((path / "state.json").read_text())
    state["files"]["resume/optimizer.pt"] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_sealed(run.run_dir, path / "state.json", state)
    with pytest.raises(TrainingError, match="a held-out figure is not finite.*step-00000003"):
        train(run)
    assert not (run.run_dir / "export").exists() and not (run.run_dir / "checkpoints" / "step-00000004").exists()


@pytest.mark.parametrize("figures", [{"loss": {}}, {"loss": 4.0, "loss_by_position": {}}, {"loss": "low"}])
def test_a_baseline_in_the_log_that_holds_no_numbers_is_left_out_of_the_card(run, figures):
    lines = [json.loads(line) for line in (run.run_dir / "log.jsonl").read_text().splitlines()]
    changed = [line | {"baseline": figures} if "baseline" in line else line for line in lines]
    assert changed != lines
    (run.run_dir / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    out = run.run_dir.parent / "out"
    export_run(ExportConfig(run=run.run_dir, step="3", output=out, store=run.store))
    assert json.loads((out / "lineage.json").read_text())["baseline"] == {}


@pytest.mark.parametrize(
    "value", [{"vocab_size": True}, {"num_hidden_layers": {}}, {"model_type": []}, {"type_vocab_size": 1 << 24}]
)
def test_an_architecture_that_cannot_be_built(run, value):
    file = run.run_dir / "config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"architecture": kept["architecture"] | value}))
    with pytest.raises(RunError, match="config.json.*do not belong together"):
        export_run(ExportConfig(run=run.run_dir, step="3", output=run.run_dir.parent / "out", store=run.store))


def test_one_key_of_config_json_does_not_change_the_products(run):
    file = run.run_dir / "config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"products": {"all": "an other library"}}))
    with pytest.raises(RunError, match=r"field products.*Move config\.json elsewhere"):
        train(run)
    shutil.move(file, run.run_dir.parent / "moved.json")
    assert train(run)["steps"] == 4 and json.loads(file.read_text()).get("products") == kept.get("products")


@pytest.mark.parametrize("name", ["lock", "log.jsonl", "config.json", "result.json"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_a_run_is_not_waited_for(run, name, put):
    (run.run_dir / name).unlink(missing_ok=True)
    put(run.run_dir / name)
    with within_seconds(60):
        try:
            assert train(run)["steps"] == 4
        except (RunError, OSError) as error:
            assert name in str(error)
            assert max(path.name for path in run.run_dir.glob("checkpoints/*")) >= "step-00000003"


def test_an_export_of_a_kept_checkpoint_takes_what_was_saved(run, tmp_path):
    kept = run.run_dir / "checkpoints" / "step-00000002"
    (tmp_path / "secret").write_text("sings")
    for name in ("notes.txt", "special_tokens_map.json"):
        (kept / name).symlink_to(tmp_path / "secret")
    (kept / "model.py").write_text("raise SystemExit")
    export_run(ExportConfig(run=run.run_dir, step="2", output=tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and not names & {"notes.txt", "special_tokens_map.json", "model.py"}
    with pytest.raises(RunError, match=r"is a link.*Nothing was pushed"):
        push("someone/student", [Revision("step-00000002", kept, "Step 2")], private=True, progress=print, api=object())


def test_strays_beside_checkpoints_stay_and_do_no_harm(run, tmp_path):
    place = run.run_dir / "checkpoints"
    (place / "step-x").mkdir()
    if not (place / "step-00000001").exists():
        (place / "step-00000001").symlink_to(tmp_path)  # as old as what is pruned
    os.mkfifo(place / "step-99999999")
    (tmp_path / "mine").write_text("")
    with within_seconds(60):
        assert train(run)["steps"] == 4
    assert (place / "step-x").is_dir() and (tmp_path / "mine").exists()
    kept = models.directories([str(run.run_dir)], step="all")
    assert [path.name for path in kept] == ["step-00000002", "step-00000004"]


def test_a_store_whose_text_is_all_held_out_says_so(files):
    path = next(files.plans.glob("*.json"))
    plan = json.loads(path.read_text())
    plan["units"] = [unit for unit in plan["units"] if unit["split"] == "held_out"]
    write_sealed(files.path, path, plan)
    with pytest.raises(StoreError, match="has no train windows; all its text is held out"):
        Store.open(files.path).split("train")


@pytest.mark.parametrize("length", [0, 5, 100, 2127])
def test_vectors_that_are_cut_are_one_error_that_names_them(length, tmp_path):
    Dictionary(np.eye(4, 32, dtype=np.float32), [], "made up", {"lam": 0.1}).save(tmp_path / "dictionary")
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32))
    os.truncate(tmp_path / "v.npy", length)
    with pytest.raises(InspectionError, match=r"--vectors .*v\.npy"):
        show_lsps(ShowLspConfig(store=str(tmp_path / "dictionary"), vectors=tmp_path / "v.npy"), silent)


@pytest.mark.parametrize("text", [b"train-student: {lr: \xa01}", b"[" * 100_000, b"\x00", b"\xff\xfe"])
def test_a_recipe_that_is_no_text_or_too_deep_is_one_error_that_names_it(text, tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=r"recipe .*recipe\.yaml: (not readable|not UTF-8|nested too)") as raised:
        read_recipe(str(tmp_path / "recipe.yaml"))
    assert type(raised.value) is ValueError

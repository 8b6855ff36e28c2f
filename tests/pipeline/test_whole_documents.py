"""Tokens of documents from every kind of source, against the tokenizer given each whole document as one string."""

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinds import opened, write
from minilm import minilm_dir
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline import plan as planning
from pipeline.commands import encode_ids
from pipeline.config import EncodeIdsConfig
from pipeline.corpus import windows as packing
from pipeline.corpus.windows import drops_white_space, packed_tokens
from pipeline.teacher import load_tokenizer
from shards.reader import Store

TRAINING = [
    "The bank raised its rates again, twice; it's 2,024 ways.\nShe'll sit on the river bank.",
    "    def encode(text):\n        return text  # ünï cödé\n\nDon't stop - 12345 words…",
    "Zwei  Zeilen mit   Leerraum\tund\nfi ﬁ ① 日本語の文章。",
] * 4


def byte_level(**options):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return backend


def modernbert():
    """NFC, no prefix space, and runs of spaces as added tokens, as in GPT-NeoX's tokenizer."""
    backend = byte_level(add_prefix_space=False)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(["    ", "  ", "rates again"])
    return backend


def unigram(normalizer=None, **options):
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"])
    backend.train_from_iterator(TRAINING, trainer)
    return backend


def stripping():
    steps = [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return unigram(normalizers.Sequence(steps))


MAKERS = {
    "roberta": lambda: byte_level(add_prefix_space=False),
    "prefixed": lambda: byte_level(add_prefix_space=True),
    "modernbert": modernbert,
    "metaspace-first": lambda: unigram(prepend_scheme="first"),
    "metaspace-always": lambda: unigram(normalizers.NFKC(), prepend_scheme="always"),
    "metaspace-whole": lambda: unigram(prepend_scheme="first", split=False),
    "stripping": stripping,
}


@cache
def tokenizer(name):
    return PreTrainedTokenizerFast(tokenizer_object=MAKERS[name]())


def tokens_of(source, tokenizer):
    """Document number -> ids, as units of a plan read them."""
    rules = planning.windowing("t", 64, whole_documents=not drops_white_space(tokenizer))
    pieces = source.pieces()
    if "text" in rules:
        pieces = source.without_last_line_end(pieces)
    found = {}
    for record, ids in packed_tokens(pieces, tokenizer, rules):
        found.setdefault(record, []).extend(ids)
    return list(found.values())


CHARACTERS = st.sampled_from("aebnkThd's0129 .,#-(\tüﬁ①日本 ")
LINE = st.text(CHARACTERS, min_size=1, max_size=60).filter(lambda line: line.strip())
DOCUMENT = st.lists(LINE, min_size=1, max_size=5).map("\n".join)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(DOCUMENT, min_size=1, max_size=4), whole=st.sampled_from([12, 40, 1 << 16]))
def test_every_source_gives_the_tokens_of_whole_documents(tmp_path, name, texts, whole):
    assert not drops_white_space(tokenizer(name))
    expected = [tokenizer(name).backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WHOLE_CHARACTERS", whole)
        patch.setattr(packing, "CONTEXT_CHARACTERS", min(whole, 20))
        for kind in ("a.txt", "a.jsonl", "a.parquet"):
            assert tokens_of(opened(write(tmp_path, kind, texts)), tokenizer(name)) == expected


@pytest.mark.parametrize("ending", ["", "\n", "\n\n\n", "\r\n\r\n"])
def test_the_end_of_the_last_line_is_no_part_of_a_text_file(tmp_path, ending):
    path = tmp_path / "a.txt"
    path.write_bytes(f"\n\nThe bank\n\n\n  raised{ending}".encode())
    for name in MAKERS:
        encode = tokenizer(name).backend_tokenizer.encode
        found = tokens_of(opened(path, boundary="file"), tokenizer(name))
        assert found == [encode("The bank\n\n\n  raised", add_special_tokens=False).ids]
        found = tokens_of(opened(path), tokenizer(name))
        assert found == [encode(text, add_special_tokens=False).ids for text in ("The bank", "  raised")]


@pytest.mark.parametrize("name", ["roberta", "prefixed", "modernbert", "metaspace-first", "metaspace-always"])
def test_a_long_document_is_cut_where_the_tokenizer_splits(name):
    draw = random.Random(0)
    words = [word for text in TRAINING for word in text.split(" ") if word]
    text = " ".join(draw.choice(words) for _ in range(40_000))
    pieces = [packing_piece(text[start : start + 50_000]) for start in range(0, len(text), 50_000)]
    parts = [piece.text for piece in packing._documents_in_parts(pieces, tokenizer(name).backend_tokenizer)]
    assert "".join(parts) == text and len(parts) >= 3
    assert max(map(len, parts)) <= packing.WHOLE_CHARACTERS + packing.CONTEXT_CHARACTERS + 50_000
    ids = [id for _, part in packed_tokens(pieces, tokenizer(name), {"text": "document"}) for id in part]
    assert ids == tokenizer(name).backend_tokenizer.encode(text, add_special_tokens=False).ids


def packing_piece(text):
    from pipeline.corpus.source import Piece

    return Piece(0, 0, text)


def test_a_document_without_a_place_to_cut_takes_bounded_memory():
    pieces = [packing_piece("日本語" * 20_000) for _ in range(60)]
    parts = list(packing._documents_in_parts(pieces, tokenizer("metaspace-whole").backend_tokenizer))
    assert "".join(part.text for part in parts) == "日本語" * 1_200_000
    assert max(len(part.text) for part in parts) <= packing.MOST_CHARACTERS + 60_000


def test_stores_of_one_text_hold_the_same_tokens_whatever_its_kind(tmp_path):
    roles = {f"{role}_token": f"<{role}>" for role in ("cls", "sep", "pad", "mask", "unk")}
    made = PreTrainedTokenizerFast(tokenizer_object=MAKERS["roberta"](), **roles)
    made.save_pretrained(tmp_path / "tokenizer")
    texts = [f"Document {n} of the bank\nraised its rates." for n in range(40)]
    found = {}
    for kind in ("a.txt", "a.jsonl"):
        path = write(tmp_path, kind, texts)
        given = EncodeIdsConfig(corpus=(str(path),), tokenizer=str(tmp_path / "tokenizer"), output=tmp_path / kind[2:])
        store = Store.open(encode_ids(given)[0]["store"])
        found[kind] = store.split("train").read(range(4)).ids.tolist()
        assert store.plan.windowing["text"] == "document"
    encode = load_tokenizer(tmp_path / "tokenizer").backend_tokenizer.encode
    assert found["a.txt"] == found["a.jsonl"]
    first = encode(texts[0], add_special_tokens=False).ids
    assert found["a.txt"][0][1 : len(first) + 2] == [*first, made.sep_token_id]


def xlm_roberta():
    backend = unigram()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_tokenizers_that_drop_white_space_keep_their_windowing(tmp_path, tiny_tokenizer):
    before = {"tokenizer": "t", "packing": "packed", "max_length": 128, "held_out": 0.01}
    texts = ["The bank raised\n  its rates", "She'll sit\non it"]
    for kept in (load_tokenizer(minilm_dir()), xlm_roberta(), tiny_tokenizer):
        assert drops_white_space(kept)
        assert planning.windowing("t", 128, whole_documents=not drops_white_space(kept)) == before
        for kind in ("a.txt", "a.jsonl"):
            found = tokens_of(opened(write(tmp_path, kind, texts)), kept)
            assert found == [kept.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.fixture
def tiny_tokenizer(tmp_path):
    from tiny_store import write_tokenizer

    write_tokenizer(tmp_path / "words", 60)
    return load_tokenizer(tmp_path / "words")


def test_others_get_a_windowing_of_their_own_but_for_pairs_of_lines():
    assert planning.windowing("t", 128, whole_documents=True)["text"] == "document"
    assert "text" not in planning.windowing("t", 128, "pairs", whole_documents=True)

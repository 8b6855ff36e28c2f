"""A trained student as files that any `transformers` user can load.

    config.json, model.safetensors   for AutoModelForMaskedLM if the objective is mlm, kd or mtl and the family known;
                                     AutoModel loads every encoder
    lsp_head.safetensors, lsp_config.json   for LspModel (lsp_model.py) if the objective has LSPs; a student of several
                                     stores also has lsp_head_2.safetensors, lsp_config_2.json, ...
    modeling_mlsm.py                 if there are LSPs or a probe: code with which transformers alone loads them;
                                     config.json names it as auto_map
    tokenizer ...                    the store's copy; it gives what the student was trained on (`as_trained`)
    lineage.json                     its origin: settings, store, steps, held-out figures
    README.md                        model card: the same for people, and how to load the export

Not handled here: a probe's files (probe.py), pushing to the Hub (hub.py).

Shapes: V vocabulary, k LSPs, d width of the head's output.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache
from safetensors import SafetensorError

from mlsm.common.durable import refuse_what_is_in_the_way, remedy_for
from mlsm.common.errors import PlaceError, RunError, WriteError
from mlsm.common.model_checks import EXPORTED, quiet_transformers, without_pooler
from mlsm.common.paths import utf8
from mlsm.common.text import code_span, hub_id, markdown_text, printable, without_directories
from shards.copies import TOKENIZER_FILES, without_code, write_files
from shards.reader import Store
from student.config import OF_MASKS, UNNAMED
from student.encoders import modeling_mlsm
from student.encoders.mask_later import mask_later_of
from student.encoders.model import Student
from student.encoders.modeling_mlsm import CONFIG_FILE, HEAD_FILE, PROBE_FILE
from student.encoders.stock import stock_model
from student.lsp_model import lsp_facts, save_lsp_head
from student.objectives.base import Objective

LINEAGE_FILE = "lineage.json"
LISTED_FILES = 5  # of a corpus, on a card
_OF_EVERY_RUN = ("optimizer", "adam_beta1", "adam_beta2", "schedule", "positions")  # shown also at their usual values
_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
_BUNDLED_TEXT = "wikipedia-en-2014.txt.xz"  # name in pipeline/bundled_text, which training does not import
CODE_FILE = f"{EXPORTED}.py"
# Entries of config.json: classes of that file for transformers to run, for LSPs and for a probe's words.
AUTO_MAP = {"AutoModel": f"{EXPORTED}.MlsmModel", "AutoModelForMaskedLM": f"{EXPORTED}.MlsmForMaskedLM"}
# SHA-256 of all versions of that file. export-student copies only such a file from a checkpoint, and no other code.
KNOWN_CODE = (
    "6cbca2840af0ea57967d765c9af4181987636f0351e3963418a9eab492b8d444",
    "9e06338699ecdb7dc88ffaeff2a5b5248448b0fb5873ccdb44ed849fddc97eee",
    "b395617476785371eda0b4322f52be6b669a69905c50a23c5e22d3dc2329de67",
)
# Patterns of the file names of all exports, of any kind, family and tokenizer.
EXPORT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    HEAD_FILE,
    CONFIG_FILE,
    "lsp_head_*.safetensors",
    "lsp_config_*.json",
    PROBE_FILE,
    CODE_FILE,
    LINEAGE_FILE,
    "README.md",
    *TOKENIZER_FILES,
)
# Settings of a store that say how its targets were made -> their names on a card.
_TARGET_SETTINGS = {
    "teacher_name": "teacher",
    "teacher": "teacher's fingerprint",
    "layer": "layer of the teacher",
    "dictionary": "dictionary's fingerprint",
    "k": "LSPs (k)",
    "lam": "λ",
    "tolerance": "solver's tolerance",
    "solver": "solver",
    "dtype": "teacher's precision",
    "documents_apart": "teacher kept documents of a window apart",
    "masked_passes": "passes of the teacher, each token hidden in one",
    "top_n": "entries kept of a token's distribution",
}


_LSPS_IN_TRANSFORMERS = """\
The distributions over latent semantic properties need no package except `transformers` (5.23 or newer) if the code in
this repository, `modeling_mlsm.py`, may run. READ_SO:

```python
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained(PATH, trust_remote_code=True), AutoTokenizer.from_pretrained(PATH)
tokens, distributions = model.lsp("The bank raised its rates.", tokenizer)    # distributions.topk(5)
```

`model(**inputs)` gives `last_hidden_state` and `lsp_logits` of every position. `model.save_pretrained(DIRECTORY)` keeps
the LSPs and the code. A model that was loaded without `trust_remote_code=True` saves neither, but its `config.json`
still names the code: load such a copy without `trust_remote_code`, too."""


class CardText(NamedTuple):
    """The parts that differ between the cards of students and probes."""

    title: str
    made: str
    """one sentence: how it was trained"""
    loading: str
    tags: list[str]
    fills_masks: bool
    """whether AutoModelForMaskedLM loads it, and it was trained on masked tokens"""
    in_transformers: str
    """how to get the LSPs with the export's own code; empty if it has none"""
    unit: str = "nats per predicted token"
    """unit of the loss"""
    reads_words: bool = False
    """whether it learned only from the store's words, not from its targets"""


def export_student(model: Student, directory: Path, objective: Objective, store: Store, lineage: dict) -> None:
    """Write a student into an existing directory.

    objective  an Objective, which knows what the outputs are
    lineage    content of the card: settings, step, tokens, flops (None: unknown), held_out, baseline (dicts of JSON
               values)
    """
    stock = stock_model(model, objective)
    with quiet_transformers():
        (stock or model.encoder).save_pretrained(directory)
    for head, (columns, of) in enumerate(objective.heads(store), 1):
        save_lsp_head(model, columns, lsp_facts(of, positions_learned(lineage)), directory, head)
    write_card_and_lineage(
        directory,
        _card_text(objective, model.encoder, stock is not None, lineage),
        store,
        {"objective": objective.name} | lineage,
        objective.other_stores,
    )


def positions_learned(lineage: dict) -> str:
    """Which tokens a student was trained to predict: `masked` or `all`. Settings name it only if it is `all`."""
    return lineage.get("settings", {}).get("positions", "masked")


OTHER_OUTPUT = "Nothing was changed. Give another --output."


def is_export_file(name: str) -> bool:
    """Whether an export has files of this name, relative to its directory."""
    return "/" not in name and any(fnmatch(name, pattern) for pattern in EXPORT_FILES)


def check_export_place(directory: Path, remedy: str = OTHER_OUTPUT) -> None:
    """Raises RunError, ending with the remedy, if an export written there would replace anything but an export."""
    if not directory.exists():
        return
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if (names or not directory.is_dir()) and not (directory / LINEAGE_FILE).is_file():
        raise RunError(f"{directory} is in use and holds no export. {remedy}")
    if foreign := [name for name in names if not is_export_file(name)]:
        raise RunError(f"{directory} holds what no export writes: {', '.join(foreign)}. {remedy}")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn any library's error about writing, such as that of a full disk, into a WriteError or PlaceError."""
    try:
        with refuse_what_is_in_the_way():
            yield
    except PlaceError:
        raise
    except (OSError, SafetensorError) as error:  # save_pretrained raises SafetensorError on a full disk
        raise WriteError(
            f"{directory} could not be written: {error}. Nothing was changed. {remedy_for(error)}, and run the same"
            f" command."
        ) from error


def write_card_and_lineage(
    directory: Path, text: CardText, store: Store, lineage: dict, other_stores: Sequence[Store] = ()
) -> None:
    """Write tokenizer, code (`write_code`), lineage.json and model card of an export.

    other_stores  of the same plan, whose targets were learned together with those of `store`
    Raises  StoreError when the store's tokenizer is not the one that its text was encoded with
    """
    learned = lineage.get("student", lineage)  # a probe's student; one that was trained further may have learned before
    facts = learned.get("settings", {}) | {"continued_from": learned.get("continued_from")}
    segments = any(facts.get(name) for name in ("segments", "continue_from", "continued_from"))
    write_files(directory, as_trained(store.read_tokenizer(), store.max_length, segments))
    write_code(directory)
    plan = {"windowing": store.plan.windowing, "corpus": store.plan.corpus}
    first, *others = [
        {"target": one.target_id, "plan": one.plan_id, "settings": one.settings} | _totals(one)
        for one in (store, *other_stores)
    ]
    lineage = lineage | {"store": first | plan} | ({"other_stores": others} if others else {})
    (directory / LINEAGE_FILE).write_bytes(utf8(_json(lineage) + "\n"))
    card = _card(text, lineage, store.max_length, (directory / CODE_FILE).is_file())
    (directory / "README.md").write_text(card, encoding="utf-8")


def as_trained(files: Mapping[str, bytes], length: int, segments: bool) -> dict[str, bytes]:
    """A tokenizer's files, name to bytes, whose output the student was trained on.

    length    where texts are cut if asked to cut: later positions were never trained
    segments  whether the output has `token_type_ids`; otherwise the second segment was never trained, or does not exist
    """
    if (name := "tokenizer_config.json") not in files:
        return dict(files)
    values = json.loads(files[name]) | {"model_max_length": length}
    if not segments:
        values["model_input_names"] = ["input_ids", "attention_mask"]
    return {**files, name: utf8(json.dumps(values, indent=2, ensure_ascii=False) + "\n")}


def write_code(directory: Path) -> None:
    """Write the code that transformers runs into an export with LSPs or a probe, and name it in its config.json.

    No other code is written or named. If [MASK] enters the encoder at a later layer, there is no code at all, because
    transformers would let [MASK] enter at layer 0.
    """
    config_file = directory / "config.json"
    if not config_file.is_file():
        return
    config_file.write_bytes(without_code(config_file.read_bytes(), config_file))
    described = json.loads(config_file.read_bytes())
    held = {"AutoModel": HEAD_FILE, "AutoModelForMaskedLM": PROBE_FILE}
    loads = {name: AUTO_MAP[name] for name, file in held.items() if (directory / file).is_file()}
    if loads and described.get("mask_later") is None:
        write_files(directory, {CODE_FILE: Path(modeling_mlsm.__file__).read_bytes()})
        described |= {"auto_map": loads}
        config_file.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@lru_cache(maxsize=8)  # each kept checkpoint needs it, and it takes seconds for a large store
def _totals(store: Store) -> dict:
    """What was encoded, special tokens included; of distributions also the average probability mass per coded token
    that the store kept, and that top-n dropped; each a fraction of 1."""
    report = store.report()
    encoded = {"encoded": {"tokens": report["tokens"], "documents": report["documents"]}}
    kept = report.get("mass_kept")
    return encoded if kept is None else encoded | {"tail": {"mass_kept": kept, "mass_dropped": 1 - kept}}


def _card_text(objective, encoder, stock: bool, lineage: dict) -> CardText:
    family = encoder.config.model_type
    continued = lineage.get("continued_from", lineage["settings"].get("continue_from"))
    layer, positions = mask_later_of(encoder.config), positions_learned(lineage)
    learns = objective.learns
    if positions == "all":
        learns = learns.replace("masked tokens", "all tokens of unmasked text")
    start = "from scratch" if continued is None else f"further, from {code_span(without_directories(continued))},"
    return CardText(
        title=f"{family} encoder pre-trained with {objective.name.upper()}",
        made=f"Trained {start} by {learns}.",
        loading="\n\n".join([_loading(objective, stock, encoder.config)] + [mask_later_note(layer)] * (layer > 0)),
        tags=[objective.name, "masked-latent-semantic-modeling"],
        fills_masks=stock and layer == 0 and positions == "masked",
        in_transformers=lsps_in_transformers(positions),
        unit=objective.unit,
        reads_words="ids" in objective.kinds,
    )


def lsps_in_transformers(positions: str) -> str:
    """The section of a card on the LSPs in plain transformers, of a student trained at `positions`."""
    read = {
        "masked": "Each token is masked in turn, and predicted from the others",
        "all": "The text is read as it is, as in training",
    }
    return _LSPS_IN_TRANSFORMERS.replace("READ_SO", read[positions])


def _loading(objective, stock: bool, config) -> str:
    has_pooler, family = bool(without_pooler(config)), config.model_type
    parts = [auto_loading("AutoModelForMaskedLM") if stock else auto_loading("AutoModel", has_pooler)]
    if stock:
        parts.append("`AutoModel` loads only the encoder." + f" {POOLER}." * has_pooler)
    elif objective.token_columns is not None:
        parts.append(f"The masked-LM head is not exported: no {family} head is known here that computes the same.")
    if objective.lsp_columns is not None:
        parts.append(LSP_LOADING)
    if objective.other_stores:
        parts.append(
            "These are the LSPs of the first store. Those of the second have a head of their own,"
            " `lsp_head_2.safetensors`, which `mlsm.LspModel.from_pretrained(PATH, head=2)` loads, and so on."
        )
    return "\n\n".join(parts)


POOLER = "transformers lists `pooler.dense` as MISSING: students have none, and hidden states do not depend on it"


def auto_loading(auto_class: str, adds_pooler: bool = False, runs_code: bool = False) -> str:
    """The lines that load an export with one of transformers' classes.

    adds_pooler  whether this class adds a pooler, which students do not have
    runs_code    whether the class is defined in the export's code
    """
    trusting = ", trust_remote_code=True" * runs_code
    return (
        f"```python\nfrom transformers import {auto_class}, AutoTokenizer\n"
        f"model, tokenizer = {auto_class}.from_pretrained(PATH{trusting}), AutoTokenizer.from_pretrained(PATH)\n"
        + f"# {POOLER}\n" * adds_pooler
        + "```"
    )


def mask_later_note(layer: int) -> str:
    """The paragraph of a card about an encoder that [MASK] enters at a later layer."""
    return (
        f"[MASK] entered the encoder at layer {layer} in training (`mask_later` in `config.json`), and does so in"
        f" `LspModel`, probes and `evaluate-blimp`. transformers lets it enter at layer 0, so its predictions for"
        f" [MASK] differ from what was learned. Text without [MASK], as in fine-tuning, is read as in training."
    )


LSP_LOADING = """\
Distributions over the latent semantic properties of text; this needs the package `mlsm`:

```python
import mlsm
lsps, = mlsm.LspModel.from_pretrained(PATH).lsp(["The bank raised its rates."])
lsps.tokens, lsps.top(5)
```

`lsp_head.safetensors` maps the last hidden
state of a token to LSP logits: `norm(activation(dense(h))) @ output.weight.T + output.bias`, with the activation
and norm epsilon of the encoder's config."""

_SENTENCES = """\
With `sentence-transformers`, a sentence's vector is the mean of its hidden states. They were not trained for that:
compare, or train further, before you rely on it. Texts are cut to LENGTH tokens, the length of training
(`pipeline("feature-extraction")`: pass `truncation=True`). The mean includes the special tokens at both ends; vectors
are not normalised.

```python
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(PATH)
```"""


_WORDS_READ = """\
## The store that was read

The student read only its words. It did not learn the targets that the store may contain, nor from the teacher that is
named here."""


def loading_code(directory: Path) -> str:
    """The lines of an export's card that load it, with PATH replaced by its directory; empty if the card has none."""
    card = directory / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    section = text.partition("\n## Loading\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return re.sub(r"\bPATH\b", lambda _: repr(str(directory)), "\n".join(blocks))


def _card(text: CardText, lineage: dict, length: int, has_code: bool) -> str:
    data = _metadata(text, lineage)
    lineage = without_directories(json.loads(_json(lineage)))
    store, rest = lineage["store"], {name: value for name, value in lineage.items() if name not in _SHOWN}
    spent = {
        "optimiser steps": lineage["step"],
        "real tokens": lineage["tokens"],
        "floating-point operations": lineage["flops"] and f"{lineage['flops']:.3g}",
    }
    spent_on = ", ".join(f"{markdown_text(amount)} {what}" for what, amount in spent.items() if amount is not None)
    sections = [
        f"---\n{printable(data.to_yaml())}\n---",
        f"# {markdown_text(text.title)}\n\n{text.made}",
        f"## Loading\n\n{text.loading}",
        *[f"## With transformers only\n\n{text.in_transformers}"] * (has_code and text.in_transformers != ""),
        f"## Sentences\n\n{_SENTENCES.replace('LENGTH', str(length))}",
        f"## Held-out text\n\n{_figures(lineage, text.unit)}",
        f"## How it was made\n\n{spent_on + '. ' if spent_on else ''}Settings:\n\n{_block(_settings_of(lineage))}",
        f"{_WORDS_READ if text.reads_words else '## Where the targets come from'}\n\n{_targets(store)}",
        f"The store's settings:\n\n{_block(store['settings'])}",
        f"{store['encoded']['tokens']:,} tokens of {store['encoded']['documents']:,} documents were encoded. The whole"
        " corpus, and the windows:\n\n" + _block({"corpus": _short(store["corpus"]), "windowing": store["windowing"]}),
    ]
    for number, other in enumerate(lineage.get("other_stores", ()), 2):
        sections.append(
            f"## Store {number}\n\nTargets of the same tokens, learned at the same time; figures and the LSP head with"
            f" this number belong to them.\n\n{_targets(other)}\n\nIts settings:\n\n{_block(other['settings'])}"
        )
    if rest:
        sections.append(f"## Earlier training\n\n{_block(rest)}")
    return "\n\n".join(sections) + "\n"


def _settings_of(lineage):
    """The settings that a card shows: with usual values and the libraries of products, and without those of masks if
    none is drawn."""
    without = OF_MASKS if positions_learned(lineage) == "all" else ()
    usual = {name: UNNAMED[name] for name in _OF_EVERY_RUN}
    settings = {name: value for name, value in (usual | lineage["settings"]).items() if name not in without}
    return settings | ({"products": lineage["products"]} if "products" in lineage else {})


def _short(corpus):
    """The counts of a corpus with those of only a few files."""
    files = corpus.get("files")
    if not isinstance(files, dict) or len(files) <= LISTED_FILES:
        return corpus
    listed = {name: files[name] for name in list(files)[:LISTED_FILES]}
    return corpus | {"files": listed, "other_files": len(files) - LISTED_FILES}


def _metadata(text: CardText, lineage: dict) -> ModelCardData:
    """The metadata for the Hub. The licence must come from the user (export-student --license): it depends on the text
    and the teacher, whose licences a store does not hold. The language is only known for the bundled text."""
    task = "fill-mask" if text.fills_masks else "feature-extraction"
    files = lineage["store"]["corpus"].get("files")
    names = files if isinstance(files, dict) else ()
    datasets = list(dict.fromkeys(found[1] for name in names if (found := _DATASET.match(name))))
    is_bundled = [Path(name).name for name in names] == [_BUNDLED_TEXT]
    results = [
        EvalResult(
            task_type=task,
            task_name=f"prediction of {positions_learned(lineage)} tokens",
            dataset_type=datasets[0] if datasets else "text",
            dataset_name="held-out documents of the corpus",
            dataset_split="held_out",
            metric_type=name,
            metric_name=f"held-out {name}" + f", {text.unit}" * (name == "loss"),
            metric_value=value,
        )
        for name, value in (lineage["held_out"] or {}).items()
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=text.tags,
        language="en" if is_bundled else None,
        base_model=_base_models(lineage, text.reads_words) or None,
        datasets=datasets or None,
        model_name=text.title,
        eval_results=results or None,
    )


def _base_models(lineage: dict, reads_words: bool) -> list[str]:
    """The Hub names of the model whose training was continued, or else of the teachers."""
    start = lineage.get("continued_from") or lineage.get("student", {}).get("name")
    stores = [] if reads_words else [lineage["store"], *lineage.get("other_stores", ())]
    sources = [start] if start else [store["settings"].get("teacher_name") for store in stores]
    return list(dict.fromkeys(found for source in sources if source and (found := _name_on_hub(source))))


def _name_on_hub(source: str) -> str | None:
    """OWNER/NAME or NAME of a model on the Hub; None for a local model or a name that may be a directory's."""
    if not re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", source):
        return hub_id(source)
    is_cached = isinstance(try_to_load_from_cache(source, "config.json"), str)
    return source if is_cached or ("/" in source and not Path(source).parent.exists()) else None


_SHOWN = {  # settings that the card shows elsewhere
    "settings",
    "continued_from",
    "step",
    "tokens",
    "flops",
    "held_out",
    "held_out_step",
    "baseline",
    "store",
    "other_stores",
    "objective",
    "products",
}


def _figures(lineage: dict, unit: str) -> str:
    if not lineage["held_out"]:
        return "None: the store has no held-out windows, or none was evaluated."
    baseline = lineage["baseline"]
    columns, header = [""], f"| figure (loss: {unit}) | student | constant prediction |"
    if "loss_by_position" in baseline:
        columns, header = ["", "_by_position"], header + " constant at each position |"
    elif "loss_by_type" in baseline:
        columns, header = ["", "_by_type"], header + " constant for each token id |"
    cells = []
    for name, value in lineage["held_out"].items():
        references = [baseline.get(name + column) for column in columns]
        shown = ["" if reference is None else f"{reference:.4f}" for reference in references]
        cells.append([code_span(name), f"{value:.4f}", *shown])
    rows = [f"| {' | '.join(row)} |" for row in cells]
    table = "\n".join([header, "|---" * (2 + len(columns)) + "|", *rows])
    measured = lineage.get("held_out_step", lineage["step"])
    return (
        table if measured == lineage["step"] else f"Measured after step {measured:,}, the last evaluation:\n\n{table}"
    )


def _targets(store: dict) -> str:
    settings = store["settings"]
    rows = [("store: target, plan", f"{code_span(store['target'])}, {code_span(store['plan'])}")]
    rows += [(name, code_span(settings[key])) for key, name in _TARGET_SETTINGS.items() if key in settings]
    if "tail" in store:
        rows.append(("mean mass that top-n dropped", f"{store['tail']['mass_dropped']:.2%}"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _block(value) -> str:
    return f"```json\n{printable(_json(value))}\n```"  # no line of JSON can begin with a fence


def _json(value) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str, ensure_ascii=False)

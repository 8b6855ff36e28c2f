"""The command line: verb to function. The only place that prints and exits.

    python cli.py encode-lsp --layer 10
    python cli.py train-student

Settings are the dataclasses of pipeline/config.py and student/config.py: a recipe gives the defaults,
flags win. Exit codes: 0 done or already finished, 1 a fault of this program, 2 bad input or usage, 3 a
store or shard that is damaged or unfinished, 4 training stopped by itself, 5 encoded but for documents in
quarantine, 74 a file could not be written or workers are gone, 129 its terminal was closed (SIGHUP), 130 interrupted
(Ctrl-C), 143 terminated (SIGTERM). A display that goes away changes no exit code (common/streams.py).
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import logging
import os
import re
import signal
import sys
import time
import warnings
from typing import NamedTuple

from common.errors import EXIT_INPUT, EXIT_QUARANTINE, EXIT_STORE, EXIT_WRITE, PeerError, exit_code
from common.invocation import program
from common.settings import convert_field, flag_of
from common.streams import guard_standard_streams, loss
from common.text import printable, printable_values, redacted
from recipes.reading import DEMONSTRATION, names_of, recipe_settings, recipe_to_keep
from terminal.progress import Progress

OWN_MATERIAL = {"corpus", "teacher", "tokenizer", "hidden", "dictionary"}
TRAINING = ("train-student", "train-probe")
CHOOSING = (*TRAINING, "export-student", "show-lsp", "derive-shards", "verify-shards", "show-shards")
OTHER_NAMES = {    # of settings, as transformers, sentence-transformers and others have them
    "learning_rate": ("lr",), "peak_lr": ("lr",), "batch_size": ("batch_windows", "batch"),
    "per_device_train_batch_size": ("micro_batch", "batch"), "gradient_accumulation_steps": ("batch_windows",),
    "num_train_epochs": ("epochs",), "num_epochs": ("epochs",), "steps": ("max_steps",), "num_steps": ("max_steps",),
    "warmup_ratio": ("warmup",), "warmup_steps": ("warmup",), "max_grad_norm": ("grad_clip",),
    "mlm_probability": ("mask_rate",), "masking_rate": ("mask_rate",), "max_seq_length": ("max_length",),
    "sequence_length": ("max_length",), "model": ("encoder", "teacher", "models"), "student_model": ("encoder",),
    "model_name_or_path": ("encoder", "teacher", "models"), "output_dir": ("output",), "data": ("corpus", "store"),
    "dataset": ("corpus", "store"), "train_file": ("corpus",), "lambda": ("lam",), "alpha": ("lam",),
    "n_components": ("k",), "tol": ("tolerance",), "fp16": ("dtype",), "bf16": ("dtype",),
}  # fmt: skip


def is_follower():
    """Whether another process of a torchrun or `accelerate launch` writes and speaks for this one."""
    return int(os.environ.get("RANK", 0)) > 0


class Verb(NamedTuple):
    """One command: what it says of itself, its settings class, its function, what prints the result, and whether
    its settings come from recipes."""

    summary: str
    settings: str
    function: str
    show: str
    recipes: bool = True


VERBS = {
    "encode-lsp": Verb(
        "text -> teacher -> sparse codes -> LSP shards",
        "pipeline.config:EncodeConfig",
        "pipeline.encode:encode_lsp",
        "terminal.encoding:encoding",
    ),
    "train-student": Verb(
        "LSP shards -> a trained encoder",
        "student.config:StudentConfig",
        "cli:train_student",
        "terminal.training:training",
    ),
    "train-probe": Verb(
        "words from the LSPs of a frozen student: a linear probe, for BLiMP",
        "student.probe_config:ProbeConfig",
        "cli:train_probe",
        "terminal.training:probing",
    ),
    "learn-dictionary": Verb(
        "the LSP atoms alone, of a teacher or a .npy file (encode-lsp learns them when needed)",
        "pipeline.config:LearnConfig",
        "pipeline.learn:learn_dictionary",
        "terminal.dictionaries:dictionaries",
    ),
    "train-tokenizer": Verb(
        "train a cased WordPiece tokenizer on a corpus",
        "pipeline.config:TokenizerConfig",
        "pipeline.tokenizer:run",
        "terminal.tables:paths",
    ),
    "encode-ids": Verb(
        "text -> shards of token ids only, for the mlm objective",
        "pipeline.config:EncodeIdsConfig",
        "pipeline.encode:encode_ids",
        "terminal.encoding:encoding",
    ),
    "encode-logits": Verb(
        "text -> teacher -> its most probable words at every token, for distillation",
        "pipeline.config:EncodeLogitsConfig",
        "pipeline.encode:encode_logits",
        "terminal.encoding:encoding",
    ),
    "choose-layer": Verb(
        "which layer to take: word-sense disambiguation with every layer's LSPs",
        "evaluation.word_senses.config:ChooseLayerConfig",
        "evaluation.word_senses.choose_layer:choose_layer",
        "terminal.layers:layers",
    ),
    "sweep": Verb(
        "a student for every layer, or every k, from one pass of the teacher: --recipe sweep-layers | sweep-k",
        "evaluation.sweeps.config:SweepConfig",
        "evaluation.sweeps.sweep:sweep",
        "terminal.sweeps:swept",
    ),
    "export-student": Verb(
        "a checkpoint of a run as files that transformers loads; pushes it to the Hub",
        "student.export_config:ExportConfig",
        "student.export_run:export_run",
        "terminal.training:exported",
        recipes=False,
    ),
    "evaluate-blimp": Verb(
        "which of two sentences do masked language models find likelier? BLiMP's 67 paradigms",
        "evaluation.blimp.config:BlimpConfig",
        "evaluation.blimp.evaluate:evaluate",
        "terminal.blimp:blimp",
        recipes=False,
    ),
    "finetune": Verb(
        "models on ten tasks, with paired heads: one record a task and seed",
        "evaluation.finetuning.config:FinetuneConfig",
        "evaluation.finetuning.suite:finetune",
        "terminal.finetuning:summary",
        recipes=False,
    ),
    "compare": Verb(
        "models by their evaluations: averages, Wilcoxon's test, win rates, the paper's figures",
        "evaluation.comparison.config:CompareConfig",
        "evaluation.comparison.report:compare",
        "terminal.comparison:comparison",
        recipes=False,
    ),
    "show-lsp": Verb(
        "what LSPs stand for: tokens, contexts, neighbours, senses; of a word, a text; as pages to browse",
        "evaluation.lsps.config:LspConfig",
        "cli:show_lsp",
        "terminal.lsps:summary",
        recipes=False,
    ),
    "count-flops": Verb(
        "operations of pre-training: the paper's table 3, what it leaves out, offline against R reuses",
        "evaluation.flops.config:CountFlopsConfig",
        "evaluation.flops.count:count_flops",
        "terminal.flops:counted",
        recipes=False,
    ),
    "derive-shards": Verb(
        "a store with fewer entries a token from a stored one, without the teacher",
        "shards.config:DeriveConfig",
        "cli:derive_shards",
        "terminal.encoding:encoding",
        recipes=False,
    ),
    "verify-shards": Verb(
        "is a store whole? names what is damaged and what encodes it again",
        "shards.config:VerifyConfig",
        "cli:verify_shards",
        "terminal.stores:verification",
        recipes=False,
    ),
    "show-shards": Verb(
        "what a store holds: statistics, a document with its targets, the settings of two stores",
        "shards.config:ShowConfig",
        "cli:show_shards",
        "terminal.stores:view",
        recipes=False,
    ),
    "clean": Verb(
        "remove what killed processes left behind",
        "shards.config:CleanConfig",
        "cli:clean",
        "terminal.stores:cleaning",
        recipes=False,
    ),
}

COMMON = """\
  --json               print the result as JSON
  --print-config       print the settings as YAML and stop
  --debug              show the whole traceback of an error"""
RECIPES = "  --recipe NAME|FILE   defaults from recipes/NAME.yaml or a YAML file; flags win"


PLACES = {"store", "run", "export"}  # in results: paths, which summaries open
SAME_REQUEST_SECONDS = 1.0  # a closed terminal's kernel and shell both send SIGHUP


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end the work in flight exactly as Ctrl-C does."""

    def __init__(self, number):
        super().__init__()
        self.number = number


def _end_on_signals():
    """Let SIGTERM and SIGHUP raise Terminated; under nohup, which has SIGHUP ignored, it stays ignored."""
    noted = []

    def terminate(number, _):
        if not noted or time.monotonic() - noted[0] >= SAME_REQUEST_SECONDS:
            noted[:] = [time.monotonic()]
            raise Terminated(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, terminate)


def main(argv=None):
    """Run one command and exit with its code."""
    guard_standard_streams()
    _end_on_signals()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = _take_flag(argv, "--debug")
    try:
        code = run(argv)
    except KeyboardInterrupt as stop:
        kept = "interrupted; finished units and checkpoints are kept. Run the same command to go on."
        code = 128 + getattr(stop, "number", signal.SIGINT)  # as a shell counts them
        if not is_follower():
            _complain(str(stop) or kept, code)
    except Exception as error:
        if debug:
            raise
        code = exit_code(error)
        if not (is_follower() and _is_told(error, code)):
            _complain(_one_line(error), code)
    sys.stdout.flush()
    if lost := loss(sys.stdout):
        message = f"standard output could not be written ({lost.strerror}): what was printed is not whole"
        code = _complain(message, EXIT_WRITE if code == 0 and "--json" in argv else code)
    sys.exit(code)


def run(argv):
    """Parse, run, show. Returns the exit code; raises what the command raises."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"mlsm {version('mlsm')}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in VERBS:
        return _complain(f"no command {name!r}. There are: {', '.join(VERBS)}", EXIT_INPUT)
    return _run_verb(name, VERBS[name], rest)


def _run_verb(name, verb, argv):
    recipe = _take_value(argv, "--recipe") if verb.recipes else None
    print_config = _take_flag(argv, "--print-config")
    as_json = "json" not in names_of(_load(verb.settings)) and _take_flag(argv, "--json")
    _quiet_libraries(downloads=not name.startswith("train-"))
    parsed = parse(name, verb, argv, recipe)
    settings = parsed.settings
    if print_config:
        print(redacted(_as_yaml(name, _settled(name, parsed))), end="")
        return 0
    settings, choice = (settings, parsed.choice) if parsed.choice else _choose(name, settings)
    with Progress(open(os.devnull, "w") if is_follower() else sys.stderr) as progress:
        if verb.recipes:
            progress.note(f"{name}, {parsed.why}" if parsed.why else name)
        if choice is not None:
            _announce(choice, progress, as_json or getattr(settings, "json", False))
        with _passing_on_notes(progress):
            arguments = (settings, progress, parsed.origins) if name in TRAINING else (settings, progress)
            result = _load(verb.function)(*arguments)
    if not is_follower():
        _show(verb, result, settings, as_json or getattr(settings, "json", False))
    return _exit_code_of_result(name, result)


def _plain(value):
    """What JSON has no type for: paths, and NumPy's numbers."""
    return value.item() if hasattr(value, "item") else str(value)


def _show(verb, result, settings, as_json):
    """Print a result. Text of others in it cannot act on the terminal, nor add lines that look like ours.

    Work that is done stays done where its summary fails: that is a warning then, and no error.
    """
    if as_json:
        print(json.dumps(result, indent=1, default=_plain))
        return
    try:
        print(printable(redacted(_load(verb.show)(printable_values(result, PLACES), settings))))
    except Exception as error:
        if not verb.recipes:
            raise
        _warn(f"the work is finished, but its summary cannot be shown: {_one_line(error)}")


def _exit_code_of_result(name, result):
    if name.startswith("encode-"):
        return _complain_of_quarantine(result, "Run the same command with --retry-quarantine to try them again")
    if name == "sweep":
        advice = "encode-lsp with these settings and --retry-quarantine tries them again"
        return _complain_of_quarantine(result.get("rows", []), advice)
    return EXIT_STORE if "damaged" in result and result["damaged"] else 0


def train_student(settings, progress, origins):
    """Train on the store of the settings."""
    from student.trainer import train

    return train(settings, progress, origins=origins)


def train_probe(settings, progress, origins):
    """Train a probe of the student of the settings."""
    from student.probe import train_probe

    return train_probe(settings, progress, origins)


def verify_shards(settings, progress):
    """Report on a store."""
    from shards.verify import verify

    return verify(settings.store, settings.full, settings.repair, progress=progress)


def show_shards(settings, progress):
    """One of the views of a store."""
    from evaluation.inspection import show

    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return show(settings.store, **{name: value for name, value in values.items() if name not in ("store", "json")})


def show_lsp(settings, progress):
    """One of the views of LSPs."""
    from evaluation.lsps.show import show

    return show(settings, progress)


def derive_shards(settings, progress):
    """Make a store with a smaller n."""
    from shards.derive import derive

    return [derive(settings.store, settings.top_n, settings.output, progress)]


def clean(settings, progress):
    """Remove left-overs."""
    from shards.clean import clean

    return clean(settings.path, settings.dry_run, settings.all)


def _choose(name, settings):
    """The settings with what the command works on where they name nothing, and the line that says what was chosen.

    That is the newest finished store of a kind that fits; the newest student for a probe; for an export the newest run.
    The line is None where nothing had to be chosen.
    Raises  StoreError, RunError where there is nothing to choose from
    """
    what = {"train-probe": "student", "export-student": "run"}.get(name, "store")
    kinds = {"show-lsp": ("lsp",), "derive-shards": ("lsp", "logits")}.get(name, ("lsp", "ids", "logits"))
    if name not in CHOOSING or getattr(settings, what) is not None:
        return settings, None
    if name == "train-probe":
        from student.probe import finished_students

        found = finished_students()
    elif name == "export-student":
        from student.export_run import runs_with_checkpoints

        found = runs_with_checkpoints()
    else:
        from shards.reader import finished_stores

        if name == "train-student":
            from student.objectives import OBJECTIVES

            kinds = OBJECTIVES[settings.objective].kinds
        found = finished_stores("runs/stores", kinds)
    which = "one" if what == "run" else "finished one"
    why = f"the only {which}" if len(found) == 1 else f"the newest {which} of {len(found)}; name another to take that"
    chosen = found[0] if what == "run" else str(found[0])
    return dataclasses.replace(settings, **{what: chosen}), f"{what} {found[0]} ({why})"


def _announce(choice, progress, as_json):
    """Say what was chosen: on standard output, with the result, but beside it where that is JSON."""
    if as_json:
        progress.note(choice)
    elif not is_follower():
        print(printable(redacted(choice)), flush=True)


def _overview():
    groups = [[f"  {name:<18} {verb.summary}" for name, verb in VERBS.items() if verb.recipes is wanted]
              for wanted in (True, False)]
    verbs, tools = map("\n".join, groups)
    return (
        f"usage: mlsm COMMAND [FLAGS]      (or: python cli.py COMMAND [FLAGS])\n\n"
        f"Masked Latent Semantic Modeling in two stages: encode a corpus once, train from it many times.\n\n"
        f"{verbs}\n\n{tools}\n\nEvery command has --help, and:\n{COMMON}\n\n"
        f"Those of the first group also:\n{RECIPES}\n\n"
        f"Running a command again resumes it, or says that it is finished."
    )


# -- settings ---------------------------------------------------------------------------------------------


class Parsed(NamedTuple):
    """What a command line says."""

    settings: object
    recipe: str | None
    """the recipe that says something of the command"""
    why: str
    """the same with the reason why it applies, for people; empty without a recipe"""
    origins: dict
    """setting -> "flag" or the recipe that it is from; a setting that is not named has its default"""
    store: object = None
    """the open store that is trained on, where it could be found"""
    choice: str | None = None
    """what to say where that store was not named but chosen"""


def parse_settings(name, verb, argv, recipe=None):
    """(settings, name of the recipe or None): the first parts of `parse`."""
    return parse(name, verb, argv, recipe)[:2]


def parse(name, verb, argv, recipe=None):
    """Recipe and flags to settings; flags win over the recipe.

    A recipe applies that is asked for. Else training on a store starts from the recipe that made it, and encoding from
    the demonstration's, `quickstart`, unless --corpus, --teacher, --tokenizer, --dictionary or --hidden name other
    material: real text must not be cut to the demonstration's two million tokens.
    Returns  Parsed
    """
    settings_class, flags, store, choice = _load(verb.settings), _flags_in(argv), None, None
    is_asked_for, why = recipe is not None, ""
    if name in TRAINING and not is_asked_for:
        argv, store, choice = _with_its_store(name, verb, argv, settings_class)
        recipe = _recipe_of(name, argv, store, flags)
        why = f"recipe {recipe}" + (", which made the store" if store else " (the demonstration's settings)")
    elif recipe is None and verb.recipes and not OWN_MATERIAL & flags:
        recipe = DEMONSTRATION
        why = f"recipe {recipe} (the demonstration's settings; --recipe NAME|FILE for others)"
    elif is_asked_for:
        why = f"recipe {recipe}"
    values = recipe_settings(recipe, name, settings_class, is_asked_for) if recipe else {}
    if name in TRAINING:
        from student.resolve import without_rivals

        values = without_rivals(values, flags)
    settings = _with_flags(name, verb, argv, settings_class, values)
    recipe = recipe if values or is_asked_for else None
    if hasattr(settings_class, "recipe"):
        object.__setattr__(settings, "recipe", recipe_to_keep(recipe))
    origins = dict.fromkeys(values, why) | dict.fromkeys(flags & set(names_of(settings)), "flag")
    return Parsed(settings, recipe, why if recipe else "", origins, store, choice)


def _with_its_store(name, verb, argv, settings_class):
    """The flags, with the store that they mean where they name none; that store, open; what to say of the choice."""
    settings = _parse_flags(name, verb, argv, settings_class())
    store, choice = _store_of(name, settings)
    return [*argv, "--store", str(store.path)] if choice else argv, store, choice


def _store_of(name, settings):
    """The store that settings of a training mean, open, and what to say of it where it was chosen and not named.

    Nothing is chosen, and there is no store, where none can be read: the command itself says why.
    """
    from common.errors import ShardError, StoreError
    from shards.reader import Store

    choice = None
    try:
        if name == "train-probe":
            from student.probe import with_student_and_store

            settings = with_student_and_store(settings)
        else:
            settings, choice = _choose(name, settings)
        return Store.open(settings.store), choice
    except (StoreError, ShardError, ValueError, OSError):
        return None, None


def _recipe_of(name, argv, store, flags):
    """The recipe of a training that names none: the store's; without any store the demonstration's."""
    if store is None:
        return None if flags & {"store", "student", "continue_from"} else DEMONSTRATION
    from recipes.reading import recipe_of_store

    recipe = recipe_of_store(store, name)
    return None if recipe == DEMONSTRATION and "continue_from" in flags else recipe


def _settled(name, parsed):
    """The settings as --print-config shows them: of a training, with what follows from its store."""
    settings = parsed.settings
    store = (parsed.store or _store_of(name, settings)[0]) if name in TRAINING else None
    if store is None:
        return settings
    from student.encoders import own_dropout, unfitted_config
    from student.resolve import resolve

    settings = resolve(settings, store, parsed.origins).config
    if name == "train-student" and settings.dropout is None:
        settings = dataclasses.replace(settings, dropout=own_dropout(unfitted_config(settings, store)))
    return settings


def _flags_in(argv):
    """Names of the settings that flags are given for."""
    words = {arg[2:].partition("=")[0].replace("-", "_") for arg in argv if arg.startswith("--")}
    return words | {word.removeprefix("no_") for word in words}


def _with_flags(name, verb, argv, settings_class, values):
    """Flags over a recipe's values, with one check of the whole.

    Raises  ValueError on text of one's own without a teacher or tokenizer
    """
    names = set(names_of(settings_class))
    material = {"teacher", "tokenizer"} & names - values.keys() if "corpus" in names else set()
    default = settings_class(**values | dict.fromkeys(material if "corpus" in values else (), "bundled"))
    settings = _parse_flags(name, verb, argv, default)
    open_ones = material - _flags_in(argv)
    return dataclasses.replace(settings, **dict.fromkeys(open_ones)) if open_ones else settings


def _parse_flags(name, verb, argv, default):
    """Flags over the default settings; tyro's framed messages become the one line of our errors."""
    import tyro

    messages, settings_class = io.StringIO(), type(default)
    argv, without_effect = _without_hidden_flags(settings_class, argv)
    try:
        with contextlib.redirect_stderr(messages):
            settings = tyro.cli(
                _with_hidden_flags(settings_class),
                prog=f"{program()} {name}",
                args=argv,
                default=_copied(default, _with_hidden_flags(settings_class)),
                description=f"{verb.summary}\n\nAlso:\n{RECIPES + chr(10) + COMMON if verb.recipes else COMMON}",
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
        said = _message_of(messages.getvalue(), settings_class)
        raise ValueError(f"{said} All flags:  {program()} {name} --help") from None
    return _copied(settings, settings_class, **without_effect)


def _without_hidden_flags(settings_class, argv):
    """The command line without flags that have no effect, which tyro does not know; and their values."""
    rest, values = list(argv), {}
    for field in dataclasses.fields(settings_class):
        if field.name in getattr(settings_class, "without_effect", ()):
            given = _take_value(rest, flag_of(field))
            values |= {} if given is None else {field.name: convert_field(field, given, text=True)}
    return rest, values


@functools.cache
def _with_hidden_flags(settings_class):
    """The class for tyro: settings that have no effect are neither flags nor listed by --help."""
    if not (names := getattr(settings_class, "without_effect", ())):
        return settings_class
    import tyro

    hidden = [(field.name, tyro.conf.Suppress[field.type], dataclasses.field(default=None))
              for field in dataclasses.fields(settings_class) if field.name in names]  # fmt: skip
    return dataclasses.make_dataclass(settings_class.__name__, hidden, bases=(settings_class,), frozen=True,
                                      kw_only=True, namespace={"__doc__": settings_class.__doc__})  # fmt: skip


def _copied(settings, settings_class, **changes):
    """The same settings, but for the changes, as an instance of a class with the same fields."""
    if type(settings) is settings_class and not changes:
        return settings
    return settings_class(**{name: getattr(settings, name) for name in names_of(settings)} | changes)


def _message_of(framed, settings_class):
    """The message inside of tyro's frame, without its title, its parts on single flags and its hint."""
    lines = [line.strip("│ ") for line in framed.splitlines() if line.startswith("│")] or framed.splitlines()
    parts = " ".join(" ".join(lines).split())
    for part in ("─", "Argument helptext", "Perhaps you meant", "For full helptext"):
        parts = parts.partition(part)[0]
    parts = parts.strip().rstrip(".").removeprefix(f"Error parsing {settings_class.__name__}: ")
    guess = _other_name_of(parts, settings_class)
    if guess is None and (found := re.search(r"Perhaps you meant:? *[─ ]*(--[\w-]+)", " ".join(lines))):
        guess = found[1]
    return f"{parts}. Did you mean {guess}?" if guess else f"{parts}."


def _other_name_of(message, settings_class):
    """The flag that is meant by one that other programs have; None where it is none of these."""
    if (unknown := re.search(r"Unrecognized options: --([\w-]+)", message)) is None:
        return None
    ours = OTHER_NAMES.get(unknown[1].replace("-", "_"), ())
    known = [name for name in ours if name in names_of(settings_class)]
    return f"--{known[0].replace('_', '-')}" if known else None


def _as_yaml(name, settings):
    import yaml

    from pipeline.config import plain

    values, without_effect = plain(settings), getattr(settings, "without_effect", ())
    shown = {key: values[key] for key in values if key in names_of(settings) and key not in without_effect}
    return yaml.safe_dump({name: shown}, sort_keys=False)


def _take_flag(argv, flag):
    found = flag in argv
    while flag in argv:
        argv.remove(flag)
    return found


def _take_value(argv, flag):
    for i, arg in enumerate(argv):
        if arg == flag and i + 1 < len(argv):
            value = argv[i + 1]
            del argv[i : i + 2]
            return value
        if arg.startswith(flag + "="):
            del argv[i]
            return arg.split("=", 1)[1]
    return None


def _load(reference):
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _quiet_libraries(downloads):
    """Libraries speak through our errors; their chatter would bury the summary.

    downloads  whether the command may fetch a model, whose progress bar is wanted
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not downloads:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("default", UserWarning)
    if is_follower():
        warnings.simplefilter("ignore")
    warnings.showwarning = lambda message, *_: _warn(message)


def _warn(message):
    print(f"warning: {printable(redacted(message))}", file=sys.stderr)


@contextlib.contextmanager
def _passing_on_notes(progress):
    """What our packages log (a resume, a damaged checkpoint passed over) becomes a line that stays."""
    handler = logging.Handler()
    handler.emit = lambda record: progress.note(record.getMessage())
    loggers = [logging.getLogger(package) for package in ("evaluation", "pipeline", "shards", "student")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
            logger.removeHandler(handler)


# -- errors -----------------------------------------------------------------------------------------------


def _one_line(error):
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def _is_told(error, code):
    """Whether the first process of this machine tells a follower's error, too."""
    same_for_all = code in (EXIT_INPUT, EXIT_STORE) and int(os.environ.get("LOCAL_RANK", 0)) > 0
    return same_for_all or isinstance(error, PeerError)


def _complain_of_quarantine(reports, advice):
    """The exit code of an encoding: 5, and a line, when documents of the stores could not be coded."""
    count = sum(report.get("quarantined", 0) for report in reports)  # an estimate has none
    if not count:
        return 0
    stores = ", ".join(report["store"] for report in reports if report["quarantined"])
    return _complain(
        f"finished, but {count} documents could not be coded and carry no targets; the records in {stores}/units name "
        f"them and why. {advice}",
        EXIT_QUARANTINE,
    )


def _complain(message, code):
    print(f"mlsm: error: {printable(redacted(message), keep='')}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()

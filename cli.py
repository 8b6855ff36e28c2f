"""The command line: verb to function. The only place that prints and exits.

    python cli.py encode-lsp --layer 10
    python cli.py train-student

Settings are the dataclasses of pipeline/config.py and student/config.py: a recipe gives the defaults,
flags win. Exit codes: 0 done or already finished, 1 a fault of this program, 2 bad input or usage, 3 a
store or shard that is damaged or unfinished, 4 training stopped by itself, 5 encoded but for documents in
quarantine, 74 a file could not be written or workers are gone, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
"""

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import os
import re
import signal
import sys
import warnings
from typing import NamedTuple

from evaluation.progress import Progress
from recipes.reading import names_of, recipe_settings

OWN_MATERIAL = {"--corpus", "--teacher", "--tokenizer", "--hidden", "--student", "--continue-from"}
EXIT_FAULT, EXIT_INPUT, EXIT_STORE, EXIT_TRAINING, EXIT_QUARANTINE, EXIT_WRITE = 1, 2, 3, 4, 5, 74


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
        "evaluation.summaries:encoding",
    ),
    "train-student": Verb(
        "LSP shards -> a trained encoder",
        "student.config:StudentConfig",
        "cli:train_student",
        "evaluation.summaries:training",
    ),
    "train-probe": Verb(
        "words from the LSPs of a frozen student: a linear probe, for BLiMP",
        "student.probe_config:ProbeConfig",
        "student.probe:train_probe",
        "evaluation.summaries:probing",
    ),
    "learn-dictionary": Verb(
        "the LSP atoms alone, of a teacher or a .npy file (encode-lsp learns them when needed)",
        "pipeline.config:LearnConfig",
        "pipeline.learn:learn_dictionary",
        "evaluation.summaries:dictionaries",
    ),
    "train-tokenizer": Verb(
        "train a cased WordPiece tokenizer on a corpus",
        "pipeline.config:TokenizerConfig",
        "pipeline.tokenizer:run",
        "evaluation.summaries:paths",
    ),
    "encode-ids": Verb(
        "text -> shards of token ids only, for the mlm objective",
        "pipeline.config:EncodeIdsConfig",
        "pipeline.encode:encode_ids",
        "evaluation.summaries:encoding",
    ),
    "encode-logits": Verb(
        "text -> teacher -> its most probable words at every token, for distillation",
        "pipeline.config:EncodeLogitsConfig",
        "pipeline.encode:encode_logits",
        "evaluation.summaries:encoding",
    ),
    "choose-layer": Verb(
        "which layer to take: word-sense disambiguation with every layer's LSPs",
        "evaluation.word_senses.config:ChooseLayerConfig",
        "evaluation.word_senses.choose_layer:choose_layer",
        "evaluation.word_senses.report:layers",
    ),
    "sweep": Verb(
        "a student for every layer, or every k, from one pass of the teacher: --recipe sweep-layers | sweep-k",
        "evaluation.sweeps.config:SweepConfig",
        "evaluation.sweeps.sweep:sweep",
        "evaluation.sweeps.summary:swept",
    ),
    "export-student": Verb(
        "a checkpoint of a run as files that transformers loads; pushes it to the Hub",
        "student.export_config:ExportConfig",
        "student.export_run:export_run",
        "evaluation.summaries:exported",
        recipes=False,
    ),
    "evaluate-blimp": Verb(
        "which of two sentences do masked language models find likelier? BLiMP's 67 paradigms",
        "evaluation.blimp.config:BlimpConfig",
        "evaluation.blimp.evaluate:evaluate",
        "evaluation.blimp.summary:blimp",
        recipes=False,
    ),
    "finetune": Verb(
        "models on ten tasks, with paired heads: one record a task and seed",
        "evaluation.finetuning.config:FinetuneConfig",
        "evaluation.finetuning.suite:finetune",
        "evaluation.finetuning.summary:summary",
        recipes=False,
    ),
    "compare": Verb(
        "models by their evaluations: averages, Wilcoxon's test, win rates, the paper's figures",
        "evaluation.comparison.config:CompareConfig",
        "evaluation.comparison.report:compare",
        "evaluation.comparison.summary:comparison",
        recipes=False,
    ),
    "show-lsp": Verb(
        "what LSPs stand for: tokens, contexts, neighbours, senses; of a word, a text; as pages to browse",
        "evaluation.lsps.config:LspConfig",
        "cli:show_lsp",
        "evaluation.lsps.terminal:summary",
        recipes=False,
    ),
    "count-flops": Verb(
        "operations of pre-training: the paper's table 3, what it leaves out, offline against R reuses",
        "evaluation.flops.config:CountFlopsConfig",
        "evaluation.flops.count:count_flops",
        "evaluation.flops.summary:counted",
        recipes=False,
    ),
    "derive-shards": Verb(
        "a store with fewer entries a token from a stored one, without the teacher",
        "shards.config:DeriveConfig",
        "cli:derive_shards",
        "evaluation.summaries:encoding",
        recipes=False,
    ),
    "verify-shards": Verb(
        "is a store whole? names what is damaged and what encodes it again",
        "shards.config:VerifyConfig",
        "cli:verify_shards",
        "evaluation.store_summaries:verification",
        recipes=False,
    ),
    "show-shards": Verb(
        "what a store holds: statistics, a document with its targets, the settings of two stores",
        "shards.config:ShowConfig",
        "cli:show_shards",
        "evaluation.store_summaries:view",
        recipes=False,
    ),
    "clean": Verb(
        "remove what killed processes left behind",
        "shards.config:CleanConfig",
        "cli:clean",
        "evaluation.store_summaries:cleaning",
        recipes=False,
    ),
}

COMMON = "  --debug              show the whole traceback of an error"
RECIPES = """\
  --recipe NAME|FILE   defaults from recipes/NAME.yaml or a YAML file; flags win
  --print-config       print the settings as YAML and stop"""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the work in flight exactly as Ctrl-C does."""

    number = signal.SIGTERM


def _terminate(*_):
    raise Terminated


def main(argv=None):
    """Run one command and exit with its code."""
    signal.signal(signal.SIGTERM, _terminate)
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = _take_flag(argv, "--debug")
    try:
        code = run(argv)
    except KeyboardInterrupt as stop:
        kept = "interrupted; finished units and checkpoints are kept. Run the same command to go on."
        code = 128 + getattr(stop, "number", signal.SIGINT)  # as a shell counts them
        if not is_follower():
            _complain(str(stop) or kept, code)
    except BrokenPipeError:
        sys.stderr.close()
        code = EXIT_WRITE
    except Exception as error:
        if debug:
            raise
        code = _exit_code(error)
        if not (is_follower() and _is_told(error, code)):
            _complain(_one_line(error), code)
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
    print_config = verb.recipes and _take_flag(argv, "--print-config")
    given = recipe is not None
    settings, recipe = parse_settings(name, verb, argv, recipe)
    if print_config:
        print(_as_yaml(name, settings), end="")
        return 0
    _quiet_libraries(downloads=not name.startswith("train-"))
    with Progress(open(os.devnull, "w") if is_follower() else sys.stderr) as progress:
        if verb.recipes:
            implied = "" if given else " (the demonstration's settings; --recipe NAME|FILE for others)"
            progress.note(f"{name}, recipe {recipe}{implied}" if recipe else name)
        with _passing_on_notes(progress):
            result = _load(verb.function)(settings, progress)
    if not is_follower():
        print(json.dumps(result, indent=1) if getattr(settings, "json", False) else _load(verb.show)(result, settings))
    return _exit_code_of_result(name, result)


def _exit_code_of_result(name, result):
    if name.startswith("encode-"):
        return _complain_of_quarantine(result, "Run the same command with --retry-quarantine to try them again")
    if name == "sweep":
        advice = "encode-lsp with these settings and --retry-quarantine tries them again"
        return _complain_of_quarantine(result.get("rows", []), advice)
    return EXIT_STORE if "damaged" in result and result["damaged"] else 0


def train_student(settings, progress):
    """Train on the store of the settings, or on the newest finished one."""
    from student.objectives import OBJECTIVES
    from student.trainer import train

    return train(_with_store(settings, progress, OBJECTIVES[settings.objective].kinds), progress)


def verify_shards(settings, progress):
    """Report on a store."""
    from shards.verify import verify

    settings = _with_store(settings, progress)
    return verify(settings.store, settings.full, settings.repair, progress=progress)


def show_shards(settings, progress):
    """One of the views of a store."""
    from evaluation.inspection import show

    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    store = _with_store(settings, progress).store
    return show(store, **{name: value for name, value in values.items() if name not in ("store", "json")})


def show_lsp(settings, progress):
    """One of the views of LSPs."""
    from evaluation.lsps.show import show

    return show(_with_store(settings, progress, ("lsp",)), progress)


def derive_shards(settings, progress):
    """Make a store with a smaller n."""
    from shards.derive import derive

    settings = _with_store(settings, progress, ("lsp", "logits"))
    return [derive(settings.store, settings.top_n, settings.output, progress)]


def clean(settings, progress):
    """Remove left-overs."""
    from shards.clean import clean

    return clean(settings.path, settings.dry_run, settings.all)


def _with_store(settings, progress, kinds=("lsp", "ids", "logits")):
    """The settings with a store: the newest finished one of these kinds where they name none."""
    if settings.store is not None:
        return settings
    from shards.reader import newest_store

    found = newest_store("runs/stores", kinds)
    progress.note(f"store {found} (the newest finished one)")
    return dataclasses.replace(settings, store=str(found))


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


def parse_settings(name, verb, argv, recipe=None):
    """Recipe and flags to a settings object.

    Without --recipe the demonstration recipe `quickstart` applies, save when --corpus, --teacher,
    --tokenizer, --hidden, --student or --continue-from ask for other material: real text must not be cut to the
    demonstration's two million tokens, nor real weights be trained with its rates.
    Returns  (settings, name of the recipe, or None where none has said anything)
    """
    is_asked_for = recipe is not None
    if recipe is None and verb.recipes and not OWN_MATERIAL & {arg.split("=")[0] for arg in argv}:
        recipe = "quickstart"
    settings_class = _load(verb.settings)
    values = recipe_settings(recipe, name, settings_class, is_asked_for) if recipe else {}
    default = settings_class(**values)
    return _parse_flags(name, verb, argv, default), recipe if values or is_asked_for else None


def _parse_flags(name, verb, argv, default):
    """Flags over the default settings; tyro's framed messages become the one line of our errors."""
    import tyro

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                type(default),
                prog=f"mlsm {name}",
                args=argv,
                default=default,
                description=f"{verb.summary}\n\nAlso:\n{RECIPES + chr(10) + COMMON if verb.recipes else COMMON}",
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
        said = _message_of(messages.getvalue(), type(default).__name__)
        raise ValueError(f"{said} All flags:  mlsm {name} --help") from None


def _message_of(framed, settings_name):
    """The message inside of tyro's frame, without its title, its parts on single flags and its hint."""
    lines = [line.strip("│ ") for line in framed.splitlines() if line.startswith("│")] or framed.splitlines()
    parts = " ".join(" ".join(lines).split())
    for part in ("─", "Argument helptext", "Perhaps you meant", "For full helptext"):
        parts = parts.partition(part)[0]
    guess = re.search(r"Perhaps you meant:? *[─ ]*(--[\w-]+)", " ".join(lines))
    parts = parts.strip().rstrip(".").removeprefix(f"Error parsing {settings_name}: ")
    return f"{parts}. Did you mean {guess[1]}?" if guess else f"{parts}."


def _as_yaml(name, settings):
    import yaml

    from pipeline.config import plain

    values = plain(settings)
    return yaml.safe_dump({name: {key: values[key] for key in values if key in names_of(settings)}}, sort_keys=False)


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
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)


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


def _exit_code(error):
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"StoreError", "ShardError"}:
        return EXIT_STORE
    if "TrainingError" in kinds:
        return EXIT_TRAINING
    if isinstance(error, ValueError | FileNotFoundError):
        return EXIT_INPUT
    return EXIT_WRITE if isinstance(error, OSError) else EXIT_FAULT


def _one_line(error):
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def _is_told(error, code):
    """Whether the first process of this machine tells a follower's error, too."""
    same_for_all = code in (EXIT_INPUT, EXIT_STORE) and int(os.environ.get("LOCAL_RANK", 0)) > 0
    return same_for_all or type(error).__name__ == "PeerError"


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
    print(f"mlsm: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()

"""The command line: a table from verb to function, and `main`, which runs one of them and exits with its code.

    python cli.py encode-lsp --layer 10
    python cli.py train-student

Settings are the dataclasses that the table names: a recipe gives the defaults, flags win. Exit codes: 0 done or already
finished, 1 a fault of this program, 2 bad input or usage, 3 a store or shard that is damaged or unfinished, 4 training
stopped by itself, 5 encoded except for documents in quarantine, 74 a file could not be written or workers are gone, 129
its terminal was closed (SIGHUP), 130 interrupted (Ctrl-C), 143 terminated (SIGTERM). A display that goes away changes
no exit code (mlsm/common/streams.py). What is printed is in mlsm/terminal/.
"""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from mlsm.common.errors import EXIT_INPUT, EXIT_WRITE, exit_code
from mlsm.common.streams import guard_standard_streams, loss
from mlsm.common.version import VERSION
from mlsm.terminal.flags import take_flag
from mlsm.terminal.help import greeting, overview, unknown_verb
from mlsm.terminal.process import (
    complain,
    end_on_signals,
    is_follower,
    is_told_by_another,
    one_line,
    wait_without_spinning,
)
from mlsm.terminal.verb import Verb, run_verb

VERBS = {
    "encode-lsp": Verb(
        "text -> teacher -> sparse codes -> LSP shards",
        "pipeline.config:EncodeConfig",
        "pipeline.commands:encode_lsp",
        "mlsm.terminal.encoding:encoding",
        exit_code="mlsm.terminal.results:code_of_encoding",
    ),
    "train-student": Verb(
        "LSP shards -> a trained encoder",
        "student.config:StudentConfig",
        "student.train:train",
        "mlsm.terminal.training:training",
        training=True,
        chooses="mlsm.terminal.choice:stores_for_the_objective",
        downloads=False,
    ),
    "train-probe": Verb(
        "words from the LSPs of a frozen student: a linear probe, for BLiMP",
        "student.config:ProbeConfig",
        "student.probe:train_probe",
        "mlsm.terminal.training:probing",
        training=True,
        completes="student.runs.probed:with_student_and_store",
        chooses="mlsm.terminal.choice:students",
        works_on="student",
        downloads=False,
    ),
    "make-mask-weights": Verb(
        "how often each token is masked, by its frequency or domain; collocations: for train-student --mask-weights",
        "student.masks.config:MaskWeightsConfig",
        "student.masks.weights:make_mask_weights",
        "mlsm.terminal.masks:weights",
        recipes=False,
        chooses="mlsm.terminal.choice:stores",
    ),
    "learn-dictionary": Verb(
        "the LSP atoms alone, of a teacher, stored hidden states or a .npy file (encode-lsp learns them when needed)",
        "pipeline.config:LearnConfig",
        "pipeline.learn:learn_dictionary",
        "mlsm.terminal.dictionaries:dictionaries",
    ),
    "import-dictionary": Verb(
        "a dictionary of the official code (or any .npy file of atoms) as one to encode with",
        "pipeline.imported:ImportConfig",
        "pipeline.imported:import_dictionary",
        "mlsm.terminal.dictionaries:imported",
        recipes=False,
        downloads=False,
    ),
    "encode-images": Verb(
        "images -> vectors of their patches: learn-dictionary --hidden, then show-lsp --vectors, for visual LSPs",
        "pipeline.images:ImagesConfig",
        "pipeline.images:encode_images",
        "mlsm.terminal.dictionaries:image_vectors",
        recipes=False,
    ),
    "train-tokenizer": Verb(
        "train a cased WordPiece tokenizer on a corpus",
        "pipeline.config:TokenizerConfig",
        "pipeline.tokenizer:run",
        "mlsm.terminal.tables:paths",
        downloads=False,
    ),
    "encode-ids": Verb(
        "text -> shards of token ids only, for the mlm objective",
        "pipeline.config:EncodeIdsConfig",
        "pipeline.commands:encode_ids",
        "mlsm.terminal.encoding:encoding",
        exit_code="mlsm.terminal.results:code_of_encoding",
    ),
    "encode-logits": Verb(
        "text -> teacher -> its most probable words at every token, for distillation",
        "pipeline.config:EncodeLogitsConfig",
        "pipeline.commands:encode_logits",
        "mlsm.terminal.encoding:encoding",
        exit_code="mlsm.terminal.results:code_of_encoding",
    ),
    "encode-hidden": Verb(
        "text -> teacher -> shards of its hidden states, to code or to learn from without it",
        "pipeline.config:EncodeHiddenConfig",
        "pipeline.commands:encode_hidden",
        "mlsm.terminal.encoding:encoding",
        exit_code="mlsm.terminal.results:code_of_encoding",
    ),
    "choose-layer": Verb(
        "which layer to take: word-sense disambiguation with every layer's LSPs",
        "mlsm.evaluation.studies.word_senses.config:ChooseLayerConfig",
        "mlsm.evaluation.studies.word_senses.choose_layer:choose_layer",
        "mlsm.terminal.layers:layers",
    ),
    "sweep": Verb(
        "a student for every layer, or every k, from one pass of the teacher: --recipe sweep-layers | sweep-k",
        "mlsm.evaluation.studies.sweeps.config:SweepConfig",
        "mlsm.evaluation.studies.sweeps.sweep:sweep",
        "mlsm.terminal.sweeps:summary",
        exit_code="mlsm.terminal.results:code_of_sweep",
    ),
    "study": Verb(
        "a whole study from one recipe: stores, students, evaluations, comparison: --recipe study-demo",
        "mlsm.evaluation.studies.protocol.config:StudyConfig",
        "mlsm.evaluation.studies.protocol.study:study",
        "mlsm.terminal.study:summary",
        recipes=False,
    ),
    "export-student": Verb(
        "a checkpoint of a run as files that transformers loads; pushes it to the Hub",
        "student.runs.export_config:ExportConfig",
        "student.runs.export_run:export_run",
        "mlsm.terminal.training:exporting",
        recipes=False,
        chooses="mlsm.terminal.choice:runs",
        works_on="run",
    ),
    "evaluate-blimp": Verb(
        "which of two sentences do masked language models find likelier? BLiMP's 67 paradigms",
        "mlsm.evaluation.tasks.blimp.config:BlimpConfig",
        "mlsm.evaluation.tasks.blimp.evaluate:evaluate",
        "mlsm.terminal.blimp:blimp",
        recipes=False,
    ),
    "score-text": Verb(
        "how likely is each sentence of a file? Pseudo-log-likelihoods; with --pairs, of minimal pairs of your own",
        "mlsm.evaluation.tasks.scoring.config:ScoreTextConfig",
        "mlsm.evaluation.tasks.scoring.score:score_text",
        "mlsm.terminal.scoring:scores",
        recipes=False,
    ),
    "prepare-data": Verb(
        "evaluation data as published -> the layout that the evaluations read: blimp | wsd | glue | wic | conll",
        "mlsm.evaluation.preparation.config:PrepareDataConfig",
        "mlsm.evaluation.preparation.prepare:prepare",
        "mlsm.terminal.preparation:preparation",
        recipes=False,
        downloads=False,
    ),
    "finetune": Verb(
        "models on ten tasks, with paired heads: one record a task and seed",
        "mlsm.evaluation.tasks.finetuning.config:FinetuneConfig",
        "mlsm.evaluation.tasks.finetuning.suite:finetune",
        "mlsm.terminal.finetuning:summary",
        recipes=False,
    ),
    "compare": Verb(
        "models by their evaluations: averages, tests, win rates, the paper's figures, a page of it all",
        "mlsm.evaluation.comparison.config:CompareConfig",
        "mlsm.evaluation.comparison.compare:compare",
        "mlsm.terminal.comparison:comparison",
        recipes=False,
    ),
    "show-lsp": Verb(
        "what LSPs stand for: tokens, contexts, neighbours, senses; of a word, a text; as pages to browse",
        "mlsm.evaluation.inspection.lsps.config:LspConfig",
        "mlsm.evaluation.inspection.lsps.show:show",
        "mlsm.terminal.lsps:summary",
        recipes=False,
        chooses="mlsm.terminal.choice:lsp_stores",
    ),
    "similarity": Verb(
        "how alike texts are by their LSPs, and which they share; zero-shot on STS-B and WiC beside hidden states",
        "mlsm.evaluation.similarity.config:SimilarityConfig",
        "mlsm.evaluation.similarity.compare:compare",
        "mlsm.terminal.similarity:similarity",
        recipes=False,
        chooses="mlsm.terminal.choice:lsp_stores",
    ),
    "track": Verb(
        "which LSPs of one store are those of the next: kept, drifted, split, merged, vanished, new",
        "mlsm.evaluation.inspection.tracking.config:TrackConfig",
        "mlsm.evaluation.inspection.tracking.track:track",
        "mlsm.terminal.tracking:tracking",
        recipes=False,
    ),
    "count-flops": Verb(
        "operations of pre-training: the paper's table 3, what it leaves out, offline against R reuses",
        "mlsm.evaluation.studies.flops.config:CountFlopsConfig",
        "mlsm.evaluation.studies.flops.count:count_flops",
        "mlsm.terminal.flops:summary",
        recipes=False,
    ),
    "match-entropy": Verb(
        "the temperature, and the penalty, at which a store's targets are as flat as another's",
        "mlsm.evaluation.studies.targets.config:MatchEntropyConfig",
        "mlsm.evaluation.studies.targets.entropy:match_entropy",
        "mlsm.terminal.targets:entropies",
        recipes=False,
        chooses="mlsm.terminal.choice:lsp_stores",
    ),
    "derive-shards": Verb(
        "a store with fewer entries a token from a stored one, without the teacher",
        "shards.config:DeriveConfig",
        "shards.tools:derive_shards",
        "mlsm.terminal.encoding:encoding",
        recipes=False,
        chooses="mlsm.terminal.choice:stores_with_entries",
    ),
    "export-store": Verb(
        "a store as Parquet files with a dataset card, for load_dataset, pandas and DuckDB",
        "shards.config:ExportStoreConfig",
        "shards.tools:export_store",
        "mlsm.terminal.stores:exporting",
        recipes=False,
        chooses="mlsm.terminal.choice:stores",
        downloads=False,
    ),
    "verify-shards": Verb(
        "is a store whole? names what is damaged and what encodes it again",
        "shards.config:VerifyConfig",
        "shards.tools:verify_shards",
        "mlsm.terminal.stores:verification",
        recipes=False,
        exit_code="mlsm.terminal.results:code_of_damage",
        chooses="mlsm.terminal.choice:stores",
    ),
    "show-shards": Verb(
        "what a store holds: statistics, a document with its targets, the settings of two stores",
        "shards.config:ShowConfig",
        "mlsm.evaluation.inspection.stores:show_shards",
        "mlsm.terminal.stores:view",
        recipes=False,
        chooses="mlsm.terminal.choice:stores",
    ),
    "doctor": Verb(
        "what this machine has (cores, GPU, libraries, disk), and what that means for speed",
        "mlsm.evaluation.inspection.machine:DoctorConfig",
        "mlsm.evaluation.inspection.machine:examine",
        "mlsm.terminal.doctor:examination",
        recipes=False,
        downloads=False,
    ),
    "docs": Verb(
        "the pages of the documentation, as installed: all by name, or one in full",
        "mlsm.evaluation.inspection.pages:DocsConfig",
        "mlsm.evaluation.inspection.pages:list_or_read",
        "mlsm.terminal.pages:page",
        recipes=False,
        downloads=False,
    ),
    "clean": Verb(
        "remove what killed processes left behind",
        "shards.config:CleanConfig",
        "shards.tools:clean",
        "mlsm.terminal.stores:cleaning",
        recipes=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    guard_standard_streams()
    end_on_signals()
    wait_without_spinning()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = take_flag(argv, "--debug")
    try:
        code = run(argv)
    except KeyboardInterrupt as stop:
        kept = "interrupted; finished units and checkpoints are kept. Run the same command to go on."
        code = 128 + getattr(stop, "number", signal.SIGINT)  # as a shell counts them
        if not is_follower():
            complain(str(stop) or kept, code)
    except Exception as error:
        if debug:
            raise
        code = exit_code(error)
        if not is_told_by_another(error, code):
            complain(one_line(error), code)
    sys.stdout.flush()
    if lost := loss(sys.stdout):
        message = f"standard output could not be written ({lost.strerror}): what was printed is not whole"
        code = complain(message, EXIT_WRITE if code == 0 and "--json" in argv else code)
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Parse, run, show. Returns the exit code; raises what the command raises."""
    if argv[:1] == ["help"] and len(argv) > 1:  # mlsm help VERB
        argv = [argv[1], "--help"]
    if not argv:
        print(greeting())
        return 0
    if argv[0] in ("-h", "--help", "help"):
        print(overview(VERBS))
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"mlsm {VERSION}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in VERBS:
        return complain(unknown_verb(name, VERBS), EXIT_INPUT)
    return run_verb(name, VERBS[name], rest)


if __name__ == "__main__":
    main()

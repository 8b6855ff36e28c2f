"""The counts of a scanned corpus for people: what it has, and what its owner may want to change about it.

    describe_corpus(job)["advice"]          # printed before the work; the counts are in dry runs and summaries

Not handled here: the scan that counts (plan.py).
"""

from collections.abc import Mapping

from pipeline.config import MUCH_UNKNOWN, EncodeIdsConfig
from pipeline.corpus import TextFile
from pipeline.job import Job
from pipeline.plan import BYTES_PER_TOKEN

COUNTED = ("documents", "held_out_documents", "duplicates", "blank", "too_short", "invalid")  # by the scan
LISTED_FILES = 5
PARAGRAPHS = 50  # with more documents per text file on average, they may be paragraphs
SMALL_UNITS = 20  # more units than this may be too many, if their tokens are few
USUAL_BYTES, BYTES_OF_IDS = 70, 2  # of a store per token (mlsm docs cost)


def describe_corpus(job: Job) -> dict:
    """The counts of the scan: a dict that JSON can hold, of the same size for any number of files.

    Returns  totals (files, documents, held_out_documents, duplicates, blank, too_short, invalid), max_tokens,
             files_listed: the same for the files with the most documents (held-out files first),
             advice: sentences on what to change about the text, such as other document boundaries
    """
    listed = job.plan.corpus.get("files", {})  # a store of somebody else may not say
    files = {name: {count: found[count] for count in COUNTED} for name, found in listed.items()}
    by_file = job.config.held_out_by == "file"  # then the files that are held out come first

    def rank(name):
        return not (by_file and files[name]["held_out_documents"]), -files[name]["documents"], name

    most = sorted(files, key=rank)[:LISTED_FILES]
    return {
        "files": len(files),
        **{count: job.plan.corpus.get(count, 0) for count in COUNTED},
        "max_tokens": job.config.max_tokens,
        "files_listed": [{"file": name, **files[name]} for name in most],
        "advice": _advice(job, listed),
    }


def _advice(job: Job, files: Mapping[str, Mapping]) -> list[str]:
    """Sentences on what to change about the text, given the counts of its files."""
    advice = []
    if not job.plan.corpus.get("held_out_documents"):
        advice.append(
            "No document is held out, so training will report no held-out loss. Encode more documents (by default an"
            " empty line ends one)."
        )
    if job.unknown_share > MUCH_UNKNOWN:
        advice.append(
            f"The tokenizer does not know about {job.unknown_share:.0%} of the text's tokens"
            f" ({job.tokenizer.unk_token}). They have no target and are never predicted. Use a teacher (or --tokenizer)"
            " that knows the text's language and script."
        )
    if "bundled" in job.config.corpus:
        return advice
    cut = {  # files whose documents end at an empty line may have too many of them, or too large ones
        file.name: files[file.name]
        for source in job.sources.values()
        for file in source.files
        if isinstance(file, TextFile) and file.boundary == "blank-line" and file.name in files
    }
    mean = sum(found["documents"] for found in cut.values()) / max(1, len(cut))
    if mean > PARAGRAPHS:
        advice.append(
            f"An empty line ends a document, so a text file has {mean:,.0f} documents on average. If each file is one"
            " text, such as a novel, pass --document-boundary file --held-out-by file."
        )
    of_unit = job.config.unit_tokens * BYTES_PER_TOKEN
    large = [name for name, found in cut.items() if found["bytes"] > of_unit * max(1, found["documents"])]
    if large:
        also = f" (and {len(large) - 1:,} more files)" if len(large) > 1 else ""
        advice.append(
            f"An empty line ends a document, and {large[0]}{also} has hardly any, so its documents are larger than a"
            " unit. Units do not divide a document: an interruption starts it again, and workers cannot share it. If"
            " each line is a document, put empty lines between them, or write JSON lines."
        )
    units, tokens = len(job.plan.units), job.expected_tokens / len(job.plan.units)
    usual = BYTES_OF_IDS if isinstance(job.config, EncodeIdsConfig) else USUAL_BYTES
    if job.sources and units > SMALL_UNITS and 4 * len(job.tokenizer) > usual / 10 * tokens:
        mend = "A unit has text of one file, or of several smaller than an eighth of a unit: raise --unit-tokens"
        if job.config.held_out_by == "file":  # then small files are not joined
            mend = "With --held-out-by file a unit never has text of two files: omit it"
        advice.append(
            f"Each shard counts the tokens of the whole vocabulary: with {tokens:,.0f} tokens per unit on average, that"
            f" is {4 * len(job.tokenizer) / tokens:,.1f} bytes per token, in addition to about {usual}. {mend}, or put"
            " the text into a few files, such as JSON lines."
        )
    return advice

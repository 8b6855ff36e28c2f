"""Locate a teacher ("bundled", a directory, or a name on the Hub) and identify its content."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from mlsm.common.disk import file_sha256
from mlsm.common.errors import TeacherError, describe
from mlsm.common.model_checks import WEIGHTS, WEIGHTS_INDEX, weight_files

BUNDLED = Path(__file__).parents[1] / "bundled_teacher"
PICKLED_WEIGHTS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
INSTALL_SENTENCEPIECE = "pip install sentencepiece protobuf"
HUB_FILES = [
    "config.json",
    WEIGHTS,
    "model-*.safetensors",
    WEIGHTS_INDEX,
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
]


def locate(name_or_path: str | Path) -> Path:
    """The directory of a teacher, given as "bundled", as a directory or as the name of a model on the Hub.

    The Hub's cache is searched first, so a downloaded teacher needs no network; `hf download` refreshes it.
    Raises  TeacherError saying what was tried
    """
    if str(name_or_path) == "bundled":
        if not BUNDLED.is_dir():
            raise TeacherError(
                f"the bundled teacher is missing: {BUNDLED} is not a directory. Reinstall this package, or name a "
                "teacher with --teacher."
            )
        return BUNDLED
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise TeacherError(f"{path} is a file, expected the directory of a model: try {path.parent}")
    named = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or path.is_absolute() or named.startswith((".", "~"))
    if is_path or named.count("/") > 1:  # never asked for on the Hub, which would tell it the path
        raise TeacherError(
            f"no such directory: {path}. Pass a model's directory, or its name on the Hub. "
            "What a recipe names, a flag such as --teacher overrides."
        )
    return _from_hub(named)


def _from_hub(name):
    with contextlib.suppress(LocalEntryNotFoundError, ValueError):  # ValueError: not a Hub name, reported below
        cached = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
        if weight_files(cached, [WEIGHTS]) and any(find(cached, TOKENIZER_FILES)):
            return cached
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the classes differ between huggingface_hub's versions
        offline = isinstance(error, LocalEntryNotFoundError)
        raise TeacherError(
            f"teacher {name!r} not found: no such directory, not in the Hub's cache, and not available from the Hub "
            f"({'no network, or HF_HUB_OFFLINE is set' if offline else describe(error)}). Pass the directory of a "
            f"model, or download it on a machine with a network: hf download {name}"
        ) from error


def require_weight_files(directory: Path, name: str | Path) -> list[Path]:
    """The files of a checkpoint, its index first. Raises TeacherError if there are no safetensors files."""
    if files := weight_files(directory, [WEIGHTS]):
        return files if files[0].name == WEIGHTS else [directory / WEIGHTS_INDEX, *files]
    pickled = sorted(path.name for path in find(directory, PICKLED_WEIGHTS))
    found = f"only {', '.join(pickled)}" if pickled else "none of it"
    raise TeacherError(
        f"{name}: expected {WEIGHTS} or every part that {WEIGHTS_INDEX} lists, found {found} in {directory}. "
        "A pickled checkpoint (.bin, .pt) can run code when it is read, so it is not loaded. If you trust it, "
        """convert it: python -c "from transformers import AutoModel as M, AutoTokenizer as T; """
        f"""[C.from_pretrained('{name}').save_pretrained('converted') for C in (M, T)]", and use converted"""
        f"{f' (after {INSTALL_SENTENCEPIECE})' if needs_sentencepiece(directory) else ''}"
    )


def needs_sentencepiece(directory: Path) -> bool:
    """Whether a tokenizer is only there as SentencePiece's model, as DeBERTa-v3's is, and that library is missing."""
    return {path.suffix for path in find(directory, TOKENIZER_FILES)} == {".model"} and not find_spec("sentencepiece")


def teacher_fingerprint(name_or_path: str | Path) -> str:
    """Hex sha256 of a teacher's configuration and weights, without loading the model.

    Equal content gives an equal fingerprint under any name or path. It reads every byte: seconds for gigabytes.
    Raises  TeacherError if the teacher is not found or its weights are not safetensors
    """
    return fingerprint(locate(name_or_path), name_or_path)


def fingerprint(directory: Path, name: str | Path) -> str:
    """`teacher_fingerprint` of a teacher that is already located."""
    digest = hashlib.sha256()
    for file in [directory / "config.json", *require_weight_files(directory, name)]:
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def find(directory: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Files of a directory that match one of the patterns."""
    return (path for pattern in patterns for path in directory.glob(pattern))

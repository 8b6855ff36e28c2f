"""Every error that ends a command, with the exit code it ends with.

A message is one line that says what was expected, what was found and what to do next. Errors of bad input are
ValueErrors and files that could not be written are OSErrors, so that Python callers can catch the built-in classes.
This module is quick to import: the command line uses these classes before any library is loaded.
"""

MOST_CHARACTERS = 4_000  # of a message: a damaged file may contain a name of megabytes
EXIT_FAULT, EXIT_INPUT, EXIT_STORE, EXIT_TRAINING, EXIT_QUARANTINE, EXIT_WRITE = 1, 2, 3, 4, 5, 74


def exit_code(error: BaseException) -> int:
    """The exit code of a command that this error ends: its own, or that of the built-in class it derives from."""
    if isinstance(error, MlsmError):
        return error.exit_code
    if isinstance(error, ValueError | FileNotFoundError):
        return EXIT_INPUT
    return EXIT_WRITE if isinstance(error, OSError) else EXIT_FAULT


def describe(error: BaseException) -> str:
    """The class and the text of a library's error on one line of at most 300 characters, without a full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")


class MlsmError(Exception):
    """The base class of all errors of this project."""

    exit_code = EXIT_INPUT

    def __str__(self) -> str:
        """The message. If it is very long, only its beginning and its end, which says what to do next."""
        message, half = super().__str__(), MOST_CHARACTERS // 2
        if len(message) <= MOST_CHARACTERS:
            return message
        from mlsm.common.text import redacted  # before cutting: it would not recognise a URL without its start

        message = redacted(message)
        return f"{message[:half]} ... {message[-half:]}"


class MissingPackageError(MlsmError, ValueError, ImportError):
    """A package that only some commands need is not installed; the message names the extra that installs it."""


class PlaceError(MlsmError, ValueError):
    """A command cannot write here: something else is in the way, such as a link."""


# -- stores ------------------------------------------------------------------------------------------------


class ShardError(MlsmError, ValueError):
    """A shard that is damaged, truncated, made by another program, or in a format that we do not read."""

    exit_code = EXIT_STORE


class BlockError(ShardError):
    """A part of a shard that does not match its record.

    block           its name, None for the file as a whole
    offset, length  its bytes in the shard
    """

    def __init__(self, problem: str, block: str | None = None, offset: int = 0, length: int = 0):
        super().__init__(problem)
        self.block, self.offset, self.length = block, offset, length


class StoreError(MlsmError, ValueError):
    """A store that is missing, unfinished or not the expected one."""

    exit_code = EXIT_STORE


class RequestError(StoreError):
    """The user asked for something that does not exist, though nothing is damaged or unfinished: there is no such
    store, or the store has no such document, or it has fewer entries.
    """

    exit_code = EXIT_INPUT


class RemoteError(StoreError):
    """A remote store that does not answer, or whose answer is wrong."""


class RefusedError(RemoteError):
    """A server's refusal that would not change on a retry, such as missing access rights."""


class WrongAnswerError(RemoteError):
    """A server's file that is not as expected, too long or too slow, however often it is fetched."""


class AnswerError(MlsmError, OSError):
    """A server's answer that is too long or too slow; the rest of it was not read."""

    exit_code = EXIT_WRITE


# -- stage A -----------------------------------------------------------------------------------------------


class CorpusError(MlsmError, ValueError):
    """A corpus that cannot be read, or holds no text."""


class NotUtf8Error(CorpusError):
    """Text that is not UTF-8, or holds a lone surrogate.

    place  the file, and what is wrong at which position
    """

    def __init__(self, place: str, remedy: str):
        super().__init__(f"{place}. {remedy}; or choose --invalid-utf8 replace or skip.")
        self.place, self.remedy = place, remedy

    def __reduce__(self):  # a worker's error is pickled on its way to the driver
        return type(self), (self.place, self.remedy)


class TeacherError(MlsmError, ValueError):
    """A teacher or tokenizer that cannot be used."""


class DeviceError(MlsmError, ValueError):
    """A device that does not exist or cannot be used here."""


class EncodeError(MlsmError, ValueError):
    """An encoding that cannot produce useful shards."""


class PrecisionError(EncodeError):
    """Hidden states or logits that overflow the teacher's dtype. The dtype is at fault, not a document."""


class CenteringError(MlsmError, ValueError):
    """Hidden states that cannot be centred as asked."""


class DictionaryError(MlsmError, ValueError):
    """A stored dictionary that cannot be used."""


# -- stage B -----------------------------------------------------------------------------------------------


class RunError(MlsmError, ValueError):
    """The run directory, the store or the settings do not belong together."""


class TrainingError(MlsmError, RuntimeError):
    """Training cannot continue: a loss or gradient that is not finite, or too little memory."""

    exit_code = EXIT_TRAINING


class PeerError(TrainingError):
    """Another process of the same run ended or hangs, so this one cannot continue."""


class WriteError(MlsmError, OSError):
    """A file could not be written; all files that were complete before still are."""

    exit_code = EXIT_WRITE


class Interrupted(KeyboardInterrupt):
    """A signal (SIGINT, SIGTERM or SIGHUP) arrived; a checkpoint was saved and the same command continues from it."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number

    def __reduce__(self):  # a process pool pickles it on its way to the caller
        return type(self), (*self.args, self.number)


# -- evaluation --------------------------------------------------------------------------------------------


class ModelError(MlsmError, ValueError):
    """There is no such model, or it is not of the kind that can be evaluated."""


class DataError(MlsmError, ValueError):
    """A file of a task is missing or malformed; the message names file, line and format."""


class BlimpError(MlsmError, ValueError):
    """Pairs that cannot be used for BLiMP, or scores of pairs that are not numbers."""


class ScoringError(MlsmError, ValueError):
    """Sentences or minimal pairs that cannot be scored; the message names the file and the line, or the sentence."""


class WsdDataError(MlsmError, ValueError):
    """Sense-annotated data that cannot be used; the message names the file, the line, and what was expected."""


class RecordError(MlsmError, ValueError):
    """A file that is not a record; the message names file and field."""


class LineageError(MlsmError, ValueError):
    """A lineage.json that cannot be read; the message names file and field."""


class StudyError(MlsmError, ValueError):
    """Records that were made with other settings, or one model given twice."""


class ComparisonError(MlsmError, ValueError):
    """Records that cannot be compared; the message says which."""


class InspectionError(MlsmError, ValueError):
    """The user asked to see something that the store, dictionary or student does not contain."""


class FlopsError(MlsmError, ValueError):
    """A model or setting whose operations cannot be counted."""

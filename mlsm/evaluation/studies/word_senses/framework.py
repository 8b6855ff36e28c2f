"""Sense-annotated text in the format of Raganato et al. 2017 (Word Sense Disambiguation: A Unified Evaluation
Framework and Empirical Comparison, EACL): <set>.data.xml and <set>.gold.key.txt.

    training = read_annotated(root, SEMCOR, wordnet)
    test = [read_annotated(root, folder, wordnet) for folder in TEST_SETS.values()]

    <sentence id="d000.s000">
    <wf lemma="the" pos="DET">The</wf>
    <instance id="d000.s000.t000" lemma="group" pos="NOUN">Fulton County Grand Jury</instance>

Each <wf> or <instance> is one word here, however many tokens it has. The files are read as streams. Not handled here:
WordNet (mlsm/common/wordnet.py). docs/word-senses.md says where to get the data.
"""

from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from mlsm.common.errors import WsdDataError
from mlsm.common.wordnet import PARTS_OF_SPEECH, WordNet

SEMCOR = Path("Training_Corpora/SemCor/semcor")
TEST_SETS = {
    name: Path(f"Evaluation_Datasets/{name}/{name}")
    for name in ("semeval2007", "senseval3", "senseval2", "semeval2013", "semeval2015")
}
SENSE_INDEX = Path("wordnet3.0/index.sense")
OUTER: dict[str, list[str]] = {"sentence": [], "wf": ["sentence"], "instance": ["sentence"]}  # parent elements


class Instance(NamedTuple):
    """An annotated word.

    place  number of the word in its sentence, from 0
    gold   its sense keys
    """

    id: str
    place: int
    lemma: str
    pos: str
    gold: tuple[str, ...]


class Sentence(NamedTuple):
    """A sentence: all of its words in order, and its annotated words."""

    words: list[str]
    instances: list[Instance]


def data_files(root: Path) -> list[Path]:
    """Every file that the diagnostic reads. Raises WsdDataError if one is missing."""
    folders = [SEMCOR, *TEST_SETS.values()]
    names = [path.with_name(path.name + end) for path in folders for end in (".data.xml", ".gold.key.txt")]
    files = [root / name for name in [*names, SENSE_INDEX]]
    for file in files:
        if not file.is_file():
            raise WsdDataError(
                f"{file} is missing. --data-dir must be the directory that contains {SEMCOR.parent}, "
                f"Evaluation_Datasets/<set> for {', '.join(TEST_SETS)}, and {SENSE_INDEX}."
            )
    return files


def read_annotated(root: Path, folder: Path, wordnet: WordNet) -> list[Sentence]:
    """The sentences of one set, in the file's order.

    wordnet  must contain every gold key
    Returns  list of Sentence
    Raises   WsdDataError on a damaged file, an instance without gold keys or gold keys without an instance
    """
    base = root / folder
    gold, xml = base.with_name(base.name + ".gold.key.txt"), base.with_name(base.name + ".data.xml")
    keys = _read_keys(gold, wordnet)
    sentences = _Reader(xml, keys, gold).read()
    if keys:
        raise WsdDataError(f"{gold}: {next(iter(keys))} has sense keys, but no instance of {xml.name} has that id.")
    return sentences


def _read_keys(path, wordnet):
    """Instance id to its sense keys."""
    found = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            instance, *keys = line.split() or [""]
            if not keys or instance in found:
                trouble = f"{instance} a second time" if keys else repr(line[:60])
                raise WsdDataError(
                    f"{path}, line {number}: expected an instance's id and its sense keys, found {trouble}."
                )
            if unknown := [key for key in keys if key not in wordnet.synset_of]:
                raise WsdDataError(
                    f"{path}, line {number}: the sense key {unknown[0]} is not in {wordnet.path}. Both must be from "
                    "the same version of WordNet (3.0)."
                )
            found[instance] = tuple(keys)
    except UnicodeDecodeError as error:
        raise WsdDataError(f"{path}: expected UTF-8 text, but {error}.") from None
    return found


class _Reader:
    """Reads one XML file; the keys of its instances are removed from `keys`."""

    def __init__(self, path, keys, gold):
        self.path, self.keys, self.gold = path, keys, gold
        self.sentences: list[Sentence] = []
        self.sentence = Sentence([], [])  # the current or the previous one
        self.text: list[str] = []  # of the current element
        self.inside: list[str] = []  # the elements of OUTER that are open
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler, self.parser.EndElementHandler = self._start, self._end
        self.parser.CharacterDataHandler = lambda text: self.text.append(text)

    def read(self):
        try:
            with open(self.path, "rb") as file:
                self.parser.ParseFile(file)
        except expat.ExpatError as error:
            raise WsdDataError(
                f"{self.path}, line {error.lineno}: expected XML, found "
                f"{expat.ErrorString(error.code)}. Fetch the file again."
            ) from None
        if not any(sentence.instances for sentence in self.sentences):
            raise self._error("expected <sentence> elements with instances, found none")
        return self.sentences

    def _start(self, name, attributes):
        if name not in OUTER:
            return
        if self.inside != OUTER[name]:
            where = f"directly inside of a <{OUTER[name][0]}>" if OUTER[name] else "outside of all others"
            raise self._error(f"expected <{name}> {where}")
        self.inside = [*self.inside, name]
        if name == "sentence":
            self.sentence = Sentence([], [])
            return
        self.text = []
        if name == "instance":
            self.sentence.instances.append(self._instance(attributes))

    def _instance(self, attributes):
        missing = [name for name in ("id", "lemma", "pos") if name not in attributes]
        if missing or attributes["pos"] not in PARTS_OF_SPEECH:
            found = f"none of {', '.join(missing)}" if missing else f"pos {attributes['pos']!r}"
            raise self._error(f"expected id, lemma and pos {', '.join(PARTS_OF_SPEECH)} of an instance; found {found}")
        gold = self.keys.pop(attributes["id"], None)
        if gold is None:
            raise self._error(f"{self.gold.name} has no sense key for the instance {attributes['id']}, or two have it")
        lemma = attributes["lemma"].lower().replace(" ", "_")  # as in index.sense
        return Instance(attributes["id"], len(self.sentence.words), lemma, attributes["pos"], gold)

    def _end(self, name):
        if name not in OUTER:
            return
        self.inside = OUTER[name]
        if name == "sentence":
            self.sentences.append(self.sentence)
        else:
            self.sentence.words.append(" ".join("".join(self.text).split()))

    def _error(self, message):
        return WsdDataError(f"{self.path}, line {self.parser.CurrentLineNumber}: {message}.")

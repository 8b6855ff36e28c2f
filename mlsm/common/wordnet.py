"""Read WordNet's sense index: a word's candidate senses, the synset of a sense key, lemmas and supersenses of synsets.

    wordnet = WordNet.load("wordnet3.0/index.sense")
    wordnet.candidates("dog", "NOUN")           # [("dog%1:05:00::", "02084071-n"), ...], first sense first
    wordnet.supersenses("dog")                  # ["noun.animal", ..., "verb.motion"], one for each synset

Format of a line (WordNet's senseidx(5WN)): sense_key synset_offset sense_number tag_count, where a key is
lemma%ss_type:lex_filenum:lex_id:head_word:head_id. A synset is named by its offset and its type's letter; senses of
satellite adjectives (s) are numbered together with those of other adjectives (a). Not handled here: glosses and
relations.
"""

from pathlib import Path

from mlsm.common.errors import WsdDataError

PARTS_OF_SPEECH = {"NOUN": "n", "VERB": "v", "ADJ": "as", "ADV": "r"}  # WordNet's letters; s is a satellite adjective
TYPES = "nvars"  # ss_type 1 ... 5
LEXNAMES = (  # noqa: SIM905 (lexnames(5WN): lex_filenum 0 ... 44; a list literal would take a page)
    "adj.all adj.pert adv.all noun.Tops noun.act noun.animal noun.artifact noun.attribute noun.body noun.cognition "
    "noun.communication noun.event noun.feeling noun.food noun.group noun.location noun.motive noun.object "
    "noun.person noun.phenomenon noun.plant noun.possession noun.process noun.quantity noun.relation noun.shape "
    "noun.state noun.substance noun.time verb.body verb.change verb.cognition verb.communication verb.competition "
    "verb.consumption verb.contact verb.creation verb.emotion verb.motion verb.perception verb.possession "
    "verb.social verb.stative verb.weather adj.ppl"
).split()


class WordNet:
    """Senses of one version of WordNet.

    path       of its index.sense
    synset_of  sense key to synset, such as "02084071-n"
    """

    def __init__(self, path: Path):
        self.path = path
        self.synset_of: dict[str, str] = {}
        self._keys_of: dict[tuple[str, str], list[tuple[int, str]]] = {}  # by (lemma, part of speech)
        self._lemmas_of: dict[str, list[tuple[int, str]]] = {}
        self._lexname_of: dict[str, str] = {}

    @classmethod
    def load(cls, path: str | Path) -> "WordNet":
        """Read an index.sense. Raises WsdDataError, which names the line, if a line has another format."""
        wordnet = cls(Path(path))
        with open(path, "rb") as file:  # decoded line by line, so that an error can name the line
            for number, line in enumerate(file, 1):
                try:
                    wordnet._add(*line.decode().split())
                except (ValueError, IndexError, TypeError):
                    raise WsdDataError(
                        f"{path}, line {number}: expected a sense key, a synset's offset, the number of "
                        f"the sense and a count; found {line[:80].rstrip()!r}."
                    ) from None
        if not wordnet.synset_of:
            raise WsdDataError(f"{path}: expected WordNet's sense index, found an empty file.")
        for senses in wordnet._keys_of.values():
            senses.sort()
        return wordnet

    def _add(self, key, offset, sense_number, tag_count):
        lemma, _, rest = key.partition("%")
        ss_type, lex_filenum = rest.split(":")[:2]
        letter = TYPES[int(ss_type) - 1]
        synset = f"{offset}-{letter}"
        self.synset_of[key] = synset
        self._keys_of.setdefault((lemma, letter.replace("s", "a")), []).append((int(sense_number), key))
        self._lemmas_of.setdefault(synset, []).append((-int(tag_count), lemma))
        self._lexname_of[synset] = LEXNAMES[int(lex_filenum)]

    def candidates(self, lemma: str, pos: str) -> list[tuple[str, str]]:
        """Senses of a word in WordNet's order: list of (sense key, synset); empty if the word is not in WordNet."""
        senses = self._keys_of.get((lemma, PARTS_OF_SPEECH[pos][0]), ())
        return [(key, self.synset_of[key]) for _, key in senses]

    def supersenses(self, lemma: str) -> list[str]:
        """The lexicographer files of a word's synsets of all parts of speech, one entry for each synset."""
        keys = [key for letter in "nvar" for _, key in self._keys_of.get((lemma, letter), ())]
        return [self.lexname(self.synset_of[key]) for key in keys]

    def lemmas(self, synset: str) -> list[str]:
        """Words of a synset, the most frequent in this sense first."""
        return [lemma for _, lemma in sorted(self._lemmas_of[synset])]

    def lexname(self, synset: str) -> str:
        """The lexicographer file of a synset, such as noun.animal."""
        return self._lexname_of[synset]

"""Compare a teacher's layers by word-sense disambiguation with their LSPs (MLSM paper, section 4.2.1).

    result = choose_layer(ChooseLayerConfig(data_dir=Path("wsd")), progress)

1. a dictionary for every layer and k, learned on the corpus in the settings, or an existing one (pipeline/learn.py);
2. one pass of the teacher over the annotated sentences, which gives the vector of every annotated word at every layer;
3. for every layer and k: codes, Φ, NPMI, answers, F1; the names of its LSPs in WordNet.

The vectors (float16, in files on disk) and each finished layer survive an interruption, and the same command continues
from there. The vectors are removed when all layers are done. Not handled here: the choice of a layer and the
conclusions (conclusions.py), names of LSPs (labels.py).
"""

import dataclasses
import hashlib
import json
import logging
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
from scipy import sparse

from mlsm.common.disk import open_to_read, read_file
from mlsm.common.durable import appearing_whole, publish_directory
from mlsm.common.errors import WsdDataError
from mlsm.common.invocation import program
from mlsm.common.progress import silent
from mlsm.common.settings import revise
from mlsm.common.workplaces import workplace
from mlsm.evaluation.studies.word_senses.conclusions import summarise_layers, write_report
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig
from mlsm.evaluation.studies.word_senses.data import WsdData, data_fingerprint
from mlsm.evaluation.studies.word_senses.labels import name_lsps
from mlsm.evaluation.studies.word_senses.sense_scores import answer, normalise, npmi, sense_sums
from mlsm.evaluation.studies.word_senses.word_vectors import Centers, Readings, word_vectors
from pipeline.announcement import announcement
from pipeline.batch import center_on
from pipeline.dictionary import Dictionary
from pipeline.dictionary.learning import ALGORITHM
from pipeline.job import load_teacher, named_by_content, open_executor, teacher_job
from pipeline.learn import batch_key, minibatch_of_sample, provide_dictionaries, wanted_dictionaries
from pipeline.solvers import Backend, nonneg_lasso, proof
from pipeline.teacher import Teacher, locate, read_config
from shards.manifest import fingerprint

FORMAT = 1  # of a layer's files; increase it when equal settings give other results
PART_TOKENS = 65_536  # per file of vectors
logger = logging.getLogger(__name__)


def choose_layer(config: ChooseLayerConfig, progress: Callable[..., None] = silent) -> dict:
    """Diagnose every layer and k in the settings, and name the best layer of each k.

    Returns  dict for JSON: directory, first_sense, conclusive (whether enough words were learned from to recommend a
             layer), layers (one dict for every layer and k), recommended (the best of each k)
    Raises   WsdDataError, CorpusError, TeacherError, DeviceError, EncodeError
    """
    started = time.perf_counter()
    root = config.data_dir
    if root is None:
        raise WsdDataError(
            "choose-layer needs --data-dir DIR: the unified evaluation framework of Raganato et al. 2017 with "
            f"WordNet's index.sense. {program()} docs word-senses says where to get them."
        )
    config = _number_layers(config)
    data_digits = data_fingerprint(root)
    job = teacher_job(config, progress)
    teacher = load_teacher(job)
    directory = _directory(job, teacher, data_digits)
    wanted = {
        (entry.layer, entry.k): directory / f"layer-{entry.layer}-k{entry.k}"
        for entry in wanted_dictionaries(job, teacher)
    }
    lacking = {key: path for key, path in wanted.items() if not path.is_dir()}
    to_learn = [entry.directory for entry in wanted_dictionaries(job, teacher) if not entry.directory.is_dir()]
    logger.info("%s", announcement("choose-layer", job, teacher, lacking=to_learn if lacking else ()))
    if lacking:
        _diagnose(job, teacher, directory, lacking)
    layers = [json.loads(read_file(path / "layer.json")) for path in wanted.values()]
    right = [np.load(BytesIO(read_file(path / "right.npy"))) for path in wanted.values()]
    result = {
        "directory": str(directory),
        "teacher": {"name": teacher.name, "fingerprint": teacher.fingerprint, "layers": teacher.num_layers},
        "lam": config.lam,
        **summarise_layers(layers, right),
        "finished_before": not lacking,
        "seconds": time.perf_counter() - started,
    }
    write_report(result, directory)
    return result


def _number_layers(config):
    """The settings, with `all` replaced by the numbers of the teacher's layers."""
    if config.layer != "all":
        return config
    depth = read_config(locate(config.teacher), config.teacher).num_hidden_layers
    return revise(config, layer=tuple(range(1, depth + 1)))


def _directory(job, teacher, data_digits):
    """The directory of the diagnostic with these settings, with a directory for each layer and k."""
    config = job.config
    request = {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        "teacher": teacher.fingerprint,
        "dtype": str(teacher.dtype).removeprefix("torch."),
        "plan": job.plan.id,
        "lam": config.lam,
        "tolerance": config.tolerance,
        "tokens": config.dictionary_tokens,
        "epochs": config.dictionary_epochs,
        "seed": config.seed,
        "data": data_digits,
        **batch_key(minibatch_of_sample(job)),
        **({} if config.limit_train is None else {"limit": config.limit_train}),
    }
    if config.documents_apart:
        request["documents_apart"] = True
    if config.center != "none":
        request["center"] = config.center
    if config.atoms != "learned":
        request["atoms"] = config.atoms
    return named_by_content(config.output / "diagnostics", Path(teacher.name).name, fingerprint(request))


def _diagnose(job, teacher, directory, lacking):
    """Make the missing directories of layers."""
    data = WsdData.read(job.config.data_dir, job.progress, job.config.limit_train)
    data.warn_of_differences()
    learned = _dictionaries(job, teacher, lacking)
    with workplace(directory / "vectors", files=("part-*.npz",)) as place:
        centers = {
            vectors_name(layer, dictionary): (layer, center_on("cpu", dictionary))
            for (layer, _), (dictionary, _) in sorted(learned.items(), key=lambda item: item[0])
        }
        text = Readings(data.sentences, job.tokenizer, job.special_ids, teacher.max_positions)
        report = partial(job.progress, "word vectors")
        batch_tokens = job.config.tokens_at_once()
        vectors = WordVectors(place, text, teacher, centers, batch_tokens, job.special_ids["pad"], report)
        vectors.make()
        for done, ((layer, k), path) in enumerate(lacking.items()):
            job.progress("layers", done, len(lacking), unit="layers")
            dictionary, seconds = learned[layer, k]
            name, lam, tolerance = vectors_name(layer, dictionary), job.config.lam, job.config.tolerance
            found = diagnose_layer(vectors, name, dictionary.atoms_Kd, data, lam, tolerance)
            found.costs = vectors.costs(layer) | {"dictionary_seconds": seconds} | found.costs
            save = partial(_save, found, teacher, layer, dictionary, data)
            publish_directory(path, save, replace=False)
        job.progress("layers", len(lacking), len(lacking), unit="layers")


def _dictionaries(job, teacher, lacking):
    """(layer, k) to its Dictionary and the mean seconds of learning one; None for a dictionary that already existed."""
    started = time.perf_counter()
    with open_executor(job, teacher) as executor:
        reports = provide_dictionaries(executor, teacher)
    seconds, new = time.perf_counter() - started, sum(not report["finished_before"] for report in reports)
    return {
        (report["layer"], report["k"]): (
            Dictionary.load(report["dictionary"]),
            None if report["finished_before"] else seconds / new,
        )
        for report in reports
        if (report["layer"], report["k"]) in lacking
    }


# -- the pass over the annotated text ----------------------------------------------------------------------


class WordVectors:
    """Vectors of all annotated words at some layers, in files of a directory, in the order of the teacher's pass.

    report       called as report(tokens read, tokens of the text)
    centers      name of the vectors -> their layer and the centre to subtract, as for `word_vectors`
    chunks       pairs of word numbers and readings, one for each file
    word_of_row  int64: the word of each row, counted from 0, training words first
    device       the teacher's, until another is set; codes are computed there if the solver's kernels passed their
                 trial (solvers/proof.py)
    """

    def __init__(
        self,
        place: Path,
        text: Readings,
        teacher: Teacher,
        centers: Centers,
        batch_tokens: int,
        pad: int,
        report: Callable[[int, int], None],
    ):
        self.place, self.text, self.teacher, self._centers = place, text, teacher, centers
        self._batch_tokens, self._pad, self._report = batch_tokens, pad, report
        self.device = teacher.device
        self.chunks = list(self.text.chunks(PART_TOKENS))
        self.word_of_row = np.concatenate([words for words, _ in self.chunks])

    def make(self) -> None:
        """Write the missing files."""
        done = 0

        def report(tokens):
            self._report(done + tokens, self.text.tokens)

        report(0)
        for number, (words, readings) in enumerate(self.chunks):
            if not self._is_whole(number):
                self._write(number, len(words), readings, report)
            done += sum(len(reading.ids) for reading in readings)
            report(0)

    def _write(self, number, words, readings, report):
        clock = time.perf_counter()
        sizes = self._batch_tokens, self._pad
        found = word_vectors(self.teacher, words, readings, self._centers, *sizes, report)
        seconds = time.perf_counter() - clock
        with appearing_whole(self._path(number)) as file:
            np.savez(
                file,
                seconds=seconds,
                deepest=self.teacher.layer,
                **{str(name): rows_nd.astype(np.float16) for name, rows_nd in found.items()},
            )

    def _path(self, number):
        return self.place / f"part-{number:05}.npz"

    @contextmanager
    def _open(self, number):
        with open_to_read(self._path(number)) as file, np.load(BufferedReader(file)) as part:
            yield part

    def _is_whole(self, number):
        try:
            with self._open(number) as part:
                return set(map(str, self._centers)) <= set(part.files)
        except (OSError, zipfile.BadZipFile, ValueError, EOFError):
            return False

    def layer(self, name: int | str) -> Iterator[np.ndarray]:
        """The vectors of this name (without a centre, a layer), part by part: float16 (n, d)."""
        for number in range(len(self.chunks)):
            with self._open(number) as part:
                yield part[str(name)]

    def costs(self, layer: int) -> dict:
        """Seconds of the teacher up to this layer (a fraction of the whole pass), and the number of tokens read."""
        seconds = 0.0
        for number in range(len(self.chunks)):
            with self._open(number) as part:
                seconds += float(part["seconds"]) * layer / int(part["deepest"])
        return {"teacher_seconds": seconds, "teacher_tokens": self.text.tokens, "coded_words": self.text.words}


def vectors_name(layer: int, dictionary: Dictionary) -> int | str:
    """The name of a layer's vectors for a dictionary: it includes the dictionary's centre, if it has one."""
    if dictionary.center is None:
        return layer
    rows_Pd = dictionary.center.rows_Pd
    digest = hashlib.sha256(repr(rows_Pd.shape).encode() + np.ascontiguousarray(rows_Pd, "<f4").tobytes())
    return f"{layer}-{digest.hexdigest()[:12]}"


# -- one layer -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerFindings:
    """The diagnostic's results for one layer.

    phi     Φ of raw codes, CSR (synsets, K)
    npmi    its NPMI
    right   variant to bool (Q): which test words were answered correctly
    scores  variant to F1 of every group of words, and the share of words answered by backing off
    costs   seconds of coding and scoring, and non-zeros per word
    """

    phi: sparse.csr_array
    npmi: sparse.csr_array
    right: dict[str, np.ndarray]
    scores: dict[str, dict]
    costs: dict


def diagnose_layer(
    vectors: WordVectors, name: int | str, atoms_Kd: np.ndarray, data: WsdData, lam: float, tolerance: float
) -> LayerFindings:
    """Codes, Φ, NPMI and answers of one layer.

    vectors         WordVectors, or an object with the same `layer`, `word_of_row` and `device`
    name            name of the vectors to use: see `vectors_name`
    lam, tolerance  penalty of the codes, and the largest KKT violation that one may keep
    """
    clock = time.perf_counter()
    codes = _codes(vectors.layer(name), vectors.word_of_row, atoms_Kd, lam, tolerance, vectors.device)
    coded = time.perf_counter()
    right, scores, phi, phi_npmi = {}, {}, None, None
    learned_from = {"raw": codes[: data.training], "normalised": normalise(codes[: data.training])}
    for kind, training in learned_from.items():
        sums = sense_sums(training, data.training_words, data.training_rows, len(data.synsets))
        association = npmi(sums)
        if kind == "raw":
            phi, phi_npmi = sums, association
        for rule, found in answer(association, data.questions, codes[data.training :]).items():
            right[f"{kind}-{rule}"] = right_Q = data.questions.are_right(found.chosen_Q)
            scores[f"{kind}-{rule}"] = {
                group: float(right_Q[in_group].mean()) if in_group.any() else None
                for group, in_group in data.groups.items()
            }
            scores[f"{kind}-{rule}"]["back_off"] = float(found.backed_off_Q.mean())
    costs = {
        "coding_seconds": coded - clock,
        "scoring_seconds": time.perf_counter() - coded,
        "nnz_per_word": codes.nnz / codes.shape[0],
    }
    return LayerFindings(phi, phi_npmi, right, scores, costs)


def _codes(parts, word_of_row, atoms_Kd, lam, tolerance, device):
    """Codes of all words in the order of their numbers: CSR (words, K)."""
    proven = proof.kept_backend(device, atoms_Kd.shape[1], len(atoms_Kd), lam) if device.type == "cuda" else None
    backend: Backend = "cuda" if proven == "cuda" else "cpu"
    gram_KK = atoms_Kd @ atoms_Kd.T
    found = []
    for rows_nd in parts:
        codes = nonneg_lasso(rows_nd, atoms_Kd, lam, gram_KK=gram_KK, tol=tolerance, backend=backend)
        found.append(sparse.csr_array((codes.values, codes.indices, codes.indptr), (len(rows_nd), len(atoms_Kd))))
    return sparse.vstack(found, format="csr")[np.argsort(word_of_row)]


def _save(found, teacher, layer, dictionary, data, directory):
    """Write the files of a layer into a temporary directory, which is then published."""
    k = len(dictionary.atoms_Kd)
    record = {
        "layer": layer,
        "k": k,
        "dictionary": dictionary.fingerprint,
        "lsps_used": int((np.diff(found.phi.tocsc().indptr) > 0).sum()),
        "scores": found.scores,
        "first_sense": {
            group: float(data.questions.first_sense_Q()[chosen].mean()) if chosen.any() else None
            for group, chosen in data.groups.items()
        },
        "counts": data.counts() | {group: int(chosen.sum()) for group, chosen in data.groups.items()},
        "costs": found.costs,
    }
    labels = {
        "dictionary": dictionary.fingerprint,
        "teacher": teacher.fingerprint,
        "layer": layer,
        "k": k,
        "lsps": name_lsps(found.phi, found.npmi, data.synsets, data.wordnet),
    }
    sparse.save_npz(directory / "phi.npz", found.phi)
    np.save(directory / "right.npy", np.array([found.right[name] for name in found.scores]))
    (directory / "synsets.json").write_text(json.dumps(data.synsets))
    (directory / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8")
    (directory / "layer.json").write_text(json.dumps(record, indent=1))

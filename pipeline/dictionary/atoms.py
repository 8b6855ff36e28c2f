"""The atoms of a dictionary, how they were learned, and their files.

    dictionary.save("atoms")
    dictionary = Dictionary.load("atoms")

    atoms.npy          float32 (K, d): unit-length atoms, one per row
    center.npy         if the dictionary is centred: what is subtracted from hidden states first
    dictionary.json    how they were learned, and the fingerprint of the atoms, which loading checks

Shapes: d width, K atoms.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from mlsm.common.disk import read_file
from mlsm.common.durable import appearing_whole, publish_directory
from mlsm.common.errors import DictionaryError
from mlsm.common.invocation import program
from pipeline.dictionary.centering import Center
from shards.copies import dictionary_fingerprint, parse_dictionary
from shards.members import read_array

FORMAT = 1  # of the files


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Atoms, and how they were learned.

    atoms_Kd  float32, row norms <= 1
    history   one dict of held-out figures for each evaluation: vectors, epoch, objective, nnz (per vector),
              explained_variance (None if the held-out vectors are all but equal), dead_atoms (unused since the
              evaluation before, then replaced), near_atoms (nearly equal to another one, and replaced just before this
              evaluation), largest_cosine (of two atoms), kept_mass (the mean share of a distribution's mass that its n
              largest entries hold, by n); older dictionaries do not have the last three
    stopped   why learning ended
    settings  the requested settings
    center    what is subtracted from a hidden state before it is scaled to unit length and coded; None: nothing
    """

    atoms_Kd: np.ndarray
    history: list
    stopped: str
    settings: dict
    center: Center | None = None

    @property
    def fingerprint(self) -> str:
        """sha256 over shape and bytes of the atoms, and of the centre if there is one, hexadecimal."""
        return dictionary_fingerprint(self.atoms_Kd, (self.center.kind, self.center.rows_Pd) if self.center else None)

    @property
    def centering(self) -> str:
        """The --center that it was learned with: "none", "mean" or "position"."""
        return "none" if self.center is None else self.center.kind

    @property
    def best(self) -> dict:
        """The held-out figures of these atoms: those with the lowest objective; empty if there was no evaluation."""
        return min(self.history, key=lambda entry: entry["objective"], default={})

    def report(self) -> dict:
        """Figures of these atoms without nesting: number, width, vectors, stopped, and the held-out figures.

        If there is no explained variance it is NaN here, so that it can be formatted as a number.
        """
        best = {name: value for name, value in self.best.items() if name != "kept_mass"}
        best["near_atoms"] = sum(entry.get("near_atoms", 0) for entry in self.history)  # over the whole learning run
        if best.get("explained_variance", 0) is None:
            best["explained_variance"] = float("nan")
        return {
            "k": len(self.atoms_Kd),
            "width": self.atoms_Kd.shape[1],
            "stopped": self.stopped,
            **{name: best[name] for name in best if name != "vectors"},
            "vectors": self.settings.get("vectors"),
        }

    def save(self, directory: str | Path) -> None:
        """Write atoms.npy, dictionary.json and, of a centred one, center.npy into a new directory, which appears whole
        or not at all.

        Raises DictionaryError if the directory already holds something else.
        """
        directory = Path(directory).expanduser()
        record = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "shape": list(self.atoms_Kd.shape),
            "stopped": self.stopped,
            "settings": self.settings,
            "history": self.history,
        }
        if self.center is not None:
            record["center"] = self.center.record

        def fill(place):
            with appearing_whole(place / "atoms.npy") as file:
                np.save(file, self.atoms_Kd)
            if self.center is not None:
                with appearing_whole(place / "center.npy") as file:
                    np.save(file, self.center.rows_Pd)
            with appearing_whole(place / "dictionary.json") as file:
                file.write(json.dumps(record, indent=1).encode())

        publish_directory(directory, fill, replace=False)
        if not _holds(directory, self.fingerprint):
            raise DictionaryError(
                f"{directory} exists and is not this dictionary. Save to another directory, or remove that one."
            )

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read what `save` wrote. Raises DictionaryError if it is missing or damaged."""
        directory = Path(os.path.expanduser(directory))
        try:
            record = parse_dictionary(read_file(directory / "dictionary.json"), "dictionary.json")
            atoms_Kd = read_array("atoms.npy", read_file(directory / "atoms.npy"), 2).copy(order="K")
            center = Center.load(directory, record["center"]) if "center" in record else None
            dictionary = cls(atoms_Kd, record["history"], record["stopped"], record["settings"], center)
            found, expected = dictionary.fingerprint, record["fingerprint"]
        except FileNotFoundError as error:
            raise DictionaryError(
                f"{directory} is not a dictionary: it has no {Path(error.filename).name}. "
                f"Make one with: {program()} learn-dictionary"
            ) from error
        except (OSError, ValueError) as error:
            raise DictionaryError(f"{directory} is damaged ({error}). Copy or learn it again.") from error
        if found != expected:
            raise DictionaryError(
                f"{directory} is damaged: its arrays have sha256 {found[:12]}, "
                f"dictionary.json says {expected[:12]}. Copy or learn it again."
            )
        return dictionary


def _holds(directory, fingerprint):
    try:
        return Dictionary.load(directory).fingerprint == fingerprint
    except DictionaryError:
        return False

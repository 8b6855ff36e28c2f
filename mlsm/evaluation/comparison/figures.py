"""Figures 3 to 10 of the MLSM paper from one's own records: a table of what each is; none is drawn empty.

    drawn = draw_all(Study(models, paper=False, diagnostic=None), Path("runs/comparison"))

A figure whose records are missing is listed with what it needs. Left out: what the figures show (sweeps.py,
trajectories.py) and the paper's figures 1, 2 and 11, which show no scores.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlsm.common import disk
from mlsm.common.errors import PlotError
from mlsm.evaluation.comparison import sweeps, trajectories
from mlsm.evaluation.comparison.drawing import HEADER, Lacking, Study
from mlsm.evaluation.plots import save_figure

FIGURES = {  # number -> name of its files, what it shows, what draws it
    3: ("layers", "fine-tuning by layer of the teacher, with its matrices", sweeps.layers),
    4: ("word-senses", "fine-tuning by word-sense F1 of the layer", sweeps.word_senses),
    5: ("lsps", "fine-tuning by number of LSPs, with its matrices", sweeps.numbers_of_lsps),
    6: ("steps", "fine-tuning by pre-training step: average and tasks", trajectories.averages_and_tasks),
    7: ("pairs", "paired scores of MLSM and the others, share of wins", trajectories.paired_scores),
    8: ("mlm-weight", "fine-tuning by weight of MLM, with its matrices", sweeps.weights_of_mlm),
    9: ("blimp", "BLiMP by cost of pre-training and teacher", trajectories.blimp_over_cost),
    10: ("another-encoder", "fine-tuning by step, another encoder", trajectories.averages_of_another_encoder),
}


def draw_all(study: Study, directory: Path, progress: Callable[..., None]) -> list[dict]:
    """Draw what the records allow; files of figures that they do not allow (any more) are removed.

    Returns  [{"figure": number in the paper, "shows", "files", "models", "caption": whether its models differ in
             nothing but what it is about, "lacks": None or what it needs}]
    """
    drawn = []
    for place, (number, (name, shows, draw)) in enumerate(FIGURES.items()):
        progress("figures", place, len(FIGURES), unit="figures")
        stem, facts = directory / f"figure-{number:02}-{name}", {"figure": number, "shows": shows}
        try:
            drawing = draw(study)
        except (Lacking, PlotError) as lack:
            _remove(stem)
            drawn.append(facts | {"files": [], "models": None, "caption": None, "lacks": str(lack)})
            continue
        files = save_figure(drawing.figure, stem, HEADER, drawing.rows)
        said = {"models": drawing.note, "caption": drawing.caption, "lacks": None}
        drawn.append(facts | {"files": list(map(str, files))} | said)
    return drawn


def _remove(stem):
    for suffix in (".svg", ".png", ".csv"):
        with suppress(FileNotFoundError):
            disk.unlink(stem.with_name(stem.name + suffix))

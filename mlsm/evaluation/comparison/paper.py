"""Draw figures 3 to 10 of the MLSM paper from your own records.

    drawn = draw_paper_figures(result, settings, progress)

Some figures vary one setting: layer (3, 4), number of LSPs (5), weight of MLM (8). Others compare checkpoints: averages
and tasks over steps (6, 10), paired scores (7), BLiMP over its cost (9). A figure whose records are missing is not
drawn but listed with what it needs. `vary` finds the models for the former, and a Drawing collects a figure's numbers
for its CSV. On request, the paper's published numbers (published.py) are drawn next to your own. Not handled here: the
paper's figures 1, 2 and 11, which show no scores.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.arms import CHECKPOINTS, PRETRAINING, Arm, sort_into_arms
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.effects import Matrices, Matrix, matrices, win_rates
from mlsm.evaluation.comparison.figures import COLORS, MARKERS, p_text, style
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import (
    PARADIGMS,
    SEEDS,
    SUITE,
    TITLES,
    Model,
    SuiteFigure,
    average,
    blimp_average,
    checkpoint_name,
    common_figures,
    common_paradigms,
    find_mixture,
    match_trainings,
    out_of,
    scored_alike,
)
from mlsm.evaluation.comparison.result import Comparison, PaperFigure
from mlsm.evaluation.plots import label, new_figure, save_figure, write_caption
from mlsm.evaluation.studies.word_senses.conclusions import read_result
from student.objectives import WITHOUT_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"layer": "layer of the teacher", "k": "number of LSPs, k", "kappa": "weight of MLM relative to MLSM, κ"}
_VARIED = {"layer": {"layer"}, "k": {"k"}, "kappa": {"objective", "kappa"}}  # fact -> the settings that vary with it
_HELD = ("encoder", "teacher", "layer", "k", "lambda", "step")  # must agree at least, except the varied one
_STUDIED = {"objective", "step"}  # by the figures of checkpoints
_RIVALS = ("mlm", "kd")  # compared with MLSM in figure 7
_HEADER = ("panel", "series", "x", "against", "value", "n", "source")
_PUBLISHED = {"color": "0.45", "linestyle": "--", "linewidth": 1, "marker": "d", "markersize": 4}
MOST_NAMED = 4  # models in a caption
_COLUMNS = 3  # in figures with a panel per task
_APART = 0.08  # least distance of two labels, as a fraction of the axis


# -- parts of figures ---------------------------------------------------------------------------------------


class Lacking(ValueError):
    """The records are not sufficient for a figure; the message says what is missing."""


@dataclass
class Drawing:
    """A figure and, for its CSV, every number in it.

    note     says whose numbers these are
    caption  says whether these models differ only in what the figure is about; shown below the figure
    """

    figure: "Figure"
    note: str
    rows: list = field(default_factory=list)
    caption: str = ""

    def explain(
        self, models: Sequence[Model], studied: Collection[str], more: str = "", are_tuned: bool = True
    ) -> None:
        """Write the caption.

        studied    names of the settings that the figure is about
        more       a sentence to add
        are_tuned  whether the figure shows fine-tuning scores
        """
        records = (record for model in models for record in model.trainings.values())
        why = find_mixture(records) if are_tuned else ""
        mixed = f"They were fine-tuned in different ways ({why}), so their averages cannot be compared." if why else ""
        self.caption = " ".join(filter(None, (differences(models).sentence(studied), mixed, more)))
        write_caption(self.figure, self.caption)

    def add(
        self,
        panel: str,
        series: str,
        x: object,
        value: object,
        n: object = "",
        against: object = "",
        source: str = "measured",
    ) -> None:
        """Record one number for the CSV."""
        self.rows.append([panel, series, x, against, value, n, source])


def task_panels(count: int, height: float) -> "tuple[Figure, list[Axes], list[Axes]]":
    """A figure with `count` panels in rows of three, each `height` inches high, without empty panels.

    Returns  (figure, the axes of these panels, the axes with no panel below them)
    """
    rows = -(-count // _COLUMNS)
    figure, axes = new_figure(width=2, rows=rows, columns=_COLUMNS)
    figure.set_figheight(max(height * rows, 4))
    panels = list(axes.flat)
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count], panels[max(0, count - _COLUMNS) : count]


def tick_steps(axes: "Axes") -> None:
    """Few ticks for optimiser steps, 250k for 250,000, so that they do not overlap in a small panel."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def tick_values(axes: "Axes", values: Iterable[float]) -> None:
    """A tick at each value, labelled unless it is so close to the label on its left that they would overlap."""
    from matplotlib.ticker import NullLocator

    values = sorted(values)
    place = math.log2 if axes.get_xscale() == "log" else float
    least, last, labels = _APART * (place(values[-1]) - place(values[0])), -math.inf, []
    for value in values:
        is_apart = place(value) - last >= least
        labels.append(f"{value:g}" if is_apart else "")
        last = place(value) if is_apart else last
    axes.set_xticks(values, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def figure_title(figure: SuiteFigure) -> str:
    """(task, metric) for people."""
    task, metric = figure
    return f"{TITLES[task]} ({metric.replace('_', ' ')})"


def how_many(models: Sequence[Model], figures: Sized) -> str:
    """For an axis label: how many of the suite's scores (n) the averages are based on."""
    shown = "" if len(figures) == len(SUITE) else f"over {len(figures)} of {len(SUITE)} figures, "
    return shown + out_of([len(model.scores) for model in models], SEEDS * len(SUITE))


# -- one quantity varied ------------------------------------------------------------------------------------


def vary(models: Iterable[Model], fact: str) -> Arm:
    """The largest arm of fine-tuned models that differ only in one fact, at the last step, ordered by the fact's
    values.

    If no two models agree in all other settings of pre-training, the largest set that agrees at least in encoder,
    teacher, layer, k, lambda and step is used. Its figure names the other differences.

    fact     layer, k (of objective mlsm), or kappa (of mtl; mlsm is κ = 0)
    Raises   Lacking
    """
    having = [model for model in models if _value_of(model, fact) is not None and model.trainings]
    roughly: dict[tuple, list[Model]] = {}
    for model in having:
        roughly.setdefault(tuple(model.facts[name] for name in _HELD if name != fact), []).append(model)

    def rank(group: Sequence[Model]) -> tuple[int, float]:
        step = group[0].facts["step"]
        return len({_value_of(model, fact) for model in group}), float("inf") if step is None else step

    alike = max((arm.models for arm in sort_into_arms(having, _VARIED[fact])), key=rank, default=())
    chosen: Sequence[Model] = max(roughly.values(), key=rank, default=[])
    if len({_value_of(model, fact) for model in alike}) > 1:
        chosen = alike
    values = [_value_of(model, fact) for model in chosen]
    if len(set(values)) < 2:
        kinds = "mlsm and mtl (with kappa)" if fact == "kappa" else "mlsm"
        raise Lacking(f"fine-tuned {kinds} models of one step that differ only in {fact}; found {fact}: {values}")
    twice = [model.label for model, value in zip(chosen, values, strict=True) if values.count(value) > 1]
    if twice:
        raise Lacking(
            f"one model for each {fact}; {', '.join(twice)} have the same {fact}. Pass the records of only one"
        )
    if not common_figures(chosen):
        raise Lacking("a task that all of these models were fine-tuned on")
    return Arm(fact, tuple(sorted(chosen, key=lambda model: _value_of(model, fact) or 0.0)))


def _value_of(model: Model, fact: str) -> float | None:
    """A model's value of the varied fact; None if the model is not among those that vary it."""
    objective = model.facts["objective"]
    if (model.facts["identity"] or {}).get("other_targets"):  # such as several layers
        return None
    if fact == "kappa":
        return {"mlsm": 0.0, "mtl": model.facts["kappa"]}.get(objective)
    return model.facts[fact] if objective == "mlsm" else None


def word_senses(models: Sequence[Model], settings: CompareConfig) -> Drawing:
    """Figure 4: word-sense F1 of choose-layer against fine-tuning averages."""
    if settings.diagnostic is None:
        raise Lacking("the result of choose-layer: --diagnostic result.json")
    arm, diagnosed = vary(models, "layer"), read_result(settings.diagnostic)
    k, identities = arm.facts["k"], [model.facts["identity"] for model in arm.models]
    known = {identity["target_settings"].get("teacher") for identity in identities if identity} - {None}
    if known - {diagnosed.fingerprint}:
        what = f"{settings.diagnostic} is for {diagnosed.teacher}"
        raise Lacking(f"a result of choose-layer for the models' own teacher; {what}")
    f1 = {layer: value for (layer, of_k), value in diagnosed.f1.items() if of_k == k}
    chosen = [model for model in arm.models if model.facts["layer"] in f1]
    if len(chosen) < 3:
        found = [model.facts["layer"] for model in chosen]
        raise Lacking(f"three layers or more of k {k} in records and {settings.diagnostic}; found {found}")
    return _draw_word_senses(models, settings, Arm("layer", tuple(chosen)), f1)


def _name_left_out(models: Sequence[Model], arm: Arm, fact: str) -> str:
    """A sentence on the fine-tuned models that a figure omits only because some other setting differs."""
    named = [
        f"{model.label} ({', '.join(differences([arm.models[0], model]).beyond(_VARIED[fact])) or 'unknown'})"
        for model in models
        if model not in arm.models
        and model.trainings
        and _value_of(model, fact) is not None
        and all(model.facts[name] == arm.facts[name] for name in _HELD if name != fact)
    ]
    return f"Excluded because other settings differ: {', '.join(named)}." if named else ""


def _draw_varied(models: Sequence[Model], settings: CompareConfig, fact: str, table: int) -> Drawing:
    """Figures 3, 5 and 8: averages by the values of a fact, next to those of a table of the paper, and matrices."""
    arm = vary(models, fact)
    values = _values(arm, fact)
    figure, axes = new_figure(width=2.2, columns=3)
    drawing = Drawing(figure, ", ".join(model.label for model in arm.models))
    figures = common_figures(arm.models)
    draw_averages(drawing, axes[0], arm, fact, figures)
    if settings.paper:
        averages = published.printed_averages(table)
        axes[0].plot(list(averages), list(averages.values()), label="paper", **_PUBLISHED)
        for value, mean in averages.items():
            drawing.add("average", "mean", value, mean, source="paper")
    if fact == "k":
        axes[0].set_xscale("log", base=2)
    title = f"average, {how_many(arm.models, figures)}"
    axes[0].set(xlabel=_NAMES[fact], ylabel="average fine-tuning score", title=title)
    tick_values(axes[0], {row[2] for row in drawing.rows})
    axes[0].title.set_fontsize(10)
    drawing.explain(arm.models, _VARIED[fact], _name_left_out(models, arm, fact))
    axes[0].legend(fontsize=8)
    _draw_matrices(drawing, axes[1:], matrices(arm.models)[0]["scores"], values)
    for panel in axes[1:]:
        panel.set(xlabel=f"against {fact}", ylabel=fact)
    return drawing


def _values(arm: Arm, fact: str) -> list[float]:
    """The values of the varied fact that the models of an arm have."""
    return [value for model in arm.models if (value := _value_of(model, fact)) is not None]


def draw_averages(drawing: Drawing, axes: "Axes", arm: Arm, fact: str, figures: Sequence[SuiteFigure]) -> None:
    """Plot the average over scores against the varied setting, with a marker for each seed."""
    values = _values(arm, fact)
    for value, model in zip(values, arm.models, strict=True):
        for seed, mean in _by_seed(model, figures).items():
            axes.plot(value, mean, ".", color="0.7", markersize=4, zorder=1)
            drawing.add("average", f"seed {seed}", value, mean, len(figures))
    means = [average(model, figures) for model in arm.models]
    axes.plot(values, means, label="mean over seeds", **style(0))
    axes.plot([], [], ".", color="0.7", label="single seeds")
    for value, model, mean in zip(values, arm.models, means, strict=True):
        drawing.add("average", "mean", value, mean, len(model.scores))


def _by_seed(model, figures):
    """seed -> average over the suite's figures, for the seeds that have them all."""
    scores = model.scores
    seeds = sorted({seed for _, _, seed in scores})
    whole = [seed for seed in seeds if all((*figure, seed) in scores for figure in figures)]
    return {seed: fmean(scores[(*figure, seed)] for figure in figures) for seed in whole}


def _draw_matrices(drawing: Drawing, axes: "Sequence[Axes]", cells: Matrices, values: Sequence) -> None:
    labels = [f"{value:g}" for value in values]
    paired = [n for row in cells.n for n in row if n is not None]
    n = out_of(paired, SEEDS * len(SUITE))
    most = max(*paired, 1)
    title = f"p, row better than column ({n}; * p < 0.01)"
    _draw_matrix(axes[0], cells.p, labels, p_text, lambda p: max(0.0, 1 - p / 0.5), title)
    _draw_matrix(axes[1], cells.wins, labels, str, lambda wins: wins / most, f"pairs won by the row ({n})")
    for i, value in enumerate(values):
        for j, other in enumerate(values):
            if i != j:
                for name in ("p", "wins", "ties"):
                    drawing.add(name, "", value, getattr(cells, name)[i][j], cells.n[i][j], other)


def _draw_matrix(
    axes: "Axes",
    cells: Matrix,
    labels: list[str],
    text: Callable[[Any], str],
    shade: Callable[[Any], float],
    title: str,
) -> None:
    """Draw a matrix of numbers, row against column; cells are dark if the row is better.

    cells  (M, M) rows; None is a pair without a number
    text   function from a number to its cell's text
    shade  function from a number to how dark its cell is, from 0 to 1
    """
    shades = [[0.0 if value is None else shade(value) for value in row] for row in cells]
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.15)
    size = 9 if len(cells) <= 5 else 7 if len(cells) <= 8 else 5
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            said = "–" if value is None else text(value)
            axes.text(j, i, said, ha="center", va="center", fontsize=size, color="w" if shades[i][j] > 0.6 else "k")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks([place + 0.5 for place in range(len(labels) - 1)], minor=True)
    axes.set_yticks([place + 0.5 for place in range(len(labels) - 1)], minor=True)
    axes.grid(visible=False)
    axes.grid(visible=True, which="minor", color="w", alpha=1)
    axes.tick_params(length=0, which="both")
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10)


# -- the word-sense diagnostic ----------------------------------------------------------------------------


def correlations(x: Sequence[float], y: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Spearman and Pearson correlation with p values, of the values and of the values rounded to 0.1 per cent, because
    the paper's Spearman value implies ties. Empty if a list is constant.
    """
    from scipy import stats

    rounded = [[round(100 * value, 1) for value in values] for values in (x, y)]
    found = {}
    for suffix, (left, right) in (("", (x, y)), (", rounded", rounded)):
        if min(left) < max(left) and min(right) < max(right):
            for name, test in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
                result = test(left, right)
                found[f"{name}{suffix}"] = float(result.statistic), float(result.pvalue)
    return found


def _draw_word_senses(models: Sequence[Model], settings: CompareConfig, arm: Arm, f1: dict[int, float]) -> Drawing:
    values = [model.facts["layer"] for model in arm.models]
    figures = common_figures(arm.models)
    figure, (left, right) = new_figure(width=1.8, columns=2)
    drawing = Drawing(figure, ", ".join(model.label for model in arm.models))
    draw_averages(drawing, left, arm, "layer", figures)
    means, senses = [average(model, figures) for model in arm.models], [f1[layer] for layer in values]
    other = left.twinx()
    other.grid(visible=False)
    other.plot(values, senses, label="word-sense F1", **style(1))
    title = f"average, {how_many(arm.models, figures)}"
    left.set(xlabel=_NAMES["layer"], ylabel="average fine-tuning score", title=title)
    other.set_ylabel("word-sense F1")
    tick_values(left, values)
    lines = [*left.get_lines()[-2:], *other.get_lines()]
    left.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="lower right")
    right.plot(senses, means, "o", color=style(0)["color"])
    for layer, x, y in zip(values, senses, means, strict=True):
        right.annotate(f" {layer}", (x, y), fontsize=8)
        drawing.add("word senses", "F1", layer, x)
    right.set(xlabel="word-sense F1", ylabel="average fine-tuning score")
    _write_correlations(settings, drawing, right, correlations(senses, means), len(values))
    drawing.explain(arm.models, _VARIED["layer"], _name_left_out(models, arm, "layer"))
    return drawing


def _write_correlations(
    settings: CompareConfig, drawing: Drawing, axes: "Axes", found: dict[str, tuple[float, float]], n: int
) -> None:
    lines = []
    for name, (r, p) in found.items():
        drawing.add("correlation", name, "", r, n)
        drawing.add("correlation", f"{name}, p", "", p, n)
        if "rounded" not in name:
            lines.append(f"{name.capitalize()} {r:.3f} (p = {p:.2g})")
    if settings.paper:
        paper = published.WORD_SENSE_CORRELATION
        lines.append(f"paper, 8 layers: {paper['spearman']} and {paper['pearson']}")
        for name, r in paper.items():
            drawing.add("correlation", name, "", r, 8, source="paper")
    axes.set_title("\n".join(lines), fontsize=9)


# -- checkpoints ------------------------------------------------------------------------------------------


def averages_and_tasks(models: Sequence[Model], settings: CompareConfig) -> Drawing:
    """Figure 6: for the encoder with the most pre-training runs, preferably the paper's DeBERTa."""
    arms = _checkpoints(models)[0]
    drawn = [model for arm in arms for model in arm.models]
    shown = [suite_figure for suite_figure in SUITE if any(suite_figure in model.figures for model in drawn)]
    figure, panels, lowest = task_panels(1 + len(shown), height=3)
    drawing = Drawing(figure, ", ".join(arm.name for arm in arms))
    _draw_checkpoints(drawing, panels[0], arms)
    for panel, suite_figure in zip(panels[1:], shown, strict=True):
        _draw_task(drawing, panel, arms, suite_figure)
    if settings.paper:
        _draw_published(drawing, panels, shown)
    for panel in lowest:
        panel.set_xlabel("pre-training steps")
    drawing.explain(drawn, _STUDIED)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return drawing


def averages_of_another_encoder(models: Sequence[Model], _: CompareConfig) -> Drawing:
    """Figure 10: figure 6's first panel for the encoder that ranks second."""
    others = _checkpoints(models)[1:]
    if not others:
        raise Lacking("checkpoints at two or more steps of an encoder other than figure 6's")
    figure, axes = new_figure()
    drawing = Drawing(figure, ", ".join(arm.name for arm in others[0]))
    _draw_checkpoints(drawing, axes, others[0])
    drawing.explain([model for arm in others[0] for model in arm.models], _STUDIED)
    axes.legend(fontsize=8)
    return drawing


def _checkpoints(models: Sequence[Model]) -> list[list[Arm]]:
    """For each encoder, the pre-training runs with at least two fine-tuned steps."""
    by_encoder: dict[str, list[Model]] = {}
    for arm in sort_into_arms([model for model in models if model.trainings], CHECKPOINTS):
        if len({model.facts["step"] for model in arm.models} - {None}) > 1:
            by_encoder.setdefault(arm.facts["encoder"] or "", []).extend(arm.models)
    if not by_encoder:
        raise Lacking("fine-tuned checkpoints at two or more steps of one pre-training run")
    arms = {encoder: sort_into_arms(group, CHECKPOINTS) for encoder, group in by_encoder.items()}
    for of_encoder in arms.values():
        _require_one_a_step(of_encoder)
    ranked = sorted(arms, key=lambda encoder: (_is_papers(encoder), len(arms[encoder])), reverse=True)
    return [arms[encoder] for encoder in ranked]


def _is_papers(encoder: str | None) -> bool:
    """Whether an encoder is of the paper's family, which is preferred."""
    return (encoder or "").startswith("deberta")


def _require_one_a_step(arms: Sequence[Arm]) -> None:
    for arm in arms:
        steps = [model.facts["step"] for model in arm.models]
        if twice := [model.label for model in arm.models if steps.count(model.facts["step"]) > 1]:
            raise Lacking(
                f"one model per step of {arm.name}; {', '.join(twice)} have the same step. Pass those of one run"
            )


def _draw_checkpoints(drawing: Drawing, axes: "Axes", arms: Sequence[Arm]) -> None:
    models = [model for arm in arms for model in arm.models]
    figures = common_figures(models)
    if not figures:
        raise Lacking("a task that all of these checkpoints were fine-tuned on")
    for place, arm in enumerate(arms):
        means = [average(model, figures) for model in arm.models]
        axes.plot([model.facts["step"] for model in arm.models], means, label=label(arm.name), **style(place))
        for model, mean in zip(arm.models, means, strict=True):
            drawing.add("average", arm.name, model.facts["step"], mean, len(model.scores))
    axes.set_title(f"average ({how_many(models, figures)})", fontsize=10)
    axes.set(xlabel="pre-training steps", ylabel="average fine-tuning score")
    tick_steps(axes)


def _draw_task(drawing: Drawing, axes: "Axes", arms: Sequence[Arm], suite_figure: SuiteFigure) -> None:
    for place, arm in enumerate(arms):
        models = [model for model in arm.models if suite_figure in model.figures]
        values = [model.figures[suite_figure] for model in models]
        axes.plot([model.facts["step"] for model in models], values, **style(place))
        for model, value in zip(models, values, strict=True):
            seeds = len(model.values[suite_figure])
            drawing.add(" ".join(suite_figure), arm.name, model.facts["step"], value, seeds)
    axes.set_title(figure_title(suite_figure), fontsize=10)
    tick_steps(axes)


def _draw_published(drawing, panels, shown):
    """Draw the paper's finished MLSM (layer 10, k = 3,072) as a horizontal line; its curves are not published."""
    levels = [published.printed_averages(1)[10], *(published.scores(1)[10][suite_figure] for suite_figure in shown)]
    names = ["average", *(" ".join(suite_figure) for suite_figure in shown)]
    for panel, level, name in zip(panels, levels, names, strict=True):
        panel.axhline(level, label="paper: MLSM, layer 10, DeBERTa, finished", **_PUBLISHED | {"marker": ""})
        drawing.add(name, "MLSM, layer 10", "", level, source="paper")


# -- paired scores ----------------------------------------------------------------------------------------


def paired_scores(models: Sequence[Model], settings: CompareConfig) -> Drawing:
    """Figure 7: each fine-tuning score of MLSM against that of MLM and KD of the same step and encoder."""
    pairs = _pairs_of_checkpoints(models)
    paired = {task for _, model, other in pairs for task, _ in match_trainings(model, other)[0]}
    shown = [suite_figure for suite_figure in SUITE if suite_figure[0] in paired]
    figure, panels, _ = task_panels(len(shown) + 1, height=3.8)
    drawing = Drawing(figure, ", ".join(dict.fromkeys(model.label for _, *both in pairs for model in both)))
    steps = sorted({model.facts["step"] for _, model, _ in pairs}, key=lambda step: step or 0)
    rivals = dict.fromkeys(name for name, _, _ in pairs)
    looks = dict(zip(steps, cycle(COLORS))), dict(zip(rivals, cycle(MARKERS)))  # colours of steps, markers of rivals
    for panel, suite_figure in zip(panels[:-1], shown, strict=True):
        _draw_pairs(drawing, panel, pairs, suite_figure, looks)
    _draw_win_rates(drawing, panels[-1], pairs, looks)
    panels[0].set(xlabel="the other's score", ylabel="MLSM's score")
    _write_legend(figure, panels[0], pairs, looks)
    drawn = list({id(model): model for _, *both in pairs for model in both}.values())
    are_of_one_seed = all(model.facts["run_seed"] == other.facts["run_seed"] for _, model, other in pairs)
    studied = _STUDIED | (PRETRAINING if are_of_one_seed else set())
    drawing.explain(drawn, studied, _name_unpaired(models, drawn))
    return drawing


def _name_unpaired(models: Sequence[Model], drawn: Sequence[Model]) -> str:
    """A sentence that names the models of this kind that figure 7 does not show; empty if there are none."""
    labels = [
        model.label
        for model in models
        if model.trainings and model.facts["objective"] in ("mlsm", *_RIVALS) and all(model is not one for one in drawn)
    ]
    if not labels:
        return ""
    more = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
    return f"Not in the largest set of pairs, so not shown: {', '.join(labels[:MOST_NAMED])}{more}."


def _pairs_of_checkpoints(models: Sequence[Model]) -> list[tuple[str, Model, Model]]:
    """[(rival's name, mlsm model, rival's model)] at the same step and encoder, for the mlsm arm with the most pairs
    of the same seed. If no pair has the same seed, those of the mlsm run with the most pairs of any seeds.
    """
    tuned = [model for model in models if model.trainings]
    rivals = [model for model in tuned if model.facts["objective"] in _RIVALS]
    for may_differ, shared in ((PRETRAINING, ("encoder", "step", "run_seed")), (CHECKPOINTS, ("encoder", "step"))):
        pairs_of = {
            arm: [
                (model, other)
                for model in arm.models
                for other in rivals
                if all(model.facts[fact] == other.facts[fact] for fact in shared) and match_trainings(model, other)[0]
            ]
            for arm in sort_into_arms(tuned, may_differ)
            if arm.facts["objective"] == "mlsm"
        }
        chosen = max(pairs_of, key=lambda arm: (len(pairs_of[arm]), _is_papers(arm.facts["encoder"])), default=None)
        if chosen is None or not pairs_of[chosen]:
            continue
        arms = sort_into_arms([other for _, other in pairs_of[chosen]], may_differ)
        for arm in (chosen, *arms):
            _require_one_a_step(sort_into_arms(arm.models, CHECKPOINTS))
        return [(arm.name, model, other) for arm in arms for model, other in pairs_of[chosen] if other in arm.models]
    raise Lacking("mlsm and mlm or kd, fine-tuned at the same step of the same encoder, with the same heads")


def _draw_pairs(drawing, axes, pairs, suite_figure, looks):
    colors, markers = looks
    task, metric = suite_figure
    drawn = []
    for rival, model, other in pairs:
        keys = [(task, metric, seed) for of, seed in match_trainings(model, other)[0] if of == task]
        points = [(other.scores[key], model.scores[key]) for key in keys]
        look = {"color": colors[model.facts["step"]], "marker": markers[rival], "alpha": 0.7, "markeredgewidth": 0}
        axes.plot([x for x, _ in points], [y for _, y in points], linestyle="", **look)
        for (_, _, seed), (x, y) in zip(keys, points, strict=True):
            drawing.add(" ".join(suite_figure), f"{model.label}, seed {seed}", x, y, 1, other.label)
        drawn += points
    axes.set_title(figure_title(suite_figure), fontsize=10)
    _fit_square(axes, [value for point in drawn for value in point])


def _fit_square(axes, values):
    """Set equal limits on both axes, so that the diagonal shows equal scores."""
    axes.axline((values[0], values[0]), slope=1, color="0.4", linestyle="--", linewidth=1, zorder=0)
    margin = max(0.005, 0.08 * (max(values) - min(values)))
    limits = min(values) - margin, max(values) + margin
    axes.set(xlim=limits, ylim=limits, aspect="equal")


def _draw_win_rates(drawing, axes, pairs, looks):
    steps, rivals = map(list, looks)
    width = 0.8 / len(rivals)
    bars: dict[tuple, list[tuple[Model, Model]]] = {}  # rival and step -> pairs, one for each seed
    for rival, model, other in pairs:
        bars.setdefault((rival, model.facts["step"]), []).append((model, other))
    for (rival, step), of_bar in bars.items():
        rates = [
            next(row for row in win_rates([model, other]) if row.task == "all" and row.model == model.label)
            for model, other in of_bar
        ]
        n = sum(rate.n for rate in rates)
        share = sum(rate.rate * rate.n for rate in rates) / n
        at = steps.index(step) + (rivals.index(rival) - (len(rivals) - 1) / 2) * width
        axes.bar(at, share, width * 0.9, color=looks[0][step], alpha=0.7)
        axes.text(at, 0.03, label(f"{rival}, n = {n}"), ha="center", va="bottom", fontsize=7, rotation=90)
        named = [", ".join(dict.fromkeys(model.label for model in side)) for side in zip(*of_bar, strict=True)]
        drawing.add("win rate", named[0], step, share, n, named[1])
    names = {model.facts["step"]: checkpoint_name(model) for _, model, _ in pairs}
    axes.set_xticks(range(len(steps)), [names[step] for step in steps], rotation=45 if len(steps) > 4 else 0)
    axes.axhline(0.5, color="0.4", linestyle="--", linewidth=1)
    axes.grid(visible=False, axis="x")
    axes.set(ylim=(0, 1), xlabel="checkpoint")
    axes.set_title("share of pairs that MLSM wins (a tie counts half)", fontsize=10)


def _write_legend(figure, axes, pairs, looks):
    names = {model.facts["step"]: checkpoint_name(model) for _, model, _ in pairs}
    for step, color in looks[0].items():
        axes.plot([], [], "s", color=color, label=names[step])
    for rival, marker in looks[1].items():
        axes.plot([], [], marker, color="0.4", label=label(f"against {rival}"))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=6)


# -- BLiMP ------------------------------------------------------------------------------------------------


def blimp_over_cost(models: Sequence[Model], settings: CompareConfig) -> Drawing:
    """Figure 9: BLiMP accuracy against operations of pre-training and teacher; mlsm models are scored with a probe."""
    scored, left_out = scored_alike(models)
    costs = {model.label: model.cost for model in scored if model.cost is not None}
    models = [model for model in scored if model.label in costs]
    if not models:
        raise Lacking(f"BLiMP records with known FLOPs; found {len(scored)} BLiMP records")
    left_out |= {model.label: "flops not known" for model in scored if model.label not in costs}
    figure, axes = new_figure(width=1.2)
    drawing = Drawing(figure, ", ".join(model.label for model in models))
    paradigms = common_paradigms(models)
    if not paradigms:
        raise Lacking("a BLiMP paradigm that all models were scored on")
    for place, arm in enumerate(sort_into_arms(models, CHECKPOINTS)):
        group = sorted(arm.models, key=lambda model: costs[model.label])
        name = f"{arm.name} + probe" if arm.facts["objective"] in WITHOUT_WORDS else arm.name
        means = [blimp_average(model, paradigms) for model in group]
        axes.plot([costs[model.label] for model in group], means, label=label(name), **style(place))
        for model, mean in zip(group, means, strict=True):
            drawing.add("blimp", name, costs[model.label], mean, len(paradigms), model.label)
    _finish_costs(settings, drawing, axes, len(paradigms))
    drawing.note += "".join(f"; without {label}: {why}" for label, why in left_out.items())
    drawing.explain(models, _STUDIED, are_tuned=False)
    return drawing


def _finish_costs(settings, drawing, axes, paradigms):
    if settings.paper:
        axes.set_xscale("log")
        costs = published.pretraining_cost()
        for place, (name, cost) in enumerate(sorted(costs.items(), key=itemgetter(1))):
            look = {"color": "0.45", "linewidth": 1, "linestyle": (0, (6, 1 + 2 * place)), "zorder": 0}
            axes.axvline(cost, label=f"paper: {name}, as table 3 counts", **look)
            drawing.add("cost of a whole pre-training", name, cost, "", source="paper")
    axes.set(
        xlabel="floating-point operations of pre-training and teacher",
        ylabel="BLiMP accuracy",
        title=f"mean over n = {paradigms} of {PARADIGMS} paradigms",
    )
    axes.figure.legend(fontsize=8, loc="outside right upper")


# -- all of them ------------------------------------------------------------------------------------------

FIGURES: dict[int, tuple[str, str, Callable[[Sequence[Model], CompareConfig], Drawing]]] = {
    # number -> name of its files, title, function
    3: (
        "layers",
        "fine-tuning by layer of the teacher, with its matrices",
        partial(_draw_varied, fact="layer", table=1),
    ),
    4: ("word-senses", "fine-tuning by word-sense F1 of the layer", word_senses),
    5: ("lsps", "fine-tuning by number of LSPs, with its matrices", partial(_draw_varied, fact="k", table=2)),
    6: ("steps", "fine-tuning by pre-training step: average and tasks", averages_and_tasks),
    7: ("pairs", "paired scores of MLSM and the others, share of wins", paired_scores),
    8: ("mlm-weight", "fine-tuning by weight of MLM, with its matrices", partial(_draw_varied, fact="kappa", table=4)),
    9: ("blimp", "BLiMP by cost of pre-training and teacher", blimp_over_cost),
    10: ("another-encoder", "fine-tuning by step, another encoder", averages_of_another_encoder),
}


def draw_paper_figures(result: Comparison, settings: CompareConfig, progress: Callable[..., None]) -> list[PaperFigure]:
    """Draw the figures for which there are records."""
    found = []
    for place, (number, (name, shows, draw)) in enumerate(FIGURES.items()):
        progress("figures", place, len(FIGURES), unit="figures")
        try:
            drawing = draw(result.models, settings)
        except (Lacking, ImportError) as lack:
            found.append(PaperFigure(number, shows, [], None, None, str(lack)))
            continue
        files = save_figure(drawing.figure, settings.output / _stem(number, name), _HEADER, drawing.rows)
        found.append(PaperFigure(number, shows, list(map(str, files)), drawing.note, drawing.caption, None))
    return found


def _stem(number, name):
    return f"figure-{number:02}-{name}"


def files_of_figures() -> set[str]:
    """The names that the files of figures may have."""
    stems = (_stem(number, name) for number, (name, *_) in FIGURES.items())
    return {f"{stem}{suffix}" for stem in stems for suffix in (".svg", ".png", ".csv")}

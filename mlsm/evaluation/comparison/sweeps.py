"""Figures of one quantity varied while all else stays: layer (3, 4), number of LSPs (5), weight of MLM (8).

Left out: checkpoints of a pre-training (trajectories.py).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.drawing import (
    PAPER,
    Drawing,
    Lacking,
    Study,
    how_many,
    p_text,
    panel_of_matrix,
    style,
    tick_values,
)
from mlsm.evaluation.comparison.identity import KEPT, differences
from mlsm.evaluation.comparison.models import SEEDS, SUITE, Model, SuiteFigure, average, common_figures, out_of
from mlsm.evaluation.comparison.significance import matrices
from mlsm.evaluation.plots import new_figure
from mlsm.evaluation.studies.word_senses.conclusions import coefficients, read_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Varied = tuple[float, Model]  # what is varied: its value, and the model that has it

_HELD = ("encoder", "teacher", "layer", "k", "lambda", "step")  # what must agree at least, save what is varied
_STUDIED = {"layer": {"layer"}, "k": {"k"}, "kappa": {"objective", "kappa"}}
_NAMES = {"layer": "layer of the teacher", "k": "number of LSPs, k", "kappa": "weight of MLM beside MLSM, κ"}


def layers(study: Study) -> Drawing:
    """Figure 3."""
    return _draw(study, "layer", table=1)


def numbers_of_lsps(study: Study) -> Drawing:
    """Figure 5."""
    drawing = _draw(study, "k", table=2)
    drawing.figure.axes[0].set_xscale("log", base=2)
    tick_values(drawing.figure.axes[0], {row[2] for row in drawing.rows if row[0] == "average"})
    return drawing


def weights_of_mlm(study: Study) -> Drawing:
    """Figure 8."""
    return _draw(study, "kappa", table=4)


def word_senses(study: Study) -> Drawing:
    """Figure 4: word-sense F1 of choose-layer against fine-tuning averages."""
    if study.diagnostic is None:
        raise Lacking("the result of choose-layer: --diagnostic result.json")
    chosen = sweep(study.models, "layer")
    k = chosen[0][1].facts["k"]
    f1 = f1_by_layer(study.diagnostic, k)
    _require_teacher(study.diagnostic, [model for _, model in chosen])
    chosen = [(layer, model) for layer, model in chosen if layer in f1]
    if len(chosen) < 3:
        found = [layer for layer, _ in chosen]
        raise Lacking(f"three layers or more of k {k} in records and {study.diagnostic}; found {found}")
    return _draw_word_senses(study, chosen, f1)


def sweep(models: Iterable[Model], fact: str) -> list[Varied]:
    """The fine-tuned models that differ in one fact alone: the largest such set, of the last step.

    Where no two models agree in every other setting of their pre-training, the largest set that agrees at least in
    encoder, teacher, layer, k, lambda and step is taken; its figure names what else differs.

    fact     layer, k (of objective mlsm), or kappa (of mtl; mlsm is κ = 0)
    Returns  [(value, Model)] in the order of values
    Raises   Lacking
    """
    groups: dict[tuple, list[Varied]] = {}
    for model in models:
        value = _value(model, fact)
        if value is not None and model.trainings:
            held = tuple(model.facts[name] for name in _HELD if name != fact)
            groups.setdefault(held, []).append((value, model))
    chosen: list[Varied] = max(groups.values(), key=_rank, default=[])
    alike: list[Varied] = max(
        (_choose_alike(group, seed, fact) for group in groups.values() for _, seed in group), key=_rank, default=[]
    )
    chosen = alike if len({value for value, _ in alike}) > 1 else chosen
    values = [value for value, _ in chosen]
    if len(set(values)) < 2:
        kinds = "mlsm and mtl (with kappa)" if fact == "kappa" else "mlsm"
        raise Lacking(f"fine-tuned {kinds} models of one step that differ in {fact} alone; found {fact}: {values}")
    twice = [model.label for value, model in chosen if values.count(value) > 1]
    if twice:
        raise Lacking(f"one model for each {fact}; of one {fact} are {', '.join(twice)}. Give the records of one")
    if not common_figures([model for _, model in chosen]):
        raise Lacking("a task that all of these models were fine-tuned on")
    return sorted(chosen, key=lambda pair: pair[0])


def _choose_alike(group, seed, fact):
    """The models of a group that differ from one of them in the fact alone, as far as their records say."""

    def agrees(model):
        found = differences([seed, model])
        is_known_alike = len(found.unknown) != 1 or model is seed
        return is_known_alike and not set(found.beyond(_STUDIED[fact])) - {KEPT}

    return [(value, model) for value, model in group if agrees(model)]


def _name_left_out(study, fact, chosen):
    """A sentence on the models that would be in a figure if their other settings agreed with those that are."""
    models = [model for _, model in chosen]
    others = [
        model
        for model in study.models
        if model not in models
        and model.trainings
        and _value(model, fact) is not None
        and all(model.facts[name] == models[0].facts[name] for name in _HELD if name != fact)
    ]
    named = [
        f"{model.label} ({', '.join(differences([models[0], model]).beyond(_STUDIED[fact])) or 'unknown'})"
        for model in others
    ]
    return f"Left out, as other settings differ: {', '.join(named)}." if named else ""


def _rank(group):
    step = group[0][1].facts["step"]
    return len({value for value, _ in group}), float("inf") if step is None else step


def _value(model, fact):
    objective = model.facts["objective"]
    if (model.facts["identity"] or {}).get("other_targets"):  # of several layers, say
        return None
    if fact == "kappa":
        return {"mlsm": 0.0, "mtl": model.facts["kappa"]}.get(objective)
    return model.facts[fact] if objective == "mlsm" else None


def _draw(study, fact, table):
    chosen = sweep(study.models, fact)
    models = [model for _, model in chosen]
    values = [value for value, _ in chosen]
    figure, axes = new_figure(width=2.2, columns=3)
    drawing = Drawing(figure, f"{', '.join(model.label for model in models)}")
    figures = common_figures(models)
    draw_averages(drawing, axes[0], chosen, figures)
    if study.paper:
        averages = published.averages(table)
        axes[0].plot(list(averages), list(averages.values()), label="paper", **PAPER)
        for value, mean in averages.items():
            drawing.add("average", "mean", value, mean, source="paper")
    axes[0].set(xlabel=_NAMES[fact], ylabel="average fine-tuning score", title=f"average, {how_many(models, figures)}")
    tick_values(axes[0], {row[2] for row in drawing.rows})
    axes[0].title.set_fontsize(10)
    drawing.explain(models, _STUDIED[fact], _name_left_out(study, fact, chosen))
    axes[0].legend(fontsize=8)
    _draw_matrices(drawing, axes[1:], matrices(models)[0]["scores"], values)
    for panel in axes[1:]:
        panel.set(xlabel=f"against {fact}", ylabel=fact)
    return drawing


def draw_averages(drawing: Drawing, axes: "Axes", chosen: list[Varied], figures: list[SuiteFigure]) -> None:
    """Average over figures against what is varied, and those of the single seeds beside it."""
    for value, model in chosen:
        for seed, mean in _by_seed(model, figures).items():
            axes.plot(value, mean, ".", color="0.7", markersize=4, zorder=1)
            drawing.add("average", f"seed {seed}", value, mean, len(figures))
    means = [average(model, figures) for _, model in chosen]
    values = [value for value, _ in chosen]
    axes.plot(values, means, label="mean over seeds", **style(0))
    axes.plot([], [], ".", color="0.7", label="single seeds")
    for (value, model), mean in zip(chosen, means, strict=True):
        drawing.add("average", "mean", value, mean, len(model.scores))


def _by_seed(model, figures):
    """seed -> average over figures, for the seeds that have them all."""
    scores = model.scores
    seeds = sorted({seed for _, _, seed in scores})
    whole = [seed for seed in seeds if all((*figure, seed) in scores for figure in figures)]
    return {seed: fmean(scores[(*figure, seed)] for figure in figures) for seed in whole}


def _draw_matrices(drawing, axes, cells, values):
    labels = [f"{value:g}" for value in values]
    paired = [n for row in cells["n"] for n in row if n is not None]
    n = out_of(paired, SEEDS * len(SUITE))
    panel_of_matrix(axes[0], cells["p"], labels, p_text, 0.5, f"p, row better than column ({n}; * p < 0.01)")
    panel_of_matrix(axes[1], cells["wins"], labels, str, -max(*paired, 1), f"pairs won by the row ({n})")
    for i, value in enumerate(values):
        for j, other in enumerate(values):
            if i != j:
                for name in ("p", "wins", "ties"):
                    drawing.add(name, "", value, cells[name][i][j], cells["n"][i][j], other)


# -- the word-sense diagnostic ----------------------------------------------------------------------------


def f1_by_layer(path: Path, k: int) -> dict[int, float]:
    """{layer: word-sense F1 on ALL} of a choose-layer result at this k. Raises WsdDataError where it is none."""
    return {layer: f1 for (layer, of_k), f1 in read_result(path).f1.items() if of_k == k}


def _require_teacher(path, models):
    """Raise Lacking where a result of choose-layer is of another teacher than the models', as far as that is known."""
    identities = [model.facts["identity"] for model in models]
    known = {identity["target_settings"].get("teacher") for identity in identities if identity} - {None}
    diagnosed = read_result(path)
    if known - {diagnosed.fingerprint}:
        raise Lacking(f"a result of choose-layer of the models' own teacher; {path} is of {diagnosed.teacher}")


def correlations(x: Sequence[float], y: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Spearman and Pearson with p values; of the values, and of the values rounded to 0.1 per cent."""
    rounded = [[round(100 * value, 1) for value in values] for values in (x, y)]
    return {
        f"{name}{suffix}": (found["coefficient"], found["p"])
        for suffix, pair in (("", (x, y)), (", rounded", rounded))
        for name, found in (coefficients(*pair) or {}).items()
    }


def _draw_word_senses(study, chosen, f1):
    models = [model for _, model in chosen]
    values = [layer for layer, _ in chosen]
    figures = common_figures(models)
    figure, (left, right) = new_figure(width=1.8, columns=2)
    drawing = Drawing(figure, f"{', '.join(model.label for model in models)}")
    draw_averages(drawing, left, chosen, figures)
    means, senses = [average(model, figures) for model in models], [f1[layer] for layer in values]
    other = left.twinx()
    other.grid(visible=False)
    other.plot(values, senses, label="word-sense F1", **style(1))
    left.set(xlabel=_NAMES["layer"], ylabel="average fine-tuning score", title=f"average, {how_many(models, figures)}")
    other.set_ylabel("word-sense F1")
    tick_values(left, values)
    lines = [*left.get_lines()[-2:], *other.get_lines()]
    left.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="lower right")
    right.plot(senses, means, "o", color=style(0)["color"])
    for layer, x, y in zip(values, senses, means, strict=True):
        right.annotate(f" {layer}", (x, y), fontsize=8)
        drawing.add("word senses", "F1", layer, x)
    right.set(xlabel="word-sense F1", ylabel="average fine-tuning score")
    _write_correlations(study, drawing, right, correlations(senses, means), len(values))
    drawing.explain(models, _STUDIED["layer"], _name_left_out(study, "layer", chosen))
    return drawing


def _write_correlations(study, drawing, axes, found, n):
    lines = []
    for name, (r, p) in found.items():
        drawing.add("correlation", name, "", r, n)
        drawing.add("correlation", f"{name}, p", "", p, n)
        if "rounded" not in name:
            lines.append(f"{name.capitalize()} {r:.3f} (p = {p:.2g})")
    if study.paper:
        paper = published.WORD_SENSE_CORRELATION
        lines.append(f"paper, 8 layers: {paper['spearman']} and {paper['pearson']}")
        for name, r in paper.items():
            drawing.add("correlation", name, "", r, 8, source="paper")
    axes.set_title("\n".join(lines), fontsize=9)

"""Figures of checkpoints: averages and tasks over steps (6, 10), paired scores (7), BLiMP over its cost (9).

Left out: one quantity varied among finished models (sweeps.py).
"""

from itertools import cycle
from operator import itemgetter

from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.drawing import (
    COLORS,
    MARKERS,
    PAPER,
    Drawing,
    Lacking,
    Study,
    figure_title,
    how_many,
    style,
    task_panels,
    tick_steps,
)
from mlsm.evaluation.comparison.models import (
    PARADIGMS,
    SUITE,
    Model,
    average,
    blimp_average,
    checkpoint_name,
    common_figures,
    common_paradigms,
    families,
    match_trainings,
    scored_alike,
)
from mlsm.evaluation.comparison.significance import win_rates
from mlsm.evaluation.plots import new_figure
from student.objectives import WITHOUT_WORDS

_STUDIED = {"objective", "step"}
_RIVALS = ("mlm", "kd")  # of MLSM in figure 7


def averages_and_tasks(study: Study) -> Drawing:
    """Figure 6: of the encoder with the most pre-trainings, the paper's DeBERTa before any other."""
    lines = _trajectories(study.models)[0]
    models = [model for group in lines.values() for model in group]
    shown = [suite_figure for suite_figure in SUITE if any(suite_figure in model.figures for model in models)]
    figure, panels, lowest = task_panels(1 + len(shown), height=3)
    drawing = Drawing(figure, ", ".join(lines))
    _draw_averages(drawing, panels[0], lines)
    for panel, suite_figure in zip(panels[1:], shown, strict=True):
        _draw_task(drawing, panel, lines, suite_figure)
    if study.paper:
        _draw_published(drawing, panels, shown)
    for panel in lowest:
        panel.set_xlabel("pre-training steps")
    drawing.explain(models, _STUDIED)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return drawing


def averages_of_another_encoder(study: Study) -> Drawing:
    """Figure 10: what figure 6's first panel shows, for the encoder that comes next."""
    others = _trajectories(study.models)[1:]
    if not others:
        raise Lacking("checkpoints of two steps or more of another encoder than figure 6's")
    figure, axes = new_figure()
    drawing = Drawing(figure, ", ".join(others[0]))
    _draw_averages(drawing, axes, others[0])
    drawing.explain([model for group in others[0].values() for model in group], _STUDIED)
    axes.legend(fontsize=8)
    return drawing


def _trajectories(models):
    """Per encoder, the families of which two steps or more were fine-tuned: [{name: models}]."""
    by_encoder: dict[str, list[Model]] = {}
    for group in families([model for model in models if model.trainings]).values():
        if len({model.facts["step"] for model in group} - {None}) > 1:
            by_encoder.setdefault(group[0].facts["encoder"] or "", []).extend(group)
    if not by_encoder:
        raise Lacking("fine-tuned checkpoints of two steps or more of one pre-training")
    lines = {encoder: families(group) for encoder, group in by_encoder.items()}
    for encoder_lines in lines.values():
        _require_one_a_step(encoder_lines)
    ranked = sorted(lines, key=lambda encoder: (_rank(encoder), len(lines[encoder])), reverse=True)
    return [lines[encoder] for encoder in ranked]


def _rank(encoder):
    """Whether an encoder is of the paper's family, which comes before others."""
    return (encoder or "").startswith("deberta")


def _require_one_a_step(lines):
    for name, group in lines.items():
        steps = [model.facts["step"] for model in group]
        if twice := [model.label for model in group if steps.count(model.facts["step"]) > 1]:
            raise Lacking(f"one model a step of {name}; of one step are {', '.join(twice)}. Give those of one run")


def _draw_averages(drawing, axes, lines):
    models = [model for group in lines.values() for model in group]
    figures = common_figures(models)
    if not figures:
        raise Lacking("a task that all of these checkpoints were fine-tuned on")
    for place, (name, group) in enumerate(lines.items()):
        means = [average(model, figures) for model in group]
        axes.plot([model.facts["step"] for model in group], means, label=name, **style(place))
        for model, mean in zip(group, means, strict=True):
            drawing.add("average", name, model.facts["step"], mean, len(model.scores))
    axes.set_title(f"average ({how_many(models, figures)})", fontsize=10)
    axes.set(xlabel="pre-training steps", ylabel="average fine-tuning score")
    tick_steps(axes)


def _draw_task(drawing, axes, lines, suite_figure):
    for place, (name, group) in enumerate(lines.items()):
        group = [model for model in group if suite_figure in model.figures]
        values = [model.figures[suite_figure] for model in group]
        axes.plot([model.facts["step"] for model in group], values, **style(place))
        for model, value in zip(group, values, strict=True):
            seeds = sum((task, metric) == suite_figure for task, metric, _ in model.scores)
            drawing.add(" ".join(suite_figure), name, model.facts["step"], value, seeds)
    axes.set_title(figure_title(suite_figure), fontsize=10)
    tick_steps(axes)


def _draw_published(drawing, panels, shown):
    """The paper's finished MLSM (layer 10, k = 3,072) as a line across each panel: its curves are not published."""
    levels = [published.averages(1)[10], *(published.scores(1)[10][suite_figure] for suite_figure in shown)]
    names = ["average", *(" ".join(suite_figure) for suite_figure in shown)]
    for panel, level, name in zip(panels, levels, names, strict=True):
        panel.axhline(level, label="paper: MLSM, finished", **PAPER | {"marker": ""})
        drawing.add(name, "MLSM, layer 10", "", level, source="paper")


# -- paired scores ----------------------------------------------------------------------------------------


def paired_scores(study: Study) -> Drawing:
    """Figure 7: each fine-tuning score of MLSM against that of MLM and KD of the same step and encoder."""
    pairs = _pairs_of_checkpoints(study.models)
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
    drawing.explain(list({id(model): model for _, *both in pairs for model in both}.values()), _STUDIED)
    return drawing


def _pairs_of_checkpoints(models):
    """[(name of the rival, mlsm model, its model)] of one step and encoder, for the mlsm family with the most."""
    tuned = [model for model in models if model.trainings]
    rivals = [model for model in tuned if model.facts["objective"] in _RIVALS]
    lines = {name: group for name, group in families(tuned).items() if group[0].facts["objective"] == "mlsm"}
    found = {
        name: [
            (model, other)
            for model in group
            for other in rivals
            if all(model.facts[fact] == other.facts[fact] for fact in ("encoder", "step"))
            and match_trainings(model, other)[0]
        ]
        for name, group in lines.items()
    }
    chosen = max(found, key=lambda name: (len(found[name]), _rank(lines[name][0].facts["encoder"])), default="")
    if not found.get(chosen):
        raise Lacking("mlsm and mlm or kd, fine-tuned at the same step of the same encoder, with the same heads")
    named = families([other for _, other in found[chosen]])
    _require_one_a_step({chosen: lines[chosen]} | named)
    return [(name, model, other) for name, group in named.items() for model, other in found[chosen] if other in group]


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
    """Equal limits on both axes, so that the diagonal is one."""
    axes.axline((values[0], values[0]), slope=1, color="0.4", linestyle="--", linewidth=1, zorder=0)
    margin = max(0.005, 0.08 * (max(values) - min(values)))
    limits = min(values) - margin, max(values) + margin
    axes.set(xlim=limits, ylim=limits, aspect="equal")


def _draw_win_rates(drawing, axes, pairs, looks):
    steps, rivals = map(list, looks)
    width = 0.8 / len(rivals)
    for rival, model, other in pairs:
        rate = next(row for row in win_rates([model, other]) if row["task"] == "all" and row["model"] == model.label)
        at = steps.index(model.facts["step"]) + (rivals.index(rival) - (len(rivals) - 1) / 2) * width
        axes.bar(at, rate["rate"], width * 0.9, color=looks[0][model.facts["step"]], alpha=0.7)
        said = f"{rival}, n = {rate['n']}"
        axes.text(at, 0.03, said, ha="center", va="bottom", fontsize=7, rotation=90)
        drawing.add("win rate", model.label, model.facts["step"], rate["rate"], rate["n"], other.label)
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
        axes.plot([], [], marker, color="0.4", label=f"against {rival}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=6)


# -- BLiMP ------------------------------------------------------------------------------------------------


def blimp_over_cost(study: Study) -> Drawing:
    """Figure 9: BLiMP against the operations spent on pre-training and teacher; mlsm models are scored with a probe."""
    scored, left_out = scored_alike(study.models)
    costs = {model.label: model.cost for model in scored if model.cost is not None}
    models = [model for model in scored if model.label in costs]
    if not models:
        raise Lacking(f"BLiMP records whose flops are known; found {len(scored)} BLiMP records")
    left_out |= {model.label: "flops not known" for model in scored if model.label not in costs}
    figure, axes = new_figure(width=1.2)
    drawing = Drawing(figure, ", ".join(model.label for model in models))
    paradigms = common_paradigms(models)
    if not paradigms:
        raise Lacking("a BLiMP paradigm that all models were scored on")
    for place, (name, group) in enumerate(families(models).items()):
        group = sorted(group, key=lambda model: costs[model.label])
        name = f"{name} + probe" if group[0].facts["objective"] in WITHOUT_WORDS else name
        means = [blimp_average(model, paradigms) for model in group]
        axes.plot([costs[model.label] for model in group], means, label=name, **style(place))
        for model, mean in zip(group, means, strict=True):
            drawing.add("blimp", name, costs[model.label], mean, len(paradigms), model.label)
    _finish_costs(study, drawing, axes, len(paradigms))
    drawing.note += "".join(f"; without {label}: {why}" for label, why in left_out.items())
    drawing.explain(models, _STUDIED)
    return drawing


def _finish_costs(study, drawing, axes, paradigms):
    if study.paper:
        axes.set_xscale("log")
        costs = published.pretraining_cost()
        for place, (name, cost) in enumerate(sorted(costs.items(), key=itemgetter(1))):
            look = {"color": "0.45", "linewidth": 1, "linestyle": (0, (6, 1 + 2 * place)), "zorder": 0}
            axes.axvline(cost, label=f"paper: {name}", **look)
            drawing.add("cost of a whole pre-training", name, cost, "", source="paper")
    axes.set(
        xlabel="floating-point operations of pre-training and teacher",
        ylabel="BLiMP accuracy",
        title=f"mean over n = {paradigms} of {PARADIGMS} paradigms",
    )
    axes.figure.legend(fontsize=8, loc="outside right upper")

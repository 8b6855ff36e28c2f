"""Train one student on one store: `train(config)`.

`Trainer.run_to_end` is the loop over the steps; step.py is a step, from loading to update. The batch, the mask, the
learning rate and the dropout of step s follow from (seed, s). So a resumed run restores weights and optimiser and goes
on with the next step: at once, and bit for bit on a CPU. Several processes share every step (ranks.py); the first of
them writes and reports. Left out: what a step computes (step.py), what an export says of its run (outcome.py).
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from common.device import choose_device, own_randomness
from common.durable import publish_directory
from common.errors import Interrupted, RunError, TrainingError
from common.progress import silent
from shards.manifest import fingerprint
from shards.reader import Store
from student.announcement import announcement
from student.batches import Batch, pin, read_ahead
from student.config import StudentConfig
from student.encoders.build import weights_fingerprint
from student.encoders.mask_later import mask_later_of
from student.encoders.products import products_record
from student.held_out import HeldOut
from student.masks.adaptive import AdaptiveWeights
from student.masks.config import ADAPTIVE
from student.masks.masking import build_masking, take_turns
from student.memory import name_lack_of_memory, what_fits
from student.meter import Meter, closest_baseline, share_of_baseline
from student.opening import open_run
from student.outcome import lineage, summary
from student.ranks import Ranks, join
from student.resolve import Resolved, training_windows
from student.runs.checkpoint import Checkpoints, restore
from student.runs.directory import Run
from student.runs.tracking import Trackers, start_trackers
from student.signals import StopSignals
from student.step import Loader, Stepper, learning_rate, resolve_compile, resolve_dtype
from student.task import Task, student_task

logger = logging.getLogger(__name__)


def train(
    config: StudentConfig,
    progress: Callable[..., None] = silent,
    prepare: Callable[[Any, Store], Task] = student_task,
    origins: dict[str, str] | None = None,
) -> dict:
    """Train, evaluate and export a student; continue where an interrupted run of the same settings stopped.

    Settings that are None follow from the store (resolve.py). Before the first step the log says, in one block, what
    will happen, and where each setting comes from. Every process that torchrun or `accelerate launch` started calls
    this, and all get the result.

    prepare   (config, store) -> what is trained; probe.py has another one
    origins   setting -> where its value comes from, for that block, when a recipe has been applied already (cli.py)
    progress  called as progress(stage, done, total, unit="tokens", **figures) after every step
    Returns   the summary that result.json holds, with run, export, store, other_stores (where there are any) and
              plan: steps, tokens (real ones), tokens_per_second, flops (nominal floating-point operations),
              seconds, seconds_to_first_step, held_out and baseline (dicts of figures), held_out_loss,
              baseline_loss (nats per token), improvement (share by which the loss is below the baseline); of LSP
              objectives baseline_loss_by_position and improvement_by_position, the same against the prediction that
              is constant at each position; of regress and recon baseline_loss_by_type and improvement_by_type, against
              the one that is constant for each token id;
              and already_finished, true when there was nothing left to do
    Raises    RunError    store, settings and output directory do not belong together
              TrainingError    loss or gradient not finite, or too little memory; PeerError, which is one, in a
                               process whose others have ended
              WriteError (an OSError)    no room on the disk; the newest whole checkpoint stays
              Interrupted (a KeyboardInterrupt)    SIGINT, SIGTERM or SIGHUP, its `number`; a checkpoint was saved
    """
    started = time.perf_counter()
    with join(choose_device(config.device)) as ranks, ExitStack() as held:
        # What a run begins with it keeps, resumed elsewhere too.
        dtype, compiled = resolve_dtype(config.dtype, ranks.device), resolve_compile(config.compile, ranks.device)
        config = replace(config, dtype=dtype, compile=compiled)
        resolved, store, task, run = ranks.first_then_all(lambda: open_run(config, ranks, prepare, origins))
        places = run.places() | {"store": str(store.path), "plan": store.plan_id}
        if others := task.objective.other_stores:
            places["other_stores"] = [str(store.path) for store in others]
        if (result := ranks.ask_first(run.result)) is not None:
            return result | places | {"already_finished": True}
        ranks.first_then_all(lambda: held.enter_context(run.locked()) if ranks.is_first else None)
        if ranks.is_first:
            run.clean()
        held.enter_context(own_randomness(ranks.device))
        held.enter_context(name_lack_of_memory(store.path, store.max_length))
        signals = held.enter_context(StopSignals())
        run.check_place()
        trainer = Trainer(resolved, store, task, run, ranks=ranks, progress=progress, signals=signals, started=started)
        return trainer.run_to_end() | places | {"already_finished": False}


class Trainer:
    """One run in this process: what a step needs, and the figures so far."""

    def __init__(
        self,
        resolved: Resolved,
        store: Store,
        task: Task,
        run: Run,
        *,
        ranks: Ranks,
        progress: Callable[..., None],
        signals: StopSignals,
        started: float,
    ):
        self.config, self.origins = config, _ = resolved
        self.store, self.task, self.run, self.ranks = store, task, run, ranks
        self.progress = progress if ranks.is_first else silent
        self.signals, self.started = signals, started
        self.objective = objective = task.objective
        self.model = model = task.build().to(ranks.device)
        self.initial_encoder = weights_fingerprint(model.encoder)  # before a checkpoint replaces the weights
        self.model_built = time.perf_counter()
        is_adaptive = config.mask_weights == ADAPTIVE
        every, device = config.mask_update_steps, ranks.device
        self.adaptive = AdaptiveWeights(store, objective, every, device) if is_adaptive else None
        self.stepper = Stepper(config, model, objective, ranks, run.products, self.adaptive)
        self.meter = Meter.of_run(config, model, store.max_length, self.stepper.autocast_dtype, ranks.size)
        kept_steps = config.checkpoint_steps(config.max_steps)
        self.checkpoints = Checkpoints(run.checkpoint_directory, kept_steps, config.keep_last)
        table_at = self.adaptive.table_at if self.adaptive else take_turns(run.tables, config)
        masking = build_masking(config, store, table_at)
        reading: dict[str, Any] = {"masking": masking, "micro_batch": config.micro_batch}
        reading |= {"documents_apart": config.documents_apart, "segments": task.segments}
        reading |= {"mask_later": mask_later_of(model.encoder.config) > 0, "few_shapes": config.compile}
        of_steps: dict[str, Any] = {"by_token": is_adaptive, "short_steps": config.short_steps(config.max_steps)}
        of_steps |= {"pieces": store.max_length // (config.short_windows or store.max_length)}
        windows = training_windows(store)
        # One process after the other: the first keeps what it makes, which the others then find.
        ranks.first_then_all(partial(objective.prepare, windows, run.marginals_directory))
        self.loader = Loader(windows, read_targets=objective.read_targets, **of_steps, **reading)
        # One process after the other: the first keeps the averages by position, which the others then find.
        reading |= {"windows": config.eval_windows, "marginals": run.marginals_directory}
        self.held_out = ranks.first_then_all(partial(HeldOut, store, self.loader.windows, objective, **reading))
        self.trackers = Trackers([])
        self.saved: Path | None = None  # newest whole checkpoint
        self._saved_step: int | None = None
        self.seconds_to_first_step: float | None = None
        # What a resumed run gets back:
        self.steps = 0  # optimiser steps done
        self.tokens = 0  # real tokens seen
        self.seconds = 0.0  # spent in steps, over all processes of this run
        self.figures: dict = {}  # newest held-out figures

    def run_to_end(self) -> dict:
        """Resume if there is something to resume from, train, export; returns the summary."""
        restore_seconds = self._resume()
        config, ranks = self.config, self.ranks
        waits = self.adaptive.waits if self.adaptive else None  # such a step's masks follow from the step before
        batches = read_ahead(self._load, self.steps, config.max_steps, waits)
        with self._start_trackers() as self.trackers, closing(batches):
            first = list(islice(batches, 1))  # none, where only the export was missing
            if first and ranks.is_first:
                logger.info(announcement(self))
            self._log_start(restore_seconds)
            if 0 in self.checkpoints.kept_steps and self.saved is None:
                self._log(**self._evaluate())
                self._save()
            self._report()
            for step, batch, waited in chain(first, batches):  # by _load: read and masked one step ahead, in a thread
                begun = time.perf_counter()
                batch = ranks.whole(batch)  # its counts of tokens, over all processes
                loss, grad_norm = self._update(step, batch)  # Stepper.update: forward, loss, backward, clip, update
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    what = (
                        f"step {step + 1}: loss {loss}, gradient norm {grad_norm}, on batch {batch.digest:016x}. The"
                        f" weights were not updated. Last whole checkpoint: {self.saved or 'none'}. Lower --lr, or"
                        f" look at that batch."
                    )
                    raise ranks.as_one(TrainingError(what))
                seconds = time.perf_counter() - begun + waited
                self.steps, self.tokens, self.seconds = step + 1, self.tokens + batch.tokens, self.seconds + seconds
                self.seconds_to_first_step = self.seconds_to_first_step or time.perf_counter() - self.started
                if self.adaptive is not None:
                    self.adaptive.finish_step(self.steps, ranks)
                line = {
                    "loss": loss,
                    "lr": learning_rate(config, step),
                    "grad_norm": grad_norm,
                    "mask_rate": self.loader.masking.rate_at(step),
                    "tokens": self.tokens,
                    **self.meter.figures(steps=self.steps, tokens=batch.tokens, seconds=seconds, waited=waited),
                    "batch": f"{batch.digest:016x}",
                }
                kept = self.steps in self.checkpoints.kept_steps
                evaluated = kept or _every(config.eval_every, self.steps)
                if evaluated:
                    line |= self._evaluate()
                if evaluated or _every(config.log_every, self.steps):
                    self._log(**line)
                if kept or _every(config.save_every, self.steps):
                    self._save()
                self._report(loss=loss)
                self._stop_if_asked()
        return ranks.ask_first(self._publish)

    # -- the parts of a step that need more than a line ----------------------------------------------------

    def _load(self, step: int) -> Batch:
        """This process's share of a step's batch, read and masked (step.py). Runs in the thread that reads ahead."""
        batch_windows = self.config.batch_windows
        batch = self.loader.step(self.config.seed, step, batch_windows, self.ranks.share(batch_windows))
        return pin(batch) if self.ranks.device.type == "cuda" else batch

    def _update(self, step: int, batch: Batch) -> tuple[float, float]:
        """What Stepper.update returns. Where memory runs out, TrainingError names a micro-batch that fits."""
        try:
            return self.stepper.update(step, batch)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]

        # Only here, after the handler: the error's traceback holds on to tensors of the step.
        def fits(windows: int) -> bool:
            first, _ = self.ranks.share(self.config.batch_windows)
            few = self.loader.step(self.config.seed, step, self.config.batch_windows, (first, first + windows))
            return self.stepper.fits(few.micro[0], batch.counts)

        advice = what_fits(self.config.micro_batch, fits)
        raise TrainingError(f"step {step + 1}: {reason}, {advice} Last whole checkpoint: {self.saved or 'none'}.")

    def _evaluate(self) -> dict:
        """Take the held-out figures; returns what the log says of them."""
        baseline = self.held_out.baseline
        try:
            self.figures = self.held_out.evaluate(self.model, self.stepper.forward, self.ranks)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"evaluation after step {self.steps}: {str(error).partition('. ')[0]}. Take a smaller --micro-batch,"
                f" the effective batch stays as it is. Last whole checkpoint: {self.saved or 'none'}."
            ) from error
        if not all(math.isfinite(figure) for figure in self.figures.values()):
            raise TrainingError(
                f"evaluation after step {self.steps}: a held-out figure is not finite ({self.figures}): weights have"
                f" become too large. Last whole checkpoint: {self.saved or 'none'}. Lower --lr; if the run ends like"
                f" this again, that checkpoint is damaged: move it elsewhere, and the run goes on from the one before."
            )
        line = {"held_out": self.figures, "held_out_vs_baseline": share_of_baseline(self.figures, baseline)}
        if (closest := closest_baseline(baseline)) != "loss":
            name = f"held_out_vs_baseline{closest.removeprefix('loss')}"
            line[name] = share_of_baseline(self.figures, baseline, closest)
        return line

    def _save(self) -> None:
        self._check_weights()
        epoch, window_of_epoch = divmod(self.steps * self.config.batch_windows, len(self.loader.windows))
        state = {
            "tokens": self.tokens,
            "flops": self.meter.flops_after(self.steps),
            "seconds": self.seconds,
            "held_out": self.figures,
            "epoch": epoch,
            "window_of_epoch": window_of_epoch,
            "plan": self.store.plan_id,
            "target": self.store.target_id,
            "run": fingerprint(self.run.identity),
            **products_record(self.run.products),
            "shards": self.objective.digest(self.loader.windows),
        }
        statistics = None if self.adaptive is None else self.adaptive.state(self.ranks)
        if self.ranks.is_first:
            parts = self.model, self.stepper.optimizer, state, self._export, statistics
            self.checkpoints.save(self.steps, *parts)
        self.saved = self.checkpoints.path(self.steps)
        self._saved_step = self.steps

    def _check_weights(self) -> None:
        """TrainingError where a weight is not finite: a loss would show that only in the next step."""
        if not all(bool(torch.isfinite(weight).all()) for weight in self.model.parameters()):
            raise TrainingError(
                f"after step {self.steps} there are weights that are not finite, so nothing is saved. Last whole"
                f" checkpoint: {self.saved or 'none'}. If the run ends like this again, the optimiser's state in that"
                f" checkpoint is damaged: move it elsewhere, and the run goes on from the one before."
            )

    def _report(self, **figures) -> None:
        split = self.loader.windows
        total = round(self.config.max_steps * self.config.batch_windows * split.tokens / len(split))
        if self.figures:
            baseline = self.held_out.baseline
            figures |= {"held_out": self.figures["loss"], "baseline": baseline[closest_baseline(baseline)]}
        done = total if self.steps == self.config.max_steps else min(self.tokens, total)
        self.progress(self.task.name, done, total, unit="tokens", step=self.steps, **figures)

    def _stop_if_asked(self) -> None:
        """Save and raise Interrupted where some process was sent a signal and steps are left."""
        if self.steps == self.config.max_steps:
            return
        if not (requested := self.ranks.agree(self.signals.requested)):
            return
        if self._saved_step != self.steps:
            self._save()
        raise Interrupted(
            f"stopped after step {self.steps} of {self.config.max_steps}; saved {self.saved}. "
            f"The same command continues from there.",
            requested,
        )

    # -- before the first step -----------------------------------------------------------------------------

    def _start_trackers(self) -> Trackers:
        store = {"store": str(self.store.path), "store_target": self.store.target_id, "store_plan": self.store.plan_id}
        settings = self.config.to_json() | store | {"baseline": self.held_out.baseline}
        names = self.config.track if self.ranks.is_first else ()
        return start_trackers(names, self.run, settings, self.steps)

    def _log_start(self, restore_seconds: float) -> None:
        self._log(
            event="start",
            initial_encoder=self.initial_encoder,
            baseline=self.held_out.baseline,
            targets=self.objective.facts,
            segments=self.task.segments,
            processes=self.ranks.size,
            restore_seconds=restore_seconds,  # weights and optimiser, read and checked
            ready_seconds=time.perf_counter() - self.model_built - restore_seconds,  # the rest, to the first batch
        )

    def _log(self, **figures) -> None:
        if not self.ranks.is_first:
            return
        line = {"step": self.steps} | figures
        self.run.log(line)
        self.trackers.log(line)

    def _resume(self) -> float:
        """Go on from the newest whole checkpoint, if there is one; returns the seconds that took."""
        begun = time.perf_counter()
        state: dict = {}
        if found := self.ranks.ask_first(self.checkpoints.newest_whole):
            path, state = found
            if not path.is_dir():
                raise RunError(
                    f"{path} is not on this machine. Give an --output on a file system that all machines share."
                )
            self.run.check_checkpoint(path, state)
            self.saved = path
            counted = partial(self.adaptive.restore, steps=state["step"]) if self.adaptive else None
            restore(path, self.model, self.stepper.optimizer, counted)
            self.steps, self.tokens = state["step"], state["tokens"]
            self.seconds, self.figures = state["seconds"], state["held_out"]
            logger.info("continuing from %s", path)
        if self.ranks.is_first:
            self.run.drop_log_after(self.steps)
            if state and state["shards"] != (now := self.objective.digest(self.loader.windows)):
                self._log(event="other shards", before=state["shards"], now=now)
                logger.warning(
                    "%s: units of its training split were encoded again since step %d, on another processor or with"
                    " other library versions: their bytes differ. The run goes on with them and will not equal an"
                    " unbroken run bit for bit.",
                    self.store.path,
                    self.steps,
                )
        return time.perf_counter() - begun

    # -- after the last step, and for checkpoints that are kept --------------------------------------------

    def _export(self, directory: Path) -> None:
        self.task.export(self.model, directory, self.objective, self.store, lineage(self))

    def _publish(self) -> dict:
        """Export the student and write the summary."""
        self._check_weights()
        if self.adaptive is not None and (table := self.adaptive.table_at(self.steps)) is not None:
            self.run.keep_table(self.run.table_file, table)
        publish_directory(self.run.export_directory, self._export)
        result = summary(self)
        self.run.finish(result)
        return result


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0

"""Train one student on one store: `train(config)`.

Read it from top to bottom: `train` opens a run, `Trainer.run_to_end` is the loop over the steps, and `Stepper.update`
is one step on one batch. A batch is loaded and masked one step ahead in a thread (batches.py); then come forward pass,
loss, backward pass, clipping, update and a line of the log.

The batch, the mask, the learning rate and the dropout of step s follow from (seed, s). So a resumed run only restores
weights and optimiser, and continues with the next step; on a CPU the result is the same bit for bit. The loss is a mean
over the whole effective batch, regardless of the micro-batch and the number of processes. The CPU waits for a GPU once
per step, when it reads loss and norm. AdamW checks them on the device and is already running then. Several processes
share every step (ranks.py); the first of them writes and reports. Not handled here: what a target and its loss are
(objectives/), the forward pass (encoders/model.py), a run's directory and checkpoints (runs/).

Shapes: M masked tokens, K outputs, T loss terms.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlsm.common.device import DRAWS, choose_device, environment, own_randomness
from mlsm.common.durable import publish_directory
from mlsm.common.errors import Interrupted, RunError, TrainingError
from mlsm.common.matrix_products import USUAL
from mlsm.common.progress import silent
from mlsm.common.proofs import lacks_memory
from mlsm.common.version import digest_of_code
from shards.counter import hash_u64
from shards.manifest import fingerprint
from shards.reader import Store
from shards.writer import local_environment
from student.announcement import announcement
from student.batches import Batch, Loader, MicroBatch, copy_to_host, pin, read_ahead, to_device
from student.config import ResolvedConfig, StudentConfig
from student.encoders.build import weights_fingerprint
from student.encoders.dropout import use_fast_dropout
from student.encoders.libraries import libraries_record
from student.encoders.linear import use_fast_linear
from student.encoders.mask_later import mask_later_of
from student.held_out import HeldOut
from student.masks.adaptive import AdaptiveWeights
from student.masks.config import ADAPTIVE
from student.masks.masking import build_masking, take_turns
from student.memory import name_lack_of_memory, shortage, what_fits
from student.meter import Meter, closest_baseline
from student.objectives.base import Objective
from student.opening import open_run
from student.optimizer import build_optimizer, gradient_norm, learning_rate
from student.ranks import Ranks, join
from student.resolve import Resolved, training_windows
from student.runs.checkpoint import Checkpoints, restore
from student.runs.directory import Run
from student.runs.export import writing
from student.runs.state import RunState
from student.runs.tracking import Trackers, start_trackers
from student.signals import StopSignals
from student.task import TrainingTask, student_task

logger = logging.getLogger(__name__)

_DROPOUT_PURPOSE = 0x64726F70  # "drop"
# Settings that say when processes add up or save together, or how they share held-out windows.
SHARED_STEPS = ("micro_batch", "eval_every", "eval_windows", "save_every", "checkpoints")


def train(
    config: StudentConfig,
    progress: Callable[..., None] = silent,
    prepare: Callable[[Any, Store], TrainingTask] = student_task,
) -> dict:
    """Train, evaluate and export a student; resume an interrupted run with the same settings.

    Settings that are None follow from the store and the device (resolve.py). Before the first step the log announces
    the work and where each setting comes from. Every process that torchrun or `accelerate launch` started calls this,
    and all get the result.

    prepare   (config, store) -> what is trained; probe.py passes its own
    progress  called as progress(stage, done, total, unit="tokens", **figures) after every step
    Returns   the summary that result.json holds, with run, export, store, other_stores (if there are any) and
              plan: steps, tokens (real ones), tokens_per_second, flops (nominal floating-point operations),
              seconds, seconds_to_first_step, held_out and baseline (dicts of figures), held_out_loss,
              baseline_loss (of the objective, per predicted token), improvement (share by which the loss is below the
              baseline); for LSP objectives baseline_loss_by_position and improvement_by_position, the same against the
              prediction that is constant at each position; for regress and recon baseline_loss_by_type and
              improvement_by_type, against the one that is constant for each token id;
              and finished_before, true when there was nothing left to do
    Raises    RunError    store, settings and run directory do not belong together
              TrainingError    loss or gradient not finite, or too little memory; PeerError, which is one, in a
                               process whose others have ended
              WriteError (an OSError)    no room on the disk; the newest whole checkpoint stays
              Interrupted (a KeyboardInterrupt)    SIGINT, SIGTERM or SIGHUP, its `number`; a checkpoint was saved
    """
    started = time.perf_counter()
    with join(choose_device(config.device)) as ranks, ExitStack() as held:
        resolved, store, task, run = ranks.first_then_all(lambda: open_run(config, ranks, prepare))
        if ranks.size > 1:  # settings that change the result are the run's, and are compared with config.json
            settings = {name: getattr(resolved.config, name) for name in SHARED_STEPS}
            code = {"code": digest_of_code("mlsm/common", "shards", "student")[:12], "torch": torch.__version__}
            ranks.check_alike(settings | code)
        places = run.places() | {"store": str(store.path), "plan": store.plan_id}
        if others := task.objective.other_stores:
            places["other_stores"] = [str(store.path) for store in others]
        if (result := ranks.ask_first(run.result)) is not None:
            if ranks.is_first:
                _warn_of_missed(run, resolved.config, result["steps"])
            return result | places | {"finished_before": True}
        ranks.first_then_all(lambda: held.enter_context(run.locked()) if ranks.is_first else None)
        if ranks.is_first:
            run.clean()
        held.enter_context(own_randomness(ranks.device))
        held.enter_context(name_lack_of_memory(store.path, store.max_length))
        signals = held.enter_context(StopSignals())
        run.check_place()
        trainer = Trainer(resolved, store, task, run, ranks=ranks, progress=progress, signals=signals, started=started)
        return trainer.run_to_end() | places | {"finished_before": False}


def _warn_of_missed(run: Run, config: ResolvedConfig, done: int) -> None:
    """Name the steps whose checkpoint --checkpoints asks for and the run no longer passes."""
    path_of = Checkpoints(run.checkpoint_directory).path
    wanted = [step for step in config.checkpoint_steps(config.max_steps) if step < done or 0 < step == done]
    if missed := [f"{step:,}" for step in wanted if not (path_of(step) / "config.json").exists()]:
        logger.warning(
            "--checkpoints: no model is kept of step %s, which the run has passed. Another --run-dir starts a run that"
            " keeps it.",
            ", ".join(missed),
        )


class Trainer:
    """One run in this process: the model and all else that a step needs, and the figures so far."""

    def __init__(
        self,
        resolved: Resolved,
        store: Store,
        task: TrainingTask,
        run: Run,
        *,
        ranks: Ranks,
        progress: Callable[..., None],
        signals: StopSignals,
        started: float,
    ):
        self.config, self.origins = resolved
        config = self.config
        self.store, self.task, self.run, self.ranks = store, task, run, ranks
        self.progress = progress if ranks.is_first else silent
        self.signals, self.started = signals, started
        self.objective = objective = task.objective
        self.model = model = task.build().to(ranks.device)
        self.environment = {**local_environment(), **environment(ranks.device)}  # in it, a resumed run has equal bits
        self.initial_encoder = weights_fingerprint(model.encoder)  # before a checkpoint replaces the weights
        self.model_built = time.perf_counter()
        self.adaptive = None
        if config.mask_weights == ADAPTIVE:
            self.adaptive = AdaptiveWeights(store, objective, config.mask_update_steps, ranks.device)
        self.stepper = Stepper(config, model, objective, ranks, run.libraries, self.adaptive)
        self.meter = Meter.of_run(config, model, store.max_length, self.stepper.autocast_dtype, ranks.size)
        kept_steps = config.checkpoint_steps(config.max_steps)
        self.checkpoints = Checkpoints(run.checkpoint_directory, kept_steps, config.keep_last)
        table_at = self.adaptive.table_at if self.adaptive else take_turns(run.tables, config)
        self.loader = Loader(
            training_windows(store),
            build_masking(config, store, table_at),
            objective.read_targets,
            micro_batch=config.micro_batch,
            documents_apart=config.documents_apart,
            segments=task.segments,
            mask_later=mask_later_of(model.encoder.config) > 0,
            by_token=self.adaptive is not None,
            few_shapes=config.compile,
            pieces=store.max_length // (config.short_windows or store.max_length),
            short_steps=config.short_steps(config.max_steps),
        )
        # The first process saves what objective and averages by position compute, so that the others can load it.
        marginals = run.marginals_directory
        ranks.first_then_all(partial(objective.prepare, self.loader.windows, marginals))
        evaluation = partial(HeldOut, store, self.loader, objective, windows=config.eval_windows, marginals=marginals)
        self.held_out = ranks.first_then_all(evaluation)
        self.trackers = Trackers([])
        self.state = RunState(baseline=self.held_out.baseline)

    def run_to_end(self) -> dict:
        """Resume if there is something to resume from, train, export; returns the summary."""
        restore_seconds = self._resume()
        config, ranks, state = self.config, self.ranks, self.state
        waits = self.adaptive.waits if self.adaptive else None  # a step's masks may need the step before
        batches = read_ahead(self._load, state.steps, config.max_steps, waits)
        with self._start_trackers() as self.trackers, closing(batches):
            first = list(islice(batches, 1))  # empty if only the export was missing
            if first and ranks.is_first:
                self._announce()
            self._log_start(restore_seconds)
            if 0 in self.checkpoints.kept_steps and state.saved is None:
                self._log(**self._evaluate())
                self._save()
            self._report()
            if not first and self.state.figures and self.state.figures_step == self.state.steps:
                self._evaluate()  # the baseline is that of today's --eval-windows
            for step, batch, waited in chain(first, batches):  # _load reads and masks one step ahead, in a thread
                begun = time.perf_counter()
                batch = ranks.whole(batch)  # its counts of tokens, over all processes
                lacking = None
                try:
                    loss, grad_norm = self.stepper.update(step, batch)  # forward, loss, backward, clip, update
                except RuntimeError as error:
                    if not lacks_memory(error):
                        raise
                    lacking = shortage(error)
                if lacking:  # not in the handler: there the error's traceback keeps the step's tensors alive
                    raise self._lack_of_memory(step, batch, lacking)
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    what = (
                        f"step {step + 1}: loss {loss}, gradient norm {grad_norm}, on batch {batch.digest:016x}. The"
                        f" weights were not updated. Last whole checkpoint: {state.saved or 'none'}. Lower --lr, or"
                        f" look at that batch."
                    )
                    raise ranks.as_one(TrainingError(what))
                seconds = time.perf_counter() - begun + waited
                state.steps, state.tokens = step + 1, state.tokens + batch.tokens
                state.seconds += seconds
                state.flops = self.meter.flops_after(state.steps)
                state.seconds_to_first_step = state.seconds_to_first_step or time.perf_counter() - self.started
                if self.adaptive is not None:
                    self.adaptive.finish_step(state.steps, ranks)
                line = {
                    "loss": loss,
                    "lr": learning_rate(config, step),
                    "grad_norm": grad_norm,
                    **({"mask_rate": self.loader.masking.rate_at(step)} if config.positions == "masked" else {}),
                    "tokens": state.tokens,
                    **self.meter.figures(steps=state.steps, tokens=batch.tokens, seconds=seconds, waited=waited),
                    "batch": f"{batch.digest:016x}",
                }
                kept = state.steps in self.checkpoints.kept_steps
                if kept or _every(config.eval_every, state.steps):
                    line |= self._evaluate()
                self._log(**line)
                if kept or _every(config.save_every, state.steps):
                    self._save()
                self._report(loss=loss)
                self._stop_if_asked()
        return ranks.ask_first(self._publish)

    # -- the parts of a step that need more than a line ----------------------------------------------------

    def _load(self, step: int) -> Batch:
        """This process's share of a step's batch, read and masked. Runs in the thread that reads ahead."""
        batch_windows = self.config.batch_windows
        batch = self.loader.step(self.config.seed, step, batch_windows, self.ranks.share(batch_windows))
        return pin(batch) if self.ranks.device.type == "cuda" else batch

    def _lack_of_memory(self, step: int, batch: Batch, reason: str) -> TrainingError:
        """The error for a step that runs out of memory; it names a micro-batch that fits."""

        def fits(windows: int) -> bool:
            first, _ = self.ranks.share(self.config.batch_windows)
            few = self.loader.step(self.config.seed, step, self.config.batch_windows, (first, first + windows))
            return self.stepper.fits(few.micro[0], batch.counts)

        advice = what_fits(self.config.micro_batch, fits)
        last = f"Last whole checkpoint: {self.state.saved or 'none'}."
        return TrainingError(f"step {step + 1}: {reason}, {advice} {last}")

    def _evaluate(self) -> dict:
        """Compute and keep the held-out figures; returns their entries for the log."""
        state = self.state
        try:
            state.figures = self.held_out.evaluate(self.model, self.stepper.forward, self.ranks)
            state.figures_step = state.steps
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            raise TrainingError(
                f"evaluation after step {state.steps}: {shortage(error)}. Take a smaller --micro-batch,"
                f" the effective batch stays as it is. Last whole checkpoint: {state.saved or 'none'}."
            ) from error
        if not all(math.isfinite(figure) for figure in state.figures.values()):
            what = (
                f"evaluation after step {state.steps}: a held-out figure is not finite ({state.figures}): weights have"
                f" become too large. {self._last_checkpoint('Lower --lr; if')}"
            )
            raise self.ranks.as_one(TrainingError(what))
        return state.held_out_line()

    def _save(self) -> None:
        self._check_weights()
        steps = self.state.steps
        kept = self.state.to_json() | {
            "plan": self.store.plan_id,
            "target": self.store.target_id,
            "run": fingerprint(self.run.identity),
            **libraries_record(self.run.libraries),
            "shards": self.objective.digest(self.loader.windows),
            "environment": self.environment,
        }
        statistics = None if self.adaptive is None else self.adaptive.state(self.ranks)
        if self.ranks.is_first:
            self.checkpoints.save(steps, self.model, self.stepper.optimizer, kept, self._export, statistics)
        self.state.saved, self.state.saved_step = self.checkpoints.path(steps), steps

    def _check_weights(self) -> None:
        """Raises TrainingError if a weight is not finite. The loss would only show this in the next step."""
        if not torch.stack([torch.isfinite(weight).all() for weight in self.model.parameters()]).all():
            what = (
                f"after step {self.state.steps} there are weights that are not finite, so nothing is saved."
                f" {self._last_checkpoint('If')}"
            )
            raise self.ranks.as_one(TrainingError(what))

    def _last_checkpoint(self, condition: str) -> str:
        """Where a run that failed resumes from, and what to do if it fails again."""
        if self.state.saved is None:
            return "There is no checkpoint yet. Lower --lr."
        return (
            f"Last whole checkpoint: {self.state.saved}. {condition} the run ends like this again, that checkpoint is"
            " damaged: move it elsewhere, and the run resumes from the one before."
        )

    def _report(self, **figures) -> None:
        split = self.loader.windows
        total = round(self.config.max_steps * self.config.batch_windows * split.tokens / len(split))
        if self.state.figures:
            baseline = self.state.baseline
            closest = closest_baseline(baseline, reads_words=self.config.positions == "all")
            figures |= {"held_out": self.state.figures["loss"], "baseline": baseline[closest]}
        done = total if self.state.steps == self.config.max_steps else min(self.state.tokens, total)
        self.progress(self.task.name, done, total, unit="tokens", step=self.state.steps, **figures)

    def _stop_if_asked(self) -> None:
        """If some process received a signal and steps are left, save a checkpoint and raise Interrupted."""
        if self.state.steps == self.config.max_steps:
            return
        if not (requested := self.ranks.agree(self.signals.requested)):
            return
        if self.state.saved_step != self.state.steps:
            self._save()
        self.ranks.tell(None)  # wait until the first has saved: a launcher ends it as soon as one of the others ends
        raise Interrupted(
            f"stopped after step {self.state.steps} of {self.config.max_steps}; saved {self.state.saved}. "
            f"The same command continues from there.",
            requested,
        )

    # -- before the first step -----------------------------------------------------------------------------

    def _announce(self) -> None:
        held_out = self.held_out.batch.micro if self.held_out.batch else []
        logger.info(
            announcement(
                self.config,
                self.origins,
                self.task,
                self.store,
                self.model,
                self.loader,
                self.meter,
                run=self.run.directory,
                steps=self.state.steps,
                held_out=sum(len(micro.input_WL) for micro in held_out),
                processes=self.ranks.size,
            )
        )

    def _start_trackers(self) -> Trackers:
        store = {"store": str(self.store.path), "store_target": self.store.target_id, "store_plan": self.store.plan_id}
        settings = self.config.to_json() | store | {"baseline": self.state.baseline}
        names = self.config.track if self.ranks.is_first else ()
        return start_trackers(names, self.run, settings, self.state.steps)

    def _log_start(self, restore_seconds: float) -> None:
        self._log(
            event="start",
            initial_encoder=self.initial_encoder,
            baseline=self.state.baseline,
            targets=self.objective.facts,
            segments=self.task.segments,
            processes=self.ranks.size,
            environment=self.environment,
            restore_seconds=restore_seconds,  # weights and optimiser, read and checked
            ready_seconds=time.perf_counter() - self.model_built - restore_seconds,  # the rest, to the first batch
        )

    def _log(self, **figures) -> None:
        if not self.ranks.is_first:
            return
        line = {"step": self.state.steps} | figures
        self.run.log(line)
        self.trackers.log(line)

    def _resume(self) -> float:
        """Resume from the newest whole checkpoint, if there is one; returns how many seconds that took."""
        begun = time.perf_counter()
        state: dict = {}
        if found := self.ranks.ask_first(self.checkpoints.newest_whole):
            path, state = found
            if not path.is_dir():
                raise RunError(
                    f"{path} is not on this machine. Give a --run-dir on a file system that all machines share."
                )
            self.run.check_checkpoint(path, state)
            self.state.restore(path, state)
            counted = partial(self.adaptive.restore, steps=state["step"]) if self.adaptive else None
            restore(path, self.model, self.stepper.optimizer, counted)
            logger.info("continuing from %s", path)
        if self.ranks.is_first:
            _warn_of_missed(self.run, self.config, self.state.steps)
            self.run.drop_log_after(self.state.steps)
            then = state["environment"] if state else self.environment
            if changed := [name for name in self.environment if then.get(name) != self.environment[name]]:
                logger.warning(
                    "%s was saved with other libraries or on another machine (%s). The run continues, and may not equal"
                    " an unbroken run bit for bit.",
                    self.state.saved,
                    ", ".join(f"{name} {then.get(name)}, now {self.environment[name]}" for name in changed),
                )
            if state and state["shards"] != self.objective.digest(self.loader.windows):
                self._log(event="other shards")
                logger.warning(
                    "%s: units of its training split were encoded again since step %d, on another processor or with"
                    " other library versions: their bytes differ. The run continues with them and will not equal an"
                    " unbroken run bit for bit.",
                    self.store.path,
                    self.state.steps,
                )
        return time.perf_counter() - begun

    # -- after the last step, and for checkpoints that are kept --------------------------------------------

    def _export(self, directory: Path) -> None:
        self.task.export(self.model, directory, self.objective, self.store, self.state.lineage(self.run, self.config))

    def _publish(self) -> dict:
        """Export the student and write the summary."""
        self._check_weights()
        if self.adaptive is not None and (table := self.adaptive.table_at(self.state.steps)) is not None:
            self.run.keep_table(self.run.table_file, table)
        with writing(self.run.export_directory):
            publish_directory(self.run.export_directory, self._export)
        parameters = sum(weight.numel() for weight in self.model.parameters())
        result = self.state.summary(self.run, self.config, parameters)
        self.run.finish(result)
        return result


class Stepper:
    """Does the updates of a student, which must be on its device already.

    ranks       the processes that share every batch
    libraries   which library computes which matrix product (encoders/libraries.py)
    adaptive    counts the losses of updates by token, with adaptive masks; else None
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: nn.Module,
        objective: Objective,
        ranks: Ranks | None = None,
        libraries: Mapping[str, str] = USUAL,
        adaptive: AdaptiveWeights | None = None,
    ):
        self.config, self.model, self.objective, self.adaptive = config, model.train(), objective, adaptive
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            use_fast_dropout(model.encoder)
            use_fast_linear(model, libraries)
        if config.activation_checkpointing:
            model.checkpoint_activations()
        if config.compile:
            model.compile()
        self.parallel = self.ranks.parallel(model)
        self.first_micro = self.ranks.micro_batches_before(config.batch_windows, config.micro_batch)
        self.autocast_dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.optimizer = build_optimizer(model, config)

    def update(self, step: int, batch: Batch) -> tuple[float, float]:
        """Do one step, counted from 0, inside own_randomness.

        batch    this process's share of the batch, with the counts of the whole batch
        Returns  loss (nats per token that carries loss) and gradient norm before clipping; if one of them is not
                 finite, the weights were not updated
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for index, micro in enumerate(batch.micro):
            is_last = index == len(batch.micro) - 1
            with DRAWS, self.ranks.accumulating(self.parallel, last=is_last):  # DRAWS: backward may draw again
                seed_dropout(self.device, self.config.seed, step, self.first_micro + index)
                micro = to_device(micro, self.device)
                with self.autocast():
                    logits_MK = self.parallel(*micro.inputs)  # Student.forward: encoder, head, output matrix
                if micro.fillers:
                    logits_MK = logits_MK[: -micro.fillers]
                if self.adaptive is not None:
                    self.adaptive.count(micro, logits_MK)
                part = self.loss(logits_MK, micro.targets, batch.counts)
                part.backward()
            loss += part.detach()
        weights = list(self.model.parameters())
        grad_norm = gradient_norm(weights)
        torch.nn.utils.clip_grads_with_norm_(weights, self.config.grad_clip, grad_norm)
        figures = torch.stack([loss, grad_norm])
        read = copy_to_host(figures)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        # As with a GradScaler: if this is not zero, the fused kernel leaves weights and moments unchanged.
        self.optimizer.found_inf = self.ranks.any((~figures.isfinite().all()).float())
        self.optimizer.step()
        loss, grad_norm = read()  # waits for the GPU
        [loss] = self.ranks.sum([loss])
        return loss, grad_norm

    def loss(self, logits_MK: Tensor, targets: Any, counts: tuple) -> Tensor:
        """A micro-batch's part of the loss of a whole effective batch, which has these counts."""
        sums_T = self.objective.loss_sums(logits_MK, targets)
        scales = term_scales(self.objective.term_weights, counts)
        return sum(total * scale for total, scale in zip(sums_T.unbind(), scales, strict=True))

    def forward(self, micro: MicroBatch) -> Tensor:
        """Logits (M, K), without fillers, of a micro-batch on the model's device. For evaluation, not for an update."""
        with self.autocast():
            logits_MK = self.model(*micro.inputs)
        return logits_MK[: -micro.fillers] if micro.fillers else logits_MK

    def autocast(self) -> AbstractContextManager:
        """The arithmetic of the forward pass."""
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def fits(self, micro: MicroBatch, counts: tuple) -> bool:
        """Whether memory suffices for a step on this micro-batch alone. It updates nothing and leaves no gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()  # does nothing without a GPU
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        try:
            moments = [] if self.optimizer.state else [torch.empty_like(weight) for weight in 2 * weights]
            micro = to_device(micro, self.device)
            loss = self.loss(self.forward(micro), micro.targets, counts)
            torch.autograd.grad(loss, weights, allow_unused=True)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return False
        del moments  # AdamW's, which the first step allocates after its backward pass
        return True


def term_scales(weights: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The factor of each term's summed loss: its weight divided by its count of tokens in the whole effective batch."""
    return [weight / max(count, 1) for weight, count in zip(weights, counts, strict=True)]


def seed_dropout(device: torch.device, seed: int, step: int, micro: int) -> None:
    """Seed dropout by (seed, step, micro-batch). Call inside own_randomness, with DRAWS."""
    key = int(hash_u64(_DROPOUT_PURPOSE, seed, step, micro))
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0

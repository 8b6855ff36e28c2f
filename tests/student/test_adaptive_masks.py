"""Adaptive masks: losses of tokens and weights against SciPy and loops; runs that are killed, or told their weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import log_softmax, rel_entr
from tiny_store import SPECIAL, log_of

from mlsm.common.errors import RunError
from student.batches import Loader
from student.config import StudentConfig
from student.masks.adaptive import PARTS, PRIOR, AdaptiveWeights
from student.masks.masking import Masking
from student.masks.table import read_table
from student.objectives import OBJECTIVES
from student.objectives.mlm import Mlm
from student.ranks import Ranks
from student.runs.identity import find_description
from student.train import train


@pytest.fixture
def settings(tmp_path):
    common = {"encoder": "bert-1x32", "dropout": 0.1, "batch_windows": 40, "micro_batch": 15, "lr": 1e-2, "seed": 1}
    adaptive = {"mask_weights": "adaptive", "mask_update_steps": 3, "mask_rate": 0.3, "max_steps": 10}
    return common | adaptive | {"save_every": 2, "eval_windows": 8, "run_dir": tmp_path / "run"}


def micro_batch(store, objective, step=0):
    masking = Masking(store.special_ids, store.vocab_size, 0.5)
    loader = Loader(store.split("train"), masking, objective.read_targets, micro_batch=99, by_token=True)
    (micro,) = loader.step(0, step, 20).micro
    return micro


def logits_for(micro, objective, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn((len(micro.ids_M), objective.outputs), generator=generator)


def dense(targets, width):
    """The target distributions as a matrix."""
    dense_MK = np.zeros((len(targets.coded_M), width))
    dense_MK.reshape(-1)[targets.entries_E.numpy()] = targets.weights_E.numpy()
    return dense_MK


def divergences(target_MK, logits_MK, tail_M=None):
    """KL of each row by SciPy; with a tail, all that the target leaves out is one more column."""
    q_MK = np.exp(log_softmax(logits_MK.double().numpy(), axis=1))
    if tail_M is not None:
        rest_M1 = np.where(target_MK > 0, 0, q_MK).sum(axis=1, keepdims=True)
        target_MK = np.concatenate((target_MK, tail_M[:, None]), axis=1)
        q_MK = np.concatenate((q_MK, rest_M1), axis=1)
    return rel_entr(target_MK, q_MK).sum(axis=1)


def losses_by_numpy(name, targets, logits_MK, lsps):
    """(term -> its loss of each token, 0 where it has none)."""
    if name in ("mlsm", "hard-mlsm", "naive-mlsm"):
        return [divergences(dense(targets, lsps), logits_MK[:, -lsps:])]
    if name == "kd":
        return [divergences(dense(targets, logits_MK.shape[1]), logits_MK, targets.tail_M.double().numpy())]
    if name == "mtl":
        words = losses_by_numpy("mlm", targets.tokens, logits_MK[:, :-lsps], lsps)
        return losses_by_numpy("mlsm", targets.lsps, logits_MK, lsps) + words
    if name in ("supersense", "type"):
        return [divergences(targets.shares_MK.double().numpy(), logits_MK)]
    if name in ("regress", "recon"):
        outputs_Md, wanted_Md = logits_MK.double().numpy(), targets.vectors_Md.double().numpy()
        products_M = (outputs_Md * wanted_Md).sum(axis=1)
        lengths_M = np.linalg.norm(outputs_Md, axis=1) * np.linalg.norm(wanted_Md, axis=1)
        has_target_M = wanted_Md.any(axis=1)
        return [np.where(has_target_M, 1 - products_M / np.where(has_target_M, lengths_M, 1), 0)]
    if name != "mlm":
        raise KeyError(f"losses_by_numpy lacks the formula of {name}: add it")
    rows = np.arange(len(logits_MK))
    return [-log_softmax(logits_MK.double().numpy(), axis=1)[rows, targets.labels_M.numpy()]]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_of_each_token_is_that_of_scipy_and_adds_up(store_for, needed_by, name):
    store = store_for(name)
    objective = OBJECTIVES[name](store, **needed_by(name))
    micro = micro_batch(store, objective)
    logits_MK = logits_for(micro, objective)
    losses_TM, carries_TM = objective.token_losses(logits_MK, micro.targets)
    expected = losses_by_numpy(name, micro.targets, logits_MK, store.k)
    np.testing.assert_allclose(losses_TM.numpy(), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(losses_TM.sum(dim=1), objective.loss_sums(logits_MK, micro.targets), rtol=1e-5)
    assert tuple(map(int, carries_TM.sum(dim=1))) == micro.targets.counts
    assert not losses_TM.requires_grad and (losses_TM[carries_TM == 0] == 0).all()


def weights_by_hand(periods, vocabulary, term_weights):
    """Weights after some periods, each a list of (term, type, loss), by the formula of the docstring."""
    sums, counts = (np.zeros((len(term_weights), vocabulary)) for _ in range(2))
    for age, losses in enumerate(reversed(periods)):
        for term, token, loss in losses:
            sums[term, token] += loss / 2**age
            counts[term, token] += 1 / 2**age
    means = sums.sum(axis=1) / counts.sum(axis=1)
    total = sum(weight * mean for weight, mean in zip(term_weights, means, strict=True))
    return [
        sum(
            term_weights[term] * (sums[term, token] + PRIOR * means[term]) / (counts[term, token] + PRIOR)
            for term in range(len(term_weights))
        )
        / total
        for token in range(vocabulary)
    ]


def test_weights_follow_the_losses_of_all_terms_and_forget_by_halves(lsp_store):
    objective = OBJECTIVES["mtl"](lsp_store, kappa=0.5)
    adaptive = AdaptiveWeights(lsp_store, objective, 2, torch.device("cpu"))
    periods = []
    for step in range(6):
        assert adaptive.waits(step) == (step in (2, 4))
        if step % 2 == 0:
            periods.append([])
        micro = micro_batch(lsp_store, objective, step)
        logits_MK = logits_for(micro, objective, step)
        adaptive.count(micro, logits_MK)
        for term, losses_M in enumerate(losses_by_numpy("mtl", micro.targets, logits_MK, lsp_store.k)):
            carries_M = micro.targets.lsps.coded_M if term == 0 else np.ones(len(losses_M))
            rows = zip(micro.ids_M.tolist(), losses_M, carries_M, strict=True)
            periods[-1] += [(term, token, loss) for token, loss, carries in rows if carries]
        adaptive.finish_step(step + 1, Ranks())
        if step < 1:
            assert adaptive.table_at(step + 1) is None
        if step % 2:
            weights_V = adaptive.table_at(step + 1).weights_V
            np.testing.assert_allclose(weights_V, weights_by_hand(periods, 65, (1.0, 0.5)), rtol=1e-6)
    unseen = list(set(range(65)) - {token for losses in periods for _, token, _ in losses})
    assert set(SPECIAL.values()) <= set(unseen) and (weights_V[unseen] == 1).all() and weights_V.std() > 0.02
    with pytest.raises(AssertionError, match="step 8 is of another period than 3 updates"):
        adaptive.table_at(8)


def test_without_a_loss_all_tokens_weigh_the_same(ids_store):
    adaptive = AdaptiveWeights(ids_store, Mlm(ids_store), 1, torch.device("cpu"))
    adaptive.finish_step(1, Ranks())
    assert adaptive.table_at(1) is None


def test_counts_do_not_depend_on_how_a_batch_is_split(ids_store):
    objective = Mlm(ids_store)
    whole, parts = (AdaptiveWeights(ids_store, objective, 1, torch.device("cpu")) for _ in range(2))
    micro = micro_batch(ids_store, objective)
    logits_MK = logits_for(micro, objective)
    whole.count(micro, logits_MK)
    for part in np.array_split(np.random.default_rng(0).permutation(len(logits_MK)), 3):
        few = micro._replace(
            ids_M=micro.ids_M[part], targets=micro.targets._replace(labels_M=micro.targets.labels_M[part])
        )
        parts.count(few, logits_MK[part])
    ours, theirs = (adaptive.state(Ranks())["recent"] for adaptive in (whole, parts))
    assert torch.equal(ours, theirs) and ours[1].sum() == PARTS * len(logits_MK)


def test_before_the_first_update_masks_are_uniform_then_they_follow_the_objective(
    store_for, needed_by, settings, tmp_path
):
    few = settings | {"max_steps": 8, "checkpoints": (1,), "save_every": 0}
    batches, baselines = {}, {}
    for name in (*OBJECTIVES, "uniform"):
        changes = {"objective": "mlm", "mask_weights": None} if name == "uniform" else {"objective": name}
        paths = {"store": store_for(changes["objective"]).path, "run_dir": tmp_path / name}
        baselines[name] = train(StudentConfig(**few | paths | changes | needed_by(name)))["baseline"]
        batches[name] = [line["batch"] for line in log_of(paths["run_dir"]).values()]
    assert all(batches[name][:3] == batches["uniform"][:3] for name in OBJECTIVES)
    apart = batches.keys() - {"naive-mlsm", "type"}  # which learn here just what mlsm learns
    assert len({tuple(batches[name][3:]) for name in apart}) == len(apart)
    assert batches["naive-mlsm"][3:] != batches["uniform"][3:]
    assert baselines["mlm"] == baselines["uniform"]  # held-out masks are uniform throughout
    kept = find_description(tmp_path / "mlm")["settings"]
    assert (kept["mask_weights"], kept["mask_update_steps"]) == ("adaptive", 3)


def test_a_step_is_masked_with_the_weights_of_the_update_before_it(ids_store, settings, tmp_path):
    """The table of a run that ends there, given to a loader of its own, leads to the masks of one that goes on."""
    constant = {"objective": "mlm", "warmup": 0, "schedule": "wsd", "decay_share": 1e-9, "store": ids_store.path}
    constant |= {"mask_update_steps": 12, "lr": 3e-2}  # so that weights differ
    for steps in (12, 14):
        train(StudentConfig(**settings | constant | {"max_steps": steps, "run_dir": tmp_path / str(steps)}))
    table = read_table(tmp_path / "12" / "mask_weights.npz")
    assert table.kind == "adaptive"
    masked = {}
    for name, found in (("by its losses", table), ("uniformly", None)):
        masking = Masking(ids_store.special_ids, ids_store.vocab_size, 0.3, table_at=lambda step, found=found: found)
        loader = Loader(ids_store.split("train"), masking, Mlm(ids_store).read_targets, micro_batch=12)
        masked[name] = [f"{loader.step(1, step, 40).digest:016x}" for step in range(10, 14)]
    batches = [line["batch"] for line in log_of(tmp_path / "14").values()]
    assert batches[12:] == masked["by its losses"][2:] and batches[10:12] == masked["uniformly"][:2]
    assert not set(masked["by its losses"]) & set(masked["uniformly"])


@pytest.mark.promise(
    "training with adaptive masks, by SIGKILL between two updates of their weights and right behind one, and by two "
    "processes that are interrupted between two: batches, losses and weights of an unbroken run",
    cases="2 real kills",
)
def test_a_killed_run_goes_on_bit_for_bit(lsp_store, settings, tmp_path, train_until_killed):
    """Killed between two updates with counts that wait for the next one, and again right behind an update."""
    common = settings | {"store": lsp_store.path, "objective": "mtl", "mask_unit": "word"}
    unbroken = StudentConfig(**common | {"run_dir": tmp_path / "unbroken"})
    train(unbroken)
    killed = StudentConfig(**common)
    for step in (5, 7):
        train_until_killed(killed, step)
    steps = []
    train(killed, lambda *args, step, **figures: steps.append(step))
    assert steps == [6, 7, 8, 9, 10]
    logs = [log_of(config.run_dir) for config in (unbroken, killed)]
    for name in ("loss", "batch", "grad_norm", "held_out"):
        ours, theirs = ([line.get(name) for line in log.values()] for log in logs)
        assert ours == theirs
    exports = [(config.run_dir / "export" / "model.safetensors").read_bytes() for config in (unbroken, killed)]
    assert exports[0] == exports[1]
    tables = [read_table(config.run_dir / "mask_weights.npz") for config in (unbroken, killed)]
    assert tables[0].name == tables[1].name and json.loads(tables[0].origin)["steps"] == 9


def test_counts_of_another_objective_are_refused(ids_store, lsp_store, tmp_path):
    cpu = torch.device("cpu")
    mtl = AdaptiveWeights(lsp_store, OBJECTIVES["mtl"](lsp_store), 3, cpu)
    save_file(mtl.state(Ranks()), tmp_path / "counts")
    with pytest.raises(ValueError, match="counts holds .*2, 2, 65.*expected .*2, 1, 65"):
        AdaptiveWeights(ids_store, Mlm(ids_store), 3, cpu).restore(tmp_path / "counts", 3)


def test_the_steps_between_updates_name_an_adaptive_run_alone():
    adaptive = StudentConfig(mask_weights="adaptive", mask_update_steps=50).identity()
    assert (adaptive["mask_weights"], adaptive["mask_update_steps"]) == ("adaptive", 50)
    assert "mask_update_steps" not in StudentConfig(mask_update_steps=50).identity()
    with pytest.raises(ValueError, match="^--mask-update-steps must be at least 1, found 0"):
        StudentConfig(mask_update_steps=0)


def test_another_interval_is_another_run(ids_store, settings):
    few = {"store": ids_store.path, "objective": "mlm", "max_steps": 2}
    train(StudentConfig(**settings | few))
    with pytest.raises(RunError, match=r"mask_update_steps \(there 3, now 4\)"):
        train(StudentConfig(**settings | few | {"mask_update_steps": 4}))

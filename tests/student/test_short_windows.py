"""Steps on short windows against transformers' models on each piece alone; runs that are killed around the switch."""

import json

import pytest
import torch
import torch.nn.functional as F
from tiny_exports import scrambled
from tiny_store import LENGTH, log_of, write_store
from torch._dynamo.utils import counters

from mlsm.common.errors import RunError
from student.batches import Loader
from student.config import ProbeConfig, StudentConfig
from student.encoders.flops import forward_flops
from student.encoders.model import build_student
from student.encoders.stock import stock_model
from student.masks.masking import build_masking
from student.objectives import OBJECTIVES
from student.objectives.mlm import Mlm
from student.resolve import resolve
from student.train import Stepper, train

WINDOWS, PIECE = 12, 4
SHORT = {"short_windows": PIECE, "short_share": 0.5}


@pytest.fixture
def settings(settings):
    """Four steps on pieces, four on whole windows."""
    return settings | SHORT


def loader_for(store, config, objective="mlm", **reading):
    facts = OBJECTIVES[objective]
    read_targets = facts(store, **{name: getattr(config, name) for name in facts.settings}).read_targets
    reading = {"micro_batch": config.micro_batch, "pieces": LENGTH // PIECE, "short_steps": 1} | reading
    return Loader(store.split("train"), build_masking(config, store), read_targets, **reading)


def loss_of_pieces_alone(stock, store, config, apart):
    """Mean cross-entropy of a stock masked language model that is given one piece after the other, without padding."""
    batch = loader_for(store, config, short_steps=0).step(config.seed, 0, WINDOWS)
    ids_WL = torch.cat([micro.input_WL for micro in batch.micro])
    where_M = [micro.where_M + LENGTH * config.micro_batch * number for number, micro in enumerate(batch.micro)]
    labels_WL = torch.full_like(ids_WL, -100)
    labels_WL.view(-1)[torch.cat(where_M)] = torch.cat([micro.targets.labels_M for micro in batch.micro])
    read = store.split("train").read(store.split("train").stream(config.seed, 0, WINDOWS)[0])
    total, alone = torch.zeros(()), 0
    for ids_L, labels_L, length, documents_L in zip(ids_WL, labels_WL, read.lengths, read.documents, strict=True):
        cuts = {*range(0, length, PIECE), length}
        cuts |= {place for place in range(1, length) if apart and documents_L[place] != documents_L[place - 1]}
        for begin, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
            logits_1lV = stock(ids_L[None, begin:end]).logits
            total = total + F.cross_entropy(logits_1lV[0], labels_L[begin:end], reduction="sum")
            alone += 1
    assert alone > WINDOWS * 3 and (read.lengths <= LENGTH - PIECE).any(), "some windows end before their last piece"
    return total / batch.counts[0]


def compare_with_pieces_alone(store, config, apart=False):
    objective = Mlm(store)
    stepper = Stepper(config, scrambled(build_student(config, store, objective)), objective)
    stock = stock_model(stepper.model, objective)
    batch = loader_for(store, config, documents_apart=apart).step(config.seed, 0, WINDOWS)
    ours = sum(stepper.loss(stepper.forward(micro), micro.targets, batch.counts) for micro in batch.micro)
    theirs = loss_of_pieces_alone(stock, store, config, apart)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    ours.backward()
    theirs.backward()
    for name, weight in stock.base_model.named_parameters():
        found = stepper.model.encoder.get_parameter(name).grad
        torch.testing.assert_close(found, weight.grad, rtol=1e-3, atol=1e-6)


def test_a_step_is_that_of_each_piece_alone(lsp_store, settings, family):
    config = StudentConfig(**settings | {"encoder": str(family), "dropout": 0.0, "mask_rate": 0.4})
    compare_with_pieces_alone(lsp_store, config)


def test_documents_of_a_piece_are_kept_apart(packed_store, settings):
    config = StudentConfig(**settings | {"dropout": 0.0, "mask_rate": 0.4, "documents_apart": True})
    compare_with_pieces_alone(packed_store, config, apart=True)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_order_masks_and_targets_are_those_of_whole_windows(store_for, needed_by, settings, objective):
    store = store_for(objective)
    config = StudentConfig(**settings | {"objective": objective} | needed_by(objective))
    short, whole = (loader_for(store, config, objective, short_steps=steps) for steps in (1, 0))
    cut, kept = (loader.step(config.seed, 0, WINDOWS) for loader in (short, whole))
    assert (cut.digest, cut.counts, cut.tokens) == (kept.digest, kept.counts, kept.tokens)
    for piece, window in zip(cut.micro, kept.micro, strict=True):
        assert piece.input_WL.shape == (config.micro_batch * LENGTH // PIECE, PIECE)
        assert torch.equal(piece.input_WL.flatten(), window.input_WL.flatten())
        assert torch.equal(piece.where_M, window.where_M) and piece.most_masked <= window.most_masked
        torch.testing.assert_close(piece.targets, window.targets, rtol=0, atol=0)
    padded = [piece.attention_WL for piece in cut.micro if piece.attention_WL is not None]
    assert padded and all(attention.any(dim=1).all() for attention in padded), "each sees something"
    later = [loader.step(config.seed, 1, WINDOWS).micro[0].input_WL for loader in (short, whole)]
    assert torch.equal(*later)


def test_a_killed_run_goes_on_bit_for_bit_and_sees_the_batches_of_others(
    lsp_store, settings, tmp_path, train_until_killed
):
    """Killed among the steps on pieces, and again behind the switch with a checkpoint right at it."""
    common = settings | {"store": str(lsp_store.path), "save_every": 2, "dropout": 0.1, "checkpoints": (0, 1)}
    whole = {"short_windows": None}
    runs = {"short": {}, "whole": whole, "words": {"objective": "mlm"}}
    for name, changes in runs.items():
        train(StudentConfig(**common | changes | {"run_dir": tmp_path / name}))
    killed = StudentConfig(**common | {"run_dir": tmp_path / "killed"})
    for step in (3, 5):
        train_until_killed(killed, step)
    steps = []
    train(killed, lambda *args, step, **figures: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]
    logs = {name: log_of(tmp_path / name) for name in (*runs, "killed")}
    for figure in ("loss", "grad_norm", "batch", "flops", "held_out"):
        ours, theirs = ([line.get(figure) for line in logs[name].values()] for name in ("killed", "short"))
        assert ours == theirs
    exports = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("killed", "short")]
    assert exports[0] == exports[1]
    batches = {name: [line.get("batch") for line in log.values()] for name, log in logs.items()}
    assert batches["short"] == batches["whole"] == batches["words"]
    assert logs["short"][1]["loss"] != logs["whole"][1]["loss"]
    untrained = [tmp_path / name / "checkpoints" / "step-00000000" / "lineage.json" for name in ("short", "whole")]
    judged = [json.loads(file.read_text())["held_out"] for file in untrained]
    assert judged[0] == judged[1] and judged[0]["loss"] > 0, "the same weights, on whole windows in both"


def test_operations_are_those_of_the_steps_so_far(lsp_store, settings, tmp_path):
    """Steps on pieces cost what attention over fewer tokens leaves; checkpoints and summary count as the log does."""
    config = StudentConfig(store=lsp_store.path, **settings | {"checkpoints": (0.25, 1), "mask_rate": 0.5})
    result, log = train(config), log_of(config.run_dir)
    student, masked = build_student(config, lsp_store, OBJECTIVES["mlsm"](lsp_store)), WINDOWS * 7
    whole = 3 * forward_flops(student, WINDOWS, LENGTH, masked)
    short = 3 * forward_flops(student, WINDOWS * LENGTH // PIECE, PIECE, masked)
    assert short < whole
    spent = [min(step, 4) * short + max(step - 4, 0) * whole for step in range(1, 9)]
    assert [log[step]["flops"] for step in range(1, 9)] == spent and result["flops"] == spent[-1]
    kept = json.loads((config.run_dir / "checkpoints" / "step-00000002" / "lineage.json").read_text())
    assert kept["flops"] == spent[1]
    for step, own in ((4, short), (5, whole)):
        seconds = own / log[step]["flops_per_second"]
        tokens = log[step]["tokens"] - log[step - 1]["tokens"]
        assert tokens / seconds == pytest.approx(log[step]["tokens_per_second"])


def test_a_compiled_student_meets_two_lengths(lsp_store, settings):
    """A static graph and one of any size, as for other shapes that change; the losses stay."""
    config = StudentConfig(**settings | {"batch_windows": 24, "micro_batch": 24, "dropout": 0.0, "mask_rate": 0.3})
    losses = []
    for compiled in (False, True):
        loader = loader_for(lsp_store, config, "mlsm", few_shapes=compiled, short_steps=4)
        objective = OBJECTIVES["mlsm"](lsp_store)
        stepper = Stepper(config, build_student(config, lsp_store, objective), objective)
        if compiled:
            stepper.model.compile(backend="eager")
            counters.clear()
        with torch.random.fork_rng():
            losses.append([stepper.update(step, loader.step(1, step, 24)) for step in range(8)])
    assert counters["stats"]["unique_graphs"] <= 2
    assert losses[1] == [pytest.approx(figures, rel=1e-4) for figures in losses[0]]


def test_the_last_step_reads_whole_windows():
    short = StudentConfig(short_windows=PIECE)
    assert [short.short_steps(steps) for steps in (1, 2, 4, 10, 1000)] == [0, 1, 3, 9, 900]
    assert StudentConfig().short_steps(1000) == 0


def test_the_setting_names_only_runs_that_have_it(settings):
    found = StudentConfig(**settings).identity()
    assert {name: found[name] for name in SHORT} == SHORT
    for whole in (StudentConfig(), StudentConfig(short_share=0.5), ProbeConfig()):
        assert not SHORT.keys() & whole.identity().keys()


def test_the_lines_before_the_first_step_say_what_is_read(ids_store, settings, caplog):
    with caplog.at_level("INFO"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings))
    assert "steps 1 to 4 read each window as 4 pieces of 4 tokens that do not see each other" in caplog.text
    assert "held-out windows are always whole" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"short_share": 1.0}, "^--short-share must be a share of the steps between 0 and 1, found 1.0"),
        ({"short_windows": 1}, "^--short-windows must be at least 2, found 1"),
        ({"mask_later": 1}, "^--short-windows 4 and --mask-later 1 cannot be combined"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, change, reason):
    with pytest.raises(ValueError, match=reason):
        StudentConfig(**settings | change)


@pytest.mark.parametrize("length", [5, 16, 32])
def test_pieces_of_unequal_length_are_refused(ids_store, settings, length):
    config = StudentConfig(**settings | {"short_windows": length})
    with pytest.raises(RunError, match=f"--short-windows {length} does not cut .* of 16 tokens.* Take 8 or 4 or 2,"):
        resolve(config, ids_store)


def test_pairs_are_not_torn_apart(settings, tmp_path):
    store = write_store(tmp_path / "pairs", k=0, pairs=True)
    with pytest.raises(RunError, match="--short-windows 4: the store's windows are pairs of sentences"):
        train(StudentConfig(store=store.path, objective="mlm", **settings))

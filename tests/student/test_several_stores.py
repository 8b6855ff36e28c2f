"""Several stores of one plan as the targets of one run. The oracles are dense formulas and runs on one store."""

import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from masked_half import read_half
from safetensors.torch import load_file
from tiny_store import log_of, write_store

from mlsm.cli.flags import read_flags
from mlsm.commands.train_student import show as training
from mlsm.common.errors import Interrupted, RunError, StoreError
from mlsm.evaluation.lineage import lineage
from shards.manifest import Plan
from shards.reader import Store
from student.batches import Loader, to_device
from student.config import ProbeConfig, StudentConfig
from student.held_out import HeldOut
from student.lsp_model import LspModel
from student.masks.masking import build_masking
from student.objectives import OBJECTIVES
from student.objectives.mlsm import Mlsm
from student.objectives.several_stores import build_objective, open_beside
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.runs.identity import find_description
from student.runs.probed import with_student_and_store
from student.task import student_task
from student.train import term_scales, train

WEIGHTS, WIDTHS = (1.0, 0.5), (24, 16)


@pytest.fixture(scope="module")
def stores(lsp_store, tmp_path_factory):
    """Two stores of one plan: 24 LSPs, and 16, of which other words have none."""
    return lsp_store, write_store(tmp_path_factory.mktemp("second") / "store", k=16, bare=5)


@pytest.fixture
def both(stores, settings):
    return settings | {"store": tuple(str(store.path) for store in stores), "store_weights": WEIGHTS}


def dense_loss(name, store, logits_Mk):
    """Mean over coded tokens of KL, or of the cross-entropy to the largest entry, by the definition in float64."""
    targets = read_half(store, Mlsm(store))
    p_Mk = torch.zeros(logits_Mk.shape, dtype=torch.float64)
    p_Mk.view(-1)[targets.entries_E] = targets.weights_E.double()
    coded_M = p_Mk.sum(dim=1) > 0
    p_Ck, log_q_Ck = p_Mk[coded_M], logits_Mk.double().log_softmax(dim=1)[coded_M]
    if name == "hard-mlsm":
        return -log_q_Ck[torch.arange(len(p_Ck)), torch.from_numpy(p_Ck.numpy().argmax(axis=1))].mean()
    return (p_Ck * (p_Ck.clamp(min=1e-300).log() - log_q_Ck)).sum(dim=1).mean()


@pytest.mark.parametrize("name", ["mlsm", "hard-mlsm"])
def test_loss_gradient_and_figures_are_the_weighted_sum_of_the_dense_formulas(name, stores):
    objective = build_objective(name, stores, WEIGHTS)
    targets = read_half(stores[0], objective)
    tokens = len(targets.of_stores[0].coded_M)
    assert objective.outputs == sum(WIDTHS) and len(set(targets.counts)) == 2, "other tokens have no code"
    logits = (2 * torch.randn(tokens, sum(WIDTHS), generator=torch.Generator().manual_seed(0))).requires_grad_()
    loss = objective.loss_sums(logits, targets) @ torch.tensor(term_scales(objective.term_weights, targets.counts))
    each = [dense_loss(name, *pair) for pair in zip(stores, logits.split(WIDTHS, dim=1), strict=True)]
    expected = sum(weight * one for weight, one in zip(WEIGHTS, each, strict=True))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient, torch.autograd.grad(expected, logits)[0], atol=1e-7)
    for losses_M, carries_M, one in zip(*objective.token_losses(logits.detach(), targets), each, strict=True):
        assert losses_M.sum().item() / carries_M.sum().item() == pytest.approx(one.item(), rel=1e-4)
    figures = objective.figures(objective.measure(logits.detach(), targets), targets.counts)
    assert figures["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for number, (store, block) in enumerate(zip(stores, logits.detach().split(WIDTHS, dim=1), strict=True), 1):
        alone = OBJECTIVES[name](store)
        of_store = read_half(store, alone)
        own = {
            f"{key}_{number}": value
            for key, value in alone.figures(alone.measure(block, of_store), of_store.counts).items()
        }
        assert own.items() <= figures.items()


@pytest.mark.parametrize("settings_of_targets", [{}, {"target_temperature": 2.0}])
def test_baselines_are_those_of_each_store_and_their_weighted_sum(settings_of_targets, stores):
    def baseline(*of, weights=()):
        objective = build_objective("mlsm", of, weights, **settings_of_targets)
        masking = build_masking(StudentConfig(), of[0])
        loader = Loader(of[0].split("train"), masking, objective.read_targets, micro_batch=8)
        return HeldOut(of[0], loader, objective, windows=20).baseline

    found, alone = baseline(*stores, weights=WEIGHTS), [baseline(store) for store in stores]
    for number, own in enumerate(alone, 1):
        for name, value in own.items():
            base, by_position, _ = name.partition("_by_position")
            assert found.pop(f"{base}_{number}{by_position}") == value
    assert found.keys() == {"loss", "loss_by_position"}
    for name, value in found.items():
        assert value == pytest.approx(alone[0][name] + 0.5 * alone[1][name])


def test_batches_and_masks_are_those_of_a_run_on_either_store(stores, both, tmp_path):
    runs = {"both": both["store"], "first": both["store"][0], "second": both["store"][1]}
    for name, store in runs.items():
        weights = WEIGHTS if name == "both" else None
        train(StudentConfig(**both | {"store": store, "store_weights": weights, "run_dir": tmp_path / name}))
    logs = {name: log_of(tmp_path / name) for name in runs}
    for name in ("first", "second"):
        for step, line in logs["both"].items():
            assert [line[key] for key in ("batch", "tokens", "mask_rate")] == [
                logs[name][step][key] for key in ("batch", "tokens", "mask_rate")
            ]
    starts = [json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[0]) for name in runs]
    assert len({start["initial_encoder"] for start in starts}) == 1
    assert [(one["target"], one["weight"]) for one in starts[0]["targets"]["stores"]] == [
        (store.target_id, weight) for store, weight in zip(stores, WEIGHTS, strict=True)
    ]
    assert logs["both"][8]["held_out"].keys() == {"loss", "loss_1", "loss_2"}
    assert "store_weights" not in (described := find_description(tmp_path / "first"))["settings"]
    assert "other_targets" not in described["settings"] and "other_stores" not in described["operational"]


def test_with_hardly_any_weight_on_the_second_store_the_run_is_that_of_the_first(both, tmp_path):
    same = both | {"lr": 5e-3, "store_weights": (1.0, 1e-30)}
    joint = train(StudentConfig(**same))
    alone = train(
        StudentConfig(**same | {"store": both["store"][0], "store_weights": None, "run_dir": tmp_path / "one"})
    )
    assert joint["held_out"]["loss_1"] == pytest.approx(alone["held_out"]["loss"], rel=1e-3)
    first, last = (log_of(tmp_path / "one")[step]["loss"] for step in (1, 8))
    assert abs(last / first - 1) > 0.02 and joint["flops"] > alone["flops"]


def test_a_run_learns_both_and_says_so(stores, both, caplog):
    with caplog.at_level("INFO", "student"):
        result = train(StudentConfig(**both | {"max_steps": 60, "lr": 5e-3}))
    held_out, baseline = result["held_out"], result["baseline"]
    assert held_out["loss"] == pytest.approx(held_out["loss_1"] + 0.5 * held_out["loss_2"])
    assert all(held_out[name] < 0.95 * baseline[name] for name in ("loss_1", "loss_2"))
    assert f"targets        24 LSPs of {stores[0].path}, weight 1" in caplog.text
    assert f"16 LSPs of {stores[1].path}, weight 0.5" in caplog.text
    assert result["other_stores"] == [str(stores[1].path)]
    text = training(result, StudentConfig(**both))
    assert re.search(rf"and its targets of +{re.escape(str(stores[1].path))}\n", text)
    assert f"held-out KL, weighted sum  {held_out['loss']:.4f} nats" in text
    assert re.search(rf"of store 2 +{held_out['loss_2']:.4f} nats, .* below the", text)


def test_killed_and_resumed_equals_unbroken_bit_for_bit(both, tmp_path, train_until_killed):
    unbroken, killed = StudentConfig(**both | {"run_dir": tmp_path / "unbroken"}), StudentConfig(**both)
    train(unbroken)
    train_until_killed(killed, 5)
    steps = []
    train(killed, lambda *args, step, **figures: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]
    names = ("loss", "grad_norm", "batch", "held_out")
    ours, theirs = (
        [[line.get(name) for name in names] for line in log_of(config.run_dir).values()]
        for config in (unbroken, killed)
    )
    assert ours == theirs
    for file in ("model.safetensors", "lsp_head.safetensors", "lsp_head_2.safetensors"):
        one, other = (load_file(config.run_dir / "export" / file) for config in (unbroken, killed))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_target_and_weight_names_the_run(stores, both, tmp_path):
    first, second = both["store"]
    third = str(write_store(tmp_path / "third", k=8).path)
    train(StudentConfig(**both))
    settings = find_description(both["run_dir"])["settings"]
    assert settings["store_weights"] == [1.0, 0.5] and settings["other_targets"] == [stores[1].target_id]
    for change, named in (
        ({"store_weights": (1, 1)}, r"store_weights \(there \[1.0, 0.5\], now \[1.0, 1.0\]\)"),
        ({"store": (first, third)}, "other_targets"),
        ({"store": (first, second, third), "store_weights": (1, 0.5, 1)}, "other_targets"),
        ({"store": (second, first)}, "store target"),
        ({"store": first, "store_weights": None}, "other_targets.*now not set"),
    ):
        with pytest.raises(RunError, match=f"holds another run, which differs in .*{named}"):
            train(StudentConfig(**both | change))
    same = StudentConfig(**both | {"store_weights": (1, 0.5), "store": [first, second]})
    assert train(same)["finished_before"]
    one = StudentConfig(store=(first,))
    assert one.store == first and one.identity() == StudentConfig(store=first).identity()


def test_stores_that_do_not_belong_together_are_refused(stores, both, logits_store, tmp_path):
    first, second = both["store"]

    def refused(store, error=RunError, **change):
        with pytest.raises(error) as caught:
            train(StudentConfig(**both | change | {"store": (first, str(store)), "run_dir": tmp_path / "run"}))
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
        return str(caught.value)

    shorter = write_store(tmp_path / "shorter", k=16, train_windows=100)
    said = refused(shorter.path)
    assert f"{shorter.path} does not have the plan of {first}" in said and "they contain different text" in said
    assert "their windows differ: there packing is 'pairs', not None" in refused(
        write_store(tmp_path / "pairs", k=16, pairs=True).path
    )
    assert f"{first} is named twice" in refused(first)
    assert "objective mlsm needs a store of LSP distributions" in refused(logits_store.path)
    assert "is not a store" in refused(tmp_path / "nowhere", StoreError)
    words = write_store(tmp_path / "words", k=16, words=50)
    said = refused(words.path)
    assert "their windows differ: there vocabulary is 55, not 65" in said


def test_a_tokenizer_that_only_the_vocabulary_tells_apart_is_refused(stores):
    other = SimpleNamespace(**vars(stores[1]) | {"path": "elsewhere", "vocab_size": 64})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("student.objectives.several_stores.Store.open", lambda *_: other)
        with pytest.raises(RunError, match="there vocabulary is 64, not 65"):
            open_beside(stores[0], ["elsewhere"])


def test_a_store_that_has_grown_is_seen_through_the_plan_of_the_first(stores, both, tmp_path):
    grown = tmp_path / "grown"
    shutil.copytree(both["store"][1], grown)
    store = Store.open(grown)
    newer = Plan(store.plan.windowing, store.plan.units[:1])
    store.files.publish_plan(newer)
    os.utime(grown / "plans" / f"{newer.id}.json", ns=(2**62, 2**62))
    assert Store.open(grown).plan_id == newer.id
    (opened,) = open_beside(stores[0], [str(grown)])
    assert opened.plan_id == stores[0].plan_id
    with pytest.raises(RunError, match="not have the plan.*contain different text"):
        open_beside(stores[0], [str(grown / "plans" / f"{newer.id}.json")])


def test_a_store_that_does_not_hold_what_its_plan_says_is_an_error(stores, tmp_path, monkeypatch):
    windows = stores[0].split("train")
    objective = build_objective("mlsm", stores, WEIGHTS)
    assert len({objective.digest(windows), windows.digest, objective.readers(windows)[1].digest}) == 3
    monkeypatch.setattr(stores[1], "split", write_store(tmp_path / "other", k=16, train_windows=100).split)
    with pytest.raises(StoreError, match="split train has 100 and 150 windows.*verify-shards --full"):
        build_objective("mlsm", stores, WEIGHTS).readers(windows)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"store": ("a", "b"), "objective": "mtl"},
            "several stores are for the objectives mlsm, hard-mlsm, found mtl",
        ),
        (
            {"store": ("a", "b"), "objective": "kd"},
            "several stores are for the objectives mlsm, hard-mlsm, found kd",
        ),
        ({"store": ("a", "b"), "store_weights": (1.0,)}, "one number for each of several stores, found 1 for 2"),
        ({"store": "a", "store_weights": (1.0,)}, "one number for each of several stores, found 1 for 1"),
        (
            {"store": ("a", "b"), "store_weights": (1.0, 0.0)},
            "--store-weights must be positive numbers, found 1.0, 0.0",
        ),
        ({"store": ()}, "--store needs a value"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        StudentConfig(**given)
    assert "\n" not in str(caught.value)


def test_the_command_line_names_stores_and_weights():
    given = read_flags(StudentConfig, ["--store", "a", "b", "--store-weights", "1", "0.5", "--lr", "1e-3"])
    config = StudentConfig(**given)
    assert config.stores == ("a", "b") and config.weights == (1.0, 0.5) and config.lr == 1e-3
    assert StudentConfig(store=("a", "b")).weights == (1.0, 1.0) and StudentConfig().stores == ()
    assert StudentConfig(**read_flags(StudentConfig, ["--store", "a"])).store == "a"


def test_an_export_has_a_head_for_each_store(stores, both, tmp_path):
    config = StudentConfig(**both)
    train(config)
    export = config.run_dir / "export"
    weights = load_file(config.run_dir / "checkpoints" / "step-00000008" / "resume" / "student.safetensors")
    ids = torch.randint(5, 65, (2, 12), generator=torch.Generator().manual_seed(0))
    for head, (store, columns) in enumerate(zip(stores, (slice(0, 24), slice(24, 40)), strict=True), 1):
        model = LspModel.from_pretrained(config.run_dir, head=head)
        assert model.facts["store"] == store.target_id and model.facts["lsps"] == store.k
        assert torch.equal(model.student.output_Kd, weights["output_Kd"][columns])
        assert torch.equal(model.student.output_bias_K, weights["output_bias_K"][columns])
        assert model(ids).shape == (2, 12, store.k)
    with pytest.raises(RunError, match="has no lsp_head_3.safetensors"):
        LspModel.from_pretrained(export, head=3)
    known = json.loads((export / "lineage.json").read_text())
    assert [one["target"] for one in (known["store"], *known["other_stores"])] == [one.target_id for one in stores]
    card = (export / "README.md").read_text()
    assert "of 2 stores at once" in card and "head=2" in card and "## Store 2" in card and stores[1].target_id in card
    found = lineage(export)["identity"]
    assert found["other_targets"] == [{"target": stores[1].target_id, **stores[1].settings}]
    probe = with_student_and_store(ProbeConfig(student=str(config.run_dir)))
    assert probe.store == str(stores[0].path)


def test_any_checkpoint_is_exported_with_all_heads(both, stores, tmp_path):
    def stop(*args, step, **figures):
        if step >= 4:
            os.kill(os.getpid(), signal.SIGINT)

    config = StudentConfig(**both | {"checkpoints": (1.0,)})
    with pytest.raises(Interrupted):
        train(config, stop)
    export_run(ExportConfig(run=config.run_dir, output=tmp_path / "out"))
    weights = load_file(config.run_dir / "checkpoints" / "step-00000004" / "resume" / "student.safetensors")
    second = LspModel.from_pretrained(tmp_path / "out", head=2).student
    assert torch.equal(second.output_Kd, weights["output_Kd"][24:])
    assert json.loads((tmp_path / "out" / "lineage.json").read_text())["settings"]["store_weights"] == [1.0, 0.5]
    moved = [str(shutil.copytree(store.path, tmp_path / f"store{number}")) for number, store in enumerate(stores)]
    export_run(ExportConfig(run=config.run_dir, output=tmp_path / "out", store=moved))
    for wrong in (moved[:1], moved[::-1]):
        with pytest.raises(RunError, match="are not the stores of .*in its order"):
            export_run(ExportConfig(run=config.run_dir, output=tmp_path / "out", store=wrong))


def test_a_step_costs_the_outputs_of_all_stores_and_one_encoder(both, stores):
    config = StudentConfig(**both)
    joint, alone = (
        student_task(one, stores[0]).build()
        for one in (config, StudentConfig(**both | {"store": both["store"][0], "store_weights": None}))
    )
    more = joint.training_flops(4, 16, 20) - alone.training_flops(4, 16, 20)
    assert more == 3 * 2 * 20 * 32 * 16


def test_targets_of_all_stores_travel_to_the_device(stores):
    targets = read_half(stores[0], build_objective("mlsm", stores, WEIGHTS))
    moved = to_device(targets, torch.device("meta"))
    assert moved.counts == targets.counts
    assert all(of_store.entries_E.device.type == "meta" for of_store in moved.of_stores)

import dataclasses
import json
import os
import signal
import textwrap

import numpy as np
import pytest
import tiny_store
from preloaded import run_python
from tiny_store import write_store
from transformers import (
    BertConfig,
    CamembertConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    RobertaConfig,
)

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES = {
    "bert": BertConfig(**SIZE),
    "roberta": RobertaConfig(**SIZE, max_position_embeddings=10),  # too few positions for the store
    "camembert": CamembertConfig(**SIZE),
    "deberta": DebertaConfig(**SIZE, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": DebertaV2Config(**SIZE, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "electra": ElectraConfig(**SIZE, embedding_size=16),
    "distilbert": DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "modernbert": ModernBertConfig(**SIZE),
}

KILLED = """
    import json, os, signal, sys
    import torch
    from student.config import ProbeConfig, StudentConfig
    from student.probe import train_probe
    from student.train import train

    torch.set_num_threads(1)

    def kill(stage, done, total, *, step=0, **figures):
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

    kinds = {"StudentConfig": (StudentConfig, train), "ProbeConfig": (ProbeConfig, train_probe)}
    config, run = kinds[sys.argv[1]]
    run(config(**json.loads(sys.argv[2])), kill)
"""


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A directory with the config of one family of encoders."""
    FAMILIES[request.param].save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    """A directory with the directories of all of them."""
    place = tmp_path_factory.mktemp("families")
    for name, config in FAMILIES.items():
        config.save_pretrained(place / name)
    return place


@pytest.fixture(scope="session")
def lsp_store(tmp_path_factory):
    """A store with k = 24: 150 training windows, 20 held out."""
    return write_store(tmp_path_factory.mktemp("lsp") / "store", k=24)


@pytest.fixture(scope="session")
def ids_store(tmp_path_factory):
    """The same windows, ids only."""
    return write_store(tmp_path_factory.mktemp("ids") / "store", k=0)


@pytest.fixture(scope="session")
def logits_store(tmp_path_factory):
    """The same windows with a teacher's distributions, its head seven wider than the vocabulary of 65."""
    return write_store(tmp_path_factory.mktemp("logits") / "store", k=72, kind="logits")


@pytest.fixture(scope="session")
def packed_store(tmp_path_factory):
    """The windows of the ids store, but a second document begins at the sixth token of every window."""
    whole = tiny_store.block

    def two_documents(rng, windows, *rest):
        columns = whole(rng, windows, *rest)
        starts = columns["run_starts"]
        columns["run_starts"] = np.stack((starts, starts + 5), axis=1).reshape(-1)
        columns["run_records"] = np.arange(2 * windows)
        return columns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_store, "block", two_documents)
        return write_store(tmp_path_factory.mktemp("packed") / "store", k=0)


@pytest.fixture(scope="session")
def hidden_store(tmp_path_factory):
    """The same windows with a teacher's hidden states of 12 values."""
    return write_store(tmp_path_factory.mktemp("hidden") / "store", k=0, kind="hidden")


@pytest.fixture(scope="session")
def atoms_store(tmp_path_factory):
    """The LSP store with a dictionary of 24 atoms of 12 values."""
    return write_store(tmp_path_factory.mktemp("atoms") / "store", k=24, atoms=True)


@pytest.fixture(scope="session")
def store_for(lsp_store, logits_store, hidden_store, atoms_store):
    """Objective -> a store that it learns from; all are of one plan."""
    own = {"kd": logits_store, "regress": hidden_store, "recon": atoms_store}
    return lambda objective: own.get(objective, lsp_store)


@pytest.fixture(scope="session")
def needed_by(tmp_path_factory):
    """Objective -> the settings that it cannot do without. In this WordNet w5 to w60 have one to three synsets."""
    file = tmp_path_factory.mktemp("wordnet") / "index.sense"
    senses = [
        (word, 7 * word % 45 if sense else word % 4, sense) for word in range(5, 61) for sense in range(word % 3 + 1)
    ]
    file.write_text(
        "".join(f"w{word}%1:{lex:02}:{sense:02}:: {word}{sense} {sense + 1} 0\n" for word, lex, sense in senses)
    )
    return lambda objective: {"wordnet": file} if objective == "supersense" else {}


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    """Tiny models are fastest so, above all on a busy machine."""


@pytest.fixture
def settings(tmp_path):
    """Settings of a run that takes a second."""
    return {
        "encoder": "bert-2x32",
        "max_steps": 8,
        "batch_windows": 12,
        "micro_batch": 4,
        "lr": 1e-3,
        "seed": 1,
        "eval_windows": 8,
        "save_every": 3,
        "eval_every": 0,
        "device": "cpu",
        "run_dir": tmp_path / "run",
    }


@pytest.fixture
def train_until_killed():
    """Function of a StudentConfig or ProbeConfig and a step: trains in a process that SIGKILL ends after that step."""

    def run(config, step):
        kept = {field.name for field in dataclasses.fields(config) if field.init}
        settings = {name: value for name, value in config.to_json().items() if name in kept}
        command = ["-c", textwrap.dedent(KILLED), type(config).__name__, json.dumps(settings), str(step)]
        child = run_python(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert child.returncode == -signal.SIGKILL, child.stderr

    return run

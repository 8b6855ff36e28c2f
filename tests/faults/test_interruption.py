"""SIGTERM, SIGHUP, Ctrl-C in real processes: out within seconds, own exit code, finished work kept, nothing left."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from preloaded import Preloaded, Python, run_python
from test_commit import temporaries, visible_units_are_whole

pytestmark = [
    pytest.mark.promise(
        "SIGTERM (exit code 143), SIGHUP (129) and Ctrl-C (130): out within 8 s, finished units kept, no "
        "temporary; while sampling, learning, encoding, in both layouts",
        cases="9 signals to real processes",
    ),
    pytest.mark.promise("30 SIGTERM, Ctrl-C"),
    pytest.mark.promise("39 SIGHUP; a display …"),
]

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_EXIT = 8
CODES = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}


def start(flags, start_new_session=False, process=Preloaded, **environment):
    """Start the command; with `process` Python, one that has to import everything first."""
    return process(
        [Path(__file__).with_name("command.py"), *flags],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def interrupted(flags, ready, number, pause=0.0, then="Run the same command again", process=Preloaded, **environment):
    """Run the command until `ready()`, send the signal; returns what it said, `then` among it."""
    process = start(flags, process=process, **environment)
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.002)
    time.sleep(pause)
    process.send_signal(number)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == CODES[number], said
    busy = max(1, os.getloadavg()[0] / os.cpu_count())  # others may take most of the machine
    assert time.monotonic() - began < SECONDS_TO_EXIT * busy
    assert said.count("mlsm: error:") == 1 and then in said and "Traceback" not in said
    return said


def finish(flags):
    process = start(flags)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said


def shards(output):
    return {path.name: path.read_bytes() for path in Path(output).glob("stores/*/units/*.tar")}


@pytest.fixture(scope="module")
def flags(english_text, teacher_directory):
    return [
        *("encode-lsp", "--teacher", teacher_directory, "--layer", 2, "--corpus", english_text, "--k", 96),
        *("--lam", 0.1, "--top-n", 8, "--max-length", 32, "--dictionary-tokens", 20_000, "--unit-tokens", 10_000),
        *("--batch-tokens", 2048, "--device", "cpu", "--dictionary-epochs", 8, "--max-tokens", 150_000),
    ]


@pytest.fixture(scope="module")
def hidden_flags(flags):
    left_out = {"--k", "--lam", "--top-n", "--dictionary-epochs", "--dictionary-tokens"}
    pairs = [pair for pair in zip(flags[1::2], flags[2::2], strict=True) if pair[0] not in left_out]
    command = ["encode-hidden", *(word for pair in pairs for word in pair), "--quantise", "pq", "--bytes", 16]
    return [*command, "--dictionary-tokens", 8_000]


RUN_ALL = """
import json, sys
from mlsm.__main__ import run

sys.exit(max(run(words) for words in json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def whole(flags, hidden_flags, tmp_path_factory):
    """Unbroken runs of both commands, in a process whose hashes of strings are not those of the others."""
    output = tmp_path_factory.mktemp("whole")
    commands = [[*flags, "--output", output], [*hidden_flags, "--output", output / "hidden"]]
    run = run_python(["-c", RUN_ALL, json.dumps([[*map(str, words)] for words in commands])], Python)
    assert run.returncode == 0, run.stderr
    return output


def test_again_and_again_while_encoding(flags, whole, tmp_path):
    pairs = [pair for pair in zip(flags[1::2], flags[2::2], strict=True) if not pair[0].startswith("--dictionary-")]
    command = ["encode-lsp", *(word for pair in pairs for word in pair)]
    command += ["--dictionary", next(whole.glob("dictionaries/*")), "--output", tmp_path]
    kept, visible = {}, 0
    for number, layout, pause in [
        (signal.SIGTERM, "cpu", 0),
        (signal.SIGINT, "cuda", 0.1),
        (signal.SIGHUP, "cpu", 0),
    ]:
        interrupted(
            command,
            lambda seen=visible: len(list(tmp_path.glob("stores/*/units/*.json"))) > seen,
            number,
            pause,
            MLSM_TEST_LAYOUT=layout,
        )
        assert not temporaries(tmp_path)
        assert kept.items() <= shards(tmp_path).items() <= shards(whole).items()
        kept = shards(tmp_path)
        visible = visible_units_are_whole(next(tmp_path.glob("stores/*")))
        # The signal may come after a shard and before its record, without which the shard does not count.
        assert len(kept) - 1 <= visible <= len(kept) < len(shards(whole))
    finish(command)
    assert shards(tmp_path) == shards(whole)


def test_while_the_dictionary_is_learned(flags, whole, tmp_path):
    command = [*flags, "--output", tmp_path]
    sampling = tmp_path / "dictionaries"
    interrupted(command, lambda: list(sampling.glob(".*.learning/.sample.npy.*.tmp")), signal.SIGTERM)
    assert not temporaries(tmp_path)
    saved = lambda: [path.stat().st_mtime_ns for path in sampling.glob(".*.learning/learning.npz")]  # noqa: E731
    for number in (signal.SIGHUP, signal.SIGINT):
        before = saved()
        interrupted(command, lambda before=before: saved() != before, number, 0.05, MLSM_TEST_SAVE_ALWAYS="1")
        assert not temporaries(tmp_path) and saved()
    process = start(command)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0 and "dictionary: continuing after" in said
    assert shards(tmp_path) == shards(whole) and not list(sampling.glob(".*"))


def test_while_a_codebook_is_learned_and_hidden_states_are_encoded(hidden_flags, whole, tmp_path):
    unbroken, output = shards(whole / "hidden"), tmp_path
    command = [*hidden_flags, "--output", output]
    interrupted(command, lambda: list(output.glob("codebooks/.*.learning/*sample.npy*")), signal.SIGTERM)
    assert not temporaries(output)
    for number, layout in ((signal.SIGINT, "cuda"), (signal.SIGHUP, "cpu")):
        seen = len(shards(output))
        ready = lambda seen=seen: len(list(output.glob("stores/*/units/*.json"))) > seen  # noqa: E731
        interrupted(command, ready, number, MLSM_TEST_LAYOUT=layout)
        assert not temporaries(output) and shards(output).items() <= unbroken.items()
        assert visible_units_are_whole(next(output.glob("stores/*"))) == len(shards(output)) > seen
    finish(command)
    assert shards(output) == unbroken and not list(output.glob("codebooks/.*"))


def test_before_any_work(flags, tmp_path):
    """In the imports, where a library may be half loaded."""
    interrupted([*flags, "--output", tmp_path], lambda: True, signal.SIGTERM, 1.5, process=Python)
    assert not list(tmp_path.rglob("*.json")) and not temporaries(tmp_path)

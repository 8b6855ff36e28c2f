"""A display that goes away, is closed, full or of another encoding: the work goes on, its exit code stays that of the
work, and all files are those of a run that was watched. Real processes, terminals, pipes and signals."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from preloaded import Preloaded, Python, run_command, run_python
from test_training import checkpoint_steps, steps_logged
from tiny_store import log_of, write_store

from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.show import show
from shards.reader import Store
from student.lsp_model import LspModel

pytestmark = [
    pytest.mark.promise(
        "a terminal that is closed, `nohup`, a dead `tee`, streams that are closed or full: training ends with a "
        "checkpoint on SIGHUP, and continues otherwise; exit code of the work; with `--json` a result that is lost "
        "is an error",
        cases="6 real processes",
    ),
    pytest.mark.promise("39 SIGHUP; a display that goes away"),
]

SCRIPT = str(Path(__file__).with_name("command.py"))
COMMAND = [sys.executable, SCRIPT]
STEPS = 30
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

ALL = """
    import os, sys
    from pathlib import Path
    import pipeline.commands, student.train    # so that the processes of the commands have not to
    from mlsm import __main__ as cli

    def run(words):
        if not (process := os.fork()):
            cli.main(words)
        assert os.waitpid(process, 0)[1] == 0, words[0]

    def output(words, flag="--output"):
        return Path(words[words.index(flag) + 1])

    then = sys.argv.index("then")
    encode, train = sys.argv[1:then], sys.argv[then + 1 :]
    run(encode)
    (store,) = (output(encode) / "stores").glob("*")
    train.append(str(store))
    run(train)
    (output(train, "--run-dir") / "result.json").unlink()    # so that it is resumed, and exported once more
    run(train)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("display") / "store", k=24)


@pytest.fixture
def train(store, tmp_path):
    """The command's flags and the run's directory."""
    flags = {
        "encoder": "bert-1x32",
        "max-steps": STEPS,
        "batch-windows": 24,
        "micro-batch": 8,
        "eval-windows": 8,
        "save-every": 7,
        "device": "cpu",
        "store": store.path,
        "run-dir": tmp_path / "run",
    }
    return ["train-student", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]


def start_after(first, flags, **options):
    """Start the command in a process that is as these statements leave it."""
    code = f"import runpy, sys; {first}; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    return Preloaded(["-c", code, SCRIPT, *flags], **options)


def is_finished(run):
    return (run / "result.json").is_file() and sorted(log_of(run)) == list(range(1, STEPS + 1))


def test_a_pipe_whose_reader_dies(train, tmp_path):
    """`mlsm train-student 2>&1 | tee log`, the tee killed: progress and the summary meet a broken pipe."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = Preloaded([SCRIPT, *train], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert is_finished(tmp_path / "run")


def test_streams_that_are_closed(train, tmp_path):
    """A closed one's number must not be given to a file of the run, which would then receive warnings."""
    line = 'exec "$@" <&- >&- 2>&-'
    run = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *train], timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0
    assert is_finished(tmp_path / "run")


def test_streams_that_are_full(train, tmp_path):
    with open("/dev/full", "w") as full:
        process = Preloaded([SCRIPT, *train], stdout=full, stderr=full, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert process.wait(timeout=300) == 0
    assert is_finished(tmp_path / "run")


def test_a_terminal_that_is_closed_stops_training_as_sigterm_does(train, tmp_path):
    """The kernel sends SIGHUP, and every further write to the terminal fails."""
    run, (master, terminal) = tmp_path / "run", pty.openpty()
    process = start_after(
        f"import fcntl; fcntl.ioctl(0, {termios.TIOCSCTTY}, 0)",
        train,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )
    os.close(terminal)
    os.set_blocking(master, False)
    while steps_logged(run) < 10:
        assert process.poll() is None
        try:
            os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.002)
    os.close(master)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert checkpoint_steps(run)[-1] == max(log_of(run)) < STEPS
    assert not list(run.rglob("*.tmp"))


def test_nohup_keeps_its_promise(train, tmp_path):
    run = tmp_path / "run"
    process = start_after(
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        train,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while steps_logged(run) < 10:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    assert is_finished(run)


@pytest.mark.parametrize("words", ["show-shards {} --json", "train-student --store {} --print-config", "docs faq"])
def test_a_result_that_a_program_should_read_is_whole_or_an_error(store, words):
    """With these the output is the work."""
    command = [SCRIPT, *(word.format(store.path) for word in words.split())]
    with open("/dev/full", "w") as full:
        run = run_python(command, stdout=full)
    assert run.returncode == 74 and "No space left" in run.stderr and "Traceback" not in run.stderr
    gone = Preloaded(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    gone.stdout.close()  # `| head -1`
    assert gone.stderr.read() == "" and gone.wait() == 0


@pytest.mark.promise(
    "names of any bytes for corpus, teacher, output; ASCII streams: encoded, trained, resumed, exported, shown",
    cases="1",
)
@pytest.mark.promise("40 names that are not UTF-8; credentials in a URL")
def test_names_that_are_not_utf_8_and_streams_that_are_not(english_text, teacher_directory, tmp_path):
    """Corpus, teacher and output with names of any bytes: encoded, trained, exported, with the codes of the work."""
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 \xff\xce\xbb"))
    place.mkdir()
    corpus, teacher = place / os.fsdecode(b"t\xe9xt.txt"), place / os.fsdecode(b"teach\xe9r")
    corpus.write_bytes(Path(english_text).read_bytes())
    teacher.symlink_to(teacher_directory)
    flags = [
        *("encode-lsp", "--teacher", teacher, "--layer", 2, "--corpus", corpus, "--k", 96, "--lam", 0.1),
        *("--top-n", 8, "--max-length", 32, "--dictionary-tokens", 5_000, "--max-tokens", 20_000, "--batch-tokens"),
        *(2048, "--device", "cpu", "--dictionary-epochs", 1, "--output", place / "runs"),
    ]
    train = ["train-student", "--encoder", "bert-1x32", "--max-steps", 3, "--batch-windows", 8,
             "--device", "cpu", "--eval-windows", 8, "--run-dir", place / "run", "--store"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ASCII
    run = run_python(["-c", textwrap.dedent(ALL), *flags, "then", *train], Python, env=environment, text=None)
    said = run.stdout.decode("utf-8", "backslashreplace") + run.stderr.decode("utf-8", "backslashreplace")
    assert run.returncode == 0 and r"caf\xe9 \xff" in said and said.count("The student is finished") == 2, said
    (store,) = (place / "runs" / "stores").glob("*")
    assert "teach" in json.loads((store / "target.json").read_text())["lineage"]["teacher_name"]
    sources = json.loads(next((store / "plans").glob("*.json")).read_text())["units"][0]["source"]
    assert os.fsencode(sources).endswith(b"t\xe9xt.txt")  # as it is called, and not as it is shown
    assert Store.open(store).report()["tokens"] > 0
    assert r"teach\xe9r" in (place / "run" / "export" / "README.md").read_text(encoding="utf-8")
    (vectors,) = LspModel.from_pretrained(place / "run").lsp(["a b"])
    assert len(vectors.tokens)
    read = replace(ShowLspConfig(store=os.fspath(store)), samples=2_000)
    assert show(read, lambda *_, **__: None)["view"] == "overview"
    assert show(replace(read, html=place / "html"), lambda *_, **__: None)["files"] == 5


def test_the_command_that_repairs_a_store_can_be_pasted_when_names_are_not_utf8(tmp_path):
    """A name in Latin-1 of a directory for text and stores: bash runs the line exactly as verify-shards prints it."""
    place = os.fsencode(tmp_path) + b"/caf\xe9's"
    os.mkdir(place)
    with open(place + b"/text.txt", "w") as file:
        file.write("\n\n".join(f"document {number} of several words" for number in range(300)))
    text, output = os.fsdecode(place + b"/text.txt"), os.fsdecode(place)
    flags = ["--tokenizer", "bundled", "--max-length", "16", "--output", output]
    assert run_command(["encode-ids", "--corpus", text, *flags]).returncode == 0
    (store,) = Path(output, "stores").iterdir()
    shards = {path.name: path.read_bytes() for path in (store / "units").iterdir()}
    for name in shards:
        (store / "units" / name).unlink()
    checked = run_command(["verify-shards", store])
    (line,) = (line.strip() for line in checked.stdout.splitlines() if "encode-ids" in line)
    pasted = subprocess.run(
        ["bash", "-c", f'python() {{ {sys.executable} "$@"; }}; {line}'], capture_output=True, cwd=tmp_path
    )
    assert pasted.returncode == 0, (line, pasted.stderr)
    assert shards == {path.name: path.read_bytes() for path in (store / "units").iterdir()}

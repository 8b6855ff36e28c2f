"""`python cli.py ...` without the seconds of importing: processes forked from one that has imported the libraries.

    run = run_command(["verify-shards", store], cwd=place)      # as subprocess.run(..., capture_output=True, text=True)

Each command is a process of its own, with its own exit and output. What it does at import is done before it begins, so
commands under another environment, and tests of how a command begins, start Python themselves.
"""

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (  # by one command or another
    "evaluation.comparison.compare",
    "evaluation.inspection.lsps.show",
    "evaluation.studies.sweeps.sweep",
    "evaluation.studies.word_senses.choose_layer",
    "evaluation.tasks.blimp.evaluate",
    "evaluation.tasks.finetuning.suite",
    "pipeline.coding.coder",
    "pipeline.encode",
    "student.export_run",
    "student.trainer",
)


def run_command(arguments, cwd=ROOT) -> subprocess.CompletedProcess:
    """Run a command to its end; what it printed is in the result."""
    server = _server()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        places = {name: f"/proc/{os.getpid()}/fd/{file.fileno()}" for name, file in (("out", out), ("err", err))}
        server.stdin.write(json.dumps({"argv": list(map(str, arguments)), "cwd": str(cwd), **places}) + "\n")
        server.stdin.flush()
        code = json.loads(server.stdout.readline())
        printed = [Path(place).read_text(encoding="utf-8") for place in places.values()]
    return subprocess.CompletedProcess(arguments, code, *printed)


@functools.cache
def _server():
    command = [sys.executable, str(Path(__file__)), "serve"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.stdin.close)
    return server


def _serve():
    """Read requests until the end of the input; returns in the child of each, with what it should run."""
    for module in IMPORTED:
        __import__(module)
    for line in sys.stdin:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
    return None


def _become(request):
    """Be the process that would have been started for the command."""
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    streams = [nothing, *(os.open(request[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err"))]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (to the end of the process)
    sys.argv = [str(ROOT / "cli.py"), *request["argv"]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from terminal.process import quiet_libraries

    quiet_libraries(downloads=False)
    if (command := _serve()) is not None:
        _become(command)

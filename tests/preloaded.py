"""Python processes without the seconds of importing: forked from one that has imported the libraries.

    run = run_command(["verify-shards", store], cwd=place)    # `python cli.py verify-shards ...`, to its end
    run = run_python(["-c", code, argument])                  # as subprocess.run([sys.executable, ...]) with its output
    process = Preloaded([file, argument], stderr=PIPE)        # as subprocess.Popen([sys.executable, ...])
    monkeypatch.setattr(module, "subprocess", SUBPROCESS)     # for code that itself starts Python

Each is a process of its own and a child of this one, with its own streams, environment, signals and exit. What Python
does at import is done before it begins, and its hashes of strings are those of all that come from the same process. So
tests of how a process begins, of memory, and comparisons of two processes that could depend on an order of hashes start
Python itself for (one of) them. At its end threads are waited for, functions of `atexit` run and streams are flushed,
but modules are not taken apart: with torch among them that takes longer than most commands.
"""

import atexit
import ctypes
import functools
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
LONGEST_REQUEST = 1 << 17  # bytes
IMPORTED = (  # by one command or another
    "mlsm.evaluation.comparison.compare",
    "mlsm.evaluation.inspection.lsps.show",
    "mlsm.evaluation.studies.protocol.study",
    "mlsm.evaluation.studies.word_senses.choose_layer",
    "mlsm.evaluation.tasks.blimp.evaluate",
    "mlsm.evaluation.tasks.finetuning.suite",
    "pipeline.encode",
    "pipeline.commands",
    "pipeline.dask_workers",
    "student.runs.export_run",
    "student.train",
    "mlsm.cli.run",
    "mlsm.terminal.training",
    "transformers.generation",
    "transformers.models.bert.modeling_bert",
)


class Preloaded(subprocess.Popen):
    """A process as [sys.executable, *arguments] would start it; of the arguments for Python itself there are -c and -m.

    Of the options there are those for streams, text, cwd, env and start_new_session.
    """

    def __init__(self, arguments, **options):
        super().__init__(list(map(os.fspath, map(_text, arguments))), **options)

    def _execute_child(self, *given):
        """In place of fork and exec."""
        given = inspect.signature(super()._execute_child).bind(*given).arguments
        assert not given["preexec_fn"] and not given["shell"], "what the process itself cannot do"
        environment = dict(os.environ if given["env"] is None else given["env"])
        request = {
            "arguments": given["args"],
            "environment": environment,
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "new_session": given["start_new_session"],
        }
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        server = _server(environment.get("OMP_NUM_THREADS"))
        with _adopting_orphans():
            socket.send_fds(server, [json.dumps(request).encode()], streams)
            self.pid = int(server.recv(LONGEST_REQUEST))
        self._child_created = True
        self._close_pipe_fds(*(given[f"{pipe}{end}"] for pipe in ("p2c", "c2p", "err") for end in ("read", "write")))


class Hanging(Preloaded):
    """One that hangs once it has made a file `hanging` in the directory that is its last argument: with that a time
    limit for it is over."""

    hangs = False

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout or 0)
        while timeout and not self.hangs and self.poll() is None:
            self.hangs = Path(self.args[-1], "hanging").exists()
            if self.hangs or time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return super().wait(timeout)


def standing_in(process):
    """The module `subprocess`, with a process of here in place of Popen."""
    return SimpleNamespace(**vars(subprocess) | {"Popen": lambda command, **more: process(command[1:], **more)})


SUBPROCESS = standing_in(Preloaded)


class Python(subprocess.Popen):
    """The same without any of this: Python itself is started."""

    def __init__(self, arguments, **options):
        super().__init__([sys.executable, *map(os.fspath, map(_text, arguments))], **options)


def run_command(arguments, cwd=ROOT, largest_file=None, code=None) -> subprocess.CompletedProcess:
    """Run a command of the command line to its end; what it printed is in the result.

    largest_file  bytes beyond which it can write no file, as where the disk is full
    code          the exit code that it must have, without a traceback
    """
    words = [ROOT / "cli.py", *arguments]
    if largest_file is not None:
        program = "import resource, sys; from mlsm.__main__ import main; size = int(sys.argv.pop(1))\n"
        program += "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)); main()"
        words = ["-c", program, largest_file, *arguments]
    run = run_python(words, cwd=cwd)
    if code is not None:
        assert run.returncode == code and "Traceback" not in run.stderr, run.stdout + run.stderr
    return run


def run_python(arguments, process=Preloaded, timeout=None, **options) -> subprocess.CompletedProcess:
    """Run Python with these arguments to its end, `process` being Preloaded or Python; what it printed is text."""
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with process(arguments, **options) as started:
        try:
            printed = started.communicate(timeout=timeout)
        except BaseException:
            started.kill()
            raise
    return subprocess.CompletedProcess(arguments, started.returncode, *printed)


def start_ranks(arguments, ranks=2, **options) -> list[Preloaded]:
    """Start as many processes that train together, as a launcher would; a single one is not told of any others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    places = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    return [Preloaded(arguments, env=alone | place, **options) for place in places]


def _text(value):
    return value if isinstance(value, os.PathLike) else str(value)


class _adopting_orphans:
    """While it lasts, a process whose parent ends becomes a child of this one."""

    def __enter__(self):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def __exit__(self, *_):
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@functools.cache
def _server(threads):
    """The socket of a process that has imported the libraries with this OMP_NUM_THREADS."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)  # which ends it
    return ours


def serve_from_here():
    """From here on this process's Preloaded ones are forked from it as it is now. For one that is itself preloaded."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        become(*serve(theirs), theirs)
        sys.exit()
    theirs.close()
    _server = lambda _: ours  # noqa: E731


def serve(requests):
    """Start a process for each request; returns in it, with what it should run and its streams."""
    for module in IMPORTED:
        __import__(module)
    sys.modules["pipeline.solvers"].nonneg_lasso([[1.0]], [[1.0]], 0.5)  # its kernels come from Numba's cache
    gc.freeze()
    while True:
        request, streams, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 3)
        if not request:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            for stream in streams:
                os.close(stream)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:  # until the process that asked is the parent
            time.sleep(0.001)
        return json.loads(request), streams


def become(request, streams, requests):
    """Be the process that would have been started."""
    if request["new_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    requests.send(str(os.getpid()).encode())
    requests.close()
    run, *arguments = request["arguments"]
    if run == "-c":
        code, *arguments = arguments
        sys.argv, sys.path[0], sys.modules["__main__"] = ["-c", *arguments], "", ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif run == "-m":
        sys.argv, sys.path[0] = arguments, ""
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [run, *arguments], str(Path(run).resolve().parent)
        runpy.run_path(run, run_name="__main__")


def end_at_once(codes):
    """End with the exit code, if it is known; where a stream cannot be flushed, Python ends the process as it would."""
    if codes:
        with suppress(OSError, ValueError):
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(codes[0])


if __name__ == "__main__":
    exit_codes = []
    atexit.register(end_at_once, exit_codes)  # before anything else is, so that it comes last
    sys.path.insert(1, str(ROOT))
    from mlsm.terminal.process import quiet_libraries

    quiet_libraries(downloads=False)
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        become(*serve(connection), connection)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            exit_codes.append(end.code or 0)
        raise
    exit_codes.append(0)

import contextlib
import errno
import json

import pytest
from huggingface_hub import CommitOperationDelete, HfApi, errors
from transformers import BertConfig

from mlsm.common.errors import RunError
from mlsm.evaluation.lineage import lineage
from student.config import StudentConfig
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.runs.hub import Revision, push
from student.train import train


class FakeHub:
    """Stands in for HfApi: repositories as branch -> file name -> bytes. `fails` is raised at the n-th upload."""

    def __init__(self, fails=None, at=0):
        self.repositories, self.private, self.messages = {}, {}, []
        self.fails, self.left = fails, at

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        if repo_id not in self.repositories:
            self.repositories[repo_id] = {"main": {".gitattributes": b""}}
            self.private[repo_id] = private
        return f"https://hub/{repo_id}"

    def create_branch(self, repo_id, *, branch, exist_ok):
        assert exist_ok
        self.repositories[repo_id].setdefault(branch, dict(self.repositories[repo_id]["main"]))

    def list_repo_files(self, repo_id, *, revision):
        return sorted(self.repositories[repo_id][revision])

    def create_commit(self, repo_id, operations, *, commit_message, revision):
        if self.fails is not None and not self.left:
            raise self.fails
        self.left -= 1
        for operation in operations:
            if isinstance(operation, CommitOperationDelete):
                del self.repositories[repo_id][revision][operation.path_in_repo]
                continue
            with operation.as_file() as file:
                self.repositories[repo_id][revision][operation.path_in_repo] = file.read()
        self.messages.append((revision, commit_message))


@pytest.fixture(scope="module")
def run(lsp_store, tmp_path_factory):
    """A finished run with kept checkpoints at 1, 2, 4 and 8."""
    output = tmp_path_factory.mktemp("hub") / "run"
    sizes = {"max_steps": 8, "batch_windows": 8, "micro_batch": 8, "eval_windows": 8, "device": "cpu"}
    train(StudentConfig(store=lsp_store.path, encoder="bert-1x32", run_dir=output, **sizes))
    return output


@pytest.fixture
def request_of(run, tmp_path):
    return lambda **changes: ExportConfig(
        **{"run": run, "output": tmp_path / "out", "push_to_hub": "someone/student"} | changes
    )


def contents(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_files_of_another_student_do_not_stay(tmp_path):
    """The LSP head of an earlier student would be loaded with the encoder of the new one."""
    hub, there = FakeHub(), {"README.md": b"1", "lsp_head.safetensors": b"1", "picture.png": b"1"}
    for name, files in (("lsps", there), ("words", {"README.md": b"2"})):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        push("a/b", [Revision("main", tmp_path / name, name)], private=False, progress=lambda *_, **__: None, api=hub)
    assert hub.repositories["a/b"]["main"] == {".gitattributes": b"", "README.md": b"2", "picture.png": b"1"}


def test_kept_checkpoints_are_branches_and_the_final_one_is_main(run, request_of):
    hub, seen = FakeHub(), []
    report = export_run(request_of(private=True), lambda *args, **rest: seen.append((args, rest)), api=hub)
    pushed = hub.repositories["someone/student"]
    assert set(pushed) == {"main", *(f"step-{step:08d}" for step in (1, 2, 4, 8))}
    assert hub.messages[-1] == ("main", "Step 8") and hub.private == {"someone/student": True}
    assert pushed["main"] == contents(run / "export") | {
        ".gitattributes": b"",
        "lineage.json": pushed["main"]["lineage.json"],  # the next test's
    }
    checkpoint = contents(run / "checkpoints" / "step-00000002")
    branch = pushed["step-00000002"]
    assert branch["model.safetensors"] == checkpoint["model.safetensors"] != pushed["main"]["model.safetensors"]
    assert set(branch) == {name for name in checkpoint if "resume" not in name and name != "state.json"} | {
        ".gitattributes"
    }
    assert report["address"] == "https://hub/someone/student"
    assert seen[-1] == (("push", 5, 5), {"unit": "revisions"})


def test_no_local_path_is_pushed(lsp_store, tmp_path):
    """Evaluations on this machine find models and corpora by their paths, so the files at home keep them."""
    run, home = tmp_path / "run", tmp_path / "home" / "ann"
    BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(home / "small")
    sizes = {"max_steps": 2, "batch_windows": 8, "micro_batch": 8, "eval_windows": 8, "device": "cpu"}
    train(StudentConfig(store=lsp_store.path, encoder=str(home / "small"), run_dir=run, **sizes))
    hub = FakeHub()
    export_run(ExportConfig(run=run, output=tmp_path / "out", push_to_hub="someone/student"), api=hub)
    pushed = hub.repositories["someone/student"]
    assert len(pushed) > 1
    for files in pushed.values():
        assert [name for name, data in files.items() if str(tmp_path).encode() in data] == []
        assert json.loads(files["lineage.json"])["settings"]["encoder"] == "small"
    for kept in (run / "export", tmp_path / "out"):
        assert json.loads((kept / "lineage.json").read_text(encoding="utf-8"))["settings"]["encoder"] == f"{home}/small"

    (tmp_path / "pulled").mkdir()
    (tmp_path / "pulled" / "lineage.json").write_bytes(pushed["main"]["lineage.json"])
    pulled, here = lineage(tmp_path / "pulled"), lineage(run / "export")
    assert pulled["identity"]["settings"].pop("encoder") == pulled.pop("encoder") == "small"
    here["identity"]["settings"].pop("encoder"), here.pop("encoder")
    for found in (pulled, here):
        found["identity"]["settings"].pop("dropout")  # is read from the config.json beside the lineage
    assert pulled == here, "all else says what it said"


def test_paths_inside_of_a_lineage_are_not_pushed(tmp_path):
    """A teacher on the disk, the files of the corpus, the student of a probe; names of the Hub and weights stay."""
    files = {"/home/ann/wiki/a.txt": {"bytes": 1}, "hf://datasets/allenai/c4/a.parquet": {"bytes": 2}}
    settings = {"teacher_name": "/home/ann/teacher", "lam": 0.05}
    student = {"name": "/home/ann/runs/students/one", "store": {"corpus": {"files": files}, "settings": settings}}
    (tmp_path / "lineage.json").write_text(json.dumps({"student": student, "base": "google-bert/bert-base-cased"}))
    (tmp_path / "model.safetensors").write_bytes(b"/home/ann as weights")
    hub = FakeHub()
    revision = Revision("main", tmp_path, "Step 1")
    push("ann/probe", [revision], private=False, progress=lambda *_, **__: None, api=hub)
    pushed = hub.repositories["ann/probe"]["main"]
    assert b"/home" not in pushed["lineage.json"] and b"hf://datasets/allenai/c4/a.parquet" in pushed["lineage.json"]
    known = json.loads(pushed["lineage.json"])
    assert known["student"]["store"]["settings"] == {"teacher_name": "teacher", "lam": 0.05}
    assert known["student"]["name"] == "one" and known["base"] == "google-bert/bert-base-cased"
    assert pushed["model.safetensors"] == b"/home/ann as weights"
    assert revision.files() == {name: len(data) for name, data in pushed.items() if name != ".gitattributes"}


def test_a_dry_run_says_what_would_be_pushed_and_touches_nothing(run, request_of, tmp_path):
    hub = FakeHub()
    before = contents(run)
    report = export_run(request_of(dry_run=True), api=hub)
    assert hub.repositories == {} and not (tmp_path / "out").exists() and contents(run) == before
    rehearsed = {row["branch"]: row["files"] for row in report["revisions"]}
    export_run(request_of(), api=hub)
    pushed = hub.repositories["someone/student"]
    assert list(rehearsed)[-1] == "main" and report["address"] is None
    for branch, files in rehearsed.items():
        assert files == {name: len(data) for name, data in pushed[branch].items() if name != ".gitattributes"}


@pytest.mark.promise("a kept checkpoint …")
def test_a_file_that_was_put_beside_an_export_is_not_pushed(run, request_of):
    stray = run / "checkpoints" / "step-00000002" / "own.py"
    stray.write_text("raise SystemExit\n")
    for dry_run in (True, False):
        hub = FakeHub()
        with pytest.raises(RunError, match=r"own\.py is no file of the export .* nothing was pushed"):
            export_run(request_of(dry_run=dry_run), api=hub)
        assert hub.repositories == {}
    stray.unlink()


def http_error(kind, status):
    """One of the Hub's errors, as huggingface_hub raises it."""
    response = type("Response", (), {"status_code": status, "headers": {}, "request": None})()
    return kind(f"{status} Client Error", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalTokenNotFoundError("Token is required"), "hf auth login"),
        (http_error(errors.HfHubHTTPError, 403), "hf auth login"),
        (http_error(errors.RepositoryNotFoundError, 404), "Check the name"),
        (http_error(errors.HfHubHTTPError, 503), "refuses for now .503 Client Error.. Try later"),
        (ValueError("Invalid metadata in README.md.\n- license must be one of"), "README.md. - license must be one of"),
        (RuntimeError("Error while uploading"), "Error while uploading"),
        (errors.OfflineModeIsEnabled("offline mode is enabled"), "cannot be reached.*HF_HUB_OFFLINE"),
        (ConnectionError(errno.ECONNREFUSED, "Connection refused"), "cannot be reached.*Connection refused"),
    ],
)
def test_an_interrupted_push_is_one_clear_line_and_goes_on(run, request_of, error, message):
    hub = FakeHub(fails=error, at=2)
    with pytest.raises(RunError, match=f"not pushed to someone/student: .*{message}.*pushes again") as caught:
        export_run(request_of(), api=hub)
    assert "\n" not in str(caught.value)
    assert set(hub.repositories["someone/student"]["main"]) == {".gitattributes"}
    hub.fails = None
    export_run(request_of(), api=hub)
    assert hub.repositories["someone/student"]["main"]["model.safetensors"]


@pytest.mark.parametrize("name", ["someone/student", "not a name/at all"])
def test_the_real_client_without_a_network_is_one_clear_line(request_of, name):
    with pytest.raises(RunError, match=f"not pushed to {name}: "), contextlib.redirect_stderr(None):
        export_run(request_of(push_to_hub=name), api=HfApi(endpoint="http://127.0.0.1:9"))

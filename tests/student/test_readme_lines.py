"""The lines of README.md for those who use Python, as they stand there, with small sizes; those of docs/python.md."""

import re
from pathlib import Path

import mlsm

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "encode_lsp": "layer=2, k=48, dictionary_tokens=2000, max_tokens=20_000, device='cpu'",
    "train_student": "encoder='bert-1x32', max_steps=8, eval_windows=8, device='cpu'",
}


def lines_of(page):
    """The first block of Python of a page that trains a student, with the sizes added to its calls."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    code = next(block for block in blocks if "mlsm.train_student(" in block)
    for name, sizes in SIZES.items():
        code, found = re.subn(rf"(mlsm\.{name}\([^\n]*)\)", rf"\1, {sizes})", code)
        assert found == 1, code
    return code


def test_the_lines_of_the_readme(english_text, teacher_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(english_text.read_bytes())
    code = lines_of("README.md").replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(teacher_directory)))
    names = {}
    exec(code, names)
    for token, best in zip(names["lsps"].tokens, names["lsps"].top(3), strict=True):
        assert token and len(best) == 3 and 0 < best[2][1] <= best[0][1] < 1


def test_train_load_look_and_probe(lsp_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"max_steps": 8, "batch_windows": 8, "micro_batch": 8, "eval_windows": 8, "device": "cpu"}

    student = mlsm.train_student(store=lsp_store.path, encoder="bert-2x32", **sizes)

    model = mlsm.LspModel.from_pretrained(student)
    for lsps in model.lsp(["w3 w10 w31", "w7 w22"]):
        assert lsps.distributions_Tk.sum(dim=1).allclose(lsps.distributions_Tk.new_ones(len(lsps.tokens)))

    probe = mlsm.train_probe(student=student, **sizes)
    words = mlsm.ProbedLspModel.from_pretrained(probe)
    inputs = model.tokenizer("w3 [MASK] w31", return_tensors="pt")
    assert words(**inputs).logits.shape == (1, 3, lsp_store.vocab_size)
    assert Path(probe.run).parent == Path("runs/probes") and probe["store"] == str(lsp_store.path)

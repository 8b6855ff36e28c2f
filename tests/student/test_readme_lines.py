"""The lines that README.md and docs/python.md show to somebody who uses Python, but for the sizes."""

from pathlib import Path

import mlsm


def test_train_load_look_and_probe(lsp_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"max_steps": 8, "batch_windows": 8, "micro_batch": 8, "eval_windows": 8, "device": "cpu"}

    student = mlsm.train_student(store=lsp_store.path, encoder="bert-2x32", **sizes)

    model = mlsm.LspModel.from_pretrained(student)
    for lsps in model.lsp(["w3 w10 w31", "w7 w22"]):
        for token, best in zip(lsps.tokens, lsps.top(3), strict=True):
            assert token.startswith("w") and len(best) == 3 and 0 < best[2][1] <= best[0][1] < 1
        assert lsps.distributions_Tk.sum(dim=1).allclose(lsps.distributions_Tk.new_ones(len(lsps.tokens)))

    probe = mlsm.train_probe(student=student, **sizes)
    words = mlsm.ProbedLspModel.from_pretrained(probe)
    inputs = model.tokenizer("w3 [MASK] w31", return_tensors="pt")
    logits = words(inputs["input_ids"], inputs["attention_mask"]).logits
    assert logits.shape == (1, 3, lsp_store.vocab_size)
    assert Path(probe.run).parent == Path("runs/probes") and probe["store"] == str(lsp_store.path)

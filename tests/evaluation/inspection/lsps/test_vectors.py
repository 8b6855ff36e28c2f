"""Visual LSPs: patches of scikit-learn's images through a tiny ViT, and vectors of a .npy file, against dense NumPy."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_sample_images
from sklearn.linear_model import Lasso

from common.errors import EncodeError, InspectionError, TeacherError
from common.progress import silent
from evaluation.inspection.lsps.config import LspConfig
from evaluation.inspection.lsps.show import show
from evaluation.inspection.lsps.vectors import VectorView
from pipeline.dictionary import Dictionary
from pipeline.images import ImagesConfig, encode_images
from terminal.lsps import summary

Image = pytest.importorskip("PIL.Image")
GRID, WIDTH, K, LAM = 4, 32, 12, 0.1


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Twenty digits and two photographs, one of which is named like markup."""
    directory = tmp_path_factory.mktemp("pictures")
    for number, digit in enumerate(load_digits().images[:20]):
        Image.fromarray((digit * 15).astype(np.uint8)).save(directory / f"digit-{number:02}.png")
    for name, photograph in zip(("a <b>photo.jpg", "flower.jpg"), load_sample_images().images, strict=True):
        Image.fromarray(photograph).save(directory / name)
    return directory


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    directory = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    ViTModel(config).save_pretrained(directory)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def encoded(pictures, vit, tmp_path_factory):
    settings = ImagesConfig(
        images=(str(pictures),), teacher=str(vit), layer=2, device="cpu", output=tmp_path_factory.mktemp("runs")
    )
    return settings, encode_images(settings)


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory):
    atoms_Kd = np.random.default_rng(0).normal(size=(K, WIDTH)).astype(np.float32)
    atoms_Kd /= np.linalg.norm(atoms_Kd, axis=1, keepdims=True)
    directory = tmp_path_factory.mktemp("dictionary") / "d"
    Dictionary(atoms_Kd, [], "made up", {"lam": LAM}).save(directory)
    return directory


def test_vectors_are_the_whole_models_hidden_states_of_the_patches(encoded, pictures, vit):
    from transformers import ViTImageProcessorPil, ViTModel

    settings, report = encoded
    assert report["images"] == 22 and report["grid"] == [GRID, GRID] and not report["finished_before"]
    vectors = np.load(report["file"]).reshape(22, GRID * GRID, WIDTH)
    names = json.loads((settings.output / "vectors").glob("*/vectors.json").__next__().read_text())["images"]
    assert names == sorted(str(path) for path in pictures.iterdir())
    model, processor = ViTModel.from_pretrained(vit).eval(), ViTImageProcessorPil.from_pretrained(vit)
    for number in (0, 7, 21):
        inputs = processor(Image.open(names[number]).convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states[2][0, 1:].numpy()
        expected = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
        assert np.abs(vectors[number] - expected).max() < 1e-3
        seen = np.asarray(Image.open(f"{report['vectors']}/pictures/{number}.jpg"), float)
        shown = np.asarray(Image.open(names[number]).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR), float)
        assert np.abs(seen - shown).mean() < 12  # JPEG, and another way of resizing
    assert encode_images(settings)["finished_before"]


def test_lsps_of_patches_are_those_of_another_solver(encoded, dictionary):
    _, report = encoded
    view = VectorView(found := Dictionary.load(dictionary), Path(report["vectors"]), 10**6, silent)
    vectors = np.load(report["file"]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    solver = Lasso(alpha=LAM / WIDTH, positive=True, fit_intercept=False, tol=1e-9, max_iter=10**5)
    codes = np.stack([solver.fit(found.atoms_Kd.T.astype(np.float64), row).coef_ for row in vectors])
    dense_NK = codes / np.maximum(codes.sum(1, keepdims=True), 1e-30)
    for lsp in range(K):
        figures = view.lsp(lsp)
        best = dense_NK[:, lsp].reshape(22, -1).max(1)
        assert [vector["weight"] for vector in figures["top"]] == pytest.approx(
            sorted(best[best > 1e-3], reverse=True)[:20], abs=5e-3
        )
        for vector in figures["top"]:
            row = vector["image"] * GRID**2 + vector["at"][0] * GRID + vector["at"][1]
            assert row == vector["row"] and dense_NK[row, lsp] == pytest.approx(vector["weight"], abs=5e-3)
        means = dense_NK[:, lsp].reshape(22, -1).mean(1)
        for image in figures["heaviest_images"]:
            assert image["weight"] == pytest.approx(means[image["image"]], abs=5e-3)
        assert [image["weight"] for image in figures["heaviest_images"]] == pytest.approx(
            np.sort(means[means > 1e-4])[::-1][:8], abs=5e-3
        )


class Pictures(HTMLParser):
    """Addresses on a page, relative to it."""

    def __init__(self, source):
        super().__init__()
        self.addresses, self.names = [], set()
        self.feed(source)

    def handle_starttag(self, name, attributes):
        self.names.add(name)
        self.addresses += [value for key, value in attributes if key in ("href", "src")]


def test_pages_show_pictures_that_are_there(encoded, dictionary, tmp_path):
    place = tmp_path / "lsps"
    settings = LspConfig(store=str(dictionary), vectors=encoded[1]["vectors"], html=place)
    assert "lsps/index.html" in summary(show(settings, silent), settings)
    (place / "pictures" / "mine.txt").write_text("of the user")
    show(settings, silent)  # an older view is replaced
    assert (place / "pictures" / "mine.txt").is_file()
    pages = [place / "index.html", *(place / "lsp").glob("*.html")]
    assert len(pages) == K + 1
    shown = 0
    for page in pages:
        found = Pictures(page.read_text(encoding="utf-8"))
        assert "b" not in found.names or "<b>photo" not in page.read_text(encoding="utf-8")
        assert all((page.parent / address).is_file() for address in found.addresses)
        shown += sum("pictures/" in address for address in found.addresses)
    assert shown > 10 * K


def test_vectors_of_a_file_are_known_by_their_rows(dictionary, tmp_path):
    vectors = np.random.default_rng(1).normal(size=(300, WIDTH)).astype(np.float32)
    np.save(tmp_path / "audio.npy", vectors)
    usual = {"store": str(dictionary), "vectors": tmp_path / "audio.npy"}
    for more in ({}, {"lsp": (3,)}, {"html": tmp_path / "lsps"}):
        settings = LspConfig(**usual, **more)
        result = show(settings, silent)
        assert json.loads(json.dumps(result)) == result
        assert "300 of 300 vectors" in summary(result, settings)
    best = show(LspConfig(**usual, lsp=(3,)), silent)["rows"][0]["top"][0]["row"]
    assert f"row {best}<" in (tmp_path / "lsps" / "lsp" / "3.html").read_text()
    np.save(tmp_path / "other.npy", vectors[:, 1:])
    with pytest.raises(InspectionError, match="width 31"):
        show(LspConfig(store=str(dictionary), vectors=tmp_path / "other.npy"), silent)
    with pytest.raises(InspectionError, match="Expected what encode-images made"):
        show(LspConfig(store=str(dictionary), vectors=tmp_path), silent)


def test_what_cannot_be_encoded_is_refused(pictures, vit, tmp_path):
    usual = {"images": (str(pictures),), "teacher": str(vit), "layer": 2, "device": "cpu", "output": tmp_path / "runs"}
    (tmp_path / "broken.png").write_bytes(b"no image")
    for change, error, message in (
        ({"layer": 4}, TeacherError, "layers 1 to 3"),
        ({"images": ("nothing/*.png",)}, EncodeError, "no image found"),
        ({"images": (str(tmp_path / "broken.png"),)}, EncodeError, "cannot be read as an image"),
        ({"teacher": str(tmp_path)}, TeacherError, "cannot be loaded"),
    ):
        with pytest.raises(error, match=message):
            encode_images(ImagesConfig(**usual | change))
    assert not list((tmp_path / "runs").glob("vectors/*"))
    with pytest.raises(ValueError, match="--layer is missing"):
        ImagesConfig(images=("a",), teacher="b")

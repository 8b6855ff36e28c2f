"""Visual LSPs: patches of scikit-learn's images through a tiny ViT, and vectors of a .npy file, against dense NumPy."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from lsp_pages import LspPage
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits, load_sample_images

from mlsm.commands.show_lsp import show as summary
from mlsm.common.errors import EncodeError, InspectionError, TeacherError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.show import show
from mlsm.evaluation.inspection.lsps.vectors import VectorView
from pipeline.dictionary import Dictionary
from pipeline.dictionary.centering import Center
from pipeline.images import ImagesConfig, _pixels, encode_images

Image = pytest.importorskip("PIL.Image")
EpsImagePlugin = pytest.importorskip("PIL.EpsImagePlugin")
ROWS, COLUMNS, WIDTH, K, LAM = 4, 6, 32, 12, 0.1
PATCHES = ROWS * COLUMNS


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Twenty digits and two photographs, one of which is named like markup."""
    directory = tmp_path_factory.mktemp("pictures")
    for number, digit in enumerate(load_digits().images[:20]):
        Image.fromarray((digit * 15).astype(np.uint8)).save(directory / f"digit-{number:02}.png")
    for name, photograph in zip(("a <b>photo.jpg", "flower.jpg"), load_sample_images().images, strict=True):
        Image.fromarray(photograph).save(directory / name)
    return directory


SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


def save_encoder(model, directory):
    """A model that is initialised at random, with a processor for images of 32 x 48 pixels."""
    model.save_pretrained(directory)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 48}).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, image_size=(32, 48), patch_size=8)
    return save_encoder(transformers.ViTModel(config), tmp_path_factory.mktemp("vit"))


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


def hidden_states(vision_model, directory, file, layer, before):
    """Unit-length vectors of the patches by the whole model, behind a layer that is not its last."""
    inputs = transformers.ViTImageProcessorPil.from_pretrained(directory)(
        Image.open(file).convert("RGB"), return_tensors="pt"
    )
    with torch.no_grad():
        outputs = vision_model.eval()(**inputs, output_hidden_states=True)
    hidden = outputs.hidden_states[layer][0, before:].numpy()
    return hidden / np.linalg.norm(hidden, axis=1, keepdims=True)


def test_vectors_are_the_whole_models_hidden_states_of_the_patches(encoded, pictures, vit):
    settings, report = encoded
    assert (report["images"], report["grid"], report["finished_before"]) == (22, [ROWS, COLUMNS], False)
    place = Path(report["vectors"]).parent
    vectors = np.load(report["vectors"]).reshape(22, PATCHES, WIDTH)
    names = json.loads((place / f"{vit.name}-l2.images.json").read_text())["images"]
    assert names == sorted(str(path) for path in pictures.iterdir())
    model = transformers.ViTModel.from_pretrained(vit)
    for number in (0, 7, 21):
        assert np.abs(vectors[number] - hidden_states(model, vit, names[number], 2, 1)).max() < 1e-3
        seen = np.asarray(Image.open(place / "pictures" / f"{number}.jpg"), float)
        shown = np.asarray(Image.open(names[number]).convert("RGB").resize((48, 32), Image.Resampling.BILINEAR), float)
        assert np.abs(seen - shown).mean() < 12  # JPEG
    assert encode_images(settings)["finished_before"]
    assert encode_images(replace(settings, layer=1))["vectors"] != report["vectors"]


def test_results_and_hidden_files_are_no_images(pictures, vit, monkeypatch, tmp_path):
    """The first run writes pictures below the directory that the second one reads."""
    shutil.copytree(pictures, tmp_path / "photos")
    (tmp_path / "photos" / "._flower.jpg").write_bytes(b"of a Mac")
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ImagesConfig(images=("~/photos",), teacher=str(vit), layer=1, output=tmp_path / "photos" / "runs")
    first, second = encode_images(settings), encode_images(settings)
    assert first["images"] == 22 and second == first | {"finished_before": True}


def test_a_photograph_is_turned_as_its_camera_was_held(pictures, vit, tmp_path):
    usual = {"teacher": str(vit), "layer": 2, "device": "cpu", "output": tmp_path / "runs"}
    upright, exif = Image.open(pictures / "flower.jpg"), Image.Exif()
    exif[0x0112] = 6  # the file's rows are the picture's columns: turn it by a quarter, clockwise
    upright.save(tmp_path / "upright.png")
    upright.rotate(90, expand=True).save(tmp_path / "held.png", exif=exif)
    found = [
        encode_images(ImagesConfig(images=(str(tmp_path / name),), **usual)) for name in ("upright.png", "held.png")
    ]
    vectors, of_held = (np.load(report["vectors"]) for report in found)
    assert np.array_equal(vectors, of_held)


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_an_image_of_16_bits_is_read_as_one_of_8_bits(tmp_path, ending):
    gradient = np.linspace(0, 1, 32 * 48).reshape(32, 48)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 48})
    found = []
    for kind, is_turned in ((np.uint8, False), (np.uint16, False), (np.uint16, True)):
        levels, exif = (gradient * np.iinfo(kind).max).round().astype(kind), Image.Exif()
        if is_turned:
            levels, exif[0x0112] = levels[::-1, ::-1].copy(), 3  # by 180 degrees
        file = tmp_path / f"{np.iinfo(kind).bits}-{is_turned}.{ending}"
        Image.fromarray(levels).save(file, exif=exif)
        found.append(_pixels(processor, file))
    for of_16_bits in found[1:]:
        assert np.abs(of_16_bits - found[0]).max() <= 1.001 * 2 / 255, "the processor's range is -1 to 1"


def test_vectors_of_a_16_bit_image_that_was_read_as_white_are_not_found_again(pictures, vit, tmp_path):
    file = tmp_path / "deep.png"
    Image.fromarray(np.asarray(Image.open(pictures / "digit-03.png")).astype(np.uint16) * 257).save(file)
    settings = ImagesConfig(images=(str(file),), teacher=str(vit), layer=1, device="cpu", output=tmp_path / "runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.images._is_of_16_bits", lambda image: False)  # as before
        before = encode_images(settings)
    after = encode_images(settings)
    assert not after["finished_before"] and after["vectors"] != before["vectors"]
    assert not np.array_equal(np.load(after["vectors"]), np.load(before["vectors"]))


def test_other_encoders(pictures, tmp_path):
    """CLIP without its half for text; registers beside the class token; an encoder whose
    patches are merged is refused."""
    torch.manual_seed(0)
    vision = SMALL | {"image_size": 32, "patch_size": 8}
    text = SMALL | {"vocab_size": 99}
    dino_settings = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    clip = transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=text))
    dino = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**dino_settings, image_size=32, patch_size=8, num_register_tokens=4)
    )
    swin = transformers.SwinModel(
        transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[1, 1], window_size=4
        )
    )
    usual = {"images": (str(pictures / "flower.jpg"),), "device": "cpu", "output": tmp_path / "runs"}
    for name, model, whole, before in (("clip", clip, clip.vision_model, 1), ("dino", dino, dino, 5)):
        directory = save_encoder(model, tmp_path / name)
        transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(directory)
        report = encode_images(ImagesConfig(teacher=str(directory), layer=2, **usual))
        expected = hidden_states(whole, directory, pictures / "flower.jpg", 2, before)
        assert report["grid"] == [4, 4] and np.abs(np.load(report["vectors"]) - expected).max() < 1e-3
    with pytest.raises(TeacherError, match="one vector per patch"):
        encode_images(ImagesConfig(teacher=str(save_encoder(swin, tmp_path / "swin")), layer=1, **usual))


def test_an_encoder_that_is_not_wholly_in_its_files_is_refused(vit, pictures, tmp_path):
    lacking, mae = shutil.copytree(vit, tmp_path / "lacking"), tmp_path / "mae"
    weights = load_file(lacking / "model.safetensors")
    save_file({f"backbone.{name}": tensor for name, tensor in weights.items()}, lacking / "model.safetensors")
    save_encoder(transformers.ViTMAEModel(transformers.ViTMAEConfig(**SMALL, image_size=32, patch_size=8)), mae)
    usual = {"images": (str(pictures / "flower.jpg"),), "layer": 1, "output": tmp_path / "runs"}
    for directory, message in ((lacking, r"lack \d+ weights of a vit encoder"), (mae, "shuffles the patches")):
        with pytest.raises(TeacherError, match=message):
            encode_images(ImagesConfig(teacher=str(directory), **usual))


def test_vectors_of_a_classifiers_encoder_are_found_again(pictures, tmp_path):
    """Its files have no pooler, whose random numbers would name the vectors."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, image_size=(32, 48), patch_size=8)
    directory = save_encoder(transformers.ViTForImageClassification(config), tmp_path / "vit")
    settings = ImagesConfig(
        images=(str(pictures / "flower.jpg"),), teacher=str(directory), layer=1, output=tmp_path / "runs"
    )
    assert [encode_images(settings)["finished_before"] for _ in range(2)] == [False, True]


def test_lsps_of_patches_are_those_of_plain_projected_gradient(encoded, dictionary):
    _, report = encoded
    view = VectorView(found := Dictionary.load(dictionary), Path(report["vectors"]), 10**6, silent)
    vectors = np.load(report["vectors"]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    atoms, codes = found.atoms_Kd.astype(np.float64), np.zeros((len(vectors), K))
    step = 1 / np.linalg.norm(atoms, 2) ** 2
    for _ in range(5000):  # projected gradient, to convergence
        codes = np.maximum(0, codes - step * ((codes @ atoms - vectors) @ atoms.T + LAM))
    dense_NK = codes / np.maximum(codes.sum(1, keepdims=True), 1e-30)
    for lsp in range(K):
        figures = view.lsp(lsp)
        heaviest = [row for row in np.argsort(-dense_NK[:, lsp]) if dense_NK[row, lsp] > 1e-3]
        first = [row for i, row in enumerate(heaviest) if row // PATCHES not in [r // PATCHES for r in heaviest[:i]]]
        others = [row for row in heaviest if row not in first]
        expected = dense_NK[(first + others)[:20], lsp]
        assert [vector["weight"] for vector in figures["top"]] == pytest.approx(np.sort(expected)[::-1], abs=5e-3)
        for vector in figures["top"]:
            row = vector["image"] * PATCHES + vector["at"][0] * COLUMNS + vector["at"][1]
            assert row == vector["row"] and dense_NK[row, lsp] == pytest.approx(vector["weight"], abs=5e-3)
            image_RC = np.zeros((ROWS, COLUMNS))
            for r, c, weight in vector["patches"]:
                image_RC[r, c] = weight
            assert np.abs(image_RC.ravel() - dense_NK[:, lsp].reshape(22, -1)[vector["image"]]).max() < 5e-3
        means = dense_NK[:, lsp].reshape(22, -1).mean(1)
        for image in figures["heaviest_images"]:
            assert image["weight"] == pytest.approx(means[image["image"]], abs=5e-3)
        assert [image["weight"] for image in figures["heaviest_images"]] == pytest.approx(
            np.sort(means[means > 1e-4])[::-1][:8], abs=5e-3
        )


@pytest.fixture(scope="module")
def shown(encoded, dictionary, tmp_path_factory):
    """Pages of the images: their directory and view."""
    place = tmp_path_factory.mktemp("shown") / "lsps"
    settings = ShowLspConfig(store=str(dictionary), vectors=encoded[1]["vectors"], html=place)
    assert "lsps/index.html" in summary(show(settings, silent), settings)
    return place, VectorView(Dictionary.load(dictionary), Path(encoded[1]["vectors"]), 10**6, silent)


def test_data_hold_what_the_view_says(shown):
    place, view = shown
    page, images = LspPage(place), set()
    for lsp in range(K):
        expected, patches = view.lsp(lsp), dict[int, list]()
        for found in expected["top"] + expected["heaviest_images"]:
            patches[found["image"]] = [[row * COLUMNS + column, round(1000 * w)] for row, column, w in found["patches"]]
        samples = [one for tenth in expected["quantiles"] for one in tenth["samples"]]
        images |= {*patches, *(one["image"] for one in samples)}
        assert page.lsps["tokens"][lsp] == expected["count"]
        assert page.lsps["weight"][lsp] == pytest.approx(expected["mean_weight"], abs=6e-5)
        assert page.column("top", lsp, 2) == in_thousandths(expected["top"])
        assert page.column("listed", lsp, 2) == in_thousandths(view.row(lsp, 8)["top"])
        assert page.column("heaviest", lsp, 2) == [
            [one["image"], round(1000 * one["weight"])] for one in expected["heaviest_images"]
        ]
        assert page.column("patches", lsp, 1, 2) == [[image, found] for image, found in patches.items()]
        assert page.column("tenths", lsp, 2, 2) == [
            [*(round(1000 * tenth[end]) for end in ("from", "to")), in_thousandths(tenth["samples"])]
            for tenth in expected["quantiles"]
        ]
        assert page.related(lsp) == {
            "co_firing": [
                [one["lsp"], pytest.approx(one["npmi"], abs=6e-3), one["support"]] for one in expected["co_firing"]
            ],
            "nearest": [[one["lsp"], pytest.approx(one["cosine"], abs=6e-3)] for one in expected["nearest"]],
        }
    assert page.data["images"] == {str(image): view.names[image] for image in images}
    assert {path.name for path in (place / "pictures").iterdir()} == {f"{image}.jpg" for image in images}
    assert "a <b>photo.jpg" in {Path(name).name for name in page.data["images"].values()}


def in_thousandths(vectors):
    return [[vector["row"], round(1000 * vector["weight"])] for vector in vectors]


def test_an_older_view_is_replaced_but_for_what_is_the_users(shown, encoded, dictionary):
    place, _ = shown
    mine = [place / "pictures" / "mine.txt", place / "data" / "own" / "mine.txt"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the user")
    (place / "pictures" / "0.jpg").write_text("of the user, too")
    settings = ShowLspConfig(store=str(dictionary), vectors=encoded[1]["vectors"], html=place)
    with pytest.raises(InspectionError, match=r"pictures/0\.jpg was not written by show-lsp"):
        show(settings, silent)
    (place / "pictures" / "0.jpg").unlink()
    show(settings, silent)
    assert all(path.read_text() == "of the user" for path in mine)
    assert (place / "pictures" / "0.jpg").read_bytes()[:2] == b"\xff\xd8"  # JPEG
    for path in mine:
        path.unlink()


def test_a_browser_shows_patches_and_pictures(browser, shown):
    place, view = shown
    browser.get((place / "index.html").as_uri())
    assert [one.text for one in browser.find_elements("css selector", "tbody td:first-child")] == [
        str(lsp) for lsp in range(K) if view.entries.counts[lsp]
    ]
    patches = browser.find_elements("css selector", "tbody tr:first-child .patch")
    titles = [
        f"{one['name']} · row {one['at'][0]}, column {one['at'][1]} · {one['weight']:.3f}"
        for one in view.row(0, 8)["top"]
    ]
    assert [patch.get_attribute("title") for patch in patches] == titles
    assert len({patch.location["y"] for patch in patches}) == 1  # in one row
    patches[0].click()
    names = ""
    for lsp in range(K):
        browser.execute_async_script(
            "const [lsp, done] = arguments; location.hash = `#lsp-${lsp}`; setTimeout(done, 50)", lsp
        )
        expected = view.lsp(lsp)
        assert browser.title == f"LSP {lsp}"
        sources = [one.get_attribute("src") for one in browser.find_elements("css selector", "img")]
        assert len(sources) >= 2 * len(expected["top"]) and all(
            (place / "pictures" / source.rpartition("/")[2]).is_file() for source in sources
        )
        tints = browser.find_elements("css selector", ".picture i")
        assert len(tints) == sum(len(one["patches"]) for one in expected["top"] + expected["heaviest_images"])
        assert len(browser.find_elements("css selector", ".picture i.at")) == len(expected["top"])
        names += browser.find_element("css selector", "body").text
        assert not browser.find_elements("css selector", ".pictures b")
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert "a <b>photo.jpg" in names and browser.get_log("browser") == []
    first = browser.find_element("css selector", ".patch img")
    place_in_picture = browser.execute_script(
        "const patch = arguments[0].parentElement.getBoundingClientRect(), all = arguments[0].getBoundingClientRect();"
        "return [(patch.top - all.top) / patch.height, (patch.left - all.left) / patch.width, all.width / patch.width]",
        first,
    )
    assert place_in_picture == pytest.approx([*view.lsp(K - 1)["top"][0]["at"], COLUMNS], abs=0.05)


def test_vectors_of_a_file_are_known_by_their_rows(dictionary, tmp_path):
    vectors = np.random.default_rng(1).normal(size=(300, WIDTH)).astype(np.float32)
    vectors[164] = 7 * Dictionary.load(dictionary).atoms_Kd[3]  # nothing else has as much of LSP 3
    vectors[20] = 0
    np.save(tmp_path / "audio.npy", vectors)
    usual = ShowLspConfig(store=str(dictionary), vectors=tmp_path / "audio.npy")
    for more in ({}, {"lsp": (3,)}, {"html": tmp_path / "lsps"}):
        settings = replace(usual, **more)
        result = show(settings, silent)
        assert json.loads(json.dumps(result)) == result
        assert "300 of 300 vectors" in summary(result, settings)
    best = show(replace(usual, lsp=(3,)), silent)["rows"][0]
    assert best["top"][0] == {"row": 164, "weight": 1.0} and best["heaviest_images"] == []
    page = LspPage(tmp_path / "lsps")
    assert page.column("top", 3, 2)[0] == [164, 1000] and page.column("listed", 3, 2)[0] == [164, 1000]
    assert page.data["images"] == {} and not (tmp_path / "lsps" / "pictures").exists()
    assert show(replace(usual, samples=100), silent)["sampled"] == 100


def test_a_browser_shows_rows(browser, dictionary, tmp_path):
    np.save(tmp_path / "audio.npy", np.random.default_rng(1).normal(size=(300, WIDTH)).astype(np.float32))
    settings = ShowLspConfig(store=str(dictionary), vectors=tmp_path / "audio.npy", html=tmp_path / "lsps")
    show(settings, silent)
    best = show(replace(settings, html=None, lsp=(3,)), silent)["rows"][0]
    browser.get((tmp_path / "lsps" / "index.html").as_uri() + "#lsp-3")
    chips = [chip.text for chip in browser.find_elements("css selector", ".chips li")]
    assert chips[: len(best["top"])] == [f"row {one['row']:,} {one['weight']:.3f}" for one in best["top"]]
    assert len(chips) == len(best["top"]) + sum(len(tenth["samples"]) for tenth in best["quantiles"])
    browser.find_element("link text", "All LSPs").click()
    give_up = time.monotonic() + 20  # the page follows its address a little later
    while browser.find_elements("css selector", ".chips li") and time.monotonic() < give_up:
        time.sleep(0.01)
    browser.find_element("css selector", "input").send_keys("3")
    (cells,) = [row.text for row in browser.find_elements("css selector", "tbody tr")]
    assert cells.startswith("3") and cells.endswith(", ".join(str(one["row"]) for one in best["top"][:8]))
    assert browser.get_log("browser") == []


def test_what_does_not_fit_is_refused(dictionary, tmp_path):
    found = Dictionary.load(dictionary)
    vectors = np.random.default_rng(1).normal(size=(30, WIDTH)).astype(np.float32)
    for name, array in (("right", vectors), ("narrow", vectors[:, 1:]), ("none", vectors[:0])):
        np.save(tmp_path / f"{name}.npy", array)
    record = {"kind": "mean", "tokens": 30}
    replace(found, center=Center(np.zeros((1, WIDTH), np.float32), record)).save(tmp_path / "centred")
    for store, file, message in (
        (dictionary, "narrow.npy", "width 31"),
        (dictionary, "none.npy", "has no vectors"),
        (dictionary, "missing.npy", "is not a file"),
        (tmp_path / "centred", "right.npy", "--center mean"),
    ):
        with pytest.raises((InspectionError, ValueError), match=message):
            show(ShowLspConfig(store=str(store), vectors=tmp_path / file), silent)
    with pytest.raises(InspectionError, match="which --student cannot be used with"):
        show(ShowLspConfig(store=str(dictionary), vectors=tmp_path / "right.npy", html=tmp_path, student="a"), silent)
    with pytest.raises(InspectionError, match="which --word cannot be used with"):
        show(ShowLspConfig(store=str(dictionary), vectors=tmp_path / "right.npy", word="bank"), silent)


def test_what_cannot_be_encoded_is_refused(pictures, vit, tmp_path, monkeypatch):
    usual = {"images": (str(pictures),), "teacher": str(vit), "layer": 2, "device": "cpu", "output": tmp_path / "runs"}
    (tmp_path / "broken.png").write_bytes(b"no image")
    program = tmp_path / "bin" / "gs"  # what Pillow would give PostScript to
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for kind in (np.int32, np.float32):
        Image.fromarray(np.zeros((32, 48), kind)).save(tmp_path / f"{kind.__name__}.tif")
    (tmp_path / "script.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    )
    for change, error, message in (
        ({"layer": 4}, TeacherError, "layers 1 to 3"),
        ({"images": ("nothing/*.png",)}, EncodeError, "no image found"),
        ({"images": ("",)}, EncodeError, "IMAGES: one of its names is empty"),
        ({"images": (str(tmp_path / "broken.png"),)}, EncodeError, "cannot be read as an image"),
        ({"images": (str(tmp_path / "script.png"),)}, EncodeError, "cannot be read as an image"),
        ({"images": (str(tmp_path / "int32.tif"),)}, EncodeError, "int32.tif: .* 8 or 16 bits"),
        ({"images": (str(tmp_path / "float32.tif"),)}, EncodeError, "float32.tif: .* 8 or 16 bits"),
        ({"teacher": str(tmp_path)}, TeacherError, "cannot be loaded"),
    ):
        with pytest.raises(error, match=message):
            encode_images(ImagesConfig(**usual | change))
    assert not list((tmp_path / "runs").glob("vectors/*")) and not (tmp_path / "was-run").exists()
    with pytest.raises(ValueError, match="--layer is missing"):
        ImagesConfig(images=("a",), teacher="b")


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b'{"grid": [1, 0], "images": ["a"]}',
        b'{"grid": [1, 1], "images": [3]}',
        b'{"grid": [1, 1], "images": ["a"]}',
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_not_of_the_vectors_is_refused(index, dictionary, tmp_path):
    np.save(tmp_path / "v.npy", np.random.default_rng(1).normal(size=(30, WIDTH)).astype(np.float32))
    (tmp_path / "v.images.json").write_bytes(index)
    with pytest.raises(InspectionError, match="v.images.json"):
        show(ShowLspConfig(store=str(dictionary), vectors=tmp_path / "v.npy"), silent)

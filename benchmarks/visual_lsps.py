"""How well LSPs of scikit-learn's 1,797 handwritten digits match classes, against chance and simpler features.

    python -m benchmarks.visual_lsps [--figure docs/figures/digits-lsps.svg]

Two kinds of vectors: the 64 pixels of a digit, and the patches of its image after layer 2 of a randomly initialised,
untrained ViT (16 patches of 8 x 8, the digit enlarged to 32 x 32). For each feature with at least 20 digits or patches,
the 20 on which it is heaviest, no two of a digit: the share that is of the class most common among them. Features are
the LSPs of a learned dictionary; those of the two controls of learn-dictionary, whose atoms are digits drawn at random
or centroids of a k-means; and the single dimensions of the vectors as they are. Chance: the LSPs with the classes of
all digits shuffled.

Prints readable lines, then one of JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.data import conditions
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.vectors import VectorView
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.images import ImagesConfig, encode_images

K, LAM, EPOCHS, HEAVIEST = 64, 0.1, 20, 20
SEEDS = range(3)
FEATURES = ("learned", "sampled", "clusters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="draw the shares into this .svg file, with .png and .csv beside it")
    options = parser.parse_args()
    from sklearn.datasets import load_digits

    digits = load_digits()
    result: dict = {"benchmark": "visual_lsps", "k": K, "lam": LAM, "epochs": EPOCHS, "shares": {}}
    shares: dict[tuple[str, str], list[float | None]] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        np.save(place / "pixels.npy", digits.data.astype(np.float32))
        for what, file in (("pixels", place / "pixels.npy"), ("patches", encode(digits, place))):
            vectors = np.load(file).astype(np.float32)
            classes = np.repeat(digits.target, len(vectors) // len(digits.target))
            digit_of = np.repeat(np.arange(len(digits.target)), len(vectors) // len(digits.target))
            shares[what, "dimensions"] = [purity(column, classes, digit_of) for column in vectors.T]
            for seed in SEEDS:
                for atoms in FEATURES:
                    dictionary = learn_dictionary(
                        file, DictionarySettings(K, LAM, seed, atoms=atoms), LearningSchedule(EPOCHS)
                    )
                    entries = VectorView(dictionary, file, 10**9, silent).entries
                    shuffled = np.random.default_rng(seed).permutation(digits.target)[digit_of]
                    for lsp in range(K):
                        column = np.zeros(len(vectors))
                        column[entries.tokens(lsp)] = entries.weights(lsp)
                        shares.setdefault((what, atoms), []).append(purity(column, classes, digit_of))
                        if atoms == "learned":
                            shares.setdefault((what, "chance"), []).append(purity(column, shuffled, digit_of))
    for (what, name), values in shares.items():
        kept = [value for value in values if value is not None]
        quartiles = np.quantile(kept, [0.25, 0.5, 0.75]).round(3).tolist()
        result["shares"][f"{what}, {name}"] = {"mean": float(np.mean(kept)), "quartiles": quartiles, "of": len(kept)}
        print(f"{what:<8} {name:<11} mean {np.mean(kept):.3f}, quartiles {quartiles}, {len(kept)} features")
    if options.figure:
        draw(shares, options.figure)
    print(json.dumps(result | conditions()))


def encode(digits, place: Path) -> Path:
    """The patches of all digits behind layer 2 of a random ViT; returns the .npy file."""
    import torch
    import transformers
    from PIL import Image

    (place / "digits").mkdir()
    for number, image in enumerate(digits.images):
        Image.fromarray((image * 15.9).astype(np.uint8)).save(place / "digits" / f"{number:04}.png")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(place / "vit")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place / "vit")
    report = encode_images(
        ImagesConfig(
            images=(str(place / "digits"),), teacher=str(place / "vit"), layer=2, device="cpu", output=place / "runs"
        )
    )
    return Path(report["vectors"])


def purity(weights_N: np.ndarray, classes_N: np.ndarray, digit_N: np.ndarray) -> float | None:
    """Share of the commonest class among the digits on which a feature is heaviest; None of a feature with too few."""
    order = np.argsort(-weights_N, kind="stable")
    order = order[weights_N[order] > 0]
    _, first = np.unique(digit_N[order], return_index=True)
    heaviest = order[np.sort(first)[:HEAVIEST]]
    return None if len(heaviest) < HEAVIEST else float(np.bincount(classes_N[heaviest]).max() / HEAVIEST)


def draw(shares: dict, path: Path) -> None:
    """Every feature a point, by kind, and the means."""
    from mlsm.evaluation.plots import new_figure, save_figure

    figure, panels = new_figure(width=1.6, columns=2)
    rng, rows = np.random.default_rng(0), []
    for panel, what in zip(panels, ("pixels", "patches"), strict=True):
        names = [name for kind, name in shares if kind == what]
        for place, name in enumerate(names):
            values = np.array([value for value in shares[what, name] if value is not None])
            panel.plot(place + rng.uniform(-0.3, 0.3, len(values)), values, ".", markersize=3, alpha=0.5)
            panel.plot([place - 0.35, place + 0.35], [values.mean()] * 2, color="black", linewidth=2)
            rows += [(what, name, f"{value:.2f}") for value in values]
        panel.set_xticks(range(len(names)), names)
        panel.set_ylim(0, 1.02)
        panel.set_title({"pixels": "digits, as 64 pixels", "patches": "patches, through a random ViT"}[what])
    panels[0].set_ylabel("share of the commonest class\namong the 20 heaviest")
    save_figure(figure, path.with_suffix(""), ("vectors", "features", "share"), rows)


if __name__ == "__main__":
    main()

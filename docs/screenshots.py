"""Takes the pictures of pages in docs/figures: of the demonstration's LSPs, of LSPs of images, of a study's report.

    make screenshots                                            # all, after make demo
    python docs/screenshots.py report                           # those of the report alone
    MLSM_BROWSER=/opt/chrome/chrome python docs/screenshots.py --store runs/stores/lsp-bundled-l10-k1024-1e281c876736

A headless Chromium or Chrome shows the pages: that of MLSM_BROWSER, or the first one on PATH. What `show-lsp` writes is
made here: pages of the store, and of the digits that benchmarks/visual_lsps.py encodes. Pictures end at the height that
stands here, and get a palette of 256 colours, which makes them less than half as large. A rule says which LSP to show:
the one with the largest mean weight on WORD, which is also searched in the list. Figures are drawn in
mlsm/evaluation/plots.py.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlsm  # noqa: E402
from benchmarks.visual_lsps import EPOCHS, LAM, K, encode  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
REPORT = ROOT / "docs" / "studies" / "cpu" / "comparison" / "report.html"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
OF = ("lsps", "images", "report")
WORD = "mother"
PATCHES_LSP = 3  # patches with a dark left half; on another processor they may have another number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="*", metavar="OF", help=f"pages to show: {', '.join(OF)}; all by default")
    parser.add_argument("--store", help="store whose LSPs are shown; by default the newest finished one under ./runs")
    parser.add_argument("--report", type=Path, default=REPORT, help="the report.html of a study or of compare")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="where to write; by default docs/figures")
    options = parser.parse_args()
    if unknown := set(options.of) - set(OF):
        parser.error(f"expected any of {', '.join(OF)}, found {min(unknown)}")
    wanted = options.of or OF
    browser = os.environ.get("MLSM_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"found none of {', '.join(BROWSERS)} on PATH. Install one, or name it with MLSM_BROWSER")
    if "report" in wanted and not options.report.is_file():
        parser.error(f"there is no {options.report}. Name another report.html with --report")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)

        def take(page: Path, name: str, width: int, height: int, address: str = "") -> None:
            """Write what the browser shows at the top of a page; width and height of its window are in pixels."""
            flags = ["headless", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"]
            flags += ["no-sandbox"]  # which root needs, in containers; the pages are ours
            flags += ["virtual-time-budget=10000"]  # milliseconds that the page's script has
            flags += [f"user-data-dir={place}/profile", f"window-size={width},{height}", f"screenshot={place}/{name}"]
            command = [browser, *(f"--{flag}" for flag in flags), page.as_uri() + address]
            subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)
            with Image.open(place / name) as image:
                small = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
            small.save(options.figures / name, optimize=True)
            print(f"{name}: {(options.figures / name).stat().st_size / 1000:.0f} kB")

        if "report" in wanted:
            take(options.report.resolve(), "report.png", 1120, 1060)
        if "images" in wanted:
            from sklearn.datasets import load_digits

            vectors = encode(load_digits(), place)
            (learned,) = mlsm.learn_dictionary(hidden=vectors, k=K, lam=LAM, dictionary_epochs=EPOCHS, output=place)
            mlsm.show_lsp(store=learned.dictionary, vectors=vectors, html=place / "images")
            take(place / "images" / "index.html", "visual-lsps.png", 860, 690)
            take(place / "images" / "index.html", "visual-lsp.png", 860, 690, f"#lsp-{PATCHES_LSP}")
        if "lsps" in wanted:
            mlsm.show_lsp(store=options.store, html=place / "lsps")
            take(place / "lsps" / "index.html", "lsp-list.png", 1040, 660, f"#q={WORD}")
            heaviest = mlsm.show_lsp(store=options.store, word=WORD, samples=200_000)["lsps"][0]["lsp"]
            take(place / "lsps" / "index.html", f"lsp-{WORD}.png", 1040, 690, f"#lsp-{heaviest}")


if __name__ == "__main__":
    main()

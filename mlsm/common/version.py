"""The version of this package, for setup.cfg and for the records of everything that the package makes."""

import hashlib
from pathlib import Path

VERSION = "0.1.0"


def digest_of_code(*packages: str) -> str:
    """A digest of the source files of packages, such as "mlsm/common", which also tells commits apart."""
    root, digest = Path(__file__).resolve().parent.parent.parent, hashlib.sha256()
    for file in sorted(file for package in packages for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()

"""The command line in a checkout: python cli.py encode-lsp --layer 10. Installed, it is `mlsm` (mlsm/__main__.py)."""

from mlsm.__main__ import main

if __name__ == "__main__":
    main()

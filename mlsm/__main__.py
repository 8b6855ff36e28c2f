"""python -m mlsm: the command line of cli.py. Importing the package first makes sure that `cli` is ours."""


def main() -> None:
    """Run one command and exit with its code."""
    from cli import main

    main()


if __name__ == "__main__":
    main()

"""Every open claim about a GPU becomes a figure: see __main__.py."""

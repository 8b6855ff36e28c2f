"""The command line: words to the settings of a command, --help, and its result to the screen and an exit code."""

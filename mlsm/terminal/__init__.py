"""The output of the commands on the terminal: progress, results, errors."""

"""What the commands print: progress, results, errors, help; and the settings that flags and recipes give."""

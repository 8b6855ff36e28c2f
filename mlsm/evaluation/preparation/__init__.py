"""Convert published archives of evaluation data to the directory layout that the evaluations read.

config.py     settings of prepare-data
archives.py   find files by name in a directory and its archives
sets.py       the files of each set, where they are published, and their checks
prepare.py    find, write, check, publish
"""

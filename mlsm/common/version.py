"""The version of this package: setup.cfg reads it here, and so do the records of what it makes."""

VERSION = "0.1.0"

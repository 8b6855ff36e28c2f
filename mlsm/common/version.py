"""The version of this package, for setup.cfg and for the records of everything that the package makes."""

VERSION = "0.1.0"

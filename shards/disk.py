"""Moved to common/disk.py; here until stage A imports it from there."""

from common.disk import discard_all, read_file  # noqa: F401

"""Skotergy: a latency-first decode engine and the harness that measures it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("skotergy")
except PackageNotFoundError:  # a bare checkout, not installed
    __version__ = "0.0.0+checkout"

"""Triton ops, one a file: formula, reference in torch, kernel, and a launcher that checks its bounds."""

"""Decoder-only language models as data: the spec, its adapters, checkpoints, and the lean decoder."""

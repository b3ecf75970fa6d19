"""Measurement: workloads, the measuring loop, parity, statistics, records and reports."""

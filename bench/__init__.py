"""Measurements: each script prints a table and writes a small JSON under bench/results."""

"""Measuring speed: ratios from one interleaved run."""

"""Benchmarks: every figure beside the limit that this machine puts on it. See bench/README.md in the source tree."""

"""Collectives that send less than the whole tensor: encoded values, or only the non-zero parts.

`quantized` runs codecs that can be sharded (reduce-scatter, then all-gather). `sparse` runs the
others (all-gather, then add). Both accept any `coding.Coding`.
"""

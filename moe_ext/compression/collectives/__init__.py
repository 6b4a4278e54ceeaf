"""Collectives that send less than a tensor: what a codec makes of it, or what is not zero in it.

`quantized` has the pattern for codecs that can be sharded (reduce-scatter and all-gather), `sparse`
that for others (all-gather and add), each written once over any `coding.Coding`.
"""

"""The sequence of samples and batches: planned from the index alone, before a shard is opened.

`qwen-train` trains by these plans and `qwen-cache inspect` reports their padding. Importing this imports no torch.
"""

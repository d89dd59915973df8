"""The transformer as it is trained: batches of mixed sizes, offloading, tabulated modulation, sharding."""

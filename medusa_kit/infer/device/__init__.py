"""Forwards of fixed shapes over the batch's own KV cache, captured in CUDA graphs and replayed."""

"""Decoding. Here: what drafters, forwards and batches share. Below: batches, attention, runners."""

"""Drafters, one file each, all with the interface of infer/decode/drafter.py."""

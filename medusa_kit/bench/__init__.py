"""Verification and measurement against plain transformers on an untouched second model."""

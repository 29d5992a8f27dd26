"""Conversations and answers: read from files and data sets, turned into tokens."""

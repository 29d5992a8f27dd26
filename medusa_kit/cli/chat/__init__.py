"""Answers in the terminal: the chat, and what other commands say of an answer or a model, too."""

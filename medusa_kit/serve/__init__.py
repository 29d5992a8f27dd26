"""An OpenAI-compatible server around one engine and its shared batch."""

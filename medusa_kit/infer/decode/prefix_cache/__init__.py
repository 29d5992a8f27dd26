"""What batches hold of earlier prompts and answers, so that it need not be read again."""

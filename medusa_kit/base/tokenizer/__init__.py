"""What is found out about a tokenizer and its chat template when a base is loaded."""

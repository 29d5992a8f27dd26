"""What is kept on disk from one run to the next: records, and files that take a while to make."""

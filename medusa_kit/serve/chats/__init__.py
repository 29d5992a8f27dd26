"""What is asked of a chat's answer, and what is read in it."""

"""What a client or a disk can make slow: each has a place of its own, a budget, and an end."""

"""`medusa-kit chat`: a streaming chat in the terminal."""

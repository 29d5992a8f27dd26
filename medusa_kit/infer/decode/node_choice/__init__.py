"""Which of the guesses a step verifies: those that pay."""

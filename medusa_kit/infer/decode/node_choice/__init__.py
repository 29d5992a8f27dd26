"""Which of the draft tokens a step verifies: those that pay."""

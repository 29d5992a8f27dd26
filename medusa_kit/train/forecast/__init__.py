"""What a run will need: memory, time and disk, from a trial of it or from a config alone."""

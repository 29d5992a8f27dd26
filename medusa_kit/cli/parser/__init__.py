"""How the command line is read: commands and groups, help panels, names from other programs."""

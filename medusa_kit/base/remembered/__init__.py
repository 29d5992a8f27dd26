"""What earlier loads found out, kept in the cache folder."""

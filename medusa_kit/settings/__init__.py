"""Every option, defined once: recipes, drafters, engines, sampling."""

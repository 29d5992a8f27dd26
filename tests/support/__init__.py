"""What several tests share: tiny models, engines, stand-in servers."""

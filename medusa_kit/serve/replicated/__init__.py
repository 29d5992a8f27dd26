"""The same server as several replicas on Ray Serve (docs/deploy.md): what has `ray_` in its name
needs Ray, the rest does not."""

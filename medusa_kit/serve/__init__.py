"""A server with OpenAI's API that decodes with trees."""

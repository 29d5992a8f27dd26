"""Who may ask and how much, and how whoever runs the server sees what it does."""

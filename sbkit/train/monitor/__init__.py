"""What a training shows and writes down of itself while it runs."""

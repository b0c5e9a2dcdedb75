"""Float weights to integers and small floats with scales: round-to-nearest with a search for scales, by format."""

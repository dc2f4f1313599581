"""What a config needs and how fast it should be, from the model's config.json alone: no torch."""

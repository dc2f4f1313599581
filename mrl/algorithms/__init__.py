"""From scores to losses: advantages, losses, KL terms, token rewards and masks."""

"""What works beside the core through its public messages, and which the core does not know."""

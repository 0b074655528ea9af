"""Optional modules that communicate with the core by its public messages. The core does not depend on them."""

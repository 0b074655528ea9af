"""Optional parts that use public messages of the core. The core does not depend on them."""

"""Optional parts that use public messages of the core, and that the core does not depend on."""

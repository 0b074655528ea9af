"""What people use beside training: the command, and what looks after, converts, checks and watches runs."""

"""Tools for users: the command line, and its functions to maintain, convert, check and observe runs."""

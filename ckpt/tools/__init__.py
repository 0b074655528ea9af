"""Tools for users: the command line, and the maintenance, conversion, checking and observation of runs."""

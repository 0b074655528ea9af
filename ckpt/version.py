"""The version of this library, for those that may not import all of it."""

VERSION = "0.1.0"

"""The ops under the names, arguments and results that other libraries' callers know. Imported by who uses them only."""

"""States, tables and traces of ids that suites save, load and gather."""

"""Numbers that runs left behind: the history of a store, and logs of job schedulers."""

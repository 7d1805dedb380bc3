"""How the ranks of a job talk, wait for each other, and come to one verdict."""

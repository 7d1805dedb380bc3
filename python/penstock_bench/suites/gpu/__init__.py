"""Everything that is promised of GPUs, measured on one: `make gpu`, in less than 20 minutes.

`rows` says what has to be reached, a module each measures some of that, and `results` keeps what
came out. What could not be measured stands there with its reason. On the driver for tests all runs
at small sizes, but for what takes CUDA in PyTorch: so it is known to run before there is a GPU.
"""

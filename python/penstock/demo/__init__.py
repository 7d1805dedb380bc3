"""The demo: a training run killed in the middle of a save resumes bit for bit.

`penstock demo` runs it. `train` is the training program, an example to copy from, with `model` and
`text` beside it; `story` runs that program three times, kills it once and checks every claim that
it prints; `run` and `crash` start and kill processes.

Only `train`, `model` and `text` import PyTorch.
"""

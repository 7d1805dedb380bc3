"""The demo: a training run killed in the middle of a save resumes bit for bit.

`penstock demo` runs it. `train` is the training program, an example to copy from, with
`model` and `text` beside it; `story` runs that program three times, kills it once and
checks every claim it prints; `run` and `crash` are its hands.

Only `train` and its two neighbours import PyTorch.
"""

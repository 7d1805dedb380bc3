"""Checkpoints in buckets: Penstock, DCP with AWS's connector and with s3fs, Run:ai's streamer."""

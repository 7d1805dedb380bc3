r"""Where the checks run: this machine as it is, and an example of a cluster.

ReFrame uses the first system whose `hostnames` match, or the one that `--system` names. A site
replaces `cluster` by its own system, or adds a second settings file with `-C`.

The expected figures of a partition are in its `extras`, and nowhere else: a check without an entry
there reports its figures and compares them with nothing.
"""

site_configuration = {
    "systems": [
        {
            # An example: its names, options and figures belong to no real cluster.
            "name": "cluster",
            "hostnames": [r"cluster-login\d+"],
            "partitions": [
                {
                    "name": "gpu",
                    "scheduler": "slurm",
                    "launcher": "srun",
                    "access": ["--partition=gpu", "--exclusive"],
                    "environs": ["builtin"],
                    # Checks that run at the same time would measure each other.
                    "max_jobs": 1,
                    "extras": {
                        "references": {
                            # check, mode, nodes x processes; then the value, the lower and upper
                            # tolerance as fractions, and the unit.
                            "fio-write-1x4": {"rate": (5.0, -0.1, None, "GB/s")},
                            "fio-read-1x4": {
                                "rate": (12.0, -0.1, None, "GB/s"),
                                "p99": (4000, None, 0.5, "us"),
                            },
                            "metadata-2x4": {"create": (20_000, -0.2, None, "1/s")},
                        }
                    },
                }
            ],
        },
        {
            "name": "any",
            "descr": "a machine by itself, without a scheduler",
            "hostnames": [".*"],
            "partitions": [
                {
                    "name": "default",
                    "scheduler": "local",
                    "launcher": "local",
                    "environs": ["builtin"],
                    "max_jobs": 1,
                }
            ],
        },
    ],
}

r"""Where the checks run: any machine as it is, and a cluster to begin with.

ReFrame takes the first system whose `hostnames` match, or the one that `--system` names. A site
puts its own in place of `cluster`, or into a file that it adds with a second `-C`.

What a partition is expected to give stands in its `extras`, and nowhere else: a check that finds
nothing there reports its figures and holds them against nothing.
"""

site_configuration = {
    "systems": [
        {
            # An example: its names, options and figures are those of no cluster.
            "name": "cluster",
            "hostnames": [r"cluster-login\d+"],
            "partitions": [
                {
                    "name": "gpu",
                    "scheduler": "slurm",
                    "launcher": "srun",
                    "access": ["--partition=gpu", "--exclusive"],
                    "environs": ["builtin"],
                    # Checks at the same time would measure each other.
                    "max_jobs": 1,
                    "extras": {
                        "references": {
                            # check, mode, nodes x processes; then the value, how far below and
                            # above it may be as fractions, and the unit.
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

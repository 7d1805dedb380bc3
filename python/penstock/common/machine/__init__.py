"""Facts about the machine, for benchmarks and the doctor."""

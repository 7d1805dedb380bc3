"""What benchmarks and the doctor ask of the machine that they run on."""

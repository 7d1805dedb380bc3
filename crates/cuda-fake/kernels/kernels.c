// The kernels of `crates/io/kernels`, compiled for the host.
#include "host.h"

#include "../../io/kernels/gather.cu"

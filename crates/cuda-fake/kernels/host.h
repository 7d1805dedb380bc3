// The machine functions of the kernels, on the host: a warp is one thread, memory is accessed
// through the driver, and memory orders are those of C.
#define PENSTOCK_HOST
#define PENSTOCK_FUNCTION static inline
#define PENSTOCK_KERNEL void
#define PENSTOCK_LANES 1u

typedef unsigned long long penstock_word;

// The host address of bytes in the memory of this thread's warp; null where a device has no access.
extern void *penstock_host_reach(penstock_word address, penstock_word bytes);
extern penstock_word penstock_warp(void);
extern penstock_word penstock_warps(void);
// Lets other threads run.
extern void penstock_pause(void);

// The result of a read without access. It is not 0, so that the warp takes its FIFO to be closed.
#define PENSTOCK_NOWHERE (~0ull)

PENSTOCK_FUNCTION unsigned penstock_lane(void)
{
    return 0;
}

PENSTOCK_FUNCTION void penstock_sync(void)
{
}

PENSTOCK_FUNCTION penstock_word penstock_first(penstock_word word)
{
    return word;
}

PENSTOCK_FUNCTION penstock_word penstock_add(penstock_word address, penstock_word more)
{
    penstock_word *at = penstock_host_reach(address, 8);
    return at ? __atomic_fetch_add(at, more, __ATOMIC_RELAXED) : PENSTOCK_NOWHERE;
}

PENSTOCK_FUNCTION penstock_word penstock_load_as(penstock_word address, int order)
{
    penstock_word *at = penstock_host_reach(address, 8);
    return at ? __atomic_load_n(at, order) : PENSTOCK_NOWHERE;
}

PENSTOCK_FUNCTION penstock_word penstock_load(penstock_word address)
{
    return penstock_load_as(address, __ATOMIC_RELAXED);
}

PENSTOCK_FUNCTION penstock_word penstock_load_int(penstock_word address)
{
    int *at = penstock_host_reach(address, 4);
    return at ? (penstock_word)(long long)*at : PENSTOCK_NOWHERE;
}

PENSTOCK_FUNCTION penstock_word penstock_load_relaxed_system(penstock_word address)
{
    return penstock_load_as(address, __ATOMIC_RELAXED);
}

PENSTOCK_FUNCTION penstock_word penstock_load_acquire_system(penstock_word address)
{
    return penstock_load_as(address, __ATOMIC_ACQUIRE);
}

PENSTOCK_FUNCTION penstock_word penstock_load_acquire_device(penstock_word address)
{
    return penstock_load_as(address, __ATOMIC_ACQUIRE);
}

PENSTOCK_FUNCTION void penstock_store_as(penstock_word address, penstock_word word, int order)
{
    penstock_word *at = penstock_host_reach(address, 8);
    if (at)
        __atomic_store_n(at, word, order);
}

PENSTOCK_FUNCTION void penstock_store_relaxed_system(penstock_word address, penstock_word word)
{
    penstock_store_as(address, word, __ATOMIC_RELAXED);
}

PENSTOCK_FUNCTION void penstock_store_release_system(penstock_word address, penstock_word word)
{
    penstock_store_as(address, word, __ATOMIC_RELEASE);
}

PENSTOCK_FUNCTION void penstock_store_release_device(penstock_word address, penstock_word word)
{
    penstock_store_as(address, word, __ATOMIC_RELEASE);
}

PENSTOCK_FUNCTION void penstock_copy(penstock_word to, penstock_word from, penstock_word bytes)
{
    unsigned char *target = penstock_host_reach(to, bytes);
    unsigned char *source = penstock_host_reach(from, bytes);
    if (target && source)
        __builtin_memmove(target, source, bytes);
}

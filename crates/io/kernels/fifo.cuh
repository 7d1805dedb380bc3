// Penstock: a kernel requests rows of a table.
//
// A warp posts ids to a FIFO in pinned host memory. A host thread reads the rows, into pinned
// memory as well, and announces them; the warp copies them to their destination. Neither side calls
// the driver in between.
//
//     unsigned long long ticket = penstock_post(fifo, ids, id_bytes, count);
//     unsigned status = penstock_take(fifo, ticket, count, out);
//
// All 32 lanes of a warp call both, with the same arguments. `fifo` is the address that Penstock
// gives; `ids` is the address of `count` ids of `id_bytes` bytes (4: int, 8: long long), at most
// PENSTOCK_POST_ROWS of the FIFO; `out` is the address of room for the rows, which are contiguous.
// A post waits for a free slot. So a warp takes its rows before it posts again, unless it is the
// only user of the FIFO and all its open posts have slots; it takes them in the order of its posts.
//
// For sm_70 and up, by nvcc or NVRTC. Tests compile the same source for the host, where a warp is
// one thread, with machine functions of their own (those up to "The FIFO").
#ifndef PENSTOCK_FIFO_CUH
#define PENSTOCK_FIFO_CUH

typedef unsigned long long penstock_word;

#ifndef PENSTOCK_HOST

#define PENSTOCK_FUNCTION static __device__ __forceinline__
#define PENSTOCK_KERNEL extern "C" __global__ void
#define PENSTOCK_LANES 32u

PENSTOCK_FUNCTION unsigned penstock_lane()
{
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The index of this warp among all warps of a one-dimensional launch, and their number.
PENSTOCK_FUNCTION penstock_word penstock_warp()
{
    return (blockIdx.x * (penstock_word)blockDim.x + threadIdx.x) / PENSTOCK_LANES;
}

PENSTOCK_FUNCTION penstock_word penstock_warps()
{
    return gridDim.x * (penstock_word)blockDim.x / PENSTOCK_LANES;
}

// Makes the lanes' writes before it visible to the other lanes after it.
PENSTOCK_FUNCTION void penstock_sync()
{
    __syncwarp();
}

// The value of lane 0.
PENSTOCK_FUNCTION penstock_word penstock_first(penstock_word word)
{
    return __shfl_sync(0xffffffffu, word, 0);
}

PENSTOCK_FUNCTION void penstock_pause()
{
    __nanosleep(64);
}

PENSTOCK_FUNCTION penstock_word penstock_add(penstock_word address, penstock_word more)
{
    return atomicAdd((unsigned long long *)address, more);
}

PENSTOCK_FUNCTION penstock_word penstock_load(penstock_word address)
{
    return *(const penstock_word *)address;
}

PENSTOCK_FUNCTION penstock_word penstock_load_int(penstock_word address)
{
    return (penstock_word)(long long)*(const int *)address;
}

PENSTOCK_FUNCTION penstock_word penstock_load_relaxed_system(penstock_word address)
{
    penstock_word word;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

PENSTOCK_FUNCTION penstock_word penstock_load_acquire_system(penstock_word address)
{
    penstock_word word;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

PENSTOCK_FUNCTION penstock_word penstock_load_acquire_device(penstock_word address)
{
    penstock_word word;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

PENSTOCK_FUNCTION void penstock_store_relaxed_system(penstock_word address, penstock_word word)
{
    asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(address), "l"(word) : "memory");
}

PENSTOCK_FUNCTION void penstock_store_release_system(penstock_word address, penstock_word word)
{
    asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(address), "l"(word) : "memory");
}

PENSTOCK_FUNCTION void penstock_store_release_device(penstock_word address, penstock_word word)
{
    asm volatile("st.release.gpu.u64 [%0], %1;" : : "l"(address), "l"(word) : "memory");
}

// Copied by all lanes, in the widest words that both sides' alignment allows.
PENSTOCK_FUNCTION void penstock_copy(penstock_word to, penstock_word from, penstock_word bytes)
{
    penstock_word at = penstock_lane();
    penstock_word all = to | from | bytes;
    if (all % 16 == 0) {
        for (; at < bytes / 16; at += PENSTOCK_LANES)
            ((ulonglong2 *)to)[at] = ((const ulonglong2 *)from)[at];
    } else if (all % 4 == 0) {
        for (; at < bytes / 4; at += PENSTOCK_LANES)
            ((unsigned *)to)[at] = ((const unsigned *)from)[at];
    } else {
        for (; at < bytes; at += PENSTOCK_LANES)
            ((unsigned char *)to)[at] = ((const unsigned char *)from)[at];
    }
}

#endif

// The FIFO: the words of its description, of 8 bytes each. "For each slot" is an array.
enum {
    // Tickets drawn. Device memory.
    PENSTOCK_HEAD,
    // For each slot, how often it was released. Device memory.
    PENSTOCK_LEFT,
    // Not 0 once posts are no longer answered. From here on host memory.
    PENSTOCK_STOP,
    // For each slot, the turn and the number of its ids.
    PENSTOCK_POSTED,
    // For each slot, the turn and the status of its last post.
    PENSTOCK_DONE,
    // For each slot, PENSTOCK_POST_ROWS ids of 8 bytes.
    PENSTOCK_IDS,
    // For each slot, PENSTOCK_SLOT_BYTES for rows.
    PENSTOCK_ROWS,
    PENSTOCK_SLOT_BYTES,
    // The number of slots, a power of two.
    PENSTOCK_SLOTS,
    // The most ids of a post.
    PENSTOCK_POST_ROWS,
    PENSTOCK_ROW_BYTES,
    PENSTOCK_FIELDS
};

// The status of a post.
enum {
    // The rows have arrived.
    PENSTOCK_OK = 0,
    // The rows could not be read; the host has the error.
    PENSTOCK_FAILED = 1,
    // The FIFO is closed: posts are no longer answered.
    PENSTOCK_CLOSED = 255
};

// Tries between two checks whether a FIFO is closed, each of which reads host memory.
#define PENSTOCK_PATIENCE 64u

PENSTOCK_FUNCTION penstock_word penstock_field(penstock_word fifo, unsigned field)
{
    return penstock_load(fifo + 8 * field);
}

PENSTOCK_FUNCTION int penstock_is_closed(penstock_word fifo)
{
    return penstock_load_relaxed_system(penstock_field(fifo, PENSTOCK_STOP)) != 0;
}

PENSTOCK_FUNCTION penstock_word penstock_turn(penstock_word fifo, penstock_word ticket)
{
    return ticket / penstock_field(fifo, PENSTOCK_SLOTS);
}

PENSTOCK_FUNCTION penstock_word penstock_slot(penstock_word fifo, penstock_word ticket)
{
    return ticket & (penstock_field(fifo, PENSTOCK_SLOTS) - 1);
}

// The fields of a post: its number of ids, and whether the host expects it.
#define PENSTOCK_COUNT_MAX 127u
#define PENSTOCK_OWN 128u

PENSTOCK_FUNCTION penstock_word penstock_post_as(
    penstock_word fifo, penstock_word ids, unsigned id_bytes, unsigned count, unsigned flags)
{
    penstock_word ticket = 0;
    if (penstock_lane() == 0)
        ticket = penstock_add(penstock_field(fifo, PENSTOCK_HEAD), 1);
    ticket = penstock_first(ticket);
    penstock_word turn = penstock_turn(fifo, ticket);
    penstock_word slot = penstock_slot(fifo, ticket);
    if (penstock_lane() == 0) {
        penstock_word left = penstock_field(fifo, PENSTOCK_LEFT) + 8 * slot;
        for (unsigned tries = 1; penstock_load_acquire_device(left) != turn; tries++) {
            if (tries % PENSTOCK_PATIENCE == 0 && penstock_is_closed(fifo))
                break;
            penstock_pause();
        }
    }
    penstock_sync();
    penstock_word posted_ids =
        penstock_field(fifo, PENSTOCK_IDS) + 8 * slot * penstock_field(fifo, PENSTOCK_POST_ROWS);
    // The host refuses a post with more ids.
    unsigned room = (unsigned)penstock_field(fifo, PENSTOCK_POST_ROWS);
    for (unsigned at = penstock_lane(); at < count && at < room; at += PENSTOCK_LANES) {
        penstock_word from = ids + at * (penstock_word)id_bytes;
        penstock_word id = id_bytes == 4 ? penstock_load_int(from) : penstock_load(from);
        penstock_store_relaxed_system(posted_ids + 8 * at, id);
    }
    penstock_sync();
    if (penstock_lane() == 0) {
        penstock_word posted = penstock_field(fifo, PENSTOCK_POSTED) + 8 * slot;
        unsigned said = count < PENSTOCK_COUNT_MAX ? count : PENSTOCK_COUNT_MAX;
        penstock_store_release_system(posted, (turn + 1) << 8 | flags | said);
    }
    return ticket;
}

// Posts ids once a slot is free. Returns the ticket to take the rows with.
PENSTOCK_FUNCTION penstock_word penstock_post(
    penstock_word fifo, penstock_word ids, unsigned id_bytes, unsigned count)
{
    return penstock_post_as(fifo, ids, id_bytes, count, 0);
}

// Waits for the posted rows, and copies them to `out`, whose content is undefined if the status is
// not PENSTOCK_OK. A ticket is taken once, by the warp that posted.
PENSTOCK_FUNCTION unsigned penstock_take(
    penstock_word fifo, penstock_word ticket, unsigned count, penstock_word out)
{
    penstock_word turn = penstock_turn(fifo, ticket);
    penstock_word slot = penstock_slot(fifo, ticket);
    penstock_word status = PENSTOCK_CLOSED;
    if (penstock_lane() == 0) {
        penstock_word done = penstock_field(fifo, PENSTOCK_DONE) + 8 * slot;
        for (unsigned tries = 1;; tries++) {
            penstock_word word = penstock_load_acquire_system(done);
            if (word >> 8 == turn + 1) {
                status = word & 255;
                break;
            }
            if (tries % PENSTOCK_PATIENCE == 0 && penstock_is_closed(fifo))
                break;
            penstock_pause();
        }
    }
    status = penstock_first(status);
    penstock_sync();
    if (status == PENSTOCK_OK) {
        penstock_word rows =
            penstock_field(fifo, PENSTOCK_ROWS) + slot * penstock_field(fifo, PENSTOCK_SLOT_BYTES);
        penstock_copy(out, rows, count * penstock_field(fifo, PENSTOCK_ROW_BYTES));
    }
    penstock_sync();
    if (penstock_lane() == 0)
        penstock_store_release_device(penstock_field(fifo, PENSTOCK_LEFT) + 8 * slot, turn + 1);
    return (unsigned)status;
}

#endif

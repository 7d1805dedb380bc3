// Penstock: rows of a table, asked for by a kernel.
//
// A warp posts ids to a FIFO in pinned memory of the host. A thread there has the rows read, into pinned
// memory as well, and says when they are there; the warp copies them to where it wants them. No call of the
// driver lies in between, neither on the device nor on the host.
//
//     unsigned long long ticket = penstock_post(fifo, ids, id_bytes, count);
//     unsigned status = penstock_take(fifo, ticket, count, out);
//
// Both are called by all 32 lanes of a warp, with the same arguments. `fifo` is the address that Penstock
// gives; `ids` that of `count` ids of `id_bytes` bytes (4: int, 8: long long), at most PENSTOCK_POST_ROWS of
// the FIFO; `out` that of room for the rows, one behind the other. Who posts waits for a slot. So a warp takes
// before it posts again, unless nobody else uses the FIFO and all posts of one moment have slots; it takes in
// the order in which it has posted.
//
// For sm_70 and up, by nvcc or NVRTC. Tests compile the same text for the host, where a warp is one thread,
// and the functions that belong to the machine (up to "The FIFO") are the tests'.
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

// Which of all warps of a launch with one dimension this is, and how many there are.
PENSTOCK_FUNCTION penstock_word penstock_warp()
{
    return (blockIdx.x * (penstock_word)blockDim.x + threadIdx.x) / PENSTOCK_LANES;
}

PENSTOCK_FUNCTION penstock_word penstock_warps()
{
    return gridDim.x * (penstock_word)blockDim.x / PENSTOCK_LANES;
}

// What lanes have written before it is seen by the others after it.
PENSTOCK_FUNCTION void penstock_sync()
{
    __syncwarp();
}

// What lane 0 has.
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

// By all lanes, in the widest words that both sides allow.
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

// The FIFO: where the words of its description are, of 8 bytes each. "Of each slot" is an array.
enum {
    // Tickets that were drawn. Memory of the device.
    PENSTOCK_HEAD,
    // Of each slot, how often it was left. Memory of the device.
    PENSTOCK_LEFT,
    // Not 0 when nothing is answered any more. From here on memory of the host.
    PENSTOCK_STOP,
    // Of each slot, turn and number of the ids in it.
    PENSTOCK_POSTED,
    // Of each slot, turn and status of what was posted last.
    PENSTOCK_DONE,
    // Of each slot, PENSTOCK_POST_ROWS ids of 8 bytes.
    PENSTOCK_IDS,
    // Of each slot, PENSTOCK_SLOT_BYTES for rows.
    PENSTOCK_ROWS,
    PENSTOCK_SLOT_BYTES,
    // How many there are, a power of two.
    PENSTOCK_SLOTS,
    // Ids of a post, at most.
    PENSTOCK_POST_ROWS,
    PENSTOCK_ROW_BYTES,
    PENSTOCK_FIELDS
};

// What becomes of a post.
enum {
    // The rows are there.
    PENSTOCK_OK = 0,
    // They are not; the host knows why.
    PENSTOCK_FAILED = 1,
    // The FIFO is closed: nothing that is posted is answered.
    PENSTOCK_CLOSED = 255
};

// Looks whether a FIFO is closed seldom: it is a read of memory of the host.
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

// What a post says of itself: how many ids it has, and whether the host counts on it.
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
    // The host refuses a post that has more.
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

// Asks for rows, once a slot is free. Gives the ticket to take them with.
PENSTOCK_FUNCTION penstock_word penstock_post(
    penstock_word fifo, penstock_word ids, unsigned id_bytes, unsigned count)
{
    return penstock_post_as(fifo, ids, id_bytes, count, 0);
}

// Waits for the rows that were posted, and copies them to `out`, where they are undefined if the status is not
// PENSTOCK_OK. A ticket is taken once, by the warp that has posted.
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

// The kernels that Penstock launches. `make kernels` compiles them to `gather.ptx`, which is what
// runs; all arguments have 64 bits.
#include "fifo.cuh"

// Gathers the rows of `count` ids through a FIFO. The warps share the posts.
PENSTOCK_KERNEL penstock_gather(
    penstock_word fifo, penstock_word ids, penstock_word id_bytes, penstock_word count, penstock_word out)
{
    penstock_word post_rows = penstock_field(fifo, PENSTOCK_POST_ROWS);
    penstock_word row_bytes = penstock_field(fifo, PENSTOCK_ROW_BYTES);
    penstock_word step = post_rows * penstock_warps();
    for (penstock_word first = post_rows * penstock_warp(); first < count; first += step) {
        unsigned here = (unsigned)(count - first < post_rows ? count - first : post_rows);
        penstock_word ticket =
            penstock_post_as(fifo, ids + first * id_bytes, (unsigned)id_bytes, here, PENSTOCK_OWN);
        unsigned status = penstock_take(fifo, ticket, here, out + first * row_bytes);
        if (status == PENSTOCK_CLOSED)
            return;
    }
}

// Gathers rows by 64-bit ids from a table that the device can access, to contiguous rows. One row
// per warp.
PENSTOCK_KERNEL penstock_pack(
    penstock_word out, penstock_word table, penstock_word ids, penstock_word count, penstock_word row_bytes)
{
    for (penstock_word row = penstock_warp(); row < count; row += penstock_warps()) {
        penstock_word id = penstock_load(ids + 8 * row);
        penstock_copy(out + row * row_bytes, table + id * row_bytes, row_bytes);
    }
}

// Gathers rows by their addresses to rows at equal distances. One row per warp.
PENSTOCK_KERNEL penstock_collect(
    penstock_word out, penstock_word out_stride, penstock_word sources, penstock_word count,
    penstock_word row_bytes)
{
    for (penstock_word row = penstock_warp(); row < count; row += penstock_warps())
        penstock_copy(out + row * out_stride, penstock_load(sources + 8 * row), row_bytes);
}

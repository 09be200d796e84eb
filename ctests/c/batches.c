/* What holds for every kernel whatever it computes: only the named slots and outputs are written; slots that no sequence owns are never read; empty
 * sequences, padded buffers, other sequences in the batch and the workspace change no bit. */
#include "valid_calls.h"

static struct world w;
static unsigned char want[ARENA], dirty[ARENA];

/* The arena after the call. */
static void run_to(enum op op, unsigned char *to)
{
    OK(world_run(&w, op, &check_err));
    if (to)
        world_keep(&w, to);
}

static int same(const unsigned char *other) { return world_kept(&w, other); }

/* Forgive what a call may write: from now on these bytes do not count. */
static void forgive(void *data, size_t size)
{
    const size_t at = (size_t)((unsigned char *)data - w.arena);
    memcpy(w.arena + at, dirty + at, size);
}

static size_t bytes_of(const pkv_tensor *t)
{
    size_t n = t->dtype == PKV_F8_E4M3 ? 1 : 4;
    for (int d = 0; d < t->ndim; ++d)
        n *= (size_t)t->shape[d];
    return n;
}

static void only_the_named_is_written(void)
{
    static const struct {
        int block, slot;
    } written[TOKENS] = {{2, 0}, {2, 1}, {2, 2}, {0, 2}, {0, 3}}; /* the new tokens, by the page table */
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        world_keep(&w, dirty);
        run_to(op, want);
        CHECK(!same(dirty)); /* it did something */
        for (int t = 0; t < TOKENS; ++t) {
            for (int kv = 0; kv < 2; ++kv)
                if (op == QKV || (op == STORE && kv == 1))
                    forgive((float *)w.plain_blocks + (((written[t].block * 2 + kv) * LAYERS + 1) * PAGE + written[t].slot) * HEADS * HEAD, HEADS * HEAD * 4);
            if (op == ROPE || op == PREFILL)
                forgive((float *)w.mla_blocks + ((written[t].block * LAYERS + 1) * PAGE + written[t].slot) * MLA_HEAD, MLA_HEAD * 4);
        }
        if (op == PREFILL) {
            for (int row = 0; row < TOKENS * 3; ++row) /* q: its rope part only */
                forgive((float *)w.prefill.q.data + row * (NOPE + R) + NOPE, R * 4);
            forgive(w.prefill.output.data, bytes_of(&w.prefill.output));
            forgive(w.prefill.lse.data, bytes_of(&w.prefill.lse));
        } else {
            for (int t = 0; t < NUM_TENSORS; ++t)
                if (tensors[t].op == op && tensors[t].output) {
                    const pkv_tensor *tensor = (const pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
                    forgive(tensor->data, bytes_of(tensor));
                }
        }
        check_that(same(dirty), "only the new slots and the outputs are written", op_names[op], __LINE__);
    }
}

/* Slots without an owner hold NaN in the world; with zeros there the results are the same, and all of them are numbers. */
static void unowned_slots_are_not_read(void)
{
    for (int i = 0; i < MERGE; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        run_to(op, want);
        for (int t = 0; t < NUM_TENSORS; ++t) {
            const pkv_tensor *tensor = (const pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            if (tensors[t].op != op || !tensors[t].output || tensor->dtype != PKV_F32 || strcmp(tensors[t].name, "params.output_scores") == 0)
                continue;
            int numbers = 1;
            for (size_t k = 0; k < bytes_of(tensor) / 4; ++k)
                numbers &= isfinite(((const float *)tensor->data)[k]) != 0;
            check_that(numbers, "NaN in slots of nobody reaches no output", tensors[t].name, __LINE__);
        }
        world_reset(&w);
        void *const blocks[] = {w.plain_blocks, w.mla_blocks, w.key_scales};
        const size_t sizes[] = {(size_t)BLOCKS * 2 * LAYERS * PAGE * HEADS * HEAD, (size_t)BLOCKS * LAYERS * PAGE * MLA_HEAD, (size_t)BLOCKS * LAYERS * PAGE};
        for (int b = 0; b < 3; ++b)
            for (size_t k = 0; k < sizes[b]; ++k)
                if (isnan(((float *)blocks[b])[k]))
                    ((float *)blocks[b])[k] = 0;
        run_to(op, NULL);
        for (int t = 0; t < NUM_TENSORS; ++t) {
            const pkv_tensor *tensor = (const pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            if (tensors[t].op == op && tensors[t].output)
                check_that(memcmp(want + ((unsigned char *)tensor->data - w.arena), tensor->data, bytes_of(tensor)) == 0, "the same with zeros there", tensors[t].name, __LINE__);
        }
    }
}

static void the_workspace_changes_nothing(void)
{
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        size_t bytes = 0;
        world_reset(&w);
        run_to(op, want);
        world_reset(&w);
        OK(query_op(w.ctx, op, world_params(&w, op), &bytes, &check_err));
        memset(w.workspace.data, 0xff, w.workspace.size); /* dirty, all NaN */
        w.workspace.size = bytes;                         /* to the byte */
        run_to(op, NULL);
        check_that(same(want), "a workspace of the exact size, dirty", op_names[op], __LINE__);
        world_reset(&w);
        memset(&w.workspace, 0, sizeof w.workspace);
        run_to(op, NULL);
        check_that(same(want), "no workspace", op_names[op], __LINE__);
    }
}

/* Sequences without new tokens first, in the middle and last, some with a history of their own. */
static void empty_sequences_change_nothing(void)
{
    static const uint32_t row_offsets[] = {0, 0, 3, 3, 5, 5}, lengths[] = {0, 0, 5, 2, 4}, buffer[] = {0, 0, 3, 3, 7, 7}, offsets[] = {0, 0, 5, 0, 4};
    static const uint32_t table[] = {UINT32_MAX, UINT32_MAX, 2, UINT32_MAX, 1, 3, 0, 0x7fffffffu, 3, 0x80000000u};
    for (int i = 0; i < MERGE; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        run_to(op, want);
        world_reset(&w);
        w.batch.input_row_offsets = row_offsets;
        w.batch.cache_lengths = lengths;
        w.batch.lookup_table = table;
        w.batch.batch_size = 5;
        w.batch.max_cache_length = 5;
        w.gather.buffer_row_offsets = w.prefill.buffer_row_offsets = buffer;
        w.gather.cache_offsets = w.prefill.cache_offsets = offsets; /* nothing from the very end */
        world_workspace(&w);
        run_to(op, NULL);
        check_that(same(want), "empty sequences change nothing", op_names[op], __LINE__);
    }
}

/* A table whose rows are full, read up to its last column; the row after it is poison. */
static void full_table_rows(void)
{
    static const uint32_t row_offsets[] = {0, 1, 1}, lengths[] = {7, 8}, table[] = {2, 0, 1, 3, UINT32_MAX, UINT32_MAX};
    static const uint32_t buffer[] = {0, 1, 1}, offsets[] = {7, 8}; /* sequence 0: its last row; sequence 1: nothing, from its end */
    world_reset(&w);
    w.batch.input_row_offsets = row_offsets;
    w.batch.cache_lengths = lengths;
    w.batch.lookup_table = table;
    w.batch.max_cache_length = 8;
    w.gather.kv_idx = w.store.kv_idx = 1;
    w.gather.buffer_row_offsets = buffer;
    w.gather.cache_offsets = offsets;
    OK(world_run(&w, STORE, &check_err));
    OK(world_run(&w, GATHER, &check_err));
    CHECK(memcmp(w.gather.out.data, w.store.values.data, HEADS * HEAD * 4) == 0);
}

/* shape[0] above the number of rows, as padded buffers have it: those rows are neither read nor written. */
static void padded_buffers(void)
{
    enum { EXTRA = 2 };
    for (int i = 0; i < MERGE; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        run_to(op, want);
        world_reset(&w);
        void *padded[NUM_TENSORS] = {NULL}, *homes[NUM_TENSORS] = {NULL};
        for (int t = 0; t < NUM_TENSORS; ++t) {
            pkv_tensor *tensor = (pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            if (tensors[t].op != op || !tensors[t].free_rows || tensor->ndim < 2)
                continue;
            const size_t bytes = bytes_of(tensor), row = bytes / (size_t)tensor->shape[0];
            padded[t] = malloc(bytes + EXTRA * row);
            if (!padded[t])
                exit(2);
            memcpy(padded[t], tensor->data, bytes);
            memset((char *)padded[t] + bytes, 0xff, EXTRA * row);
            homes[t] = tensor->data;
            tensor->data = padded[t];
            tensor->shape[0] += EXTRA;
        }
        world_workspace(&w);
        OK(world_run(&w, op, &check_err));
        for (int t = 0; t < NUM_TENSORS; ++t) {
            if (!padded[t])
                continue;
            pkv_tensor *tensor = (pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            const size_t row = bytes_of(tensor) / (size_t)tensor->shape[0], bytes = bytes_of(tensor) - EXTRA * row;
            int kept = 1;
            for (size_t k = bytes; k < bytes + EXTRA * row; ++k)
                kept &= ((unsigned char *)padded[t])[k] == 0xff;
            check_that(kept, "rows of padding are not written", tensors[t].name, __LINE__);
            memcpy(homes[t], padded[t], bytes);
            free(padded[t]);
        }
        check_that(same(want), "padding changes nothing", op_names[op], __LINE__);
    }
}

/* Each sequence alone gives the bits that the batch of both gives. */
static void alone_as_in_the_batch(void)
{
    static const uint32_t rows[2][2] = {{0, 3}, {0, 2}}, buffers[2][2] = {{0, 3}, {0, 4}};
    static const int64_t first_row[2] = {0, 3}, counts[2] = {3, 2}, keys[2] = {3, 4};
    for (int i = 0; i < MERGE; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        run_to(op, want);
        world_reset(&w);
        pkv_tensor saved[NUM_TENSORS];
        memset(saved, 0, sizeof saved);
        for (int t = 0; t < NUM_TENSORS; ++t)
            if (tensors[t].op == op)
                saved[t] = *(const pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
        for (int s = 0; s < 2; ++s) {
            w.batch.input_row_offsets = rows[s];
            w.batch.cache_lengths = w.cache_lengths + s;
            w.batch.lookup_table = w.table + s * PAGES;
            w.batch.batch_size = 1;
            w.gather.buffer_row_offsets = w.prefill.buffer_row_offsets = buffers[s];
            w.prefill.buffer_length = keys[s];
            for (int t = 0; t < NUM_TENSORS; ++t) {
                pkv_tensor *tensor = (pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
                if (tensors[t].op != op || !tensors[t].free_rows || strcmp(tensors[t].name, "params.freqs_cis") == 0)
                    continue;
                *tensor = saved[t];
                const size_t row = bytes_of(tensor) / (size_t)tensor->shape[0];
                tensor->data = (char *)tensor->data + (size_t)first_row[s] * row; /* gather: rows of the buffer, 0 and 3 as well */
                tensor->shape[0] = op == GATHER ? keys[s] : counts[s];
            }
            OK(world_run(&w, op, &check_err));
        }
        check_that(same(want), "alone as in the batch", op_names[op], __LINE__);
    }
}

int main(void)
{
    world_open(&w, NULL);
    only_the_named_is_written();
    unowned_slots_are_not_read();
    the_workspace_changes_nothing();
    empty_sequences_change_nothing();
    full_table_rows();
    padded_buffers();
    alone_as_in_the_batch();
    world_close(&w);
    return check_end();
}

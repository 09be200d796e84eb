/* No kernel reads or writes a byte outside what it was given: every tensor, array, block store and weight lies against an unreadable page, once ending
 * at it and once starting behind it. Odd widths, so that vectors have tails. The results are those of ordinary memory to the bit. */
#define _GNU_SOURCE
#define WORLD_WIDTHS HEAD = 13, R = 6, NOPE = 33, VDIM = 23, DEPTH = 61
#include "valid_calls.h"

#include <sys/mman.h>

enum side { ENDS_AT_PAGE, STARTS_AT_PAGE };

static struct world w;
static unsigned char want[ARENA];

/* A copy of `size` bytes beside a guard page; mappings are few and live to the end. */
static void *guarded(const void *from, size_t size, enum side side)
{
    const size_t page = 4096, body = (size + page - 1) / page * page;
    char *all = (char *)mmap(NULL, body + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all, page, PROT_NONE) || mprotect(all + page + body, page, PROT_NONE))
        exit(2);
    char *data = all + page + (side == ENDS_AT_PAGE ? body - size : 0);
    return memcpy(data, from, size);
}

static size_t bytes_of(const pkv_tensor *t)
{
    size_t n = t->dtype == PKV_F8_E4M3 ? 1 : 4;
    for (int d = 0; d < t->ndim; ++d)
        n *= (size_t)t->shape[d];
    return n;
}

/* The world's handles over guarded storage; blocks are copied in before a call and back after it. */
struct stores {
    pkv_collection *plain, *mla, *keys;
    pkv_gguf_weight *wq, *wkv;
    pkv_collection_options options[3];
};

static void open_stores(struct stores *s, enum side side, uint32_t flags)
{
    s->options[0] = plain_options(&w);
    s->options[1] = mla_options(&w);
    s->options[2] = key_options(&w);
    for (int i = 0; i < 3; ++i) {
        s->options[i].blocks.data = guarded(s->options[i].blocks.data, s->options[i].blocks.size, side);
        if (s->options[i].scales.data)
            s->options[i].scales.data = guarded(s->options[i].scales.data, s->options[i].scales.size, side);
    }
    OK(pkv_collection_create(w.ctx, &s->options[0], &s->plain, &check_err));
    OK(pkv_collection_create(w.ctx, &s->options[1], &s->mla, &check_err));
    OK(pkv_collection_create(w.ctx, &s->options[2], &s->keys, &check_err));
    pkv_gguf_weight_options q = weight_options(&w, 3 * HEADS * HEAD), kv = weight_options(&w, HEADS * HEAD);
    q.data = guarded(q.data, q.data_size, side);
    kv.data = guarded(kv.data, kv.data_size, side);
    q.flags = kv.flags = flags;
    OK(pkv_gguf_weight_create(w.ctx, &q, &s->wq, &check_err));
    OK(pkv_gguf_weight_create(w.ctx, &kv, &s->wkv, &check_err));
}

static void close_stores(struct stores *s)
{
    pkv_collection_destroy(s->plain);
    pkv_collection_destroy(s->mla);
    pkv_collection_destroy(s->keys);
    pkv_gguf_weight_destroy(s->wq);
    pkv_gguf_weight_destroy(s->wkv);
}

static void run_guarded(enum op op, enum side side, uint32_t flags)
{
    struct stores s = {0};
    world_reset(&w);
    open_stores(&s, side, flags);
    w.qkv.collection = w.store.collection = w.gather.collection = s.plain;
    w.rope.collection = w.prefill.collection = s.mla;
    w.indexer.collection = s.keys;
    w.qkv.q_weight = s.wq;
    w.qkv.k_weight = w.qkv.v_weight = s.wkv;
    w.batch.input_row_offsets = (const uint32_t *)guarded(w.row_offsets, 12, side);
    w.batch.cache_lengths = (const uint32_t *)guarded(w.cache_lengths, 8, side);
    w.batch.lookup_table = (const uint32_t *)guarded(w.table, 16, side);
    w.gather.buffer_row_offsets = w.prefill.buffer_row_offsets = (const uint32_t *)guarded(w.buffer_row_offsets, 12, side);
    w.gather.cache_offsets = w.prefill.cache_offsets = (const uint32_t *)guarded(w.cache_offsets, 8, side);
    void *homes[NUM_TENSORS] = {NULL};
    for (int t = 0; t < NUM_TENSORS; ++t) {
        pkv_tensor *tensor = (pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
        if (tensors[t].op == op) {
            homes[t] = tensor->data;
            tensor->data = guarded(tensor->data, bytes_of(tensor), side);
        }
    }
    size_t bytes = 0;
    OK(query_op(w.ctx, op, world_params(&w, op), &bytes, &check_err));
    pkv_buffer workspace = {NULL, bytes};
    if (bytes) {
        static unsigned char scratch[ARENA];
        workspace.data = guarded(scratch, (bytes + 255) / 256 * 256, side);
    }
    OK(run_op(w.ctx, op, no_stream, world_params(&w, op), bytes ? workspace : no_workspace, &check_err));

    for (int t = 0; t < NUM_TENSORS; ++t)
        if (homes[t]) {
            const pkv_tensor *tensor = (const pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            memcpy(homes[t], tensor->data, bytes_of(tensor));
        }
    memcpy(w.plain_blocks, s.options[0].blocks.data, s.options[0].blocks.size);
    memcpy(w.mla_blocks, s.options[1].blocks.data, s.options[1].blocks.size);
    memcpy(w.key_blocks, s.options[2].blocks.data, s.options[2].blocks.size);
    memcpy(w.key_scales, s.options[2].scales.data, s.options[2].scales.size);
    close_stores(&s);
}

int main(void)
{
    world_open(&w, NULL);
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        for (uint32_t flags = 0; flags <= (op == QKV ? PKV_WEIGHT_PACK : 0u); ++flags) {
            world_reset(&w);
            pkv_gguf_weight *borrowed[2] = {w.wq, w.wk}, *packed[2] = {NULL, NULL};
            if (flags) { /* compare packed with packed: their bits need not be those of borrowed weights */
                pkv_gguf_weight_options q = weight_options(&w, 3 * HEADS * HEAD), kv = weight_options(&w, HEADS * HEAD);
                q.flags = kv.flags = flags;
                OK(pkv_gguf_weight_create(w.ctx, &q, &packed[0], &check_err));
                OK(pkv_gguf_weight_create(w.ctx, &kv, &packed[1], &check_err));
            }
            w.qkv.q_weight = flags ? packed[0] : borrowed[0];
            w.qkv.k_weight = w.qkv.v_weight = flags ? packed[1] : borrowed[1];
            OK(world_run(&w, op, &check_err));
            world_keep(&w, want);
            pkv_gguf_weight_destroy(packed[0]);
            pkv_gguf_weight_destroy(packed[1]);
            for (int side = ENDS_AT_PAGE; side <= STARTS_AT_PAGE; ++side) {
                run_guarded(op, (enum side)side, flags);
                check_that(world_kept(&w, want), side == ENDS_AT_PAGE ? "ends at an unreadable page" : "starts at one", op_names[op], __LINE__);
            }
        }
    }
    world_close(&w);
    return check_end();
}

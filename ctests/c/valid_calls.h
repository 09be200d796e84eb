/* A small valid call of every kernel, for tests that break one thing at a time.
 *
 * All memory that the library may touch lies in one arena: collections' blocks, inputs, outputs, workspace, each between canaries. So "a refused call
 * wrote nothing" and "a call wrote only its own slots" are one memcmp of the arena. Every slot that no sequence owns holds NaN. */
#ifndef PAGEDKV_VALID_CALLS_H
#define PAGEDKV_VALID_CALLS_H

#include "check.h"

#include <math.h>
#include <stdint.h>

enum op { QKV, ROPE, PREFILL, INDEXER, STORE, GATHER, MERGE, NUM_OPS };
static const char *const op_names[NUM_OPS] = {"pkv_qkv_matmul_gguf", "pkv_mla_rope_rmsnorm_quantize", "pkv_mla_prefill_fp8", "pkv_mla_indexer_fp8",
                                              "pkv_kv_store", "pkv_kv_gather", "pkv_merge_attention"};

/* Widths of a head, the rope part, q's other part, a value, an index key; a test may ask for odd ones. */
#ifndef WORLD_WIDTHS
#define WORLD_WIDTHS HEAD = 16, R = 16, NOPE = 32, VDIM = 24, DEPTH = 64
#endif
enum {
    WORLD_WIDTHS,
    BLOCKS = 4, LAYERS = 2, PAGE = 4, HEADS = 2,            /* the plain collection: f32, keys and values */
    K = 64,                                                 /* model width of the GGUF matmul */
    RANK = 128, MLA_HEAD = RANK + R,                        /* the MLA collection: f32 */
    TOP_K = 8,                                              /* the indexer's collection: fp8 with one f32 scale a row */
    BATCH = 2, PAGES = 2, TOKENS = 5, ROWS = 7,             /* sequence 0: 3 new; sequence 1: 2 cached, 2 new; ROWS: 3 + 4 keys */
    POSITIONS = 8, ARENA = 16 << 20                         /* the most there can be; only what is used is touched */
};

struct world {
    pkv_context *ctx;
    pkv_collection *plain, *mla, *keys;
    pkv_gguf_weight *wq, *wk, *wv;
    pkv_batch batch;
    pkv_qkv_matmul_gguf_params qkv;
    pkv_mla_rope_rmsnorm_quantize_params rope;
    pkv_mla_prefill_fp8_params prefill;
    pkv_mla_indexer_fp8_params indexer;
    pkv_kv_store_params store;
    pkv_kv_gather_params gather;
    pkv_merge_attention_params merge;
    pkv_stream stream;
    pkv_buffer workspace; /* handed to the call; {NULL, 0} is a valid one too */
    uint32_t *row_offsets, *cache_lengths, *table, *buffer_row_offsets, *cache_offsets;
    void *plain_blocks, *mla_blocks, *key_blocks, *key_scales, *weights;
    void *allocation, *scratch;
    unsigned char *arena;
    size_t used, results; /* bytes of the arena; those before the workspace */
};

/* `size` dirty bytes at a multiple of 256, canaries on both sides. */
static inline void *world_take(struct world *w, size_t size)
{
    unsigned char *piece = w->arena + w->used;
    w->used += (size + 255) / 256 * 256 + 512;
    if (w->used > ARENA) {
        printf("the arena is too small\n");
        exit(2);
    }
    memset(piece, 0xa5, (size + 255) / 256 * 256 + 512);
    return piece + 256;
}

static inline pkv_tensor tensor3(void *data, int32_t dtype, int64_t a, int64_t b, int64_t c)
{
    pkv_tensor t = {0};
    t.data = data;
    t.dtype = dtype;
    t.ndim = c ? 3 : b ? 2 : 1;
    t.shape[0] = a;
    t.shape[1] = b;
    t.shape[2] = c;
    return t;
}
static inline pkv_tensor tensor2(void *data, int32_t dtype, int64_t a, int64_t b) { return tensor3(data, dtype, a, b, 0); }
static inline pkv_tensor tensor1(void *data, int32_t dtype, int64_t a) { return tensor3(data, dtype, a, 0, 0); }

/* Small numbers with no pattern, the same in every run. */
static inline float *world_floats(struct world *w, size_t count)
{
    float *x = (float *)world_take(w, count * sizeof *x);
    uint32_t state = 12345u + (uint32_t)w->used;
    for (size_t i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        x[i] = ((float)(state >> 8) / 16777216.0f - 0.5f) * 2.0f;
    }
    return x;
}

/* fp8 e4m3 codes, no NaN. */
static inline unsigned char *world_codes(struct world *w, size_t count)
{
    unsigned char *x = (unsigned char *)world_take(w, count);
    for (size_t i = 0; i < count; ++i)
        x[i] = (unsigned char)(((i * 37 + i / 7) % 0x50) | (i % 3 ? 0x80 : 0));
    return x;
}

static inline pkv_collection_options plain_options(struct world *w)
{
    pkv_collection_options o = {0};
    o.struct_size = sizeof o;
    o.dtype = PKV_F32;
    o.num_blocks = BLOCKS;
    o.num_layers = LAYERS;
    o.page_size = PAGE;
    o.num_heads = HEADS;
    o.head_size = HEAD;
    o.blocks.data = w->plain_blocks;
    o.blocks.size = (size_t)BLOCKS * 2 * LAYERS * PAGE * HEADS * HEAD * 4;
    return o;
}
static inline pkv_collection_options mla_options(struct world *w)
{
    pkv_collection_options o = plain_options(w);
    o.num_heads = 1;
    o.head_size = MLA_HEAD;
    o.is_mla = 1;
    o.blocks.data = w->mla_blocks;
    o.blocks.size = (size_t)BLOCKS * LAYERS * PAGE * MLA_HEAD * 4;
    return o;
}
static inline pkv_collection_options key_options(struct world *w)
{
    pkv_collection_options o = mla_options(w);
    o.dtype = PKV_F8_E4M3;
    o.scale_dtype = PKV_F32;
    o.head_size = DEPTH;
    o.blocks.data = w->key_blocks;
    o.blocks.size = (size_t)BLOCKS * LAYERS * PAGE * DEPTH;
    o.scales.data = w->key_scales;
    o.scales.size = (size_t)BLOCKS * LAYERS * PAGE * 4;
    return o;
}
static inline pkv_gguf_weight_options weight_options(struct world *w, int64_t rows)
{
    pkv_gguf_weight_options o = {0};
    o.struct_size = sizeof o;
    o.data = w->weights;
    o.rows = rows;
    o.cols = K;
    o.data_size = (size_t)rows * K / 32 * 34;
    o.encoding = PKV_GGUF_Q8_0;
    return o;
}

static inline void *world_params(struct world *w, enum op op)
{
    void *const params[NUM_OPS] = {&w->qkv, &w->rope, &w->prefill, &w->indexer, &w->store, &w->gather, &w->merge};
    return params[op];
}

static const size_t params_sizes[NUM_OPS] = {sizeof(pkv_qkv_matmul_gguf_params), sizeof(pkv_mla_rope_rmsnorm_quantize_params), sizeof(pkv_mla_prefill_fp8_params),
                                             sizeof(pkv_mla_indexer_fp8_params), sizeof(pkv_kv_store_params), sizeof(pkv_kv_gather_params), sizeof(pkv_merge_attention_params)};

static inline pkv_status query_op(const pkv_context *ctx, enum op op, const void *params, size_t *bytes, pkv_error *err)
{
    switch (op) {
    case QKV: return pkv_qkv_matmul_gguf_workspace_size(ctx, (const pkv_qkv_matmul_gguf_params *)params, bytes, err);
    case ROPE: return pkv_mla_rope_rmsnorm_quantize_workspace_size(ctx, (const pkv_mla_rope_rmsnorm_quantize_params *)params, bytes, err);
    case PREFILL: return pkv_mla_prefill_fp8_workspace_size(ctx, (const pkv_mla_prefill_fp8_params *)params, bytes, err);
    case INDEXER: return pkv_mla_indexer_fp8_workspace_size(ctx, (const pkv_mla_indexer_fp8_params *)params, bytes, err);
    case STORE: return pkv_kv_store_workspace_size(ctx, (const pkv_kv_store_params *)params, bytes, err);
    case GATHER: return pkv_kv_gather_workspace_size(ctx, (const pkv_kv_gather_params *)params, bytes, err);
    default: return pkv_merge_attention_workspace_size(ctx, (const pkv_merge_attention_params *)params, bytes, err);
    }
}

static inline pkv_status run_op(const pkv_context *ctx, enum op op, pkv_stream stream, const void *params, pkv_buffer workspace, pkv_error *err)
{
    switch (op) {
    case QKV: return pkv_qkv_matmul_gguf(ctx, stream, (const pkv_qkv_matmul_gguf_params *)params, workspace, err);
    case ROPE: return pkv_mla_rope_rmsnorm_quantize(ctx, stream, (const pkv_mla_rope_rmsnorm_quantize_params *)params, workspace, err);
    case PREFILL: return pkv_mla_prefill_fp8(ctx, stream, (const pkv_mla_prefill_fp8_params *)params, workspace, err);
    case INDEXER: return pkv_mla_indexer_fp8(ctx, stream, (const pkv_mla_indexer_fp8_params *)params, workspace, err);
    case STORE: return pkv_kv_store(ctx, stream, (const pkv_kv_store_params *)params, workspace, err);
    case GATHER: return pkv_kv_gather(ctx, stream, (const pkv_kv_gather_params *)params, workspace, err);
    default: return pkv_merge_attention(ctx, stream, (const pkv_merge_attention_params *)params, workspace, err);
    }
}

/* A workspace of the size that the hungriest of the calls, as they stand, asks for. It comes last in the arena, so it can change its size; what lies in it
 * after a call is nobody's result. */
static inline void world_workspace(struct world *w)
{
    w->workspace.size = 4096;
    for (int op = 0; w->wv && op < NUM_OPS; ++op) {
        size_t bytes = 0;
        if (query_op(w->ctx, (enum op)op, world_params(w, (enum op)op), &bytes, NULL) == PKV_OK && bytes > w->workspace.size)
            w->workspace.size = bytes;
    }
    w->used = w->results;
    w->workspace.data = w->scratch = world_take(w, w->workspace.size);
}

/* Keeps all that lies in the arena but the workspace, and compares with it. */
static inline void world_keep(const struct world *w, unsigned char *to) { memcpy(to, w->arena, w->results); }
static inline int world_kept(const struct world *w, const unsigned char *kept) { return memcmp(kept, w->arena, w->results) == 0; }

/* The calls as they should be. Undoes what a test has changed; the arena is filled anew, so outputs are dirty again. */
static inline void world_reset(struct world *w)
{
    static const uint32_t row_offsets[] = {0, 3, 5}, lengths[] = {0, 2}, table[] = {2, 0xffffffffu, 0, 0x7fffffffu}, buffer[] = {0, 3, 7}, zeros[] = {0, 0};
    w->used = 0;

    w->row_offsets = (uint32_t *)world_take(w, sizeof row_offsets);
    w->cache_lengths = (uint32_t *)world_take(w, sizeof lengths);
    w->table = (uint32_t *)world_take(w, sizeof table);
    w->buffer_row_offsets = (uint32_t *)world_take(w, sizeof buffer);
    w->cache_offsets = (uint32_t *)world_take(w, sizeof zeros);
    memcpy(w->row_offsets, row_offsets, sizeof row_offsets);
    memcpy(w->cache_lengths, lengths, sizeof lengths);
    memcpy(w->table, table, sizeof table);
    memcpy(w->buffer_row_offsets, buffer, sizeof buffer);
    memcpy(w->cache_offsets, zeros, sizeof zeros);

    /* All bits set is NaN in every dtype here. Block 0 slots 0 and 1 are what sequence 1 has cached; they get numbers. */
    w->plain_blocks = world_take(w, (size_t)BLOCKS * 2 * LAYERS * PAGE * HEADS * HEAD * 4);
    w->mla_blocks = world_take(w, (size_t)BLOCKS * LAYERS * PAGE * MLA_HEAD * 4);
    w->key_blocks = world_take(w, (size_t)BLOCKS * LAYERS * PAGE * DEPTH);
    w->key_scales = world_take(w, (size_t)BLOCKS * LAYERS * PAGE * 4);
    memset(w->plain_blocks, 0xff, (size_t)BLOCKS * 2 * LAYERS * PAGE * HEADS * HEAD * 4);
    memset(w->mla_blocks, 0xff, (size_t)BLOCKS * LAYERS * PAGE * MLA_HEAD * 4);
    memset(w->key_blocks, 0xff, (size_t)BLOCKS * LAYERS * PAGE * DEPTH);
    memset(w->key_scales, 0xff, (size_t)BLOCKS * LAYERS * PAGE * 4);
    for (int layer = 0; layer < LAYERS; ++layer) {
        for (int i = 0; i < 4 * HEADS * HEAD; ++i) /* all four slots: the gather reads the "new" ones too */
            for (int kv = 0; kv < 2; ++kv)
                ((float *)w->plain_blocks)[(kv * LAYERS + layer) * PAGE * HEADS * HEAD + i] = (float)(i + 1000 * kv + 100 * layer);
        for (int i = 0; i < 4 * MLA_HEAD; ++i)
            ((float *)w->mla_blocks)[layer * PAGE * MLA_HEAD + i] = (float)(i % 17) * 0.125f - 1.0f;
        for (int block = 0; block < 3; block += 2) /* the indexer reads rows of both sequences */
            for (int slot = 0; slot < PAGE; ++slot) {
                ((float *)w->key_scales)[(block * LAYERS + layer) * PAGE + slot] = 0.5f;
                for (int i = 0; i < DEPTH; ++i)
                    ((unsigned char *)w->key_blocks)[((block * LAYERS + layer) * PAGE + slot) * DEPTH + i] = (unsigned char)((i * 5 + slot * 3) % 0x48);
            }
        for (int i = 0; i < 3 * HEADS * HEAD; ++i) /* sequence 0's rows, in block 2, for the gather */
            for (int kv = 0; kv < 2; ++kv)
                ((float *)w->plain_blocks)[((2 * 2 + kv) * LAYERS + layer) * PAGE * HEADS * HEAD + i] = (float)(-i);
    }

    w->weights = world_take(w, (size_t)3 * HEADS * HEAD * K / 32 * 34);
    for (int b = 0; b < 3 * HEADS * HEAD * K / 32; ++b) {
        unsigned char *block = (unsigned char *)w->weights + b * 34;
        block[0] = 0x00;
        block[1] = 0x20; /* the scale, f16 2^-7 */
        for (int i = 0; i < 32; ++i)
            block[2 + i] = (unsigned char)(signed char)((b * 13 + i * 29) % 255 - 127);
    }

    memset(&w->stream, 0, sizeof w->stream);

    memset(&w->batch, 0, sizeof w->batch);
    w->batch.struct_size = sizeof w->batch;
    w->batch.input_row_offsets = w->row_offsets;
    w->batch.cache_lengths = w->cache_lengths;
    w->batch.lookup_table = w->table;
    w->batch.batch_size = BATCH;
    w->batch.max_pages = PAGES;
    w->batch.max_seq_length = 3;
    w->batch.max_cache_length = 2;

    memset(&w->qkv, 0, sizeof w->qkv);
    w->qkv.struct_size = sizeof w->qkv;
    w->qkv.collection = w->plain;
    w->qkv.batch = &w->batch;
    w->qkv.q_weight = w->wq;
    w->qkv.k_weight = w->wk;
    w->qkv.v_weight = w->wv;
    w->qkv.layer_idx = 1;
    w->qkv.hidden_state = tensor2(world_floats(w, TOKENS * K), PKV_F32, TOKENS, K);
    w->qkv.q_output = tensor2(world_take(w, TOKENS * 3 * HEADS * HEAD * 4), PKV_F32, TOKENS, 3 * HEADS * HEAD);
    w->qkv.q_bias = tensor1(world_floats(w, 3 * HEADS * HEAD), PKV_F32, 3 * HEADS * HEAD);
    w->qkv.k_bias = tensor1(world_floats(w, HEADS * HEAD), PKV_F32, HEADS * HEAD);

    memset(&w->rope, 0, sizeof w->rope);
    w->rope.struct_size = sizeof w->rope;
    w->rope.collection = w->mla;
    w->rope.batch = &w->batch;
    w->rope.layer_idx = 1;
    w->rope.q_rope = tensor3(world_floats(w, TOKENS * 3 * R), PKV_F32, TOKENS, 3, R);
    w->rope.q_rope_output = tensor3(world_take(w, TOKENS * 3 * R * 4), PKV_F32, TOKENS, 3, R);
    w->rope.kv = tensor2(world_floats(w, TOKENS * MLA_HEAD), PKV_F32, TOKENS, MLA_HEAD);
    w->rope.freqs_cis = tensor2(world_floats(w, POSITIONS * R), PKV_F32, POSITIONS, R);
    w->rope.gamma = tensor1(world_floats(w, RANK), PKV_F32, RANK);
    w->rope.epsilon = 1e-6f;

    memset(&w->prefill, 0, sizeof w->prefill);
    w->prefill.struct_size = sizeof w->prefill;
    w->prefill.collection = w->mla;
    w->prefill.batch = &w->batch;
    w->prefill.layer_idx = 1;
    w->prefill.scale = 0.125f;
    w->prefill.epsilon = 1e-6f;
    w->prefill.buffer_length = ROWS;
    w->prefill.buffer_row_offsets = w->buffer_row_offsets;
    w->prefill.cache_offsets = w->cache_offsets;
    w->prefill.q = tensor3(world_floats(w, TOKENS * 3 * (NOPE + R)), PKV_F32, TOKENS, 3, NOPE + R);
    w->prefill.kv = tensor2(world_floats(w, TOKENS * MLA_HEAD), PKV_F32, TOKENS, MLA_HEAD);
    w->prefill.freqs_cis = w->rope.freqs_cis;
    w->prefill.kv_norm_gamma = w->rope.gamma;
    w->prefill.kv_b_proj = tensor2(world_codes(w, 3 * (NOPE + VDIM) * RANK), PKV_F8_E4M3, 3 * (NOPE + VDIM), RANK);
    w->prefill.kv_b_proj_scale = tensor2(world_floats(w, (3 * (NOPE + VDIM) + 127) / 128 * (RANK / 128)), PKV_F32, (3 * (NOPE + VDIM) + 127) / 128, RANK / 128);
    w->prefill.output = tensor3(world_take(w, TOKENS * 3 * VDIM * 4), PKV_F32, TOKENS, 3, VDIM);
    w->prefill.lse = tensor2(world_take(w, TOKENS * 3 * 4), PKV_F32, TOKENS, 3);

    memset(&w->indexer, 0, sizeof w->indexer);
    w->indexer.struct_size = sizeof w->indexer;
    w->indexer.collection = w->keys;
    w->indexer.batch = &w->batch;
    w->indexer.layer_idx = 1;
    w->indexer.top_k = TOP_K;
    w->indexer.q = tensor3(world_codes(w, TOKENS * 3 * DEPTH), PKV_F8_E4M3, TOKENS, 3, DEPTH);
    w->indexer.q_s = tensor2(world_floats(w, TOKENS * 3), PKV_F32, TOKENS, 3);
    w->indexer.output_indices = tensor2(world_take(w, TOKENS * TOP_K * 4), PKV_I32, TOKENS, TOP_K);
    w->indexer.output_scores = tensor2(world_take(w, TOKENS * TOP_K * 4), PKV_F32, TOKENS, TOP_K);

    memset(&w->store, 0, sizeof w->store);
    w->store.struct_size = sizeof w->store;
    w->store.collection = w->plain;
    w->store.batch = &w->batch;
    w->store.layer_idx = 1;
    w->store.kv_idx = 1;
    w->store.values = tensor3(world_floats(w, TOKENS * HEADS * HEAD), PKV_F32, TOKENS, HEADS, HEAD);

    memset(&w->gather, 0, sizeof w->gather);
    w->gather.struct_size = sizeof w->gather;
    w->gather.collection = w->plain;
    w->gather.batch = &w->batch;
    w->gather.layer_idx = 1;
    w->gather.buffer_row_offsets = w->buffer_row_offsets;
    w->gather.cache_offsets = w->cache_offsets;
    w->gather.out = tensor3(world_take(w, ROWS * HEADS * HEAD * 4), PKV_F32, ROWS, HEADS, HEAD);

    memset(&w->merge, 0, sizeof w->merge);
    w->merge.struct_size = sizeof w->merge;
    w->merge.output_a = tensor3(world_floats(w, TOKENS * 3 * VDIM), PKV_F32, TOKENS, 3, VDIM);
    w->merge.lse_a = tensor2(world_floats(w, TOKENS * 3), PKV_F32, TOKENS, 3);
    w->merge.output_b = tensor3(world_floats(w, TOKENS * 3 * VDIM), PKV_F32, TOKENS, 3, VDIM);
    w->merge.lse_b = tensor2(world_floats(w, TOKENS * 3), PKV_F32, TOKENS, 3);
    w->merge.output = tensor3(world_take(w, TOKENS * 3 * VDIM * 4), PKV_F32, TOKENS, 3, VDIM);
    w->merge.lse = tensor2(world_take(w, TOKENS * 3 * 4), PKV_F32, TOKENS, 3);

    w->results = w->used;
    world_workspace(w);
}

static inline void world_open(struct world *w, const pkv_context_options *options)
{
    memset(w, 0, sizeof *w);
    w->allocation = malloc(ARENA + 4096);
    if (!w->allocation)
        exit(2);
    w->arena = (unsigned char *)w->allocation + (4096 - (uintptr_t)w->allocation % 4096);
    world_reset(w);
    pkv_collection_options plain = plain_options(w), mla = mla_options(w), keys = key_options(w);
    pkv_gguf_weight_options q = weight_options(w, 3 * HEADS * HEAD), kv = weight_options(w, HEADS * HEAD);
    if (!OK(pkv_context_create(options, &w->ctx, &check_err)) || !OK(pkv_collection_create(w->ctx, &plain, &w->plain, &check_err)) ||
        !OK(pkv_collection_create(w->ctx, &mla, &w->mla, &check_err)) || !OK(pkv_collection_create(w->ctx, &keys, &w->keys, &check_err)) ||
        !OK(pkv_gguf_weight_create(w->ctx, &q, &w->wq, &check_err)) || !OK(pkv_gguf_weight_create(w->ctx, &kv, &w->wk, &check_err)) ||
        !OK(pkv_gguf_weight_create(w->ctx, &kv, &w->wv, &check_err)))
        exit(1);
    world_reset(w);
}

static inline void world_close(struct world *w)
{
    pkv_gguf_weight_destroy(w->wq);
    pkv_gguf_weight_destroy(w->wk);
    pkv_gguf_weight_destroy(w->wv);
    pkv_collection_destroy(w->plain);
    pkv_collection_destroy(w->mla);
    pkv_collection_destroy(w->keys);
    pkv_context_destroy(w->ctx);
    free(w->allocation);
}

/* The valid call as it stands in `w`. */
static inline pkv_status world_run(struct world *w, enum op op, pkv_error *err)
{
    return run_op(w->ctx, op, w->stream, world_params(w, op), w->workspace, err);
}

/* Every pkv_tensor of every params struct. */
struct tensor_row {
    enum op op;
    const char *name;
    size_t offset;
    int optional, output, free_rows, free_cols; /* free: an extent the library cannot know to be wrong by itself */
};
#define TENSOR(op, type, field, optional, output, free_rows, free_cols) {op, "params." #field, offsetof(type, field), optional, output, free_rows, free_cols}
static const struct tensor_row tensors[] = {
    TENSOR(QKV, pkv_qkv_matmul_gguf_params, hidden_state, 0, 0, 1, 0),
    TENSOR(QKV, pkv_qkv_matmul_gguf_params, q_output, 0, 1, 1, 0),
    TENSOR(QKV, pkv_qkv_matmul_gguf_params, q_bias, 1, 0, 0, 0),
    TENSOR(QKV, pkv_qkv_matmul_gguf_params, k_bias, 1, 0, 0, 0),
    TENSOR(ROPE, pkv_mla_rope_rmsnorm_quantize_params, q_rope, 0, 0, 1, 0),
    TENSOR(ROPE, pkv_mla_rope_rmsnorm_quantize_params, q_rope_output, 0, 1, 1, 0),
    TENSOR(ROPE, pkv_mla_rope_rmsnorm_quantize_params, kv, 0, 0, 1, 0),
    TENSOR(ROPE, pkv_mla_rope_rmsnorm_quantize_params, freqs_cis, 0, 0, 1, 0),
    TENSOR(ROPE, pkv_mla_rope_rmsnorm_quantize_params, gamma, 0, 0, 0, 0),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, q, 0, 1, 1, 1),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, kv, 1, 0, 1, 0),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, freqs_cis, 0, 0, 1, 0),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, kv_norm_gamma, 0, 0, 0, 0),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, kv_b_proj, 0, 0, 0, 0),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, kv_b_proj_scale, 0, 0, 0, 0),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, output, 0, 1, 1, 1),
    TENSOR(PREFILL, pkv_mla_prefill_fp8_params, lse, 1, 1, 1, 0),
    TENSOR(INDEXER, pkv_mla_indexer_fp8_params, q, 0, 0, 1, 0),
    TENSOR(INDEXER, pkv_mla_indexer_fp8_params, q_s, 0, 0, 1, 0),
    TENSOR(INDEXER, pkv_mla_indexer_fp8_params, output_indices, 0, 1, 1, 0),
    TENSOR(INDEXER, pkv_mla_indexer_fp8_params, output_scores, 1, 1, 1, 0),
    TENSOR(STORE, pkv_kv_store_params, values, 0, 0, 1, 0),
    TENSOR(GATHER, pkv_kv_gather_params, out, 0, 1, 1, 0),
    TENSOR(MERGE, pkv_merge_attention_params, output_a, 0, 0, 1, 1),
    TENSOR(MERGE, pkv_merge_attention_params, lse_a, 0, 0, 0, 0),
    TENSOR(MERGE, pkv_merge_attention_params, output_b, 0, 0, 0, 0),
    TENSOR(MERGE, pkv_merge_attention_params, lse_b, 0, 0, 0, 0),
    TENSOR(MERGE, pkv_merge_attention_params, output, 0, 1, 0, 0),
    TENSOR(MERGE, pkv_merge_attention_params, lse, 1, 1, 0, 0),
};
enum { NUM_TENSORS = sizeof tensors / sizeof *tensors };

/* The strides that all zeros mean. */
static inline void contiguous(pkv_tensor *t)
{
    uint64_t step = 1; /* unsigned: a test may ask for a product that overflows */
    for (int d = t->ndim; d-- > 0; step *= (uint64_t)t->shape[d])
        t->stride[d] = (int64_t)step;
}

#endif

/* Bad input: every row breaks one thing in a valid call and states the status and the argument that the error must name. A refused call writes
 * nothing: the arena with all blocks, inputs, outputs and workspace keeps its bits. The workspace query refuses what it can see (shapes, dtypes,
 * handles, scalars), with the same words, and never answers for a call that it refused. */
#include "valid_calls.h"

static struct world w, other;
static unsigned char before[ARENA];

enum seen_by { QUERY_TOO, CALL_ONLY };

static void refused(enum op op, const char *what, int line, pkv_status status, const char *argument, enum seen_by seen_by)
{
    const size_t untouched = 0x5a5a5a5a;
    const pkv_buffer workspace = w.workspace;
    memcpy(before, w.arena, w.used);
    for (int given = 0; given < 2; ++given) {
        if (!given)
            memset(&w.workspace, 0, sizeof w.workspace);
        char text[256];
        snprintf(text, sizeof text, "%s with %s (line %d, %s workspace)", op_names[op], what, line, given ? "given" : "no");
        check_reset();
        check_status(world_run(&w, op, &check_err), status, argument, text, __FILE__, line);
        check_that(memcmp(before, w.arena, w.used) == 0, "a refused call writes nothing", text, line);
        w.workspace = workspace;
    }
    size_t bytes = untouched;
    pkv_error err = {0};
    err.struct_size = sizeof err;
    pkv_status asked = query_op(w.ctx, op, world_params(&w, op), &bytes, &err);
    if (seen_by == QUERY_TOO)
        check_that(asked == status && strstr(err.argument, argument) != NULL, "the query refuses it too", what, line);
    else
        check_that(asked == PKV_OK || asked == status, "the query accepts or refuses alike", what, line);
    check_that((asked == PKV_OK) == (bytes != untouched), "the query answers only on PKV_OK", what, line);
    check_that(memcmp(before, w.arena, w.used) == 0, "the query writes nothing", what, line);
}

/* One row. `mutation` is any statements; afterwards the world is made whole again by the next row. */
#define BAD(op, status, argument, seen_by, mutation)                       \
    do {                                                                   \
        world_reset(&w);                                                   \
        mutation;                                                          \
        refused(op, #mutation, __LINE__, status, argument, seen_by);       \
    } while (0)

/* The call is fine after all: what looks like a fault but is none. */
#define GOOD(op, mutation)                                                 \
    do {                                                                   \
        world_reset(&w);                                                   \
        mutation;                                                          \
        check_reset();                                                     \
        check_status(world_run(&w, op, &check_err), PKV_OK, "", #mutation, __FILE__, __LINE__); \
    } while (0)

static void valid_calls(void)
{
    for (int op = 0; op < NUM_OPS; ++op) {
        size_t bytes = ~(size_t)0;
        world_reset(&w);
        OK(query_op(w.ctx, (enum op)op, world_params(&w, (enum op)op), &bytes, &check_err));
        CHECK(bytes <= w.workspace.size);
        OK(world_run(&w, (enum op)op, &check_err));
        memset(&w.workspace, 0, sizeof w.workspace);
        if (op != PREFILL) /* in place: a second run would rope again */
            OK(world_run(&w, (enum op)op, &check_err));
    }
}

/* pkv_tensor arguments: every way in which one can be wrong. */
static void every_tensor(void)
{
    for (size_t i = 0; i < NUM_TENSORS; ++i) {
        const struct tensor_row row = tensors[i];
        pkv_tensor *t = (pkv_tensor *)((char *)world_params(&w, row.op) + row.offset);
        world_reset(&w);
        int last = t->ndim - 1;
#define TENSOR_BAD(status, part, seen_by, mutation)                                            \
    do {                                                                                       \
        char argument[64], what[128];                                                          \
        snprintf(argument, sizeof argument, "%s%s", row.name, part);                           \
        snprintf(what, sizeof what, "%s: %s", row.name, #mutation);                            \
        world_reset(&w);                                                                       \
        mutation;                                                                              \
        refused(row.op, what, __LINE__, status, argument, seen_by);                            \
    } while (0)
        TENSOR_BAD(PKV_ERR_DTYPE, ".dtype", QUERY_TOO, t->dtype = 99);
        TENSOR_BAD(PKV_ERR_DTYPE, ".dtype", QUERY_TOO, t->dtype = -1);
        TENSOR_BAD(PKV_ERR_DTYPE, ".dtype", QUERY_TOO, t->dtype = PKV_I64);
        TENSOR_BAD(PKV_ERR_DTYPE, ".dtype", QUERY_TOO, t->dtype = PKV_F8_E5M2);
        TENSOR_BAD(PKV_ERR_DTYPE, ".dtype", QUERY_TOO, t->dtype = PKV_F8_E8M0);
        TENSOR_BAD(PKV_ERR_DTYPE, ".dtype", QUERY_TOO, t->dtype = PKV_DTYPE_NONE);
        TENSOR_BAD(PKV_ERR_SHAPE, ".ndim", QUERY_TOO, t->ndim = 0);
        TENSOR_BAD(PKV_ERR_SHAPE, ".ndim", QUERY_TOO, t->ndim = -3);
        TENSOR_BAD(PKV_ERR_SHAPE, ".ndim", QUERY_TOO, t->ndim += 1);
        TENSOR_BAD(PKV_ERR_SHAPE, ".ndim", QUERY_TOO, t->ndim = INT32_MAX);
        TENSOR_BAD(PKV_ERR_SHAPE, ".shape[0]", QUERY_TOO, t->shape[0] = -1);
        TENSOR_BAD(PKV_ERR_SHAPE, "", QUERY_TOO, t->shape[0] = INT64_MAX; contiguous(t));
        TENSOR_BAD(PKV_ERR_SHAPE, "", QUERY_TOO, t->shape[0] = INT64_MAX / 2);
        TENSOR_BAD(PKV_ERR_SHAPE, "", QUERY_TOO, t->shape[last] = INT64_MIN);
        TENSOR_BAD(PKV_ERR_SHAPE, ".stride[0]", QUERY_TOO, contiguous(t); t->stride[0] = -t->stride[0]);
        world_reset(&w);
        if (t->shape[last] > 1)
            TENSOR_BAD(PKV_ERR_SHAPE, ".stride", QUERY_TOO, contiguous(t); t->stride[last] = 2);
        if (last)
            TENSOR_BAD(PKV_ERR_SHAPE, "", QUERY_TOO, t->shape[0] = 3; contiguous(t); t->stride[0] = INT64_MAX / 2);
        if (!row.free_cols)
            TENSOR_BAD(PKV_ERR_SHAPE, "", QUERY_TOO, t->shape[last] += 1);
        if (!row.free_rows)
            TENSOR_BAD(PKV_ERR_SHAPE, "", QUERY_TOO, t->shape[0] -= 1);
        else if (strcmp(row.name, "params.freqs_cis") != 0 && strcmp(row.name, "params.output_a") != 0)
            TENSOR_BAD(PKV_ERR_SHAPE, ".shape[0]", CALL_ONLY, t->shape[0] -= 1);
        if (row.output && last)
            TENSOR_BAD(PKV_ERR_SHAPE, ".stride", QUERY_TOO, contiguous(t); t->stride[0] = 1);
        if (row.output && last)
            TENSOR_BAD(PKV_ERR_SHAPE, ".stride", QUERY_TOO, contiguous(t); t->stride[0] = 0);
        TENSOR_BAD(PKV_ERR_NULL, ".data", CALL_ONLY, t->data = NULL);
        if (!row.optional)
            TENSOR_BAD(PKV_ERR_NULL, ".data", QUERY_TOO, memset(t, 0, sizeof *t));
        world_reset(&w);
        if (t->dtype != PKV_F8_E4M3) { /* one byte is aligned everywhere */
            TENSOR_BAD(PKV_ERR_ALIGNMENT, ".data", CALL_ONLY, t->data = (char *)t->data + 1);
            TENSOR_BAD(PKV_ERR_ALIGNMENT, ".data", CALL_ONLY, t->data = (char *)t->data + 2);
        }
#undef TENSOR_BAD
        if (row.optional) {
            world_reset(&w);
            memset(t, 0, sizeof *t);
            if (row.op == PREFILL && strcmp(row.name, "params.kv") == 0)
                continue; /* absent there means "already in the cache", which holds NaN here */
            check_reset();
            check_status(world_run(&w, row.op, &check_err), PKV_OK, "", row.name, __FILE__, __LINE__);
        }
    }
}

/* What all kernels over a collection share. */
struct common_row {
    enum op op;
    const pkv_collection **collection;
    const pkv_batch **batch;
    uint32_t *layer_idx;
    int writes;
};
static void every_batch(void)
{
    const struct common_row rows[] = {
        {QKV, &w.qkv.collection, &w.qkv.batch, &w.qkv.layer_idx, 1},     {ROPE, &w.rope.collection, &w.rope.batch, &w.rope.layer_idx, 1},
        {PREFILL, &w.prefill.collection, &w.prefill.batch, &w.prefill.layer_idx, 1}, {INDEXER, &w.indexer.collection, &w.indexer.batch, &w.indexer.layer_idx, 0},
        {STORE, &w.store.collection, &w.store.batch, &w.store.layer_idx, 1}, {GATHER, &w.gather.collection, &w.gather.batch, &w.gather.layer_idx, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        const struct common_row r = rows[i];
        const enum op op = r.op;
        BAD(op, PKV_ERR_NULL, "params.collection", QUERY_TOO, *r.collection = NULL);
        BAD(op, PKV_ERR_VALUE, "params.collection", QUERY_TOO, *r.collection = op == INDEXER ? other.keys : op == ROPE || op == PREFILL ? other.mla : other.plain);
        BAD(op, PKV_ERR_VALUE, "params.layer_idx", QUERY_TOO, *r.layer_idx = LAYERS);
        BAD(op, PKV_ERR_VALUE, "params.layer_idx", QUERY_TOO, *r.layer_idx = UINT32_MAX);
        BAD(op, PKV_ERR_NULL, "params.batch", QUERY_TOO, *r.batch = NULL);
        BAD(op, PKV_ERR_NULL, "input_row_offsets", CALL_ONLY, w.batch.input_row_offsets = NULL);
        BAD(op, PKV_ERR_NULL, "cache_lengths", CALL_ONLY, w.batch.cache_lengths = NULL);
        BAD(op, PKV_ERR_NULL, "lookup_table", CALL_ONLY, w.batch.lookup_table = NULL);
        BAD(op, PKV_ERR_ALIGNMENT, "input_row_offsets", CALL_ONLY, w.batch.input_row_offsets = (const uint32_t *)((char *)w.row_offsets + 1));
        BAD(op, PKV_ERR_ALIGNMENT, "cache_lengths", CALL_ONLY, w.batch.cache_lengths = (const uint32_t *)((char *)w.cache_lengths + 2));
        BAD(op, PKV_ERR_ALIGNMENT, "lookup_table", CALL_ONLY, w.batch.lookup_table = (const uint32_t *)((char *)w.table + 3));
        BAD(op, PKV_ERR_VALUE, "input_row_offsets[0]", CALL_ONLY, w.row_offsets[0] = 1);
        BAD(op, PKV_ERR_VALUE, "input_row_offsets[2]", CALL_ONLY, w.row_offsets[2] = 2);
        BAD(op, PKV_ERR_VALUE, "input_row_offsets[2]", CALL_ONLY, w.row_offsets[1] = 6; w.batch.max_seq_length = 6; w.table[1] = 1);
        BAD(op, PKV_ERR_VALUE, "max_seq_length", CALL_ONLY, w.batch.max_seq_length = 2);
        BAD(op, PKV_ERR_VALUE, "max_seq_length", CALL_ONLY, w.row_offsets[2] = UINT32_MAX);
        BAD(op, PKV_ERR_VALUE, "max_cache_length", CALL_ONLY, w.batch.max_cache_length = 1);
        BAD(op, PKV_ERR_VALUE, "max_cache_length", CALL_ONLY, w.cache_lengths[0] = UINT32_MAX);
        /* 2^32 - 1 cached tokens and three new ones: a 32-bit sum would wrap to two */
        BAD(op, PKV_ERR_PAGE_TABLE, "max_pages", CALL_ONLY, w.cache_lengths[0] = UINT32_MAX; w.batch.max_cache_length = UINT32_MAX);
        BAD(op, PKV_ERR_PAGE_TABLE, "max_pages", CALL_ONLY, w.batch.max_pages = 0);
        BAD(op, PKV_ERR_PAGE_TABLE, "max_pages", CALL_ONLY, w.cache_lengths[1] = 7; w.batch.max_cache_length = 7);
        BAD(op, PKV_ERR_PAGE_TABLE, "lookup_table[0][0]", CALL_ONLY, w.table[0] = BLOCKS);
        BAD(op, PKV_ERR_PAGE_TABLE, "lookup_table[1][0]", CALL_ONLY, w.table[2] = UINT32_MAX);
        BAD(op, PKV_ERR_PAGE_TABLE, "lookup_table[1][0]", CALL_ONLY, w.table[2] = 0x80000000u);
        BAD(op, PKV_ERR_SHAPE, "lookup_table_stride", QUERY_TOO, w.batch.lookup_table_stride = 1);
        BAD(op, PKV_ERR_SHAPE, "lookup_table_stride", QUERY_TOO, w.batch.lookup_table_stride = -2);
        BAD(op, PKV_ERR_SHAPE, "lookup_table_stride", QUERY_TOO, w.batch.lookup_table_stride = INT64_MAX);
        if (r.writes) {
            BAD(op, PKV_ERR_PAGE_TABLE, "lookup_table[1]", CALL_ONLY, w.table[2] = 2);
        } else {
            GOOD(op, w.table[2] = 2); /* sharing a block for reading is no fault */
        }
        BAD(op, PKV_ERR_VALUE, "stream", CALL_ONLY, w.stream.native = &w);
        GOOD(op, w.batch.lookup_table_stride = 2);
    }
}

static void every_op(void)
{
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        size_t bytes = 0;
        world_reset(&w);
        REFUSED(query_op(NULL, op, world_params(&w, op), &bytes, &check_err), PKV_ERR_NULL, "ctx");
        REFUSED(query_op(w.ctx, op, NULL, &bytes, &check_err), PKV_ERR_NULL, "params");
        REFUSED(query_op(w.ctx, op, world_params(&w, op), NULL, &check_err), PKV_ERR_NULL, "bytes");
        REFUSED(run_op(NULL, op, no_stream, world_params(&w, op), no_workspace, &check_err), PKV_ERR_NULL, "ctx");
        REFUSED(run_op(w.ctx, op, no_stream, NULL, no_workspace, &check_err), PKV_ERR_NULL, "params");
        CHECK(run_op(NULL, op, no_stream, NULL, no_workspace, NULL) == PKV_ERR_NULL);

        OK(query_op(w.ctx, op, world_params(&w, op), &bytes, &check_err));
        BAD(op, PKV_ERR_VALUE, "stream", CALL_ONLY, w.stream.native = (void *)8);
        /* A workspace that is given is checked even where none is needed. */
        world_reset(&w);
        memcpy(before, w.arena, w.used);
        pkv_buffer short_one = w.workspace, unaligned = w.workspace, nowhere = {NULL, w.workspace.size};
        short_one.size = bytes ? bytes - 1 : 0;
        unaligned.data = (char *)unaligned.data + 128;
        if (bytes) {
            REFUSED(run_op(w.ctx, op, no_stream, world_params(&w, op), short_one, &check_err), PKV_ERR_WORKSPACE, "workspace");
            char needed[32], given[32];
            snprintf(needed, sizeof needed, "%zu", bytes);
            snprintf(given, sizeof given, "%zu", bytes - 1);
            CHECK(strstr(check_err.message, needed) && strstr(check_err.message, given)); /* both numbers */
            short_one.size = 0;
            REFUSED(run_op(w.ctx, op, no_stream, world_params(&w, op), short_one, &check_err), PKV_ERR_WORKSPACE, "workspace");
        }
        REFUSED(run_op(w.ctx, op, no_stream, world_params(&w, op), unaligned, &check_err), PKV_ERR_ALIGNMENT, "workspace");
        REFUSED(run_op(w.ctx, op, no_stream, world_params(&w, op), nowhere, &check_err), PKV_ERR_NULL, "workspace");
        CHECK(memcmp(before, w.arena, w.used) == 0);

        /* Exactly the size that was asked for is enough, and not a byte behind it is touched. */
        world_reset(&w);
        pkv_buffer exact = {w.workspace.data, bytes};
        if (bytes)
            OK(run_op(w.ctx, op, no_stream, world_params(&w, op), exact, &check_err));
        for (size_t at = bytes; at < w.workspace.size + 256; ++at)
            if (((unsigned char *)exact.data)[at] != 0xa5) {
                CHECK(!"the workspace ends where the query says");
                break;
            }

        /* The query needs no data: it can be asked before anything is allocated. */
        world_reset(&w);
        size_t without = ~(size_t)0;
        for (size_t t = 0; t < NUM_TENSORS; ++t)
            if (tensors[t].op == op)
                ((pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset))->data = NULL;
        w.batch.input_row_offsets = w.batch.cache_lengths = w.batch.lookup_table = NULL;
        w.prefill.buffer_row_offsets = w.prefill.cache_offsets = w.gather.buffer_row_offsets = w.gather.cache_offsets = NULL;
        OK(query_op(w.ctx, op, world_params(&w, op), &without, &check_err));
        CHECK(without == bytes);
    }
}

static void store_and_gather(void)
{
    BAD(STORE, PKV_ERR_VALUE, "kv_idx", QUERY_TOO, w.store.kv_idx = 2);
    BAD(STORE, PKV_ERR_VALUE, "kv_idx", QUERY_TOO, w.store.collection = w.mla); /* has keys only, and the call stores values */
    BAD(STORE, PKV_ERR_SHAPE, "values.shape[1]", QUERY_TOO, w.store.kv_idx = 0; w.store.collection = w.mla);
    BAD(GATHER, PKV_ERR_VALUE, "kv_idx", QUERY_TOO, w.gather.kv_idx = UINT32_MAX);
    const enum op ops[] = {GATHER, PREFILL};
    for (int i = 0; i < 2; ++i) {
        const enum op op = ops[i];
        BAD(op, PKV_ERR_NULL, "buffer_row_offsets", CALL_ONLY, w.gather.buffer_row_offsets = w.prefill.buffer_row_offsets = NULL);
        BAD(op, PKV_ERR_VALUE, "buffer_row_offsets[0]", CALL_ONLY, w.buffer_row_offsets[0] = 1);
        BAD(op, PKV_ERR_VALUE, "buffer_row_offsets[2]", CALL_ONLY, w.buffer_row_offsets[2] = 1);
        BAD(op, PKV_ERR_VALUE, "_offsets[", CALL_ONLY, w.buffer_row_offsets[1] = 4; w.buffer_row_offsets[2] = 8);
        BAD(op, PKV_ERR_VALUE, "cache_offsets[1]", CALL_ONLY, w.cache_offsets[1] = 1);
        BAD(op, PKV_ERR_VALUE, "cache_offsets[0]", CALL_ONLY, w.cache_offsets[0] = UINT32_MAX);
        BAD(op, PKV_ERR_VALUE, "cache_offsets[0]", CALL_ONLY, w.cache_offsets[0] = UINT32_MAX - 2); /* + 3 rows wraps to 0 in 32 bits */
        BAD(op, PKV_ERR_ALIGNMENT, "cache_offsets", CALL_ONLY, w.gather.cache_offsets = w.prefill.cache_offsets = (const uint32_t *)((char *)w.cache_offsets + 1));
        GOOD(op, w.gather.cache_offsets = w.prefill.cache_offsets = NULL);
        /* No rows from the very end of a sequence, where the table has no column to look at. */
        GOOD(op, w.cache_offsets[1] = 4; w.buffer_row_offsets[2] = 3; w.prefill.buffer_length = 3);
    }
    BAD(PREFILL, PKV_ERR_VALUE, "buffer_length", CALL_ONLY, w.prefill.buffer_length = ROWS - 1);
    BAD(PREFILL, PKV_ERR_VALUE, "buffer_length", CALL_ONLY, w.prefill.buffer_length = ROWS + 1);
    BAD(PREFILL, PKV_ERR_SHAPE, "buffer_length", QUERY_TOO, w.prefill.buffer_length = -1);
}

static void scalars(void)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; ++i) {
        BAD(PREFILL, PKV_ERR_VALUE, "params.scale", QUERY_TOO, w.prefill.scale = bad[i]);
        BAD(PREFILL, PKV_ERR_VALUE, "params.epsilon", QUERY_TOO, w.prefill.epsilon = bad[i]);
        BAD(ROPE, PKV_ERR_VALUE, "params.epsilon", QUERY_TOO, w.rope.epsilon = bad[i]);
    }
    BAD(ROPE, PKV_ERR_VALUE, "params.epsilon", QUERY_TOO, w.rope.epsilon = -1e-6f);
    BAD(PREFILL, PKV_ERR_VALUE, "params.epsilon", QUERY_TOO, w.prefill.epsilon = -1e-6f);
    GOOD(ROPE, w.rope.epsilon = 0);
    BAD(ROPE, PKV_ERR_VALUE, "params.reserved", QUERY_TOO, w.rope.reserved = 1);
    BAD(INDEXER, PKV_ERR_VALUE, "params.reserved", QUERY_TOO, w.indexer.reserved = 1);
    const int32_t numbers[] = {-1, 4, 77, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; ++i) {
        BAD(QKV, PKV_ERR_VALUE, "params.compute", QUERY_TOO, w.qkv.compute = numbers[i]);
        BAD(ROPE, PKV_ERR_VALUE, "params.rope", QUERY_TOO, w.rope.rope = numbers[i]);
        BAD(PREFILL, PKV_ERR_VALUE, "params.rope", QUERY_TOO, w.prefill.rope = numbers[i]);
        BAD(PREFILL, PKV_ERR_VALUE, "params.mask", QUERY_TOO, w.prefill.mask = numbers[i]);
        BAD(PREFILL, PKV_ERR_VALUE, "params.score_mod", QUERY_TOO, w.prefill.score_mod = numbers[i]);
        BAD(INDEXER, PKV_ERR_VALUE, "params.mask", QUERY_TOO, w.indexer.mask = numbers[i]);
    }
    BAD(INDEXER, PKV_ERR_VALUE, "params.mask", QUERY_TOO, w.indexer.mask = PKV_MASK_SLIDING_WINDOW_CAUSAL);
    BAD(INDEXER, PKV_ERR_VALUE, "params.top_k", QUERY_TOO, w.indexer.top_k = 0);
    BAD(INDEXER, PKV_ERR_SHAPE, "output_indices.shape[1]", QUERY_TOO, w.indexer.top_k = TOP_K + 1);
    BAD(PREFILL, PKV_ERR_VALUE, "params.window", QUERY_TOO, w.prefill.mask = PKV_MASK_SLIDING_WINDOW_CAUSAL);
    BAD(PREFILL, PKV_ERR_VALUE, "params.chunk", QUERY_TOO, w.prefill.mask = PKV_MASK_CHUNKED_CAUSAL);
    GOOD(PREFILL, w.prefill.mask = PKV_MASK_SLIDING_WINDOW_CAUSAL; w.prefill.window = UINT32_MAX);
    GOOD(PREFILL, w.prefill.mask = PKV_MASK_CHUNKED_CAUSAL; w.prefill.chunk = UINT32_MAX);
    BAD(PREFILL, PKV_ERR_VALUE, "params.flags", QUERY_TOO, w.prefill.flags = 2);
    BAD(PREFILL, PKV_ERR_VALUE, "params.flags", QUERY_TOO, w.prefill.flags = 0x80000000u);
    BAD(PREFILL, PKV_ERR_VALUE, "params.kv", QUERY_TOO, w.prefill.flags = PKV_PREFILL_FINISHED);
    BAD(PREFILL, PKV_ERR_UNSUPPORTED, "m_scale_granularity", QUERY_TOO, w.prefill.m_scale_granularity = 128);
    BAD(PREFILL, PKV_ERR_UNSUPPORTED, "n_scale_granularity", QUERY_TOO, w.prefill.n_scale_granularity = 1);
    BAD(PREFILL, PKV_ERR_UNSUPPORTED, "k_scale_granularity", QUERY_TOO, w.prefill.k_scale_granularity = 64);
    GOOD(PREFILL, w.prefill.m_scale_granularity = 1; w.prefill.n_scale_granularity = w.prefill.k_scale_granularity = 128);
}

static void collections_of_the_wrong_kind(void)
{
    BAD(QKV, PKV_ERR_VALUE, "params.collection", QUERY_TOO, w.qkv.collection = w.mla);
    BAD(ROPE, PKV_ERR_VALUE, "params.collection", QUERY_TOO, w.rope.collection = w.plain);
    BAD(PREFILL, PKV_ERR_VALUE, "params.collection", QUERY_TOO, w.prefill.collection = w.plain);
    BAD(INDEXER, PKV_ERR_SHAPE, "params.collection", QUERY_TOO, w.indexer.collection = w.plain); /* two heads */
    BAD(INDEXER, PKV_ERR_DTYPE, "params.collection", QUERY_TOO, w.indexer.collection = w.mla);   /* not fp8 */
    BAD(ROPE, PKV_ERR_SHAPE, "", QUERY_TOO, w.rope.collection = w.keys);                          /* another head size */
}

/* output_indices are 32-bit and signed. Reading, a sequence may come to so many positions in one block. */
static void positions_past_the_indices(void)
{
    static uint32_t table[2048], offsets[] = {0, 1}, lengths[] = {INT32_MAX};
    pkv_collection_options o = {0};
    pkv_collection *keys = NULL;
    o.struct_size = sizeof o;
    OK(pkv_collection_info(w.keys, &o, &check_err));
    memset(&o.blocks, 0, sizeof o.blocks);
    memset(&o.scales, 0, sizeof o.scales);
    o.num_blocks = 1;
    o.page_size = 1 << 20;
    OK(pkv_collection_create(w.ctx, &o, &keys, &check_err));
    pkv_batch batch = {0};
    batch.struct_size = sizeof batch;
    batch.input_row_offsets = offsets;
    batch.cache_lengths = lengths;
    batch.lookup_table = table;
    batch.batch_size = batch.max_seq_length = 1;
    batch.max_pages = 2048;
    batch.max_cache_length = INT32_MAX;
    BAD(INDEXER, PKV_ERR_VALUE, "params.batch.cache_lengths[0]", CALL_ONLY, w.indexer.collection = keys; w.indexer.batch = &batch);
    pkv_collection_destroy(keys);
}

static void positions_past_the_table(void)
{
    BAD(ROPE, PKV_ERR_VALUE, "freqs_cis.shape[0]", CALL_ONLY, w.rope.freqs_cis.shape[0] = 3);
    BAD(PREFILL, PKV_ERR_VALUE, "freqs_cis.shape[0]", CALL_ONLY, w.prefill.freqs_cis.shape[0] = 3);
    BAD(ROPE, PKV_ERR_VALUE, "freqs_cis.shape[0]", CALL_ONLY, w.rope.freqs_cis.shape[0] = 0);
    GOOD(ROPE, w.rope.freqs_cis.shape[0] = 4); /* the last position is 3 */
}

static void weights(void)
{
    BAD(QKV, PKV_ERR_NULL, "params.q_weight", QUERY_TOO, w.qkv.q_weight = NULL);
    BAD(QKV, PKV_ERR_NULL, "params.k_weight", QUERY_TOO, w.qkv.k_weight = NULL);
    BAD(QKV, PKV_ERR_NULL, "params.v_weight", QUERY_TOO, w.qkv.v_weight = NULL);
    BAD(QKV, PKV_ERR_VALUE, "params.q_weight", QUERY_TOO, w.qkv.q_weight = other.wq);
    BAD(QKV, PKV_ERR_VALUE, "params.v_weight", QUERY_TOO, w.qkv.v_weight = other.wv);
    BAD(QKV, PKV_ERR_SHAPE, "params.k_weight", QUERY_TOO, w.qkv.k_weight = w.wq);
    BAD(QKV, PKV_ERR_SHAPE, "params.v_weight", QUERY_TOO, w.qkv.v_weight = w.wq);
    BAD(QKV, PKV_ERR_SHAPE, "", QUERY_TOO, w.qkv.q_weight = w.wk);
    BAD(QKV, PKV_ERR_SHAPE, "hidden_state.shape[1]", QUERY_TOO, w.qkv.hidden_state.shape[1] = K - 1);

    /* pkv_gguf_weight_create */
    pkv_gguf_weight *made = (pkv_gguf_weight *)8;
#define WEIGHT_BAD(status, argument, mutation)                                                        \
    do {                                                                                              \
        pkv_gguf_weight_options o = weight_options(&w, 4);                                            \
        mutation;                                                                                     \
        REFUSED(pkv_gguf_weight_create(w.ctx, &o, &made, &check_err), status, argument);              \
        CHECK(made == (pkv_gguf_weight *)8);                                                          \
        o.flags |= PKV_WEIGHT_PACK;                                                                   \
        REFUSED(pkv_gguf_weight_create(w.ctx, &o, &made, &check_err), status, argument);              \
        CHECK(made == (pkv_gguf_weight *)8);                                                          \
    } while (0)
    world_reset(&w);
    WEIGHT_BAD(PKV_ERR_NULL, "options.data", o.data = NULL);
    WEIGHT_BAD(PKV_ERR_UNSUPPORTED, "options.encoding", o.encoding = 4);
    WEIGHT_BAD(PKV_ERR_UNSUPPORTED, "options.encoding", o.encoding = -1);
    WEIGHT_BAD(PKV_ERR_UNSUPPORTED, "options.encoding", o.encoding = 16); /* IQ2_XXS: a real one, not built */
    WEIGHT_BAD(PKV_ERR_VALUE, "options.flags", o.flags = 2);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.cols", o.cols = K - 1);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.cols", o.cols = 0);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.cols", o.cols = -32);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.rows", o.rows = 0);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.rows", o.rows = INT64_MIN);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.data_size", o.data_size -= 1);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.data_size", o.data_size = 0);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.data_size", o.rows += 1);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.row_bytes", o.row_bytes = K / 32 * 34 - 1);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.row_bytes", o.row_bytes = -68);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.data_size", o.row_bytes = K / 32 * 34 + 1);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.rows", o.rows = INT64_MAX / 32; o.data_size = SIZE_MAX);
    WEIGHT_BAD(PKV_ERR_SHAPE, "options.", o.cols = INT64_MAX / 32 * 32; o.data_size = SIZE_MAX);
    pkv_gguf_weight_options o = weight_options(&w, 4);
    REFUSED(pkv_gguf_weight_create(NULL, &o, &made, &check_err), PKV_ERR_NULL, "ctx");
    REFUSED(pkv_gguf_weight_create(w.ctx, NULL, &made, &check_err), PKV_ERR_NULL, "options");
    REFUSED(pkv_gguf_weight_create(w.ctx, &o, NULL, &check_err), PKV_ERR_NULL, "out");

    /* pkv_gguf_encoding_info: the block sizes of GGUF's public layouts */
    static const struct {
        int32_t encoding;
        const char *name;
        uint32_t elements, bytes;
    } known[] = {{PKV_GGUF_F32, "F32", 1, 4},       {PKV_GGUF_F16, "F16", 1, 2},      {PKV_GGUF_BF16, "BF16", 1, 2},     {PKV_GGUF_Q4_0, "Q4_0", 32, 18},
                 {PKV_GGUF_Q4_1, "Q4_1", 32, 20},   {PKV_GGUF_Q5_0, "Q5_0", 32, 22},  {PKV_GGUF_Q5_1, "Q5_1", 32, 24},   {PKV_GGUF_Q8_0, "Q8_0", 32, 34},
                 {PKV_GGUF_Q2_K, "Q2_K", 256, 84},  {PKV_GGUF_Q3_K, "Q3_K", 256, 110}, {PKV_GGUF_Q4_K, "Q4_K", 256, 144}, {PKV_GGUF_Q5_K, "Q5_K", 256, 176},
                 {PKV_GGUF_Q6_K, "Q6_K", 256, 210}, {PKV_GGUF_IQ4_NL, "IQ4_NL", 32, 18}, {PKV_GGUF_IQ4_XS, "IQ4_XS", 256, 136}, {PKV_GGUF_MXFP4, "MXFP4", 32, 17}};
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
        const char *name = NULL;
        uint32_t elements = 0, bytes = 0;
        CHECK(pkv_gguf_encoding_info(known[i].encoding, &name, &elements, &bytes) == PKV_OK);
        CHECK(name && strcmp(name, known[i].name) == 0 && elements == known[i].elements && bytes == known[i].bytes);
        CHECK(pkv_gguf_encoding_info(known[i].encoding, NULL, NULL, NULL) == PKV_OK);
    }
    const int32_t unknown[] = {-1, 4, 5, 9, 15, 16, 24, 31, 40, 255, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; ++i) {
        const char *name = "kept";
        uint32_t elements = 7, bytes = 7;
        CHECK(pkv_gguf_encoding_info(unknown[i], &name, &elements, &bytes) == PKV_ERR_UNSUPPORTED);
        CHECK(strcmp(name, "kept") == 0 && elements == 7 && bytes == 7);
    }
}

static void never_called(void *user, uint32_t count, pkv_task_fn run, void *task)
{
    (void)user, (void)count, (void)run, (void)task;
}

static void contexts(void)
{
    pkv_context *made = (pkv_context *)8;
#define CONTEXT_BAD(status, argument, mutation)                                          \
    do {                                                                                 \
        pkv_context_options o = {0};                                                     \
        o.struct_size = sizeof o;                                                        \
        o.abi_version = PKV_ABI_VERSION;                                                 \
        mutation;                                                                        \
        REFUSED(pkv_context_create(&o, &made, &check_err), status, argument);            \
        CHECK(made == (pkv_context *)8);                                                 \
    } while (0)
    CONTEXT_BAD(PKV_ERR_ABI, "options.abi_version", o.abi_version = 0);
    CONTEXT_BAD(PKV_ERR_ABI, "options.abi_version", o.abi_version = PKV_ABI_VERSION + 1);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.backend", o.backend = 2);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.backend", o.backend = -1);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.device", o.device = 1);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.log_level", o.log_level = 5);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.log_level", o.log_level = -1);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.reserved", o.reserved = 1);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.num_threads", o.num_threads = 1025);
    CONTEXT_BAD(PKV_ERR_VALUE, "options.num_threads", o.parallel_for = never_called; o.num_threads = UINT32_MAX);
    REFUSED(pkv_context_create(NULL, NULL, &check_err), PKV_ERR_NULL, "out");
    CHECK(pkv_context_num_threads(NULL) == 0);

    /* A CUDA context where there is no such device: a clear answer, never a fall back to the CPU. */
    pkv_context_options cuda = {0};
    cuda.struct_size = sizeof cuda;
    cuda.abi_version = PKV_ABI_VERSION;
    cuda.backend = PKV_BACKEND_CUDA;
    cuda.device = 9999;
    pkv_status status = pkv_context_create(&cuda, &made, &check_err);
    CHECK(status == PKV_ERR_NO_DEVICE || status == PKV_ERR_UNSUPPORTED || status == PKV_ERR_VALUE);
    CHECK(made == (pkv_context *)8 && check_err.message[0]);
}

static void collections(void)
{
    pkv_collection *made = (pkv_collection *)8;
    size_t blocks = 0, scales = 0;
#define COLLECTION_BAD(status, argument, mutation)                                                   \
    do {                                                                                             \
        pkv_collection_options o = key_options(&w);                                                  \
        mutation;                                                                                    \
        REFUSED(pkv_collection_create(w.ctx, &o, &made, &check_err), status, argument);              \
        CHECK(made == (pkv_collection *)8);                                                          \
    } while (0)
#define SHAPE_BAD(status, argument, mutation)                                                        \
    do {                                                                                             \
        COLLECTION_BAD(status, argument, mutation);                                                  \
        pkv_collection_options o = key_options(&w);                                                  \
        mutation;                                                                                    \
        blocks = scales = 77;                                                                        \
        REFUSED(pkv_collection_storage_size(&o, &blocks, &scales, &check_err), status, argument);    \
        CHECK(blocks == 77 && scales == 77);                                                         \
    } while (0)
    world_reset(&w);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.dtype", o.dtype = PKV_DTYPE_NONE);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.dtype", o.dtype = PKV_I8);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.dtype", o.dtype = PKV_F8_E8M0);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.dtype", o.dtype = -7);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.scale_dtype", o.scale_dtype = PKV_F16);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.scale_dtype", o.scale_dtype = 1000);
    SHAPE_BAD(PKV_ERR_DTYPE, "options.scale_dtype", o.dtype = PKV_BF16); /* nothing to scale */
    SHAPE_BAD(PKV_ERR_SHAPE, "options.num_blocks", o.num_blocks = 0);
    SHAPE_BAD(PKV_ERR_SHAPE, "options.num_layers", o.num_layers = 0);
    SHAPE_BAD(PKV_ERR_SHAPE, "options.page_size", o.page_size = 0);
    SHAPE_BAD(PKV_ERR_SHAPE, "options.num_heads", o.num_heads = 0);
    SHAPE_BAD(PKV_ERR_SHAPE, "options.head_size", o.head_size = 0);
    SHAPE_BAD(PKV_ERR_VALUE, "options.is_mla", o.is_mla = 2);
    SHAPE_BAD(PKV_ERR_VALUE, "options.reserved", o.reserved = 1);
    SHAPE_BAD(PKV_ERR_VALUE, "options.quantization_granularity", o.scale_dtype = PKV_DTYPE_NONE; o.quantization_granularity = 64);
    SHAPE_BAD(PKV_ERR_SHAPE, "options", o.num_blocks = UINT32_MAX; o.num_layers = UINT32_MAX);
    SHAPE_BAD(PKV_ERR_SHAPE, "options", o.num_blocks = o.num_layers = o.page_size = o.num_heads = o.head_size = UINT32_MAX);
    COLLECTION_BAD(PKV_ERR_SHAPE, "options.blocks", o.blocks.size -= 1);
    COLLECTION_BAD(PKV_ERR_SHAPE, "options.scales", o.scales.size -= 1);
    COLLECTION_BAD(PKV_ERR_NULL, "options.blocks", o.blocks.data = NULL);
    COLLECTION_BAD(PKV_ERR_NULL, "options.scales", o.scales.data = NULL);
    COLLECTION_BAD(PKV_ERR_NULL, "options.scales", o.scales.data = NULL; o.scales.size = 0);
    COLLECTION_BAD(PKV_ERR_ALIGNMENT, "options.scales", o.scales.data = (char *)o.scales.data + 1; o.scales.size += 8);
    COLLECTION_BAD(PKV_ERR_ALIGNMENT, "options.blocks", o = plain_options(&w); o.blocks.data = (char *)o.blocks.data + 2; o.blocks.size += 8);
    pkv_collection_options o = key_options(&w);
    REFUSED(pkv_collection_create(NULL, &o, &made, &check_err), PKV_ERR_NULL, "ctx");
    REFUSED(pkv_collection_create(w.ctx, NULL, &made, &check_err), PKV_ERR_NULL, "options");
    REFUSED(pkv_collection_create(w.ctx, &o, NULL, &check_err), PKV_ERR_NULL, "out");
    REFUSED(pkv_collection_storage_size(NULL, &blocks, &scales, &check_err), PKV_ERR_NULL, "options");
    OK(pkv_collection_storage_size(&o, NULL, NULL, &check_err));

    /* More than the machine has: refused, not aborted. */
    pkv_collection_options huge = plain_options(&w);
    huge.num_blocks = 1u << 28;
    huge.page_size = 1u << 12;
    memset(&huge.blocks, 0, sizeof huge.blocks);
    REFUSED(pkv_collection_create(w.ctx, &huge, &made, &check_err), PKV_ERR_NO_MEMORY, "options.blocks");
    CHECK(made == (pkv_collection *)8);

    pkv_cache_view view, kept;
    memset(&view, 0x77, sizeof view);
    kept = view;
    REFUSED(pkv_collection_key_cache(NULL, 0, &view, &check_err), PKV_ERR_NULL, "collection");
    REFUSED(pkv_collection_key_cache(w.plain, 0, NULL, &check_err), PKV_ERR_NULL, "out");
    REFUSED(pkv_collection_key_cache(w.plain, LAYERS, &view, &check_err), PKV_ERR_VALUE, "layer_idx");
    REFUSED(pkv_collection_value_cache(NULL, 0, &view, &check_err), PKV_ERR_NULL, "collection");
    REFUSED(pkv_collection_value_cache(w.plain, 0, NULL, &check_err), PKV_ERR_NULL, "out");
    REFUSED(pkv_collection_value_cache(w.plain, UINT32_MAX, &view, &check_err), PKV_ERR_VALUE, "layer_idx");
    REFUSED(pkv_collection_value_cache(w.mla, 0, &view, &check_err), PKV_ERR_VALUE, "collection");
    REFUSED(pkv_collection_info(NULL, &o, &check_err), PKV_ERR_NULL, "collection");
    REFUSED(pkv_collection_info(w.plain, NULL, &check_err), PKV_ERR_NULL, "out");
    CHECK(memcmp(&view, &kept, sizeof view) == 0);
}

/* batch_size 0 and batches without new tokens: fine, nothing written, and the arrays of an empty batch are not looked at. */
static void nothing_to_do(void)
{
    for (int i = 0; i < MERGE; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        w.batch.batch_size = 0;
        w.batch.input_row_offsets = w.batch.cache_lengths = w.batch.lookup_table = NULL;
        w.gather.buffer_row_offsets = w.gather.cache_offsets = w.prefill.buffer_row_offsets = w.prefill.cache_offsets = NULL;
        w.prefill.buffer_length = 0;
        world_keep(&w, before);
        OK(world_run(&w, op, &check_err));
        CHECK(world_kept(&w, before));

        if (op == GATHER)
            continue; /* has rows to copy all the same */
        world_reset(&w);
        w.row_offsets[1] = w.row_offsets[2] = 0;
        w.buffer_row_offsets[1] = 0;
        w.buffer_row_offsets[2] = 2;
        w.prefill.buffer_length = 2;
        world_keep(&w, before);
        OK(world_run(&w, op, &check_err));
        CHECK(world_kept(&w, before));
    }
    world_reset(&w);
    for (size_t t = 0; t < NUM_TENSORS; ++t)
        if (tensors[t].op == MERGE) {
            pkv_tensor *tensor = (pkv_tensor *)((char *)&w.merge + tensors[t].offset);
            tensor->shape[0] = 0;
            tensor->data = NULL; /* no elements, no pointer */
        }
    world_keep(&w, before);
    OK(world_run(&w, MERGE, &check_err));
    CHECK(world_kept(&w, before));
}

int main(void)
{
    world_open(&w, NULL);
    world_open(&other, NULL);
    valid_calls();
    every_tensor();
    every_batch();
    every_op();
    store_and_gather();
    scalars();
    collections_of_the_wrong_kind();
    positions_past_the_table();
    positions_past_the_indices();
    weights();
    contexts();
    collections();
    nothing_to_do();
    world_close(&w);
    world_close(&other);
    return check_end();
}

/* A C99 program links, stores two sequences' rows in pages, reads them back, and frees everything. */
#include "check.h"

enum { HEADS = 2, HEAD = 5, TOKENS = 7 };

static void round_trip(const pkv_context *ctx, int32_t dtype, uint32_t page_size)
{
    pkv_collection_options options = {0};
    options.struct_size = sizeof options;
    options.dtype = dtype;
    options.num_blocks = 8;
    options.num_layers = 3;
    options.page_size = page_size;
    options.num_heads = HEADS;
    options.head_size = HEAD;
    pkv_collection *collection = NULL;
    if (!OK(pkv_collection_create(ctx, &options, &collection, &check_err)))
        return;

    /* Sequence 0 brings four tokens, sequence 1 none, sequence 2 three. */
    const uint32_t row_offsets[] = {0, 4, 4, 7}, lengths[] = {0, 0, 0};
    const uint32_t table[] = {7, 1, 5, 3, /**/ 0, 0, 0, 0, /**/ 2, 6, 4, 0};
    pkv_batch batch = {0};
    batch.struct_size = sizeof batch;
    batch.input_row_offsets = row_offsets;
    batch.cache_lengths = lengths;
    batch.lookup_table = table;
    batch.batch_size = 3;
    batch.max_pages = 4;
    batch.max_seq_length = 4;

    float values[TOKENS][HEADS][HEAD], out[TOKENS][HEADS][HEAD];
    for (int t = 0; t < TOKENS; ++t)
        for (int h = 0; h < HEADS; ++h)
            for (int i = 0; i < HEAD; ++i)
                values[t][h][i] = (float)(t * 16 + h * 8 + i); /* whole numbers below 256: exact in bf16 too */
    memset(out, 0xff, sizeof out);

    pkv_kv_store_params store = {0};
    store.struct_size = sizeof store;
    store.collection = collection;
    store.batch = &batch;
    store.layer_idx = 2;
    store.kv_idx = 1;
    store.values.data = values;
    store.values.dtype = PKV_F32;
    store.values.ndim = 3;
    store.values.shape[0] = TOKENS;
    store.values.shape[1] = HEADS;
    store.values.shape[2] = HEAD;
    OK(pkv_kv_store(ctx, no_stream, &store, no_workspace, &check_err));

    pkv_kv_gather_params gather = {0};
    gather.struct_size = sizeof gather;
    gather.collection = collection;
    gather.batch = &batch;
    gather.layer_idx = 2;
    gather.kv_idx = 1;
    gather.buffer_row_offsets = row_offsets;
    gather.out = store.values;
    gather.out.data = out;
    OK(pkv_kv_gather(ctx, no_stream, &gather, no_workspace, &check_err));
    CHECK(memcmp(out, values, sizeof out) == 0);

    /* The view says where a row lies: token 3 of sequence 0. */
    pkv_cache_view view;
    OK(pkv_collection_value_cache(collection, 2, &view, &check_err));
    CHECK(view.blocks.dtype == dtype && view.blocks.ndim == 4 && view.scales.data == NULL);
    CHECK(view.blocks.shape[0] == 8 && view.blocks.shape[1] == (int64_t)page_size && view.blocks.shape[2] == HEADS && view.blocks.shape[3] == HEAD);
    if (dtype == PKV_F32) {
        const float *row = (const float *)view.blocks.data + table[3 / page_size] * view.blocks.stride[0] + 3 % page_size * view.blocks.stride[1];
        CHECK(memcmp(row, values[3], sizeof values[3]) == 0);
    }
    pkv_collection_destroy(collection);
}

int main(void)
{
    pkv_context *ctx = NULL;
    if (!OK(pkv_context_create(NULL, &ctx, &check_err)))
        return check_end();
    CHECK(pkv_context_num_threads(ctx) >= 1);
    const int32_t dtypes[] = {PKV_F32, PKV_F16, PKV_BF16};
    const uint32_t pages[] = {1, 2, 3, 7, 16, 32, 64, 128, 256};
    for (int d = 0; d < 3; ++d)
        for (int p = 0; p < 9; ++p)
            round_trip(ctx, dtypes[d], pages[p]);
    pkv_context_destroy(ctx);
    pkv_context_destroy(NULL);
    pkv_collection_destroy(NULL);
    pkv_gguf_weight_destroy(NULL);
    return check_end();
}

/* The smallest complete program: two sequences, one layer, rows stored in pages and gathered back.
 *
 *   cc -std=c99 main.c $(pkg-config --cflags --libs pagedkv)
 */
#include <pagedkv.h>
#include <stdio.h>

enum { NUM_BLOCKS = 4, PAGE_SIZE = 2, NUM_HEADS = 1, HEAD_SIZE = 4, TOKENS = 5 };

static int failed(const char *what, const pkv_error *error)
{
    fprintf(stderr, "%s: %s, %s: %s\n", what, pkv_status_name(error->status), error->argument, error->message);
    return 1;
}

static pkv_tensor tensor(float *data)
{
    pkv_tensor t = {0}; /* strides of zero: contiguous, row-major */
    t.data = data;
    t.dtype = PKV_F32;
    t.ndim = 3;
    t.shape[0] = TOKENS;
    t.shape[1] = NUM_HEADS;
    t.shape[2] = HEAD_SIZE;
    return t;
}

int main(void)
{
    pkv_error error = {0};
    error.struct_size = sizeof error;

    pkv_context *ctx = NULL;
    if (pkv_context_create(NULL, &ctx, &error) != PKV_OK)
        return failed("context", &error);

    /* An fp8 cache with one f32 scale a row; the library allocates it, because blocks and scales are left {NULL, 0}. */
    pkv_collection_options options = {0};
    options.struct_size = sizeof options;
    options.dtype = PKV_F8_E4M3;
    options.scale_dtype = PKV_F32;
    options.num_blocks = NUM_BLOCKS;
    options.num_layers = 1;
    options.page_size = PAGE_SIZE;
    options.num_heads = NUM_HEADS;
    options.head_size = HEAD_SIZE;
    pkv_collection *cache = NULL;
    if (pkv_collection_create(ctx, &options, &cache, &error) != PKV_OK)
        return failed("collection", &error);

    /* Sequence 0 brings three new tokens and owns blocks 2 and 0; sequence 1 brings two and owns block 3. */
    const uint32_t row_offsets[] = {0, 3, 5}, cache_lengths[] = {0, 0}, table[][2] = {{2, 0}, {3, 0}};
    pkv_batch batch = {0};
    batch.struct_size = sizeof batch;
    batch.input_row_offsets = row_offsets;
    batch.cache_lengths = cache_lengths;
    batch.lookup_table = &table[0][0];
    batch.batch_size = 2;
    batch.max_pages = 2;
    batch.max_seq_length = 3;

    float keys[TOKENS][HEAD_SIZE], out[TOKENS][HEAD_SIZE] = {{0}};
    for (int t = 0; t < TOKENS; ++t)
        for (int i = 0; i < HEAD_SIZE; ++i)
            keys[t][i] = 0.5f * (float)(t + 1) * (float)(i - 1);

    pkv_kv_store_params store = {0};
    store.struct_size = sizeof store;
    store.collection = cache;
    store.batch = &batch;
    store.values = tensor(&keys[0][0]);
    const pkv_stream stream = {NULL}; /* the CPU has no streams */
    const pkv_buffer workspace = {NULL, 0}; /* the library takes what it needs for the call */
    if (pkv_kv_store(ctx, stream, &store, workspace, &error) != PKV_OK)
        return failed("store", &error);

    pkv_kv_gather_params gather = {0};
    gather.struct_size = sizeof gather;
    gather.collection = cache;
    gather.batch = &batch;
    gather.buffer_row_offsets = row_offsets; /* all rows of both sequences */
    gather.out = tensor(&out[0][0]);
    if (pkv_kv_gather(ctx, stream, &gather, workspace, &error) != PKV_OK)
        return failed("gather", &error);

    /* fp8 e4m3 keeps four significant bits, so a value comes back within 1/16 of itself. */
    int wrong = 0;
    for (int t = 0; t < TOKENS; ++t) {
        printf("token %d:", t);
        for (int i = 0; i < HEAD_SIZE; ++i) {
            const float difference = out[t][i] - keys[t][i], size = keys[t][i] < 0 ? -keys[t][i] : keys[t][i];
            wrong += difference > size / 16 || difference < -size / 16;
            printf(" %6.3f (%6.3f)", (double)out[t][i], (double)keys[t][i]);
        }
        printf("\n");
    }

    pkv_collection_destroy(cache);
    pkv_context_destroy(ctx);
    printf("pagedkv %s: %s\n", pkv_version(), wrong ? "wrong" : "right");
    return wrong != 0;
}

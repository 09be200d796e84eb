/* Many threads, one context, one collection, one set of weights: each thread has its own layer, its own batch and its own error. Results are those of
 * a thread alone, and no thread sees another's error. Also contexts made and destroyed while others work. Run under ThreadSanitizer as well. */
#define _POSIX_C_SOURCE 200809L
#include "engine_threads.h"
#include "valid_calls.h"

enum { THREADS = 8, ROUNDS = 12, BIG_TOKENS = 40, BIG_HEAD = 32, BIG_PAGE = 16, BIG_PAGES = 3, WIDTH = 64 };

struct shared {
    pkv_context *ctx;
    pkv_collection *cache;
    pkv_gguf_weight *weight;
    unsigned char weight_data[BIG_HEAD * WIDTH / 32 * 34];
    pthread_mutex_t lock;
    pthread_cond_t start;
    int waiting;
};

struct worker {
    struct shared *shared;
    uint32_t layer;
    unsigned wrong; /* the counts of check.h are for one thread */
};

static void fill(float *x, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; ++i) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 24) - 128.0f;
    }
}

/* One step of a layer: q, k and v by three matmuls, then keys and values read back. */
static int step(struct shared *s, uint32_t layer, uint32_t seed, float *q, float *keys, float *values)
{
    float hidden[BIG_TOKENS * WIDTH];
    fill(hidden, BIG_TOKENS * WIDTH, seed);
    const uint32_t row_offsets[] = {0, BIG_TOKENS}, lengths[] = {0};
    const uint32_t table[] = {layer % 4 + 2, layer % 2, 6 + layer % 2};
    pkv_batch batch = {0};
    batch.struct_size = sizeof batch;
    batch.input_row_offsets = row_offsets;
    batch.cache_lengths = lengths;
    batch.lookup_table = table;
    batch.batch_size = 1;
    batch.max_pages = BIG_PAGES;
    batch.max_seq_length = BIG_TOKENS;

    pkv_error err = {0};
    err.struct_size = sizeof err;
    pkv_qkv_matmul_gguf_params qkv = {0};
    qkv.struct_size = sizeof qkv;
    qkv.collection = s->cache;
    qkv.batch = &batch;
    qkv.q_weight = qkv.k_weight = qkv.v_weight = s->weight;
    qkv.layer_idx = layer;
    qkv.hidden_state = tensor2(hidden, PKV_F32, BIG_TOKENS, WIDTH);
    qkv.q_output = tensor2(q, PKV_F32, BIG_TOKENS, BIG_HEAD);
    if (pkv_qkv_matmul_gguf(s->ctx, no_stream, &qkv, no_workspace, &err) != PKV_OK)
        return 1;

    pkv_kv_gather_params gather = {0};
    gather.struct_size = sizeof gather;
    gather.collection = s->cache;
    gather.batch = &batch;
    gather.layer_idx = layer;
    gather.buffer_row_offsets = row_offsets;
    gather.out = tensor3(keys, PKV_F32, BIG_TOKENS, 1, BIG_HEAD);
    if (pkv_kv_gather(s->ctx, no_stream, &gather, no_workspace, &err) != PKV_OK)
        return 2;
    gather.kv_idx = 1;
    gather.out.data = values;
    if (pkv_kv_gather(s->ctx, no_stream, &gather, no_workspace, &err) != PKV_OK)
        return 3;

    /* A fault of this thread, and its own words about it. */
    char argument[48];
    gather.layer_idx = 1000 + layer;
    snprintf(argument, sizeof argument, "is %u", (unsigned)gather.layer_idx);
    if (pkv_kv_gather(s->ctx, no_stream, &gather, no_workspace, &err) != PKV_ERR_VALUE || !strstr(err.message, argument))
        return 4;
    return 0;
}

enum { ROW = BIG_TOKENS * BIG_HEAD };

static void *worker_main(void *arg)
{
    struct worker *me = (struct worker *)arg;
    pthread_mutex_lock(&me->shared->lock); /* all start together: the first calls of a process meet */
    if (++me->shared->waiting == THREADS)
        pthread_cond_broadcast(&me->shared->start);
    while (me->shared->waiting < THREADS)
        pthread_cond_wait(&me->shared->start, &me->shared->lock);
    pthread_mutex_unlock(&me->shared->lock);

    float q[ROW], keys[ROW], values[ROW], first[3][ROW];
    for (uint32_t round = 0; round < ROUNDS; ++round) {
        me->wrong += step(me->shared, me->layer, round % 3 * 97 + me->layer, q, keys, values) != 0;
        if (round == 0) {
            memcpy(first[0], q, sizeof q);
            memcpy(first[1], keys, sizeof keys);
            memcpy(first[2], values, sizeof values);
        } else if (round % 3 == 0) {
            me->wrong += memcmp(first[0], q, sizeof q) || memcmp(first[1], keys, sizeof keys) || memcmp(first[2], values, sizeof values);
        }
        me->wrong += memcmp(keys, values, sizeof keys) != 0; /* one weight makes both */
        if (round % 4 == 1) {
            pkv_context *mine = NULL;
            pkv_context_options o = {0};
            o.struct_size = sizeof o;
            o.abi_version = PKV_ABI_VERSION;
            o.num_threads = OWN_POOLS ? 2 : 1;
            me->wrong += pkv_context_create(&o, &mine, NULL) != PKV_OK || pkv_context_num_threads(mine) != o.num_threads;
            pkv_context_destroy(mine);
        }
        me->wrong += !pkv_build_info()[0] || !pkv_version()[0] || pkv_abi_version() != PKV_ABI_VERSION;
    }
    return NULL;
}

/* All workers on one context: the library's pool, shared by all callers, or the engine's threads. */
static void many_callers(struct engine *engine)
{
    struct shared s = {0};
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.start, NULL);
    pkv_context_options o = {0};
    o.struct_size = sizeof o;
    o.abi_version = PKV_ABI_VERSION;
    o.num_threads = 3;
    if (engine) {
        o.parallel_for = engine_parallel_for;
        o.parallel_user = engine;
    }
    OK(pkv_context_create(&o, &s.ctx, &check_err));
    pkv_collection_options c = {0};
    c.struct_size = sizeof c;
    c.dtype = PKV_F32;
    c.num_blocks = 8;
    c.num_layers = THREADS;
    c.page_size = BIG_PAGE;
    c.num_heads = 1;
    c.head_size = BIG_HEAD;
    OK(pkv_collection_create(s.ctx, &c, &s.cache, &check_err));
    for (size_t b = 0; b < sizeof s.weight_data / 34; ++b) {
        s.weight_data[b * 34 + 1] = 0x20; /* the scale, f16 2^-7 */
        for (size_t i = 0; i < 32; ++i)
            s.weight_data[b * 34 + 2 + i] = (unsigned char)(signed char)((b * 13 + i * 29) % 255 - 127);
    }
    pkv_gguf_weight_options weight = {0};
    weight.struct_size = sizeof weight;
    weight.data = s.weight_data;
    weight.data_size = sizeof s.weight_data;
    weight.rows = BIG_HEAD;
    weight.cols = WIDTH;
    weight.encoding = PKV_GGUF_Q8_0;
    weight.flags = PKV_WEIGHT_PACK;
    OK(pkv_gguf_weight_create(s.ctx, &weight, &s.weight, &check_err));

    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    for (uint32_t t = 0; t < THREADS; ++t) {
        struct worker worker = {&s, t, 0};
        workers[t] = worker;
        if (pthread_create(&threads[t], NULL, worker_main, &workers[t]))
            exit(2);
    }
    for (int t = 0; t < THREADS; ++t) {
        pthread_join(threads[t], NULL);
        CHECK(workers[t].wrong == 0);
    }

    /* The shared pool gives what one thread alone computes. */
    static float q[ROW], keys[ROW], values[ROW], alone_q[ROW], alone_keys[ROW], alone_values[ROW];
    pkv_context *single = NULL;
    o.num_threads = 1;
    o.parallel_for = NULL;
    OK(pkv_context_create(&o, &single, &check_err));
    struct shared alone = s;
    alone.ctx = single;
    OK(pkv_collection_create(single, &c, &alone.cache, &check_err));
    OK(pkv_gguf_weight_create(single, &weight, &alone.weight, &check_err));
    for (uint32_t layer = 0; layer < THREADS; ++layer) {
        CHECK(step(&s, layer, layer, q, keys, values) == 0 && step(&alone, layer, layer, alone_q, alone_keys, alone_values) == 0);
        CHECK(memcmp(q, alone_q, sizeof q) == 0 && memcmp(keys, alone_keys, sizeof keys) == 0 && memcmp(values, alone_values, sizeof values) == 0);
    }
    pkv_gguf_weight_destroy(alone.weight);
    pkv_collection_destroy(alone.cache);
    pkv_context_destroy(single);
    pkv_gguf_weight_destroy(s.weight);
    pkv_collection_destroy(s.cache);
    pkv_context_destroy(s.ctx);
    pthread_cond_destroy(&s.start);
    pthread_mutex_destroy(&s.lock);
}

int main(void)
{
    struct engine engine;
    engine_open(&engine, 3, 0);
    many_callers(&engine);
    engine_close(&engine);
    if (OWN_POOLS)
        many_callers(NULL);
    return check_end();
}

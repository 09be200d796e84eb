/* The engine's callbacks: parallel_for (serial, backwards, on the engine's own threads, also from several calls at once) and log.
 * Results are the same bits for every way of running them. */
#define _POSIX_C_SOURCE 200809L
#include "engine_threads.h"
#include "valid_calls.h"

static pkv_context_options options(uint32_t threads)
{
    pkv_context_options o = {0};
    o.struct_size = sizeof o;
    o.abi_version = PKV_ABI_VERSION;
    o.num_threads = threads;
    return o;
}

/* All kernels in one world; what they wrote stays in the arena. */
static void run_all(struct world *w, unsigned char results[NUM_OPS][ARENA])
{
    for (int op = 0; op < NUM_OPS; ++op) {
        world_reset(w);
        OK(world_run(w, (enum op)op, &check_err));
        world_keep(w, results[op]);
    }
}

static unsigned char want[NUM_OPS][ARENA], got[NUM_OPS][ARENA];

static void same_results(const struct world *w)
{
    for (int op = 0; op < NUM_OPS; ++op)
        check_that(memcmp(want[op], got[op], w->results) == 0, "the same bits", op_names[op], __LINE__);
}

static void same_bits_on_any_threads(void)
{
    struct world w;
    pkv_context_options o = options(1);
    world_open(&w, &o);
    CHECK(pkv_context_num_threads(w.ctx) == 1);
    run_all(&w, want);
    world_close(&w);

    const uint32_t pools[] = {2, 3, 7};
    for (int p = 0; p < OWN_POOLS * 3; ++p) {
        o = options(pools[p]);
        world_open(&w, &o);
        CHECK(pkv_context_num_threads(w.ctx) == pools[p]);
        run_all(&w, got);
        same_results(&w);
        world_close(&w);
    }

    const struct {
        int threads, backwards;
        uint32_t told;
    } engines[] = {{1, 0, 0}, {1, 0, 1}, {1, 1, 4}, {4, 0, 4}, {3, 1, 8}, {2, 0, 1}};
    for (size_t e = 0; e < sizeof engines / sizeof *engines; ++e) {
        struct engine engine;
        engine_open(&engine, engines[e].threads, engines[e].backwards);
        o = options(engines[e].told);
        o.parallel_for = engine_parallel_for;
        o.parallel_user = &engine;
        world_open(&w, &o);
        CHECK(pkv_context_num_threads(w.ctx) == (engines[e].told ? engines[e].told : 1)); /* 1 if the engine says nothing */
        run_all(&w, got);
        same_results(&w);
        world_close(&w);
        /* Asked where there are threads to give, and only there; the plain reference runs on the caller's thread. */
        const char *isa = getenv("PAGEDKV_CPU_ISA");
        CHECK((engine.calls > 0) == (engines[e].told > 1 && !(isa && strcmp(isa, "reference") == 0)));
        engine_close(&engine);
    }
}

/* Work that is worth splitting goes to the engine's threads and nowhere else, each index once. */
static void long_work_is_given_to_the_engine(void)
{
    enum { T = 4096, H = 8, D = 64 };
    struct engine engine;
    engine_open(&engine, 3, 0);
    pkv_context_options o = options(3);
    o.parallel_for = engine_parallel_for;
    o.parallel_user = &engine;
    pkv_context *ctx = NULL;
    OK(pkv_context_create(&o, &ctx, &check_err));
    float *a = (float *)malloc(sizeof(float) * T * H * D), *b = (float *)malloc(sizeof(float) * T * H * D), *lse = (float *)malloc(sizeof(float) * T * H);
    if (!a || !b || !lse)
        exit(2);
    for (int i = 0; i < T * H * D; ++i)
        a[i] = (float)(i % 97);
    for (int i = 0; i < T * H; ++i)
        lse[i] = (float)(i % 5);
    memset(b, 0xff, sizeof(float) * T * H * D);
    pkv_merge_attention_params merge = {0};
    merge.struct_size = sizeof merge;
    merge.output_a = merge.output_b = tensor3(a, PKV_F32, T, H, D);
    merge.lse_a = merge.lse_b = tensor2(lse, PKV_F32, T, H);
    merge.output = tensor3(b, PKV_F32, T, H, D);
    OK(pkv_merge_attention(ctx, no_stream, &merge, no_workspace, &check_err));
    int wrong = 0; /* the mean of a and a is a */
    for (int i = 0; i < T * H * D; ++i)
        wrong += fabsf(b[i] - a[i]) > 1e-5f * fabsf(a[i]);
    CHECK(wrong == 0);
    pkv_context_destroy(ctx);
    engine_close(&engine);
    free(a);
    free(b);
    free(lse);
}

struct log {
    pthread_mutex_t lock;
    unsigned lines, above, empty;
    int32_t level;
};

static void log_line(void *user, int32_t level, const char *target, const char *message)
{
    struct log *log = (struct log *)user;
    pthread_mutex_lock(&log->lock);
    log->lines++;
    log->above += level < PKV_LOG_ERROR || level > log->level;
    log->empty += !target || !target[0] || !message || !message[0];
    pthread_mutex_unlock(&log->lock);
}

static void log_lines_go_to_the_callback(void)
{
    unsigned lines[PKV_LOG_DEBUG + 1];
    for (int32_t level = PKV_LOG_OFF; level <= PKV_LOG_DEBUG; ++level) {
        struct log log = {PTHREAD_MUTEX_INITIALIZER, 0, 0, 0, level};
        pkv_context_options o = options(1);
        o.log_level = level;
        o.log = log_line;
        o.log_user = &log;
        struct world w;
        world_open(&w, &o);
        OK(world_run(&w, STORE, &check_err));
        world_close(&w);
        CHECK(log.above == 0 && log.empty == 0);
        lines[level] = log.lines;
        CHECK(level == PKV_LOG_OFF || lines[level] >= lines[level - 1]);
    }
    CHECK(lines[PKV_LOG_OFF] == 0);
    CHECK(lines[PKV_LOG_INFO] > 0); /* what was chosen for this machine */

    pkv_context_options silent = options(1); /* a level without a callback */
    silent.log_level = PKV_LOG_DEBUG;
    pkv_context *ctx = NULL;
    OK(pkv_context_create(&silent, &ctx, &check_err));
    pkv_context_destroy(ctx);
}

int main(void)
{
    same_bits_on_any_threads();
    long_work_is_given_to_the_engine();
    log_lines_go_to_the_callback();
    return check_end();
}

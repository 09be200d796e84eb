/* struct_size: a caller built against an older or a newer header is understood or refused, never misread. */
#include "valid_calls.h"

enum { MAX = 64 * 1024 };

/* Not struct_size's business, but the same rule for all: too short, absurd, and longer with something in it. */
static const size_t refused_sizes[] = {0, 1, 7, 8, MAX + 1, MAX + 8, (size_t)1 << 32, SIZE_MAX - 7, SIZE_MAX};
enum { NUM_REFUSED = sizeof refused_sizes / sizeof *refused_sizes };

static unsigned char *big; /* a struct of 64 KiB: ours, then zeros */

static void *grown(const void *ours, size_t size, size_t claimed)
{
    memset(big, 0, MAX + 64);
    memcpy(big, ours, size);
    memcpy(big, &claimed, sizeof claimed);
    return big;
}

#define SIZES(type, value, call, argument)                                                       \
    do {                                                                                         \
        const type ours = value;                                                                 \
        for (int i = 0; i < NUM_REFUSED; ++i) {                                                  \
            const type *in = (const type *)grown(&ours, sizeof ours, refused_sizes[i]);          \
            REFUSED(call, PKV_ERR_ABI, argument);                                                \
        }                                                                                        \
        {                                                                                        \
            const type *in = (const type *)grown(&ours, sizeof ours, sizeof ours - 8);           \
            REFUSED(call, PKV_ERR_ABI, argument); /* shorter than the first version */           \
        }                                                                                        \
        for (size_t size = sizeof ours; size <= MAX; size = size == sizeof ours ? size + 8 : size * 2 > MAX && size != MAX ? MAX : size * 2) { \
            const type *in = (const type *)grown(&ours, sizeof ours, size);                      \
            OK(call); /* longer, and what we do not know is zero */                              \
            if (size > sizeof ours) {                                                            \
                big[size - 1] = 1;                                                               \
                REFUSED(call, PKV_ERR_ABI, argument);                                            \
                grown(&ours, sizeof ours, size);                                                 \
                big[sizeof ours] = 0x80;                                                         \
                REFUSED(call, PKV_ERR_ABI, argument);                                            \
                grown(&ours, sizeof ours, size);                                                 \
                big[size] = 0xff; /* past the struct: not the library's to look at */            \
                OK(call);                                                                        \
            }                                                                                    \
        }                                                                                        \
    } while (0)

static struct world w;

static pkv_status make_context(const pkv_context_options *in)
{
    pkv_context *ctx = NULL;
    pkv_status status = pkv_context_create(in, &ctx, &check_err);
    CHECK((status == PKV_OK) == (ctx != NULL));
    pkv_context_destroy(ctx);
    return status;
}
static pkv_status make_collection(const pkv_collection_options *in)
{
    pkv_collection *collection = NULL;
    pkv_status status = pkv_collection_create(w.ctx, in, &collection, &check_err);
    CHECK((status == PKV_OK) == (collection != NULL));
    pkv_collection_destroy(collection);
    return status;
}
static pkv_status make_weight(const pkv_gguf_weight_options *in)
{
    pkv_gguf_weight *weight = NULL;
    pkv_status status = pkv_gguf_weight_create(w.ctx, in, &weight, &check_err);
    CHECK((status == PKV_OK) == (weight != NULL));
    pkv_gguf_weight_destroy(weight);
    return status;
}
static pkv_status store_batch(const pkv_batch *in)
{
    w.store.batch = in;
    return pkv_kv_store(w.ctx, no_stream, &w.store, no_workspace, &check_err);
}

static void options(void)
{
    pkv_context_options context = {0};
    context.struct_size = sizeof context;
    context.abi_version = PKV_ABI_VERSION;
    context.num_threads = 1;
    SIZES(pkv_context_options, context, make_context(in), "options.struct_size");
    SIZES(pkv_collection_options, plain_options(&w), make_collection(in), "options.struct_size");
    SIZES(pkv_gguf_weight_options, weight_options(&w, 4), make_weight(in), "options.struct_size");
    size_t a, b;
    SIZES(pkv_collection_options, key_options(&w), pkv_collection_storage_size(in, &a, &b, &check_err), "options.struct_size");
    SIZES(pkv_batch, w.batch, store_batch(in), "batch.struct_size");
    world_reset(&w);
}

static void kernel_params(void)
{
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        const size_t size = params_sizes[op];
        static unsigned char before[ARENA];
        world_reset(&w);
        memcpy(before, w.arena, w.used);
        size_t bytes = 0;
        for (int r = 0; r < NUM_REFUSED; ++r) {
            const void *in = grown(world_params(&w, op), size, refused_sizes[r]);
            REFUSED(query_op(w.ctx, op, in, &bytes, &check_err), PKV_ERR_ABI, "params.struct_size");
            REFUSED(run_op(w.ctx, op, no_stream, in, no_workspace, &check_err), PKV_ERR_ABI, "params.struct_size");
        }
        const void *in = grown(world_params(&w, op), size, size - 8);
        REFUSED(run_op(w.ctx, op, no_stream, in, no_workspace, &check_err), PKV_ERR_ABI, "params.struct_size");
        const size_t longer[] = {size + 8, size + 1000, MAX};
        for (int l = 0; l < 3; ++l) {
            in = grown(world_params(&w, op), size, longer[l]);
            big[longer[l] - 1] = 1;
            REFUSED(query_op(w.ctx, op, in, &bytes, &check_err), PKV_ERR_ABI, "params.struct_size");
            REFUSED(run_op(w.ctx, op, no_stream, in, no_workspace, &check_err), PKV_ERR_ABI, "params.struct_size");
        }
        CHECK(bytes == 0 && memcmp(before, w.arena, w.used) == 0);
        for (int l = 0; l < 3; ++l) {
            world_reset(&w);
            in = grown(world_params(&w, op), size, longer[l]);
            OK(query_op(w.ctx, op, in, &bytes, &check_err));
            OK(run_op(w.ctx, op, no_stream, in, no_workspace, &check_err));
        }
    }
}

/* The out struct of pkv_collection_info is the caller's size too: as much as it has room for, its unknown tail zeroed. */
static void info(void)
{
    for (int i = 0; i < NUM_REFUSED; ++i) {
        memset(big, 0x33, MAX + 64);
        memcpy(big, &refused_sizes[i], sizeof refused_sizes[i]);
        REFUSED(pkv_collection_info(w.plain, (pkv_collection_options *)big, &check_err), PKV_ERR_ABI, "out.struct_size");
        CHECK(big[8] == 0x33 && big[sizeof(pkv_collection_options)] == 0x33);
    }
    const pkv_collection_options want = plain_options(&w);
    const size_t longer = sizeof want + 24;
    memset(big, 0x33, MAX + 64);
    memcpy(big, &longer, sizeof longer);
    OK(pkv_collection_info(w.plain, (pkv_collection_options *)big, &check_err));
    CHECK(memcmp(big + 8, (const char *)&want + 8, sizeof want - 8) == 0);
    CHECK(memcmp(big, &longer, sizeof longer) == 0);
    for (size_t at = sizeof want; at < longer; ++at)
        CHECK(big[at] == 0);
    CHECK(big[longer] == 0x33);
}

/* pkv_error: filled on failure, cleared on success, not touched with struct_size 0, and never past what the caller has. */
static void error_struct(void)
{
    pkv_error err, kept;
    memset(&err, 0x44, sizeof err);
    err.struct_size = 0;
    kept = err;
    CHECK(pkv_context_create(NULL, NULL, &err) == PKV_ERR_NULL);
    CHECK(memcmp(&err, &kept, sizeof err) == 0);
    CHECK(pkv_context_create(NULL, NULL, NULL) == PKV_ERR_NULL);

    const size_t small[] = {1, 7, 8, 16, 64, 511};
    for (int i = 0; i < 6; ++i) {
        memset(&err, 0x44, sizeof err);
        err.struct_size = small[i];
        kept = err;
        CHECK(pkv_context_create(NULL, NULL, &err) == PKV_ERR_NULL);
        CHECK(memcmp((char *)&err + small[i], (char *)&kept + small[i], sizeof err - small[i]) == 0);
        CHECK(err.struct_size == small[i]);
    }
    memset(big, 0x44, MAX + 64);
    const size_t longer = sizeof err + 64;
    memcpy(big, &longer, sizeof longer);
    CHECK(pkv_context_create(NULL, NULL, (pkv_error *)big) == PKV_ERR_NULL);
    CHECK(((pkv_error *)big)->status == PKV_ERR_NULL && strcmp(((pkv_error *)big)->argument, "out") == 0);
    CHECK(((pkv_error *)big)->struct_size == longer && big[longer] == 0x44);

    /* The error of an earlier call does not stay. */
    REFUSED(pkv_collection_storage_size(NULL, NULL, NULL, &check_err), PKV_ERR_NULL, "options");
    const pkv_collection_options fine = plain_options(&w);
    CHECK(pkv_collection_storage_size(&fine, NULL, NULL, &check_err) == PKV_OK);
    CHECK(check_err.status == PKV_OK && !check_err.argument[0] && !check_err.message[0] && check_err.native_code == 0);
}

int main(void)
{
    big = (unsigned char *)malloc(MAX + 64);
    if (!big)
        return 2;
    world_open(&w, NULL);
    options();
    kernel_params();
    info();
    error_struct();
    world_close(&w);
    free(big);
    return check_end();
}

/* offsets64 [cuda]
 *
 * Offsets are 64-bit everywhere. Memory here is a sparse mapping that costs only the pages that are touched, so a block id times a block's size,
 * a row times a stride and a table row times its stride all go far beyond 2^32 elements, where a 32-bit product would land elsewhere.
 * `cuda`: the CUDA kernels on the emulation, which reach host memory as well as the device's. */
#define _GNU_SOURCE
#include "valid_calls.h"

#include <sys/mman.h>
#include <sys/resource.h>

#define ALIGNED __attribute__((aligned(16))) /* as CUDA wants it */

static struct world w;
static pkv_context *cpu; /* where the arena is under a CUDA context: the one that holds the weights */

static void other_context(pkv_context *ctx)
{
    const pkv_collection_options plain = plain_options(&w), mla = mla_options(&w), keys = key_options(&w);
    pkv_collection_destroy(w.plain);
    pkv_collection_destroy(w.mla);
    pkv_collection_destroy(w.keys);
    w.plain = w.mla = w.keys = NULL;
    w.ctx = ctx;
    if (!OK(pkv_collection_create(ctx, &plain, &w.plain, &check_err)) || !OK(pkv_collection_create(ctx, &mla, &w.mla, &check_err)) ||
        !OK(pkv_collection_create(ctx, &keys, &w.keys, &check_err)))
        exit(1);
}

static void *sparse(size_t size)
{
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        printf("this system does not let a process map %zu bytes\n", size);
        exit(77); /* ctest: skipped */
    }
    return data;
}

/* A collection of one TiB; rows go to its last blocks. */
static void high_block_ids(void)
{
    enum { PAGE_ = 64, HEADS_ = 8, HEAD_ = 128, LAYERS_ = 32, COUNT = 65536, T = 3 };
    pkv_collection_options o = {0};
    o.struct_size = sizeof o;
    o.dtype = PKV_F32;
    o.num_blocks = COUNT;
    o.num_layers = LAYERS_;
    o.page_size = PAGE_;
    o.num_heads = HEADS_;
    o.head_size = HEAD_;
    OK(pkv_collection_storage_size(&o, &o.blocks.size, NULL, &check_err));
    CHECK(o.blocks.size == (size_t)COUNT * 2 * LAYERS_ * PAGE_ * HEADS_ * HEAD_ * 4);
    o.blocks.data = sparse(o.blocks.size);
    pkv_collection *collection = NULL;
    if (!OK(pkv_collection_create(w.ctx, &o, &collection, &check_err)))
        return;

    ALIGNED const uint32_t row_offsets[] = {0, 1, 3};
    ALIGNED const uint32_t lengths[] = {63, 127};
    ALIGNED const uint32_t table[] = {COUNT - 1, 0, 0, 12345, COUNT - 2, COUNT - 3};
    pkv_batch batch = {0};
    batch.struct_size = sizeof batch;
    batch.input_row_offsets = row_offsets;
    batch.cache_lengths = lengths;
    batch.lookup_table = table;
    batch.batch_size = 2;
    batch.max_pages = 3;
    batch.max_seq_length = 2;
    batch.max_cache_length = 127;
    ALIGNED static float values[T][HEADS_][HEAD_];
    ALIGNED static float out[T][HEADS_][HEAD_];
    for (int i = 0; i < T * HEADS_ * HEAD_; ++i)
        (&values[0][0][0])[i] = (float)(i + 1);

    pkv_kv_store_params store = {0};
    store.struct_size = sizeof store;
    store.collection = collection;
    store.batch = &batch;
    store.layer_idx = LAYERS_ - 1;
    store.kv_idx = 1;
    store.values = tensor3(values, PKV_F32, T, HEADS_, HEAD_);
    OK(pkv_kv_store(w.ctx, no_stream, &store, no_workspace, &check_err));

    const struct {
        size_t block, slot;
    } where[T] = {{COUNT - 1, 63}, {COUNT - 2, 63}, {COUNT - 3, 0}};
    for (int t = 0; t < T; ++t) {
        const size_t row = (((where[t].block * 2 + 1) * LAYERS_ + LAYERS_ - 1) * PAGE_ + where[t].slot) * HEADS_ * HEAD_;
        CHECK(memcmp((float *)o.blocks.data + row, values[t], sizeof values[t]) == 0);
        CHECK(((float *)o.blocks.data)[(uint32_t)row] == 0); /* where a 32-bit offset points */
    }
    pkv_cache_view view;
    OK(pkv_collection_value_cache(collection, LAYERS_ - 1, &view, &check_err));
    CHECK(((float *)view.blocks.data)[(COUNT - 3) * view.blocks.stride[0]] == values[2][0][0]);

    ALIGNED const uint32_t rows[] = {0, 1, 3};
    ALIGNED const uint32_t from[] = {63, 127};
    pkv_kv_gather_params gather = {0};
    gather.struct_size = sizeof gather;
    gather.collection = collection;
    gather.batch = &batch;
    gather.layer_idx = LAYERS_ - 1;
    gather.kv_idx = 1;
    gather.buffer_row_offsets = rows;
    gather.cache_offsets = from;
    gather.out = tensor3(out, PKV_F32, T, HEADS_, HEAD_);
    OK(pkv_kv_gather(w.ctx, no_stream, &gather, no_workspace, &check_err));
    CHECK(memcmp(out, values, sizeof out) == 0);
    pkv_collection_destroy(collection);
    munmap(o.blocks.data, o.blocks.size);
}

/* Storage that the library allocates is zeroed without being touched: a large cache costs memory as it fills. */
static void a_fresh_cache_is_not_resident(void)
{
    pkv_collection_options o = plain_options(&w);
    memset(&o.blocks, 0, sizeof o.blocks);
    o.num_blocks = 1u << 20; /* 2 GiB */
    o.page_size = 4;
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    pkv_collection *collection = NULL;
    if (!OK(pkv_collection_create(w.ctx, &o, &collection, &check_err)))
        return;
    getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss < 1024 * 1024); /* KiB; AddressSanitizer's shadow alone takes an eighth */
    pkv_cache_view view;
    OK(pkv_collection_key_cache(collection, 0, &view, &check_err));
    CHECK((uintptr_t)view.blocks.data % 256 == 0 && ((const float *)view.blocks.data)[((1 << 20) - 1) * view.blocks.stride[0]] == 0);
    pkv_collection_destroy(collection);
}

static size_t element_size(int32_t dtype) { return dtype == PKV_F8_E4M3 ? 1 : 4; }

/* The row of a tensor (all of its outer dimensions but the first are contiguous here). */
static size_t row_bytes(const pkv_tensor *t)
{
    size_t elements = 1;
    for (int d = 1; d < t->ndim; ++d)
        elements *= (size_t)t->shape[d];
    return elements * element_size(t->dtype);
}

/* Every tensor of every kernel with rows two billion elements apart, and the page table too: the same bits as contiguous ones. */
static void huge_strides(void)
{
    const int64_t far = ((int64_t)1 << 31) + 64;
    static unsigned char whole[ARENA];
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        if (op == QKV && cpu)
            continue;
        world_reset(&w);
        OK(world_run(&w, op, &check_err));
        world_keep(&w, whole);

        world_reset(&w);
        void *homes[NUM_TENSORS] = {NULL};
        for (int t = 0; t < NUM_TENSORS; ++t) {
            pkv_tensor *tensor = (pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            if (tensors[t].op != op || tensor->ndim < 2)
                continue;
            const size_t rows = (size_t)tensor->shape[0], step = (size_t)far * element_size(tensor->dtype), bytes = row_bytes(tensor);
            homes[t] = tensor->data;
            tensor->data = sparse(rows * step);
            contiguous(tensor);
            tensor->stride[0] = far;
            for (size_t r = 0; r < rows; ++r)
                memcpy((char *)tensor->data + r * step, (char *)homes[t] + r * bytes, bytes);
        }
        const size_t table_step = (size_t)far * 2;
        uint32_t *table = (uint32_t *)sparse(table_step * 4 * 2);
        memcpy(table, w.table, 8);
        memcpy(table + table_step, w.table + 2, 8);
        w.batch.lookup_table = table;
        w.batch.lookup_table_stride = (int64_t)table_step;

        OK(world_run(&w, op, &check_err));
        for (int t = 0; t < NUM_TENSORS; ++t) {
            if (!homes[t])
                continue;
            const pkv_tensor *tensor = (const pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            const size_t rows = (size_t)tensor->shape[0], step = (size_t)far * element_size(tensor->dtype), bytes = row_bytes(tensor);
            for (size_t r = 0; r < rows; ++r)
                memcpy((char *)homes[t] + r * bytes, (char *)tensor->data + r * step, bytes);
            munmap(tensor->data, rows * step);
        }
        munmap(table, table_step * 4 * 2);
        check_that(world_kept(&w, whole), "strided equals contiguous to the bit", op_names[op], __LINE__);
    }
}

int main(int argc, char **argv)
{
    world_open(&w, NULL);
    pkv_context *cuda = NULL;
    if (argc > 1 && strcmp(argv[1], "cuda") == 0) {
        pkv_context_options options = {0};
        options.struct_size = sizeof options;
        options.abi_version = PKV_ABI_VERSION;
        options.backend = PKV_BACKEND_CUDA;
        if (!OK(pkv_context_create(&options, &cuda, &check_err)))
            return check_end();
        cpu = w.ctx;
        other_context(cuda);
    }
    high_block_ids();
    if (!cpu)
        a_fresh_cache_is_not_resident();
    huge_strides();
    if (cpu)
        other_context(cpu);
    pkv_context_destroy(cuda);
    world_close(&w);
    return check_end();
}

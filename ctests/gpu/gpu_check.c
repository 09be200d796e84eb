/* Every kernel on the first NVIDIA GPU against the CPU, over one small ragged batch with NaN in every slot of nobody. The arena of valid_calls.h is copied
 * to the device as a whole, so writes outside the named slots and outputs show too. A kernel that CUDA does not have says so and is listed; exit status:
 * 0 all that ran agree, 1 not, 77 no driver or no GPU. */
#define _GNU_SOURCE
#include "../c/valid_calls.h"

#include <dlfcn.h>

typedef unsigned long long device_ptr;
static int (*cu_init)(unsigned), (*cu_retain)(void **, int), (*cu_current)(void *), (*cu_alloc)(device_ptr *, size_t);
static int (*cu_to_device)(device_ptr, const void *, size_t), (*cu_to_host)(void *, device_ptr, size_t), (*cu_synchronize)(void), (*cu_name)(char *, int, int);

static void symbol(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    if (!found) {
        printf("the driver has no %s\n", name);
        exit(77);
    }
    memcpy(function, &found, sizeof found);
}

static device_ptr open_device(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context = NULL;
    char name[256] = "";
    device_ptr arena = 0;
    if (!driver) {
        printf("no NVIDIA driver on this machine: %s\n", dlerror());
        exit(77);
    }
    symbol(driver, "cuInit", &cu_init);
    symbol(driver, "cuDevicePrimaryCtxRetain", &cu_retain);
    symbol(driver, "cuCtxSetCurrent", &cu_current);
    symbol(driver, "cuMemAlloc_v2", &cu_alloc);
    symbol(driver, "cuMemcpyHtoD_v2", &cu_to_device);
    symbol(driver, "cuMemcpyDtoH_v2", &cu_to_host);
    symbol(driver, "cuCtxSynchronize", &cu_synchronize);
    symbol(driver, "cuDeviceGetName", &cu_name);
    if (cu_init(0) || cu_retain(&context, 0) || cu_current(context) || cu_alloc(&arena, ARENA)) {
        printf("no usable NVIDIA GPU on this machine\n");
        exit(77);
    }
    cu_name(name, sizeof name, 0);
    printf("device: %s\n%s\n", name, pkv_build_info());
    return arena;
}

static struct world w;
static device_ptr device;

static void *on_device(const void *host)
{
    return host ? (void *)(uintptr_t)(device + (size_t)((const unsigned char *)host - w.arena)) : NULL;
}

/* Bits, or floats that are nearly the same: sums may run in another order before a rounding. */
static size_t different(const unsigned char *a, const unsigned char *b, size_t size)
{
    size_t count = 0;
    for (size_t at = 0; at < size; at += 4) {
        float x, y;
        if (memcmp(a + at, b + at, 4) == 0)
            continue;
        memcpy(&x, a + at, 4);
        memcpy(&y, b + at, 4);
        /* integers would be tiny floats: those are different */
        count += !(fabsf(x - y) <= 1e-4f * fmaxf(1, fabsf(x))) || (fabsf(x) < 1e-30f && x != 0) || (fabsf(y) < 1e-30f && y != 0);
    }
    return count;
}

int main(void)
{
    static unsigned char want[ARENA], got[ARENA];
    device = open_device();
    world_open(&w, NULL);
    pkv_context_options options = {0};
    options.struct_size = sizeof options;
    options.abi_version = PKV_ABI_VERSION;
    options.backend = PKV_BACKEND_CUDA;
    pkv_context *cuda = NULL;
    if (!OK(pkv_context_create(&options, &cuda, &check_err)))
        return check_end();
    pkv_collection *collections[3] = {NULL, NULL, NULL};
    pkv_collection_options stores[3] = {plain_options(&w), mla_options(&w), key_options(&w)};
    for (int i = 0; i < 3; ++i) {
        stores[i].blocks.data = on_device(stores[i].blocks.data);
        stores[i].scales.data = on_device(stores[i].scales.data);
        if (!OK(pkv_collection_create(cuda, &stores[i], &collections[i], &check_err)))
            return check_end();
    }

    unsigned ran = 0;
    for (int i = 0; i < NUM_OPS; ++i) {
        const enum op op = (enum op)i;
        world_reset(&w);
        OK(world_run(&w, op, &check_err));
        world_keep(&w, want);

        world_reset(&w);
        if (cu_to_device(device, w.arena, ARENA))
            return 1;
        w.qkv.collection = w.store.collection = w.gather.collection = collections[0];
        w.rope.collection = w.prefill.collection = collections[1];
        w.indexer.collection = collections[2];
        w.batch.input_row_offsets = (const uint32_t *)on_device(w.row_offsets);
        w.batch.cache_lengths = (const uint32_t *)on_device(w.cache_lengths);
        w.batch.lookup_table = (const uint32_t *)on_device(w.table);
        w.gather.buffer_row_offsets = w.prefill.buffer_row_offsets = (const uint32_t *)on_device(w.buffer_row_offsets);
        w.gather.cache_offsets = w.prefill.cache_offsets = (const uint32_t *)on_device(w.cache_offsets);
        for (int t = 0; t < NUM_TENSORS; ++t) {
            pkv_tensor *tensor = (pkv_tensor *)((char *)world_params(&w, op) + tensors[t].offset);
            if (tensors[t].op == op)
                tensor->data = on_device(tensor->data);
        }
        size_t bytes = 0;
        check_reset();
        pkv_status status = query_op(cuda, op, world_params(&w, op), &bytes, &check_err);
        if (status == PKV_ERR_UNSUPPORTED) {
            printf("%-28s not on CUDA: %s\n", op_names[op], check_err.message);
            continue;
        }
        const pkv_buffer workspace = {bytes ? on_device(w.scratch) : NULL, bytes};
        if (!check_status(status, PKV_OK, "", op_names[op], __FILE__, __LINE__) || !CHECK(bytes <= ARENA - w.results - 512))
            continue;
        const int called = OK(run_op(cuda, op, no_stream, world_params(&w, op), workspace, &check_err));
        if (!CHECK(cu_synchronize() == 0) || !CHECK(cu_to_host(got, device, ARENA) == 0) || !called)
            continue;
        const size_t wrong = different(want, got, w.results);
        printf("%-28s %s\n", op_names[op], wrong ? "DIFFERS from the CPU" : "agrees with the CPU");
        CHECK(wrong == 0);
        ++ran;
    }
    CHECK(ran > 0);
    for (int i = 0; i < 3; ++i)
        pkv_collection_destroy(collections[i]);
    pkv_context_destroy(cuda);
    world_close(&w);
    return check_end();
}
